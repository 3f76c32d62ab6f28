"""Generation during training: stale samples are kept, or dropped, counted and replaced."""

import asyncio
import itertools
import math
import random
from collections import Counter
from statistics import fmean
from types import SimpleNamespace

import pytest
from support.fake_engines import (
    ENDLESS,
    PARAMS,
    FakeEngines,
    SimulatedEngines,
    check_sample,
    coordinator_over,
    fake_prompts,
    wait_until,
)

from roll_lite.engine.request import EngineReport, Load, Request
from roll_lite.rollout.engines import EngineClient
from roll_lite.rollout.prompts import derive_seed
from roll_lite.types import SamplingParams, Turn


@pytest.mark.parametrize("max_staleness", [0.5, 1, 2])
@pytest.mark.parametrize("restart", [False, True])
def test_asynchronous_samples_are_never_too_stale(max_staleness, restart):
    """Versions change while groups are running; the staleness of collected groups is bounded."""
    options = {
        "samples_per_prompt": 4,
        "prompts_per_step": 10,
        "max_staleness": max_staleness,
        "stale": "drop",
    }
    totals, gaps, bound = Counter(), [], 10 * (1 + max_staleness)
    with (
        FakeEngines(3, max_delay=0.06) as engines,
        coordinator_over(engines, **options) as rollout,
    ):
        rollout.start()
        for version in range(1, 16):
            groups = rollout.collect()
            gaps += [version - 1 - s.turns[0].versions[0][1] for g in groups for s in g.samples]
            # The training step: a group completes, most others are still running.
            wait_until(lambda: totals.update(m := rollout.metrics()) or m["rollout/groups_ready"])
            engines.load(version, restart)
            rollout.set_version(version)
            metrics = rollout.metrics()
            in_flight = metrics["rollout/groups_in_flight"] + metrics["rollout/groups_ready"]
            assert in_flight <= bound
            totals.update(metrics)
            for group in groups:
                for sample in group.samples:
                    check_sample(sample)
    assert min(gaps) >= 0 and 0 < max(gaps) <= -(-max_staleness // 1)
    assert totals["rollout/done"] == len(gaps)
    assert (totals["rollout/retried"] > 0) == restart


def sample_seconds(request, index):
    """Lognormal, with a mean of 1."""
    return random.Random(f"{request.seed} {index}").lognormvariate(-0.5, 1.0)


def kolmogorov_smirnov(first, second):
    """Largest distance of two empirical distributions, and that of one in a thousand equal ones."""
    values = sorted([(x, 1 / len(first)) for x in first] + [(x, -1 / len(second)) for x in second])
    distance = max(map(abs, itertools.accumulate(step for _, step in values)))
    return distance, 1.949 * math.sqrt(1 / len(first) + 1 / len(second))


@pytest.mark.slow
@pytest.mark.parametrize("stale", ["keep", "drop"])
def test_with_keep_trained_samples_are_as_long_as_generated_ones(stale):
    """Training takes 1 s and a step about 2; one sample in nine takes more than 2 s, some 30."""
    options = {"samples_per_prompt": 4, "prompts_per_step": 16, "max_staleness": 1, "stale": stale}
    engines, trained, gaps, version = (
        SimulatedEngines(num_slots=64, delay=sample_seconds),
        [],
        [],
        0,
    )
    with coordinator_over(engines, **options) as rollout:
        rollout.start()
        while len(trained) < 10_000:
            for sample in (sample for group in rollout.collect() for sample in group.samples):
                seed = derive_seed(3, sample.prompt.id, 0)
                request = Request(prompt_ids=sample.turns[0].prompt_ids, params=PARAMS, seed=seed)
                trained.append(sample_seconds(request, sample.index))
                gaps.append(version - sample.first_version)
            engines.wait(rollout, 1.0)
            version += 1
            engines.load(version)
            rollout.set_version(version)
        metrics = rollout.metrics()
    generated = [random.Random(i).lognormvariate(-0.5, 1.0) for i in range(10_000)]
    distance, critical = kolmogorov_smirnov(trained, generated)
    assert (distance < critical) == (stale == "keep")
    assert (metrics["rollout/stale"] == 0) == (stale == "keep")
    assert fmean(gaps) <= 1 and (max(gaps) > 1) == (stale == "keep")


@pytest.mark.parametrize("replica_fails", [False, True])
def test_aborted_samples_of_a_request_are_sent_again(replica_fails):
    """A sample without a first token is answered after the running ones were aborted."""

    class Engines:
        role = SimpleNamespace(num_replicas=1)

        def __init__(self):
            self.posts = []

        def post(self, replica, *message):
            self.posts.append(message)

        def listen(self, on_report, on_failure):
            self.report = on_report

    def recorder(index, admitted, retried):
        return SimpleNamespace(
            on_admitted=lambda: admitted.append(index), on_retry=lambda: retried.append(index)
        )

    def turn(reason):
        return Turn(prompt_ids=[1], token_ids=[], logprobs=[], finish_reason=reason, versions=[])

    def answer(engines, key, **reasons):
        turns = [(key, int(name[1:]), turn(reason)) for name, reason in reasons.items()]
        engines.report(0, "answers", EngineReport(turns, [], Load(0, 0, 0), 1))

    async def run(replica_fails):
        engines, admitted, retried = Engines(), [], []
        errors, news = [], []
        client = EngineClient(engines)
        client.listen(lambda function, *args: function(*args), errors.append, news.append)
        request = Request(prompt_ids=[1], params=SamplingParams(max_tokens=2), num_samples=3)
        pending = client.submit(request, group_number=7)
        for index in range(3):
            pending.join(index, recorder(index, admitted, retried))
        key = pending.key
        first_versions = [(key, 0, 0), (key, 1, 0)]
        engines.report(0, "answers", EngineReport([], [], Load(0, 0, 0), 1, first_versions))
        assert pending.first_versions == {0: 0, 1: 0} and news == [{7}]
        answer(engines, key, s0="abort", s1="abort")
        assert pending.first_versions == {}  # they begin again, under the version of that time
        assert len(engines.posts) == 1  # the engine still has the third
        if replica_fails:
            engines.report(0, "failed", [key], "out of order")
        else:
            answer(engines, key, s2="stop")
        await asyncio.sleep(0)
        lost = [0, 1, 2] if replica_fails else [0, 1]
        assert (admitted, retried) == ([0, 1, 2, *lost], lost)
        if replica_fails:  # what it had aborted before is forgotten
            answer(engines, pending.key, s2="stop")
            await asyncio.sleep(0)
        (_, _, first), (name, key, second) = engines.posts
        assert (list(first.indices), list(second.indices)) == ([0, 1, 2], lost)
        assert (name, key) == ("submit", pending.key) and client._num_unfinished == [2]
        answer(engines, key, s0="stop", s1="length")
        assert [future.result().finish_reason for future in pending.futures] == [
            "stop",
            "length",
            "stop",
        ]
        await asyncio.sleep(0)
        assert client._num_unfinished == [0] and len(engines.posts) == 2
        assert (errors, len(news)) == ([], 1)

    asyncio.run(run(replica_fails))


def test_stale_samples_are_kept():
    options = {"samples_per_prompt": 2, "prompts_per_step": 4, "max_staleness": 1}
    with FakeEngines(2, num_slots=8) as engines, coordinator_over(engines, **options) as rollout:
        rollout.start()
        earlier = rollout.collect()
        wait_until(lambda: rollout.metrics()["rollout/groups_ready"] == 4)
        engines.load(5)
        rollout.set_version(5)
        groups, metrics = rollout.collect(), rollout.metrics()
    ids = [group.prompt.id for group in [*earlier, *groups]]  # in the order in which they ended
    assert sorted(ids) == [f"p{i}" for i in range(8)]
    assert {s.first_version for g in groups for s in g.samples} == {0}
    assert metrics["rollout/stale"] == 0 and metrics["rollout/max_staleness"] == 5


def test_samples_that_run_through_many_versions_are_kept():
    """The reward of the first prompt ends last; meanwhile other groups are trained on."""
    may_end = asyncio.Event()

    async def reward(prompt, reply):
        if prompt.id == "p0":
            await may_end.wait()
        return 0.0

    options = {"samples_per_prompt": 2, "prompts_per_step": 2, "max_staleness": 1}
    with FakeEngines(1) as engines, coordinator_over(engines, reward, **options) as rollout:
        rollout.start()
        taken = []
        for version in range(1, 9):
            taken += [group.prompt.id for group in rollout.collect()]
            engines.load(version)
            rollout.set_version(version)
        rollout._loop.call(may_end.set)
        wait_until(lambda: "p0" in taken or taken.extend(g.prompt.id for g in rollout.collect()))
        metrics = rollout.metrics()
    assert taken[:4] == ["p1", "p2", "p3", "p4"] and len(taken) == len(set(taken))
    assert metrics["rollout/stale"] == 0 and metrics["rollout/max_staleness"] == 8


def test_stale_samples_are_dropped_and_counted():
    with (
        FakeEngines(2) as engines,
        coordinator_over(
            engines, samples_per_prompt=2, prompts_per_step=4, max_staleness=1, stale="drop"
        ) as rollout,
    ):
        rollout.start()
        first = rollout.collect()
        # No more come: they could not be used.
        wait_until(lambda: rollout.metrics()["rollout/groups_ready"] == 4)
        engines.load(5)
        rollout.set_version(5)
        second = rollout.collect()
        metrics = rollout.metrics()
    assert {s.first_version for g in first for s in g.samples} == {0}
    assert {s.first_version for g in second for s in g.samples} == {5}
    assert metrics["rollout/stale"] == 8 and metrics["rollout/max_staleness"] == 0


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_running_groups_that_become_stale_are_replaced(max_staleness):
    """Every fourth prompt is endless: otherwise such groups would take all the room."""
    source, groups, totals = fake_prompts(endless_every=4), [], Counter()
    options = {
        "samples_per_prompt": 2,
        "prompts_per_step": 4,
        "max_staleness": max_staleness,
        "stale": "drop",
    }
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(engines, source=source, deadline=10, **options) as rollout,
    ):
        rollout.start()
        for version in range(1, 13):
            groups += rollout.collect()
            engines.load(version)
            rollout.set_version(version)
            wait_until(lambda v=version: all(s.reported_version == v for s in engines.services))
            totals.update(rollout.metrics())
        metrics = rollout.metrics()
        totals.update(metrics)
        unfinished = [prompt["id"] for prompt, _ in rollout.state_dict()["unfinished"]]
        endless = set(filter(is_endless, unfinished))
        wait_until(lambda: num_endless(engines) == len(endless))  # all other samples were aborted
        dropped = rollout.dropped()
    assert len(groups) == 48 and not any(is_endless(group.prompt.id) for group in groups)
    ids = [(s.prompt.id, s.index) for g in groups for s in g.samples]
    ids += [(s.prompt.id, s.index) for s, _ in dropped]
    assert len(ids) == len(set(ids))
    assert {(why, s.state) for s, why in dropped} == {("too stale", "filtered")}
    num_drawn = int(next(source).id[1:])
    gone = {s.prompt.id for s, _ in dropped if is_endless(s.prompt.id)}
    assert gone.isdisjoint(endless)
    assert gone | endless == set(filter(is_endless, (f"p{i}" for i in range(num_drawn))))
    under_way = metrics["rollout/groups_in_flight"] + metrics["rollout/groups_ready"]
    assert totals["rollout/started"] == 2 * num_drawn == len(ids) + 2 * under_way
    assert totals["rollout/stale"] == len(dropped) and totals["rollout/done"] == 2 * 48
    for sample, _ in dropped:
        if is_endless(sample.prompt.id):  # ended by the first version that is too far away
            gap = sample.events[-1].policy_version - sample.events[1].policy_version
            assert max_staleness + 1 <= gap <= max_staleness + 2  # it may begin a version later


def is_endless(prompt_id):
    return int(prompt_id[1:]) % 4 == 3


def num_endless(engines):
    """Requests without end that engines have."""
    requests = [request for s in engines.services for request, _ in list(s.under_way.values())]
    return sum(request.prompt_ids[0] == ENDLESS for request in requests)


def test_groups_that_have_not_begun_are_not_stale():
    """Two endless groups take all the room; the rest begin under the new version."""
    source = itertools.chain(
        itertools.islice(fake_prompts(endless_every=1), 2), itertools.islice(fake_prompts(), 2, 99)
    )
    options = {"samples_per_prompt": 2, "prompts_per_step": 4, "max_staleness": 1, "stale": "drop"}
    with (
        FakeEngines(1, num_slots=4) as engines,
        coordinator_over(engines, source=source, deadline=10, **options) as rollout,
    ):
        rollout.start()
        wait_until(lambda: len(engines.services[0].under_way) == 8)
        engines.load(5)
        rollout.set_version(5)
        groups, dropped = rollout.collect(), rollout.dropped()
    assert [group.prompt.id for group in groups] == ["p2", "p3", "p4", "p5"]
    assert {s.first_version for g in groups for s in g.samples} == {5}
    assert [(s.prompt.id, why) for s, why in dropped] == [
        (prompt_id, "too stale") for prompt_id in ("p0", "p0", "p1", "p1")
    ]


@pytest.mark.parametrize(("num_begun", "stale", "filtered"), [(4, 4, 0), (3, 3, 1), (2, 0, 0)])
def test_a_group_goes_on_as_long_as_two_of_its_samples_can_be_used(num_begun, stale, filtered):
    options = {"samples_per_prompt": 4, "prompts_per_step": 1, "max_staleness": 1, "stale": "drop"}
    totals = Counter()
    with (
        FakeEngines(1, num_slots=num_begun) as engines,
        coordinator_over(engines, source=fake_prompts(endless_every=1), **options) as rollout,
    ):
        rollout.start()
        wait_until(lambda: len(engines.services[0].running) == num_begun)
        engines.load(2)
        rollout.set_version(2)
        wait_until(lambda: totals.update(rollout.metrics()) or "rollout/engine_running" in totals)
        under_way = [prompt["id"] for prompt, _ in rollout.state_dict()["unfinished"]]
        why = Counter(why for _, why in rollout.dropped())
    assert (totals["rollout/stale"], totals["rollout/filtered"]) == (stale, filtered)
    assert why == Counter({"too stale": stale, "its group became too stale": filtered})
    assert under_way == (["p1", "p2"] if stale else ["p0", "p1"])


def test_restarted_samples_are_not_stale():
    options = {"samples_per_prompt": 2, "prompts_per_step": 2, "max_staleness": 1, "stale": "drop"}
    stale = {}
    with (
        FakeEngines(1) as engines,
        coordinator_over(engines, source=fake_prompts(endless_every=1), **options) as rollout,
    ):
        rollout.start()
        (service,) = engines.services
        wait_until(lambda: len(service.running) == 8)
        for version in (5, 6, 7):
            engines.load(version, restart=version == 5)
            rollout.set_version(version)
            wait_until(
                lambda v=version: service.reported_version == v and len(service.running) == 8
            )
            metrics = rollout.metrics()
            stale[version] = metrics["rollout/stale"]
            assert metrics["rollout/groups_in_flight"] == 4
    assert stale == {5: 0, 6: 0, 7: 8}


def test_samples_that_become_stale_while_they_are_scored_are_dropped():
    """All tokens are sampled and no engine runs: the turns have the policy versions."""

    async def reward(prompt, reply):
        await asyncio.sleep(0 if int(prompt.id[1:]) > 7 else 60)
        return 0.0

    options = {"samples_per_prompt": 2, "prompts_per_step": 4, "max_staleness": 1, "stale": "drop"}
    with FakeEngines(1) as engines, coordinator_over(engines, reward, **options) as rollout:
        rollout.start()
        (service,) = engines.services
        wait_until(lambda: service.num_answered == 16 and not (service.under_way or service.turns))
        engines.load(2)
        rollout.set_version(2)
        groups, metrics = rollout.collect(), rollout.metrics()
        states = {tuple(e.state for e in sample.events) for sample, _ in rollout.dropped()}
    assert [group.prompt.id for group in groups] == ["p8", "p9", "p10", "p11"]
    assert metrics["rollout/stale"] == 16
    assert states == {("queued", "generating", "scoring", "filtered")}
