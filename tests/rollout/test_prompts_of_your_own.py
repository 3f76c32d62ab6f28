"""A function of one's own says which prompt comes next, from the pass rates so far."""

import itertools
import json
import random
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from statistics import fmean

import pytest
from support.fake_engines import (
    PARAMS,
    FakeChat,
    FakeEngines,
    SimulatedEngines,
    check_sample,
    fake_prompts,
)

from roll_lite.checks import UserError
from roll_lite.data import Mixture
from roll_lite.envs.play import question_player
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.history import History, Visits
from roll_lite.rollout.prompts import PromptQueue
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.stopping import Stopped
from roll_lite.types import Group, Prompt, Sample, Score

DOMAINS = ("easy", "hard")


def some_rewards(prompt, reply):
    """0, 0.5 or 1; a half of the groups of three has equal rewards, and is dropped."""
    if random.Random(prompt.id).random() < 0.4:
        return 0.5
    return random.Random(f"{prompt.id} {reply}").choice([0.0, 0.5, 1.0])


@pytest.fixture
def two_files(tmp_path):
    for domain in DOMAINS:
        rows = [{"id": f"{domain}/{i}", "prompt": f"1 {i}", "domain": domain} for i in range(30)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{domain}.jsonl").write_text(text)
    return tuple(f"{tmp_path}/{domain}.jsonl" for domain in DOMAINS)


@contextmanager
def coordinator(engines, source, choose, reward=some_rewards, pass_reward=1.0, **options):
    defaults = {"samples_per_prompt": 3, "prompts_per_step": 6, "drop_equal": True}
    with Coordinator(
        engines=engines, chat=FakeChat(), prompts=source, params=PARAMS, seed=3,
        play=question_player(dict.fromkeys((*DOMAINS, "fake", "addition"), reward)),
        options=RolloutOptions(**defaults | options), choose=choose, pass_reward=pass_reward,
    ) as rollout:  # fmt: skip
        yield rollout


def in_turn(source, history):
    return next(source)


def curriculum(source, history):
    """Half of the prompts in turn, the others again by how often they fail; from both domains."""
    r = random.Random(history.num_drawn)
    if r.random() < 0.5:
        return next(source)
    if r.random() < 0.3:
        return source.next_of(source.domains[history.step % 2])
    weights = [2 - history[row.id].rate if row.id in history else 0.1 for row in source.rows]
    return r.choices(source.rows, weights)[0]


def drawn(groups):
    return [(group.prompt.id, group.samples[0].visit, group.samples[0].seed) for group in groups]


def count_visits(groups_by_step, pass_reward):
    """What the history should be, from the scored samples of each step, in the order of draws."""
    scored, last = defaultdict(list), {}
    for step, groups in enumerate(groups_by_step, 1):
        for prompt_id, values in groups:
            passed = [value >= pass_reward for value in values]
            scored[prompt_id] += passed
            last[prompt_id] = fmean(passed), step
    return {name: (len(all_), sum(all_), *last[name]) for name, all_ in scored.items()}


@pytest.mark.parametrize("pass_reward", [1.0, 0.5])
def test_it_sees_the_history_of_all_groups_at_the_end_of_each_step(two_files, pass_reward):
    """Of dropped groups too, whose prompts are not in what is collected; not of failed samples."""
    seen, steps = defaultdict(list), []

    def choose(source, history):
        seen[history.step].append(dict(history))
        return curriculum(source, history)

    def reward(prompt, reply):
        if random.Random(f"{reply} {prompt.id}").random() < 0.1:
            raise ArithmeticError("a bad reward")
        return some_rewards(prompt, reply)

    with (
        FakeEngines(2, max_delay=0.002) as engines,
        coordinator(
            engines, Mixture(two_files, seed=1), choose, reward, pass_reward, max_retries=0
        ) as rollout,
    ):
        for _ in range(5):
            samples = [sample for group in rollout.collect() for sample in group.samples]
            samples += [sample for sample, why in rollout.dropped() if sample.score]
            values = defaultdict(list)
            for sample in samples:
                values[sample.visit, sample.prompt.id].append(sample.score.value)
            # Visits of a prompt are numbered in the order in which they are drawn.
            steps.append([(name, scores) for (_, name), scores in sorted(values.items())])
            assert rollout.metrics()["rollout/failed"] > 0
    assert seen[0][0] == {} and sum(len(calls) for calls in seen.values()) > 5 * 6
    for step in range(1, 5):
        assert seen[step][0] == count_visits(steps[:step], pass_reward)
        assert all(call == seen[step][0] for call in seen[step])
    assert any(visits.num_samples > 3 for visits in seen[4][0].values())
    assert len({visits.rate for visits in seen[4][0].values()}) > 3


@pytest.mark.parametrize("max_refills", [10, 1])
@pytest.mark.parametrize("choose", [curriculum, in_turn])
def test_the_order_in_which_samples_end_changes_nothing(two_files, choose, max_refills):
    """Two domains, of which one may replace the other, and groups that end in opposite orders."""

    def run(delay):
        ends = []

        def reward(prompt, reply):
            ends.append(prompt.id)
            return some_rewards(prompt, reply)

        engines = SimulatedEngines(delay=lambda request, index: delay(request.prompt_ids[1]))
        with coordinator(
            engines, Mixture(two_files, seed=1), choose, reward, max_refills=max_refills
        ) as rollout:
            steps = [drawn(rollout.collect()) for _ in range(6)]
            return steps, rollout.state_dict(), ends

    steps, state, ends = run(lambda number: 1 + number)
    others, other_state, other_ends = run(lambda number: 1000 - number)
    assert ends != other_ends and sorted(ends) == sorted(other_ends)
    assert steps == others
    assert (max_refills == 1) == (min(map(len, steps)) < 6)
    assert state == other_state


def test_a_resumed_run_draws_the_same(two_files):
    def run(num_steps, state=None):
        with (
            FakeEngines(2, max_delay=0.002) as engines,
            coordinator(engines, Mixture(two_files, seed=1), curriculum) as rollout,
        ):
            if state:
                rollout.load_state_dict(json.loads(json.dumps(state)))
            return [drawn(rollout.collect()) for _ in range(num_steps)], rollout.state_dict()

    steps, end = run(6)
    first, state = run(3)
    last, resumed_end = run(3, state)
    assert first + last == steps
    assert json.dumps(resumed_end, sort_keys=True) == json.dumps(end, sort_keys=True)
    assert state["history"]["step"] == 3 and len(state["history"]["visits"]) > 20
    without_history = {name: value for name, value in state.items() if name != "history"}
    assert run(3, without_history)[0] != last


def test_an_abandoned_step_is_drawn_again(two_files):
    def run(num_steps, stop_in=None, state=None):
        asked = Counter()

        def choose(source, history):
            asked[history.step] += 1
            if history.step == stop_in and asked[history.step] == 8:  # a second refill
                rollout.stop(Stopped(2))
            return curriculum(source, history)

        engines = SimulatedEngines(delay=lambda request, index: 1 + request.prompt_ids[1])
        with coordinator(engines, Mixture(two_files, seed=1), choose) as rollout:
            if state:
                rollout.load_state_dict(json.loads(json.dumps(state)))
            steps = []
            for _ in range(num_steps):
                try:
                    steps.append(drawn(rollout.collect()))
                except Stopped:
                    break
            return steps, rollout.state_dict()

    steps, _ = run(5)
    first, state = run(5, stop_in=2)
    last, _ = run(3, state=state)
    assert len(first) == 2 and first + last == steps


def test_groups_that_ended_since_the_last_step_are_saved():
    """They count in the order of their numbers, in a resumed run before those of its own."""

    def group(prompt_id, *values):
        prompt = Prompt(id=prompt_id, messages=(), domain="", ground_truth="")
        samples = [Sample(prompt=prompt, index=0, score=Score(value=value)) for value in values]
        return Group(prompt=prompt, samples=samples)

    history = History(1.0)
    history.note(7, group("a", 0, 1))
    history.note(9, group("a", 0, 0))
    history.note(2, group("a", 1, 1, 1))
    history.note(3, group("b"))
    state = json.loads(json.dumps(history.state_dict()))
    resumed = History(1.0)
    resumed.load_state_dict(state)
    resumed.note(0, group("a", 1, 0, 0, 0))
    for known in (history, resumed):
        assert not known
        known.step += 1
        known.update()
    assert history == {"a": Visits(7, 4, 0.0, 1)} and history["a"].rate == 4 / 7
    assert resumed == {"a": Visits(11, 5, 0.25, 1)}


def test_episodes_pass_by_their_success(two_files):
    seen = []

    def choose(source, history):
        seen.append(dict(history))
        return next(source)

    def reward(prompt, reply):
        return Score(value=5.0, parts={"success": float(prompt.domain == "easy")})

    with (
        FakeEngines(1) as engines,
        coordinator(
            engines, Mixture(two_files, seed=0), choose, reward, drop_equal=False
        ) as rollout,
    ):
        rollout.collect()
        rollout.collect()
    assert len(seen[-1]) == 6
    for prompt_id, visits in seen[-1].items():
        assert visits.rate == visits.last_rate == prompt_id.startswith("easy")


@pytest.mark.parametrize("entries", ["two_files", ("addition:2",)])
def test_a_prompt_that_is_chosen_again_is_sampled_anew(entries, request):
    """Also a generated one, which a source never repeats by itself."""
    entries = request.getfixturevalue(entries) if isinstance(entries, str) else entries
    first = Mixture(entries, seed=0).next_of("addition" if len(entries) == 1 else "easy")
    first = replace(first, messages=({"role": "user", "content": "1 2"},))
    options = {"drop_equal": False, "prompts_per_step": 2}
    samples, state = [], None
    for _ in range(2):
        with (
            FakeEngines(1) as engines,
            coordinator(
                engines, Mixture(entries, seed=0), lambda source, history: first, **options
            ) as rollout,
        ):
            if state:
                rollout.load_state_dict(state)
            samples += [sample for group in rollout.collect() for sample in group.samples]
            state = json.loads(json.dumps(rollout.state_dict()))
    assert len({sample.seed for sample in samples}) == 4
    for number, sample in enumerate(samples):
        check_sample(sample, visit=number // 3)


FOREIGN = Prompt(id="x", messages=(), domain="law", ground_truth="")
WRONG = {
    "nothing": (lambda: None, "returned None, which is no Prompt; return next"),
    "text": (lambda: "9 9", "returned '9 9', which is no Prompt"),
    "end": (lambda: next(iter(())), r"raised StopIteration: .*; return one of source.rows again"),
    "domain": (lambda: FOREIGN, "returned a prompt of domain 'law'.*return one of easy, hard"),
}


@pytest.mark.parametrize("num_right", [0, 6])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice_ends_the_run_and_names_the_function(two_files, case, num_right):
    """Also in place of a group that was dropped, while `collect` waits."""
    answer, message = WRONG[case]

    def choose(source, history):
        return next(source) if history.num_drawn < num_right else answer()

    place = rf"test_prompts_of_your_own\.py line {choose.__code__.co_firstlineno}: choose\(\) "
    with (
        FakeEngines(1) as engines,
        coordinator(engines, Mixture(two_files, seed=0), choose) as rollout,
        pytest.raises(UserError, match=place + message),
    ):
        rollout.collect()


class Chooser:
    def __call__(self, source, history):
        return None

    def method(self, source, history):
        return None


@wraps(in_turn)
def decorated(*arguments):
    return None


@pytest.mark.parametrize(
    ("choose", "place"),
    [
        (Chooser().method, r"test_prompts_of_your_own\.py line \d+: method\(\)"),
        (
            decorated,
            rf"test_prompts_of_your_own\.py line {in_turn.__code__.co_firstlineno}: in_turn\(\)",
        ),
        (Chooser(), r"Chooser object at .*>\(\)"),
        (partial(decorated, 1), r"line \d+: in_turn\(\)"),
    ],
)
def test_whatever_is_called_is_named(choose, place):
    with pytest.raises(UserError, match=f"{place} returned None"):
        PromptQueue(fake_prompts(), choose).draw(None)


@pytest.mark.parametrize("error", [IndexError, SystemExit])
@pytest.mark.parametrize("num_right", [0, 6, 8])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_error_in_it_ends_the_run_with_its_traceback(two_files, num_right, max_staleness, error):
    """In the first draws, in place of a dropped group, and while generating ahead."""

    def broken(source, history):
        if history.num_drawn == num_right:
            raise error
        return next(source)

    with (
        FakeEngines(1) as engines,
        coordinator(
            engines, Mixture(two_files, seed=0), broken, max_staleness=max_staleness
        ) as rollout,
        pytest.raises(error) as caught,
    ):
        if max_staleness:
            rollout.start()
        for _ in range(3):
            rollout.collect()
    assert "broken" in [entry.name for entry in caught.traceback]


def test_prompts_that_end():
    """What they end with is whole; then the function has nothing to choose from."""
    source = itertools.islice(fake_prompts(), 10)
    with (
        FakeEngines(1) as engines,
        coordinator(engines, source, in_turn, prompts_per_step=4, drop_equal=False) as rollout,
    ):
        assert [len(rollout.collect()) for _ in range(2)] == [4, 4]
        with pytest.raises(UserError, match=r"in_turn\(\) raised StopIteration: there are no more"):
            rollout.collect()


def test_when_no_group_is_left_the_history_says_what_was_tried(two_files):
    with (
        FakeEngines(1) as engines,
        coordinator(
            engines, Mixture(two_files, seed=0), in_turn, lambda *_: 1.0, max_refills=1
        ) as rollout,
    ):
        assert rollout.collect() == []
        history = rollout.state_dict()["history"]
    assert history["step"] == 1 and history["num_drawn"] == 12
    assert list(history["visits"].values()) == [(3, 3, 1.0, 1)] * 12


def test_a_run_may_begin_and_cease_to_choose(two_files, capsys):
    def run(choose, state=None):
        with (
            FakeEngines(1) as engines,
            coordinator(engines, Mixture(two_files, seed=1), choose) as rollout,
        ):
            if state:
                rollout.load_state_dict(json.loads(json.dumps(state)))
            return [group.prompt.id for group in rollout.collect()], rollout.state_dict()

    _, plain = run(None)
    assert "history" not in plain
    _, chosen = run(in_turn, plain)
    assert "no prompts() chose before: its history begins now" in capsys.readouterr().err
    assert chosen["history"]["step"] == 1
    assert chosen["prompts"] != plain["prompts"]
    ids, again = run(None, chosen)
    assert "the order of the data is used" in capsys.readouterr().err
    assert "history" not in again
    assert not set(ids) & set(chosen["history"]["visits"])
    run(in_turn, chosen)
    run(None, plain)
    assert "warning" not in capsys.readouterr().err
