"""Turns as data: sequences, rewards, measurements, budgets, conversations."""

import json
import math
import re
from dataclasses import replace

import pytest
from support.fake_engines import FakeChat, FakeEngines, fake_prompts, playing
from support.models import make_reference
from support.trainers import make_trainer, same, step_gradient
from support.training_data import make_groups, standardised

from roll_lite.envs.env import OutOfTokens
from roll_lite.envs.play import EpisodeOptions, player, question_player
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.prompts import derive_seed
from roll_lite.rollout.record import read_group, write_group
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.batch import pack
from roll_lite.train.losses import LossOptions, PolicyLoss
from roll_lite.train.sample_rows import with_advantages
from roll_lite.train.sequences import equal_parts, plain_sequences
from roll_lite.types import SamplingParams, TokenSequence, Turn, TurnResult, combine_measurements

PARAMS = SamplingParams(max_tokens=4)


def recorded_groups():
    """Two groups of three episodes with three turns, rewards and states."""
    groups = make_groups([[0.3, 1.0, 0.0], [2.0, -1.0, 0.5]], num_turns=3)
    for g, group in enumerate(groups):
        for i, sample in enumerate(group.samples):
            for t, turn in enumerate(sample.turns):
                turn.result = TurnResult(reward=math.sin(5 * g + 3 * i + t))
                turn.state = "start" if t == 0 else f"state {(i + t) % 2}"
            total = sum(turn.result.reward for turn in sample.turns)
            sample.score = replace(sample.score, value=total)
    return groups


def apart(groups):
    """The same groups with a sequence for each turn, as if no turn went on where one ended."""
    groups = [replace(group, samples=[replace(s) for s in group.samples]) for group in groups]
    for group in groups:
        for sample in group.samples:
            sample.sequences = [TokenSequence() for _ in sample.turns]
            for number, (sequence, turn) in enumerate(
                zip(sample.sequences, sample.turns, strict=True)
            ):
                sequence.add(number, turn)
    return groups


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    make_reference("qwen3").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("advantage", ["grpo", "gigpo", "reinforce++"])
@pytest.mark.parametrize(
    "loss",
    [
        {"loss": "ppo"},
        {"loss": "ppo", "aggregation": "seq_mean_token_mean"},
        {"loss": "ppo", "aggregation": "seq_mean_token_sum_const", "constant": 9.0},
        {"loss": "segment"},
        {"loss": "gspo"},
        {"loss": "topr"},
        {"loss": "kimi"},
    ],
    ids=lambda loss: "-".join(map(str, loss.values())),
)
def test_merged_or_apart_the_gradient_is_the_same(place, qwen_folder, advantage, loss):
    if advantage != "grpo" and loss["loss"] in ("gspo", "topr", "kimi"):
        pytest.skip("one advantage per sample")
    options, gradients = LossOptions.of(**loss), []
    for groups in (recorded_groups(), apart(recorded_groups())):
        sequences = with_advantages(groups, AdvantageOptions(advantage=advantage))
        batch = pack(sequences, 60, **options.pack_options)
        assert len(batch) > 1
        trainer = make_trainer(place, qwen_folder, PolicyLoss(options))
        gradients.append(step_gradient(trainer, batch))
    (merged, merged_metrics), (split, split_metrics) = gradients
    same(split, merged)
    assert split_metrics["loss/loss"] == pytest.approx(merged_metrics["loss/loss"], rel=1e-4)


def test_updates_never_divide_a_sample():
    sequences = plain_sequences(apart(recorded_groups()))
    parts = equal_parts(sequences, 4)
    assert [len(part) for part in parts] == [6, 6, 3, 3]
    numbers = [{sequence.sample for sequence in part} for part in parts]
    assert sorted(n for part in numbers for n in part) == list(range(6))


def discounted(rewards, gamma):
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


@pytest.mark.parametrize("gamma", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("split", [False, True])
def test_gigpo_on_recorded_episodes_is_its_formula(gamma, split):
    groups = recorded_groups()
    options = AdvantageOptions.of(advantage="gigpo", gamma=gamma, step_weight=0.7)
    found = iter(with_advantages(apart(groups) if split else groups, options))
    for group in groups:
        rewards = [[turn.result.reward for turn in s.turns] for s in group.samples]
        episode = standardised([sum(r) for r in rewards])
        returns = [discounted(r, gamma) for r in rewards]
        for i, sample in enumerate(group.samples):
            expected = []
            for t, turn in enumerate(sample.turns):
                peers = [
                    (j, u)
                    for j, other in enumerate(group.samples)
                    for u, later in enumerate(other.turns)
                    if later.state == turn.state
                ]
                steps = standardised([returns[j][u] for j, u in peers])
                expected.append(episode[i] + 0.7 * steps[peers.index((i, t))])
            got = [next(found) for _ in range(3 if split else 1)]
            numbers = [(k, a) for s in got for a, m, k in tokens(s) if m]
            assert [a for _, a in numbers] == pytest.approx([expected[k] for k, _ in numbers])


def tokens(sequence):
    return zip(sequence.advantages, sequence.loss_mask, sequence.segments, strict=True)


@pytest.mark.parametrize("whiten", [False, True])
def test_discounted_turn_rewards_are_their_formula(whiten):
    groups = recorded_groups()
    options = AdvantageOptions.of(advantage="agentic_reinforce", gamma=0.8, whiten=whiten)
    found = with_advantages(groups, options)
    samples = [sample for group in groups for sample in group.samples]
    returns = [discounted([t.result.reward for t in s.turns], 0.8) for s in samples]
    by_token = [
        [r for r, turn in zip(per_turn, s.turns, strict=True) for _ in turn.token_ids]
        for per_turn, s in zip(returns, samples, strict=True)
    ]
    flat = [r for row in by_token for r in row]
    if whiten:
        flat = standardised(flat)
    got = [a for s in found for a, m, _ in tokens(s) if m]
    assert got == pytest.approx(flat, abs=1e-9)


def turn_of(prompt_ids, token_ids, **more):
    logprobs = [-0.5] * len(token_ids)
    return Turn(
        prompt_ids=prompt_ids, token_ids=token_ids, logprobs=logprobs, finish_reason="stop",
        versions=[(0, 0)], **more,
    )  # fmt: skip


def test_conversations_that_alternate_are_merged_each_into_its_own_sequence():
    sample = make_groups([[1.0]])[0].samples[0]
    sample.turns, sample.sequences = [], []
    for turn in (
        turn_of([1, 2], [3]),
        turn_of([9], [8]),
        turn_of([1, 2, 3, 4], [5, 6]),  # goes on with the first
        turn_of([9, 8, 7], [6]),  # and this with the second
        turn_of([1, 2, 4], [5]),  # the first one's beginning, without its reply
    ):
        sample.add_turn(turn)
    assert [s.token_ids for s in sample.sequences] == [
        [1, 2, 3, 4, 5, 6],
        [9, 8, 7, 6],
        [1, 2, 4, 5],
    ]
    assert [s.turns for s in sample.sequences] == [[0, 2], [1, 3], [4]]
    assert sample.sequences[0].segments == [0, 0, 0, 2, 2, 2]
    assert sample.sequences[1].loss_mask == [False, True, False, True]
    # Token-wise returns follow time, not the order of the sequences.
    group = replace(make_groups([[1.0]])[0], samples=[sample])
    options = AdvantageOptions.of(advantage="reinforce", gamma=0.5, whiten=False)
    learned = [[a for a, m, _ in tokens(s) if m] for s in with_advantages([group], options)]
    assert learned == [[2.0**-5, 2.0**-3, 2.0**-2], [2.0**-4, 2.0**-1], [1.0]]


def test_measurements_are_combined_as_they_say():
    rows = [(1.0, 2.0, 0.0, 3.0), (0.0, 3.0, 0.0, 7.0), (0.0, 4.0, 1.0, 5.0)]
    turns = [
        turn_of([1], [2], result=TurnResult(measurements={
            "mean": {"valid": a}, "sum": {"coins": b}, "last": {"success": c}, "max": {"depth": d},
        }))
        for a, b, c, d in rows
    ]  # fmt: skip
    assert combine_measurements(turns) == {
        "valid": pytest.approx(1 / 3),
        "coins": 9.0,
        "success": 1.0,
        "depth": 7.0,
    }
    turns[0].result = TurnResult(measurements={"sum": {"valid": 1.0}})
    with pytest.raises(ValueError, match="'valid' is given as sum and as mean"):
        combine_measurements(turns)
    with pytest.raises(ValueError, match="'median' is not a way to combine"):
        TurnResult(measurements={"median": {"x": 1.0}})


class Counting:
    """Five turns; what it says is one word longer each time."""

    def __init__(self, prompt):
        self.prompt, self.num_steps = prompt, 0

    def reset(self, seed):
        return "1 0", {"rules": "100", "state": "s0"}

    async def step(self, action):
        self.num_steps += 1
        info = {"state": f"s{self.num_steps}", "mean": {"valid": self.num_steps % 2}}
        words = " ".join(["7"] * (self.num_steps + 1))
        return words, 0.5, self.num_steps == 5, False, info


def collected(play, num_samples=2, max_length=None, episodes=None, params=PARAMS):
    with (
        FakeEngines(1) as engines,
        Coordinator(
            engines=engines, chat=FakeChat(), play=play, prompts=fake_prompts(), params=params,
            options=RolloutOptions(samples_per_prompt=num_samples, prompts_per_step=1), seed=0,
            max_length=max_length, episodes=episodes or EpisodeOptions(), min_samples=1,
        ) as rollout,
    ):  # fmt: skip
        task = replace(next(fake_prompts()), messages=())
        (group,) = rollout.answer([task], num_samples=num_samples, params=params)
    return group.samples


def test_in_a_mixture_questions_have_one_turn_and_the_options_are_for_tasks():
    """A question that leaves no room for a whole reply fails; a task uses what room there is."""

    def play(chat, prompt):
        if prompt.is_question:
            return question_player({"fake": lambda prompt, reply: 1.0})(chat, prompt)
        return playing(Counting)(chat, prompt)

    def ended(prompt, **limits):
        with (
            FakeEngines(1) as engines,
            Coordinator(
                engines=engines, chat=FakeChat(), play=play, prompts=iter(()), params=PARAMS,
                options=RolloutOptions(samples_per_prompt=1), seed=0, **limits,
            ) as rollout,
        ):  # fmt: skip
            (group,) = rollout.answer([prompt], num_samples=1, params=PARAMS)
        sample = group.samples[0]
        return sample.state, sample.end

    question = next(fake_prompts())
    task = replace(question, messages=())
    one_token = EpisodeOptions(episode_tokens=1)
    assert ended(question, episodes=one_token) == ("done", "returned")
    assert ended(task, episodes=one_token) == ("done", "tokens")
    assert ended(question, max_length=5) == ("failed", "")
    assert ended(task, max_length=5) == ("done", "context")
    assert ended(question, max_length=6) == ("done", "returned")


def playing_with(options, make_env=Counting):
    async def play(chat, task):
        return await player(lambda: make_env(task), "counting", options)(chat, task)

    return play


def test_an_episode_has_rewards_states_measurements_and_a_reason_for_its_end():
    for sample in collected(playing(Counting)):
        assert [turn.result.reward for turn in sample.turns] == [0.5] * 5
        assert sample.score.value == 2.5 and sample.end == "terminated"
        assert sample.score.parts == {"valid": pytest.approx(3 / 5)}
        assert len({turn.state for turn in sample.turns}) == 5
        assert len(sample.sequences) == 1


@pytest.mark.parametrize("history", [0, 1, 3])
def test_with_a_history_each_turn_reads_the_rules_and_the_last_turns(history):
    samples = collected(playing_with(EpisodeOptions(history=history)))
    whole = collected(playing(Counting))
    for sample, other in zip(samples, whole, strict=True):
        assert len(sample.sequences) == 5 - history
        for number, turn in enumerate(sample.turns):
            assert turn.prompt_ids[0] == 100
            replies = [t.token_ids for t in sample.turns[max(0, number - history) : number]]
            read = turn.prompt_ids
            for reply in replies:  # each of them, in order, and none before them
                place = next(i for i in range(len(read)) if read[i : i + len(reply)] == reply)
                read = read[place + len(reply) :]
            assert read.count(7) == (number + 1 if number else 0)
        assert [t.state for t in sample.turns] == [t.state for t in other.turns]


@pytest.mark.parametrize("limit", ["context", "tokens"])
def test_at_the_limit_an_episode_ends_and_is_kept_or_fails(limit):
    whole = collected(playing(Counting))[0]
    third = whole.turns[2]
    if limit == "context":  # the third reply is cut, and there is no room for a fourth
        bounds = {"max_length": len(third.prompt_ids) + len(third.token_ids)}
        episodes = EpisodeOptions()
    else:
        bounds, num = {}, sum(len(turn.token_ids) for turn in whole.turns[:3])
        episodes = EpisodeOptions(episode_tokens=num)
    (sample,) = collected(playing(Counting), 1, episodes=episodes, **bounds)
    assert sample.state == "done" and sample.end == limit
    assert [t.token_ids for t in sample.turns] == [t.token_ids for t in whole.turns[:3]]
    assert sample.score.value == 1.5 and sample.score.parts == {"valid": pytest.approx(2 / 3)}
    failing = replace(episodes, at_limit="fail")
    (sample,) = collected(playing(Counting), 1, episodes=failing, **bounds)
    assert sample.state == "failed" and "max_tokens=4" in sample.error


def test_a_coroutine_may_summarise_and_catch_the_limit():
    async def episode(chat, task):
        said = [{"role": "user", "content": "1 2"}]
        first = await chat(said, state="a")
        chat.result(0.25, sum={"asked": 1})
        said = [*said, first, {"role": "user", "content": "3"}]
        await chat(said, state="b", max_tokens=2)
        chat.result(sum={"asked": 1})
        try:
            await chat([{"role": "user", "content": "4 5 6 7"}], max_tokens=1)  # a summary
        except OutOfTokens:
            return 3.0
        return 1.0

    def play(chat, task):
        return player(episode, "mine", EpisodeOptions())(chat, task)

    (sample,) = collected(play, 1)
    assert sample.error is None
    assert [s.turns for s in sample.sequences] == [[0, 1], [2]] and sample.end == "returned"
    assert sample.score.value == 1.0 and sample.score.parts == {"asked": 2.0}
    assert [t.result.reward for t in sample.turns] == [0.25, 0.0, 0.75]
    num_before = sum(len(turn.token_ids) for turn in sample.turns[:2])
    (sample,) = collected(play, 1, episodes=EpisodeOptions(episode_tokens=num_before))
    assert sample.score.value == 3.0 and len(sample.turns) == 2


def test_a_coroutine_has_no_more_turns_than_the_options_allow():
    async def talks_on(chat, task):
        while True:
            await chat([{"role": "user", "content": "1 2"}])
            chat.result(0.5)

    def play(chat, task):
        return player(talks_on, "mine", EpisodeOptions())(chat, task)

    (sample,) = collected(play, 1, episodes=EpisodeOptions(max_turns=3))
    assert sample.end == "turns" and sample.score.value == 1.5 and len(sample.turns) == 3


def test_episodes_are_kept_by_a_checkpoint_with_all_their_sequences():
    (sample,) = collected(playing_with(EpisodeOptions(history=1)), 1)
    group = make_groups([[0.0]])[0]
    group = replace(group, prompt=sample.prompt, samples=[sample])
    again = read_group(json.loads(json.dumps(write_group(group)))).samples[0]
    assert again.sequences == sample.sequences and again.end == sample.end
    assert again.score == sample.score
    for turn, other in zip(again.turns, sample.turns, strict=True):
        logprobs = pytest.approx(other.logprobs, abs=1e-6)
        assert replace(turn, logprobs=[]) == replace(other, logprobs=[])
        assert turn.logprobs == logprobs


class Bad:
    """Goes wrong in the second turn, in the way that its prompt says."""

    def __init__(self, fault):
        self.fault, self.num_steps = fault, 0

    def reset(self, seed):
        return "1 2", {}

    def step(self, action):
        self.num_steps += 1
        good = ("3", 0.0, False, False, {})
        return good if self.num_steps < 2 else self.fault(good)


def raises(good):
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raises, "KeyError: 'lost'"),
        (lambda good: (None, *good[1:]), "the observation is None; it must be a text"),
        (lambda good: ([{"role": "user"}], *good[1:]), "the observation is .*must be a text"),
        (lambda good: ((), *good[1:]), "the observation is empty"),
        (lambda good: (good[0], math.nan, *good[2:]), "reward=nan is not a finite"),
        (lambda good: (good[0], "much", *good[2:]), "reward='much' is not a number"),
        (lambda good: good[:4], r"step returned \('3', 0.0, False, False\), not"),
        (lambda good: (*good[:4], {"mean": {"x": math.inf}}), "measurement x=inf"),
    ],
)
def test_what_an_environment_does_wrong_fails_its_sample_with_name_seed_and_turn(fault, message):
    def play(chat, task):
        return player(lambda: Bad(fault), "bad", EpisodeOptions())(chat, task)

    for sample in collected(play):
        assert sample.state == "failed"
        seed = derive_seed(0, sample.prompt.id, -1)
        assert len(sample.turns) == 2 and f"bad, seed {seed}, turn 2: " in sample.error
        assert re.search(message, sample.error)
