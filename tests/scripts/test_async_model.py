"""The model that scripts/bench/staleness.py measures against."""

import importlib.util
import math
import random
import sys
from statistics import NormalDist

import pytest
from support.paths import SCRIPTS

SCRIPT = SCRIPTS / "bench/async_model.py"


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("async_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["async_model"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["async_model"]


def test_mean_of_the_longest_has_a_closed_form_for_one_and_two(model):
    work = model.Workload(prompts_per_step=1, samples_per_prompt=1, mean_seconds=3.0, sigma=1.2)
    assert model.expected_longest(work) == pytest.approx(3.0, rel=1e-5)
    work.samples_per_prompt = 2
    closed = 2 * 3.0 * NormalDist().cdf(1.2 / math.sqrt(2))
    assert model.expected_longest(work) == pytest.approx(closed, rel=1e-5)


def list_schedule(times, num_slots):
    """When the last sample ends, each on whichever slot is free first."""
    ends = [0.0] * num_slots
    for seconds in times:
        slot = ends.index(min(ends))
        ends[slot] += seconds
    return max(ends)


def test_synchronous_steps_are_list_schedules_and_training(model):
    work = model.Workload(prompts_per_step=5, samples_per_prompt=3, slots=1, mean_seconds=1.0)
    pace = model.simulate(work, model.SYNCHRONOUS, 0, 0.25, warm_up=2, steps=6)
    makespans = []
    for step in range(2, 8):
        prompts = range(5 * step, 5 * step + 5)
        times = [work.seconds(prompt, index) for prompt in prompts for index in range(3)]
        makespans.append(list_schedule(times, 4))
    busy = sum(work.seconds(p, i) for p in range(10, 40) for i in range(3))
    assert pace.step_seconds == pytest.approx(sum(makespans) / 6 + 0.25)
    assert pace.idle_slots == pytest.approx(1 - busy / (4 * sum(makespans)))
    assert pace.gaps == {0: 6 * 15} and pace.dropped == 0


def test_mean_makespan_is_within_its_bounds(model):
    work = model.Workload(prompts_per_step=6, samples_per_prompt=4, slots=2, mean_seconds=1.0)
    r, totals = random.Random(0), []
    for _ in range(4000):
        times = [r.lognormvariate(-0.5, 1.0) for _ in range(24)]
        totals.append(list_schedule(times, 8))
    low, high = model.makespan_bounds(work)
    assert low < sum(totals) / 4000 < high


@pytest.mark.parametrize("train_seconds, step", [(0.5, 4.0), (3.0, 6.0)])
def test_equal_times_reach_the_asynchronous_bound(model, train_seconds, step):
    """Two ranks of one slot take 4 s for 8 samples of 1 s; two ranks train for twice as long."""
    work = model.Workload(prompts_per_step=4, samples_per_prompt=2, slots=1, sigma=0.0)
    work.mean_seconds = 1.0
    layout = model.Layout(2, 2)
    assert model.asynchronous_bound(work, layout, train_seconds) == step
    pace = model.simulate(work, layout, 1, train_seconds, warm_up=5, steps=10)
    assert pace.step_seconds == pytest.approx(step)
    assert set(pace.gaps) <= {0, 1}


def test_a_group_that_gets_too_old_gives_its_slots_to_others(model):
    """The first takes for ever. Its samples begin under version 0 and end when 2 is there."""

    class OneEndless(model.Workload):
        def seconds(self, prompt, index):
            return 1e9 if prompt == 0 else 1.0

    work = OneEndless(prompts_per_step=1, samples_per_prompt=2, slots=2)
    simulation = model.Simulation(work, model.Layout(2, 2), max_staleness=1, stale="drop")
    # Training on two ranks takes 1 s. The first group has the place of the one to train on next, so
    # that two steps take 2 s each; then generating goes on beside training.
    first = simulation.run(train_seconds=0.5, num_steps=2)
    assert first.gaps == {0: 4} and first.dropped == pytest.approx(2 / 6)
    assert simulation.now == pytest.approx(4.0)
    later = simulation.run(train_seconds=0.5, num_steps=3)
    assert later.gaps == {0: 2, 1: 4} and later.dropped == 0
    assert simulation.now == pytest.approx(8.0)
