"""Samples through a real engine: lives, groups, failures, several turns."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from support.fake_engines import playing

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.data.tasks import prompts
from roll_lite.engine.service import EngineService
from roll_lite.envs.guess import Guess
from roll_lite.envs.play import question_player
from roll_lite.report.run import Run
from roll_lite.rollout import event_loop
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.evaluation import describe_groups, pass_rates, refuse_all_failed
from roll_lite.rollout.event_loop import PumpedLoop, Signal
from roll_lite.rollout.prompts import derive_seed
from roll_lite.rollout.record import read_group, write_group
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Group, Sample, SamplingParams, Score, Turn


@pytest.fixture(scope="module")
def chat(tiny_folder):
    return Chat(tiny_folder)


class Service(EngineService):
    def has_work(self):
        return self.engine.has_work

    def num_used_pages(self):
        return self.engine.pool.num_pages - self.engine.pool.num_free


@pytest.fixture
def engine(tiny_folder):
    """The role of one engine in a world of one."""
    with Cluster("generate=all", "cpu") as cluster:
        yield cluster.role("generate", Service, folder=tiny_folder, kv_cache_gib=0.02)


def some_prompts(count):
    generated = prompts("reverse:3", seed=0)
    return [next(generated) for _ in range(count)]


def params(chat, max_tokens=6):
    return SamplingParams(max_tokens=max_tokens, stop_ids=chat.stop_ids)


def rollout_of(engine, chat, play, seed=0, **options):
    return Coordinator(
        engines=engine,
        chat=chat,
        play=play,
        prompts=iter(()),
        params=params(chat),
        options=RolloutOptions(max_retries=0, **options),
        seed=seed,
    )


def rollout_with(engine, chat, reward, seed=0):
    return rollout_of(engine, chat, question_player({"reverse": reward}), seed)


def test_it_works_in_a_thread_with_an_event_loop_as_in_a_notebook(engine, chat):
    def replies(seed):
        with rollout_with(engine, chat, lambda prompt, reply: 1.0, seed) as rollout:
            groups = rollout.answer(some_prompts(2), num_samples=2, params=params(chat))
            again = rollout.answer(some_prompts(2), num_samples=2, params=params(chat))
        return [sample.reply for group in (*groups, *again) for sample in group.samples]

    async def cell():
        with rollout_of(engine, chat, None) as rollout, pytest.raises(TypeError, match="NoneType"):
            rollout.answer(some_prompts(1), num_samples=1, params=params(chat))
        return replies(0)

    assert asyncio.run(cell()) == replies(0) != replies(1)


def test_every_sample_is_scored_once_with_its_own_text(engine, chat):
    seen = []

    def reward(prompt, reply):
        seen.append((prompt.id, reply))
        return Score(value=len(reply), parts={"length": float(len(reply))})

    asked = some_prompts(5)
    groups = rollout_with(engine, chat, reward).answer(asked, num_samples=4, params=params(chat))
    assert [group.prompt for group in groups] == asked
    assert sorted(seen) == sorted((s.prompt.id, s.reply) for g in groups for s in g.samples)
    for group in groups:
        opening = chat.encode(group.prompt.messages)
        assert [s.index for s in group.samples] == [0, 1, 2, 3]
        for sample in group.samples:
            sampled = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
            assert sample.token_ids == opening + sampled
            assert chat.decode(sampled) == sample.reply
            assert sample.score.value == len(sample.reply)
            assert len(sample.logprobs) == len(sample.token_ids)
    assert engine.num_used_pages() == 0


def test_a_life_is_recorded_in_order(engine, chat):
    rollout = rollout_with(engine, chat, lambda p, r: 0.0)
    (group,) = rollout.answer(some_prompts(1), num_samples=2, params=params(chat))
    for sample in group.samples:
        assert [e.state for e in sample.events] == ["queued", "generating", "scoring", "done"]
        times = [e.time for e in sample.events]
        assert times == sorted(times)
        assert {e.policy_version for e in sample.events} == {0}


def test_scoring_starts_while_others_generate(engine, chat):
    """Samples that stop early are scored before the longest one ends."""
    left = []

    def reward(prompt, reply):
        left.append(engine.has_work())
        return 0.0

    rollout_with(engine, chat, reward).answer(
        some_prompts(4), num_samples=4, params=params(chat, max_tokens=32)
    )
    assert any(left)


def test_the_clock_of_a_pumped_loop_stands_between_runs(monkeypatch):
    """A sample that waits for the end of training does not come nearer to its deadline."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(event_loop, "time", clock)
    loop, event = PumpedLoop(lambda: False, Signal()), asyncio.Event()

    async def begin():
        return asyncio.create_task(asyncio.wait_for(event.wait(), 60))

    async def end(task):
        await asyncio.sleep(0.01)
        event.set()
        return await task

    async def time_out(task):
        passed[0] += 100
        await task

    task = loop.run(begin())
    passed[0] += 100
    assert loop.run(end(task)) is True
    event.clear()
    task = loop.run(begin())
    with pytest.raises(TimeoutError):
        loop.run(time_out(task))
    loop.close()


def test_the_same_seed_gives_the_same_samples(engine, chat):
    def replies(seed):
        groups = rollout_with(engine, chat, lambda p, r: 0.0, seed).answer(
            some_prompts(3), num_samples=3, params=params(chat)
        )
        return [s.token_ids for g in groups for s in g.samples]

    assert replies(1) == replies(1) != replies(2)


def test_a_prompt_seen_again_is_sampled_anew(engine, chat):
    rollout = rollout_with(engine, chat, lambda p, r: 0.0)
    prompt = some_prompts(1) * 2
    first, second = rollout.answer(prompt, num_samples=3, params=params(chat))
    assert [s.token_ids for s in first.samples] != [s.token_ids for s in second.samples]


def test_other_prompts_in_between_change_nothing(engine, chat):
    asked = some_prompts(4)
    replies = []
    for between in ([], asked[2:]):
        rollout = rollout_with(engine, chat, lambda p, r: 0.0)
        rollout.answer(between, num_samples=1, params=params(chat))
        groups = rollout.answer(asked[:2], num_samples=2, params=params(chat))
        replies.append([s.token_ids for g in groups for s in g.samples])
    assert replies[0] == replies[1]


def test_a_reward_that_raises_is_an_error_not_a_zero(engine, chat):
    def reward(prompt, reply):
        if calls.append(reply) or len(calls) in (2, 5):
            raise ZeroDivisionError("reward broke")
        return 1.0

    calls = []
    rollout = rollout_with(engine, chat, reward)
    groups = rollout.answer(some_prompts(2), num_samples=3, params=params(chat))
    failed = [s for g in groups for s in g.samples if s.state == "failed"]
    assert len(failed) == 2 and all(s.score is None for s in failed)
    assert all("ZeroDivisionError: reward broke" in s.error for s in failed)
    assert rollout.dropped() == [(sample, "failed") for sample in failed]  # for the records
    refuse_all_failed(groups)  # four are left


def scored_group(*values, **parts):
    samples = []
    for index, value in enumerate(values):
        sample = Sample(prompt=some_prompts(1)[0], index=index)
        sample.score = None if value is None else Score(value=value, parts=parts)
        sample.enter("failed" if value is None else "done", 0)
        samples.append(sample)
    return Group(prompt=samples[0].prompt, samples=samples)


def test_pass_rates_with_failed_samples():
    """They are neither right nor wrong, and pass@k keeps its name."""
    groups = [scored_group(1.0, None, 0.0, 0.0), scored_group(0.0, 0.0, 0.0, None)]
    rates = pass_rates(groups)
    assert rates["eval/pass@1"] == pytest.approx((1 / 3 + 0) / 2)
    assert rates["eval/pass@4"] == 0.5 and rates["eval/failed"] == 2
    assert "eval/pass@3" not in rates


def test_parts_of_a_reward_are_metrics():
    metrics = describe_groups([scored_group(1.0, 0.5, other=2.0)])
    assert metrics["reward/mean"] == 0.75 and metrics["reward/other"] == 2.0


def test_spread_of_rewards_and_percentiles_of_lengths():
    group = scored_group(0.0, 1.0, None, 5.0)
    for sample, length in zip(group.samples, (1, 2, 3, 4), strict=True):
        turn = {"prompt_ids": [1], "token_ids": [5] * length, "logprobs": [-1.0] * length}
        sample.add_turn(Turn(**turn, finish_reason="stop", versions=[(0, 0)]))
    metrics = describe_groups([group])
    rewards = {name: metrics[f"reward/{name}"] for name in ("mean", "std", "min", "max")}
    assert rewards == pytest.approx({"mean": 2.0, "std": (14 / 3) ** 0.5, "min": 0.0, "max": 5.0})
    names = ("reply_tokens", "reply_tokens_p50", "reply_tokens_p90", "reply_tokens_p99")
    assert [metrics[f"rollout/{name}"] for name in names] == [2.5, 2, 4, 4]


def test_when_everything_fails_the_run_stops_with_the_cause(engine, chat):
    def reward(prompt, reply):
        raise KeyError("no such key")

    rollout = rollout_with(engine, chat, reward)
    groups = rollout.answer(some_prompts(2), num_samples=2, params=params(chat))
    with pytest.raises(RuntimeError, match=r"4 samples failed(.|\n)*KeyError: 'no such key'"):
        refuse_all_failed(groups)


def test_an_unknown_domain_stops_the_run_and_frees_the_engine(engine, chat):
    rollout = rollout_of(engine, chat, question_player({"math": None}))
    with pytest.raises(ValueError, match=r"domain=.reverse..*known domains: math"):
        rollout.answer(some_prompts(2), num_samples=2, params=params(chat))
    assert not engine.has_work()


def test_a_request_the_engine_refuses_fails_its_samples(engine, chat):
    rollout = rollout_with(engine, chat, lambda p, r: 0.0)
    too_long = params(chat, max_tokens=2000)
    (group,) = rollout.answer(some_prompts(1), num_samples=3, params=too_long)
    assert [s.state for s in group.samples] == ["failed"] * 3
    assert all("max_tokens=2000" in s.error for s in group.samples)


def test_a_reward_that_is_no_number_fails_its_sample(engine, chat):
    rollout = rollout_with(engine, chat, lambda p, r: float("nan"))
    (group,) = rollout.answer(some_prompts(1), num_samples=2, params=params(chat))
    assert all(s.state == "failed" and "reward=nan" in s.error for s in group.samples)


class Wayward:
    """Opens differently every time, which a group must not."""

    count = 0

    def reset(self, seed):
        Wayward.count += 1
        return ({"role": "user", "content": str(Wayward.count)},), {}


def test_openings_that_differ_within_a_group_are_an_error(engine, chat):
    rollout = rollout_of(engine, chat, playing(lambda task: Wayward()))
    (group,) = rollout.answer(some_prompts(1), num_samples=2, params=params(chat))
    assert "opens differently" in group.samples[1].error


class Echo:
    """Two turns: repeats what the model said, then ends."""

    def reset(self, seed):
        self.said = []
        return ({"role": "user", "content": f"seed {seed}"},), {}

    def step(self, action):
        self.said.append(action)
        observation = ({"role": "user", "content": f"you said {len(action)}"},)
        return observation, 0.5, len(self.said) == 2, False, {}


def test_several_turns_never_retokenise(engine, chat):
    rollout = rollout_of(engine, chat, playing(lambda task: Echo()))
    (group,) = rollout.answer(some_prompts(1), num_samples=3, params=params(chat))
    for sample in group.samples:
        first, second = sample.turns
        # The second turn read exactly the first one's ids, then what the template adds.
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        start = len(first.prompt_ids)
        assert second.prompt_ids[start : start + len(first.token_ids)] == first.token_ids
        assert sample.token_ids == second.prompt_ids + second.token_ids
        assert sum(sample.loss_mask) == len(first.token_ids) + len(second.token_ids)
        assert sample.score.value == 1.0


def test_several_turns_have_a_transcript(engine, chat, tmp_path):
    rollout = rollout_of(engine, chat, playing(lambda task: Echo()))
    groups = rollout.answer(some_prompts(1), num_samples=2, params=params(chat))
    run = Run(tmp_path / "run", RolloutOptions(), num_steps=1, shown={})
    run.write_rollouts(1, groups)
    run.flush()
    lines = (tmp_path / "run" / "rollouts" / "step_00001.jsonl").read_text().splitlines()
    for line, sample in zip(map(json.loads, lines), groups[0].samples, strict=True):
        first, second = (chat.decode(turn.token_ids) for turn in sample.turns)
        roles = [message["role"] for message in line["transcript"]]
        assert roles == ["user", "assistant", "user", "assistant"]
        said = [message["content"] for message in line["transcript"]]
        assert (said[1], said[3]) == (first, second) and line["reply"] == second
    again = read_group(json.loads(json.dumps(write_group(groups[0]))))
    assert [s.transcript for s in again.samples] == [s.transcript for s in groups[0].samples]


def test_a_game_is_played_by_a_group_from_one_opening(engine, chat):
    rollout = rollout_of(
        engine, chat, playing(lambda task: Guess(max_steps=2, invalid_reward=-0.5))
    )
    (group,) = rollout.answer(some_prompts(1), num_samples=2, params=params(chat, max_tokens=2))
    first, second = group.samples
    assert first.turns[0].prompt_ids == second.turns[0].prompt_ids
    for sample in group.samples:  # the untrained model writes no tags
        assert len(sample.turns) == 2 and sample.score.value == -1
        assert sample.score.parts == {"success": 0, "valid": 0, "effective": 0}
        roles = [message["role"] for message in sample.transcript]
        assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_seeds_depend_on_every_part():
    seeds = {derive_seed(a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert derive_seed(1, 23) != derive_seed(12, 3)
