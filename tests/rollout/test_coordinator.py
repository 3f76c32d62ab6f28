"""The coordinator over fake engines: many samples, every kind of failure."""

import asyncio
import gc
import itertools
import json
import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_engines import (
    PARAMS,
    FakeChat,
    FakeEngines,
    check_sample,
    coordinator_over,
    fake_prompts,
    fake_tokens,
    playing,
    wait_until,
)

from roll_lite.data import Mixture
from roll_lite.engine.request import EngineReport, Load, Request
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.engines import EngineClient, PendingRequest
from roll_lite.rollout.episode import Episode
from roll_lite.rollout.prompts import PromptQueue, derive_seed
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Turn


class Troubled:
    """A reward that sometimes raises, depending only on the reply and the attempt."""

    def __init__(self):
        self.attempts, self.lock = Counter(), threading.Lock()

    def __call__(self, prompt, reply):
        with self.lock:
            self.attempts[prompt.id, reply] += 1
            attempt = self.attempts[prompt.id, reply]
        draw = random.Random(f"{prompt.id} {reply} {attempt}").random()
        if draw < 0.3:
            raise ArithmeticError("a bad reward")
        return float(draw > 0.65)


@pytest.mark.parametrize("num_collects", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_of_thousands_of_samples_none_is_lost_and_none_twice(num_collects):
    """Delays, failures, a replica that dies, endless prompts, rewards that raise."""
    source = fake_prompts(endless_every=50)
    trouble = {"max_delay": 0.02, "failure_rate": 0.002, "dies": ((2, 300),)}
    handed_out, totals = [], Counter()
    with (
        FakeEngines(4, **trouble) as engines,
        coordinator_over(
            engines, Troubled(), source, samples_per_prompt=8, prompts_per_step=125,
            extra_groups=10, drop_equal=True, deadline=5, max_retries=3,
        ) as rollout,
    ):  # fmt: skip
        for _ in range(num_collects):
            groups = rollout.collect()
            assert len(groups) == 125
            ids = [int(group.prompt.id[1:]) for group in groups]
            assert ids == sorted(ids)
            handed_out += groups
            totals.update(rollout.metrics())
    samples = [sample for group in handed_out for sample in group.samples]
    ids = [(sample.prompt.id, sample.index) for sample in samples]
    assert len(ids) == len(set(ids)) and len(ids) > 900 * num_collects
    for sample in samples:
        assert sample.state == "done" and sample.score is not None
        check_sample(sample)
    num_drawn = int(next(source).id[1:])
    assert totals["rollout/started"] == 8 * num_drawn
    ends = ("done", "filtered", "aborted", "failed", "stale")
    assert totals["rollout/started"] == sum(totals[f"rollout/{end}"] for end in ends)
    assert totals["rollout/done"] == len(samples)
    assert totals["rollout/aborted"] >= 8 * (num_drawn // 50 - 10)
    assert totals["rollout/failed"] > 0 and totals["rollout/retried"] > 10 * num_collects
    assert totals["rollout/refilled"] > 0 and totals["rollout/filtered"] > 0
    assert all(len(group.samples) >= 2 for group in handed_out)
    assert all(len({s.score.value for s in group.samples}) == 2 for group in handed_out)


def test_samples_that_have_ended_are_freed_without_a_garbage_collection():
    """Also those whose reward raised, that were dropped, or that passed their deadline."""

    def num_left():
        return sum(type(thing) in (Episode, PendingRequest) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        num_before = num_left()
        with (
            FakeEngines(2, max_delay=0.01) as engines,
            coordinator_over(
                engines, Troubled(), fake_prompts(endless_every=10), samples_per_prompt=4,
                prompts_per_step=100, drop_equal=True, deadline=1, max_retries=1,
            ) as rollout,
        ):  # fmt: skip
            rollout.collect()
            counts = rollout.metrics()
            assert all(counts[f"rollout/{end}"] for end in ("retried", "failed", "aborted"))
            wait_until(lambda: num_left() <= num_before)
    finally:
        gc.enable()


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_replicas_change_nothing_and_groups_come_in_order(num_replicas):
    def reward(prompt, reply):
        return len(reply) % 2

    with (
        FakeEngines(num_replicas, max_delay=0.01, seed=num_replicas) as engines,
        coordinator_over(
            engines, reward, samples_per_prompt=3, prompts_per_step=20, drop_equal=True
        ) as rollout,
    ):
        groups = rollout.collect() + rollout.collect()
    wanted = []
    for prompt in fake_prompts():  # without any concurrency: what must come out
        seed, token_ids = derive_seed(3, prompt.id, 0), FakeChat().encode(prompt.messages)
        request = Request(prompt_ids=token_ids, params=PARAMS, seed=seed)
        replies = [fake_tokens(request, index) for index in range(3)]
        if len({len(FakeChat().decode(reply)) % 2 for reply in replies}) == 2:
            wanted.append((prompt.id, replies))
        if len(wanted) == 40:
            break
    assert [(g.prompt.id, [s.turns[0].token_ids for s in g.samples]) for g in groups] == wanted


def test_a_group_goes_to_one_replica_and_groups_to_all():
    with (
        FakeEngines(4, max_delay=0.05) as engines,
        coordinator_over(engines, samples_per_prompt=4, prompts_per_step=40) as rollout,
    ):
        seen = [[] for _ in range(4)]
        for replica, service in enumerate(engines.services):
            receive = service.receive
            service.receive = lambda *a, r=replica, f=receive: (seen[r].append(a), f(*a))
        rollout.collect()
    submitted = [[a[2] for a in posts if a[0] == "submit"] for posts in seen]
    assert [len(requests) for requests in submitted] == [10] * 4
    assert all(request.num_samples == 4 for requests in submitted for request in requests)


def test_groups_wait_for_a_replica_with_room():
    most = [0, 0]
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(
            engines, samples_per_prompt=4, prompts_per_step=40, samples_per_replica=12
        ) as rollout,
    ):
        for replica, service in enumerate(engines.services):
            report = service.report

            def watch(r=replica, s=service, f=report):
                most[r] = max(most[r], sum(len(left) for _, left in s.under_way.values()))
                f()

            service.report = watch
        assert len(rollout.collect()) == 40
    assert all(6 < number <= 12 for number in most)


def test_a_deadline_does_not_count_the_wait_for_an_engine():
    """The first group is endless and takes all the room; the next start when it is aborted."""
    options = {"samples_per_prompt": 2, "prompts_per_step": 3, "samples_per_replica": 2}
    source = itertools.chain([next(fake_prompts(endless_every=1))], fake_prompts(1))
    with (
        FakeEngines(1) as engines,
        coordinator_over(engines, source=source, deadline=1.0, **options) as rollout,
    ):
        groups = rollout.collect()
        dropped = rollout.dropped()
    assert [(sample.prompt.id, why) for sample, why in dropped] == [("p0", "aborted")] * 2
    assert [group.prompt.id for group in groups] == ["p1", "p2", "p3"]
    for sample in (sample for group in groups for sample in group.samples):
        assert [event.state for event in sample.events] == [
            "queued", "generating", "scoring", "done"
        ]  # fmt: skip
    queued, generating, *_ = groups[0].samples[0].events
    assert generating.time - queued.time >= 1.0


class Wayward:
    """The second of two samples opens differently from the first."""

    openings = itertools.cycle(["1 0", "1 1"])

    def __init__(self, prompt):
        self.prompt = prompt

    def reset(self, seed):
        content = (
            next(self.openings) if self.prompt.id == "p1" else self.prompt.messages[0]["content"]
        )
        return ({"role": "user", "content": content},), {}

    async def step(self, action):
        return (), 0.0, True, False, {}


def test_a_sample_that_failed_while_its_group_waited_stays_failed():
    """Its group is admitted later; a sample that has ended does not start."""
    options = {"samples_per_prompt": 2, "prompts_per_step": 2, "samples_per_replica": 2}
    with (
        FakeEngines(1, max_delay=0.05) as engines,
        Coordinator(
            engines=engines, chat=FakeChat(), play=playing(Wayward), prompts=fake_prompts(),
            params=PARAMS, options=RolloutOptions(deadline=5, **options), seed=0,
        ) as rollout,
    ):  # fmt: skip
        ids = [group.prompt.id for group in rollout.collect()]
        dropped = rollout.dropped()
    assert ids == ["p0", "p2"]
    lives = {s.index: [event.state for event in s.events] for s, _ in dropped}
    assert lives[1] == ["queued", "failed"]
    assert lives[0] == ["queued", "generating", "stepping", "done", "filtered"]


def test_evaluations_have_no_deadline():
    with (
        FakeEngines(1, max_delay=0.1) as engines,
        coordinator_over(engines, deadline=0.01) as rollout,
    ):
        asked = itertools.islice(fake_prompts(), 4)
        groups = rollout.answer(asked, num_samples=2, params=PARAMS)
    samples = [sample for group in groups for sample in group.samples]
    assert {sample.state for sample in samples} == {"done"}
    assert max(s.events[-1].time - s.events[0].time for s in samples) > 0.01


class Talk:
    """Three turns; the reward of each is 1."""

    def __init__(self, prompt):
        self.prompt, self.num_turns = prompt, 0

    def reset(self, seed):
        return self.prompt.messages, {}

    async def step(self, action):
        self.num_turns += 1
        return ({"role": "user", "content": "5"},), 1.0, self.num_turns == 3, False, {}


def test_later_turns_stay_where_the_conversation_began():
    with FakeEngines(3, max_delay=0.01) as engines:
        asked = []
        post = engines.post
        engines.post = lambda replica, *message: (
            asked.append((replica, message)),
            post(replica, *message),
        )
        with Coordinator(
            engines=engines, chat=FakeChat(), play=playing(Talk), prompts=fake_prompts(),
            params=PARAMS, options=RolloutOptions(samples_per_prompt=2, prompts_per_step=9), seed=0,
        ) as rollout:  # fmt: skip
            groups = rollout.collect()
    assert all(len(s.turns) == 3 and s.score.value == 3.0 for g in groups for s in g.samples)
    homes = {}
    for replica, (_, _, request) in asked:
        homes.setdefault(request.prompt_ids[1], set()).add(replica)
    assert len(asked) == 9 * (1 + 2 * 2) and all(len(home) == 1 for home in homes.values())


@pytest.mark.parametrize(
    ("unfinished", "waiting", "num_tokens", "replica"),
    [
        ((4, 4), (3, 0), 10, 0),  # balanced
        ((4, 0), (0, 0), 10, 0),  # nothing waits at home
        ((4, 0), (1, 0), 10, 1),
        ((4, 0), (1, 1), 10, 0),  # samples wait elsewhere too
        ((4, 3), (1, 0), 10, 0),  # one sample more is no reason
        ((8, 0), (0, 0), 10, 1),  # samples_per_replica, though none has been reported as waiting
        ((5, 0), (9, 0), 2040, 1),  # four samples fewer are worth 4 * 512 tokens of prefill
        ((5, 0), (9, 0), 2060, 0),
        ((4, 2, 0), (1, 0, 0), 10, 2),  # the least loaded
    ],
)
def test_a_conversation_moves_when_waiting_costs_more_than_reading_it_again(
    unfinished, waiting, num_tokens, replica
):
    async def run():
        engines = SimpleNamespace(
            role=SimpleNamespace(num_replicas=len(unfinished)), post=lambda *message: None
        )
        client = EngineClient(engines, RolloutOptions(samples_per_replica=8))
        first = client.submit(Request(prompt_ids=[1], params=PARAMS))
        first.futures[0].set_result(None)
        await asyncio.sleep(0)
        client.loads = [Load(4, number, 0) for number in waiting]
        client._num_unfinished = list(unfinished)
        request = Request(prompt_ids=[1] * num_tokens, params=PARAMS)
        return client.submit(request, same_replica_as=first).replica

    assert asyncio.run(run()) == replica


class UnevenTalk(Talk):
    """Prompts with an odd number have eight turns, the others one."""

    async def step(self, action):
        self.num_turns += 1
        is_over = self.num_turns == (8 if int(self.prompt.id[1:]) % 2 else 1)
        return ({"role": "user", "content": "5"},), 1.0, is_over, False, {}


def test_conversations_move_to_an_idle_replica_and_stay_there():
    """Long conversations begin on one of two replicas, each with room for one sample."""
    options = {"samples_per_prompt": 2, "prompts_per_step": 8}
    sent = []
    with (
        FakeEngines(2, max_delay=0.002, num_slots=1) as engines,
        Coordinator(
            engines=engines, chat=FakeChat(), play=playing(UnevenTalk), prompts=fake_prompts(),
            params=PARAMS, options=RolloutOptions(**options), seed=3,
        ) as rollout,
    ):  # fmt: skip
        submit = rollout._engines.submit

        def watch(request, same_replica_as=None, group_number=None):
            pending = submit(request, same_replica_as, group_number)
            sent.append((pending, same_replica_as))
            return pending

        rollout._engines.submit = watch
        groups = rollout.collect()
    later = [(pending, last) for pending, last in sent if last is not None]
    moved = [pending for pending, last in later if pending.replica != last.replica]
    assert len(later) == 4 * 2 * 7 and 0 < len(moved) < len(later) / 2
    for pending, last in later:  # the request before it, wherever that was
        ids = last.request.prompt_ids
        assert pending.request.prompt_ids[: len(ids)] == ids
        assert len(pending.request.prompt_ids) <= len(ids) + 4 + 1
    for sample in (sample for group in groups for sample in group.samples):
        seed = derive_seed(3, sample.prompt.id, 0)
        for number, turn in enumerate(sample.turns[1:], 1):
            own = derive_seed(seed, sample.index, number)
            request = Request(prompt_ids=turn.prompt_ids, params=PARAMS, seed=own)
            assert turn.token_ids == fake_tokens(request, 0)  # wherever it was generated


def test_surplus_groups_are_aborted():
    options = {"samples_per_prompt": 2, "prompts_per_step": 8, "extra_groups": 8}
    with (
        FakeEngines(2, max_delay=0.005) as engines,
        coordinator_over(engines, source=fake_prompts(endless_every=5), **options) as rollout,
    ):
        groups = rollout.collect() + rollout.collect()
        metrics = rollout.metrics()
        wait_until(lambda: not any(s.under_way for s in engines.services))
    assert len({group.prompt.id for group in groups}) == 16
    assert metrics["rollout/groups_in_flight"] == metrics["rollout/groups_ready"] == 0
    assert metrics["rollout/started"] == 2 * 2 * 16 and metrics["rollout/aborted"] == 2 * 16


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_group_keeps_the_samples_that_are_done_first(max_staleness):
    """Rewards of a group end in a prescribed order, each after the one before it."""
    order, num_wanted = [4, 0, 5, 2, 1, 3], 3
    ended = {f"p{i}": [asyncio.Event() for _ in range(7)] for i in range(99)}

    async def reward(prompt, reply):
        request = Request(
            prompt_ids=FakeChat().encode(prompt.messages), params=PARAMS,
            seed=derive_seed(3, prompt.id, 0),
        )  # fmt: skip
        replies = [FakeChat().decode(fake_tokens(request, index)) for index in range(6)]
        place = order.index(replies.index(reply))
        if place:
            await ended[prompt.id][place - 1].wait()
        ended[prompt.id][place].set()
        return float(place)

    options = {"samples_per_prompt": num_wanted, "extra_samples": 3, "prompts_per_step": 4}
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(engines, reward, max_staleness=max_staleness, **options) as rollout,
    ):
        if max_staleness:
            rollout.start()
        groups = rollout.collect()
        wait_until(lambda: len(rollout._groups.ready) == 4 * max_staleness)
        dropped, metrics = rollout.dropped(), rollout.metrics()
    assert [[s.index for s in group.samples] for group in groups] == [[0, 4, 5]] * 4
    assert [[s.score.value for s in group.samples] for group in groups] == [[1.0, 0.0, 2.0]] * 4
    num_groups = 4 + 4 * max_staleness  # collected and ready
    assert Counter(why for _, why in dropped) == {"one too many": num_groups * 3}
    counts = [metrics[f"rollout/{name}"] for name in ("started", "done", "aborted", "failed")]
    assert counts == [num_groups * 6, 4 * 3, num_groups * 3, 0]


@pytest.mark.parametrize(("num_failing", "num_done"), [(0, 3), (1, 3), (2, 3), (3, 2), (4, 1)])
def test_extra_samples_make_up_for_failed_ones(num_failing, num_done):
    """Of 3 + 2 samples one never ends, unless all others are needed."""
    endless, failing = (1,) if num_failing < 2 else (), itertools.count()

    def reward(prompt, reply):
        if next(failing) < num_failing:
            raise KeyError("no such key")
        return 0.0

    options = {"samples_per_prompt": 3, "extra_samples": 2, "prompts_per_step": 1, "max_retries": 0}
    with (
        FakeEngines(1, endless=endless) as engines,
        coordinator_over(engines, reward, **options) as rollout,
    ):
        (group,) = rollout.collect()
        dropped, metrics = rollout.dropped(), rollout.metrics()
        wait_until(lambda: not engines.services[0].under_way)
    reasons = Counter(why for sample, why in dropped if sample.prompt.id == "p0")
    assert reasons["failed"] == num_failing and reasons["one too many"] == max(0, 2 - num_failing)
    if num_done > 1:
        assert group.prompt.id == "p0" and len(group.samples) == num_done
        assert not {s.index for s in group.samples} & set(endless)
    else:
        assert group.prompt.id == "p1" and reasons["its group had too few samples left"] == 1
    ends = ("done", "filtered", "aborted", "failed", "stale")
    assert metrics["rollout/started"] == sum(metrics[f"rollout/{end}"] for end in ends)


def test_a_reward_that_ignores_its_cancellation_adds_no_sample():
    num_asked = Counter()

    async def reward(prompt, reply):
        num_asked[prompt.id] += 1
        place = num_asked[prompt.id]
        if place > 2:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        if place > 6:
            raise ValueError("disturbed")
        return 0.0

    options = {"samples_per_prompt": 2, "extra_samples": 8, "prompts_per_step": 4, "max_retries": 0}
    with FakeEngines(1) as engines, coordinator_over(engines, reward, **options) as rollout:
        groups, metrics = rollout.collect(), rollout.metrics()
    assert [len(group.samples) for group in groups] == [2] * 4
    assert metrics["rollout/failed"] == 0 and metrics["rollout/aborted"] == 4 * 8


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("extra_groups", [0, 3])
def test_when_refills_are_used_up_a_step_goes_on_with_what_is_left(num_replicas, extra_groups):
    """Every fifth prompt is worth training on: of 4 + extra + 2 * 4 two or three are left."""
    options = {"prompts_per_step": 4, "extra_groups": extra_groups, "max_refills": 2}

    def reward(prompt, reply):
        return float(len(reply) if int(prompt.id[1:]) % 5 == 4 else 0)

    with (
        FakeEngines(num_replicas, max_delay=0.003) as engines,
        coordinator_over(engines, reward, samples_per_prompt=9, drop_equal=True, **options)
        as rollout,
    ):  # fmt: skip
        rounds = [rollout.collect() for _ in range(3)]
        metrics = rollout.metrics()
    taken = [[int(group.prompt.id[1:]) for group in groups] for groups in rounds]
    total = sum(s.score.value for groups in rounds for group in groups for s in group.samples)
    num_asked = 12 + extra_groups
    asked = [range(n * num_asked, (n + 1) * num_asked) for n in range(3)]
    expected = [[i for i in numbers if i % 5 == 4] for numbers in asked]
    assert taken == expected
    assert metrics["rollout/missing_groups"] == 12 - sum(map(len, expected)) > 0
    assert metrics["rollout/done"] == 9 * sum(map(len, expected))
    # Dropped groups had zeros.
    assert metrics["rollout/reward"] == pytest.approx(total / (9 * 3 * num_asked))


@pytest.mark.parametrize(("num_left", "is_kept"), [(1, False), (2, True)])
def test_a_group_of_one_sample_has_nothing_to_compare_with(num_left, is_kept):
    """Rewards of the first prompt fail for all but `num_left` samples."""
    left = itertools.count(num_left, -1)

    def reward(prompt, reply):
        if prompt.id == "p0" and next(left) <= 0:
            raise KeyError("no such key")
        return 0.0

    options = {"samples_per_prompt": 4, "prompts_per_step": 2, "max_retries": 0}
    with FakeEngines(1) as engines, coordinator_over(engines, reward, **options) as rollout:
        groups = rollout.collect()
        metrics = rollout.metrics()
        reasons = Counter(why for _, why in rollout.dropped())
    sizes = {group.prompt.id: len(group.samples) for group in groups}
    assert sizes == ({"p0": num_left, "p1": 4} if is_kept else {"p1": 4, "p2": 4})
    assert metrics["rollout/failed"] == 4 - num_left
    assert metrics["rollout/filtered"] == (0 if is_kept else num_left)
    assert reasons["its group had too few samples left"] == metrics["rollout/filtered"]


def test_a_filter_of_your_own_sees_the_groups_that_pass_the_others():
    """Every third prompt has equal rewards and is dropped before it is asked."""
    asked = []

    def keep(group):
        asked.append(group)
        return int(group.prompt.id[1:]) % 2 == 0

    def reward(prompt, reply):
        return float(len(reply)) if int(prompt.id[1:]) % 3 else 1.0

    options = {"samples_per_prompt": 9, "prompts_per_step": 4, "drop_equal": True}
    with FakeEngines(2) as engines, coordinator_over(engines, reward, keep=keep, **options) as r:
        groups, dropped, metrics = r.collect(), r.dropped(), r.metrics()
    assert [group.prompt.id for group in groups] == ["p2", "p4", "p8", "p10"]
    assert not any(int(group.prompt.id[1:]) % 3 == 0 for group in asked)
    assert all(len(group.samples) == 9 and group.samples[0].score for group in asked)
    why = {int(sample.prompt.id[1:]): why for sample, why in dropped}
    assert all(
        text
        == ("its group was not kept by keep()" if number % 3 else "its group had equal rewards")
        for number, text in why.items()
    )
    assert metrics["rollout/refilled"] == len(why)
    assert metrics["rollout/filtered"] == 9 * len(why)


def test_an_error_in_a_filter_of_your_own_ends_the_run_with_its_traceback():
    def keep(group):
        return group.samples[99]

    with FakeEngines(1) as engines, coordinator_over(engines, keep=keep) as rollout:
        for _ in range(2):
            with pytest.raises(IndexError) as caught:
                rollout.collect()
            assert "keep" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_request_is_retried_as_often_as_max_retries(max_retries):
    """A group that fails on every replica; four replicas, so that none reaches MAX_FAILURES."""
    with (
        FakeEngines(4) as engines,
        coordinator_over(
            engines, samples_per_prompt=2, prompts_per_step=1, max_retries=max_retries
        ) as rollout,
    ):
        asked = Counter()
        post = engines.post

        def failing(replica, name, key, request=None):
            if name == "submit" and request.prompt_ids[1] == 0:
                asked["p0"] += 1
                engines.on_report(replica, "failed", [key], "a bad moment")
            else:
                post(replica, name, key, request)

        engines.post = failing
        (group,) = rollout.collect()
        dropped = rollout.dropped()
    assert asked["p0"] == 1 + max_retries and group.prompt.id == "p1"
    assert [(s.prompt.id, why) for s, why in dropped] == [("p0", "failed")] * 2
    assert all(f"engines failed {1 + max_retries} times" in s.error for s, _ in dropped)


def test_a_prompt_of_a_file_that_comes_again_after_a_resume_is_sampled_anew(tmp_path):
    """Visit counts are saved, so the second epoch is that of an uninterrupted run."""
    path = tmp_path / "rows.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"1 {i}", "domain": "fake"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"samples_per_prompt": 2, "prompts_per_step": 4}

    def run(num_collects, state=None):
        source = Mixture([str(path)], seed=0)
        with FakeEngines(1) as engines, coordinator_over(engines, source=source, **options) as r:
            if state:
                r.load_state_dict(json.loads(json.dumps(state)))
            steps = [r.collect() for _ in range(num_collects)]
            return steps, r.state_dict()

    (first, second), _ = run(2)
    _, state = run(1)
    (resumed,), _ = run(1, state)
    ids = [[s.token_ids for g in groups for s in g.samples] for groups in (first, second, resumed)]
    assert ids[0] != ids[1] == ids[2]
    for group in resumed:
        for sample in group.samples:
            check_sample(sample, visit=1)


def test_when_no_group_is_left_the_step_is_empty_and_says_why():
    """In a checkpoint too; a step with groups begins anew."""
    rewards = itertools.chain([1.0] * 32, [0.5] * 32, itertools.cycle([0.0, 1.0]))
    with (
        FakeEngines(2) as engines,
        coordinator_over(
            engines, lambda *_: next(rewards),
            samples_per_prompt=2, prompts_per_step=4, drop_equal=True, max_refills=3,
        ) as rollout,
    ):  # fmt: skip
        for number in (1, 2):
            assert rollout.collect() == [] and len(rollout.empty_steps) == number
            assert rollout.metrics()["rollout/missing_groups"] == 4
        assert [step.has_passed for step in rollout.empty_steps] == [True, False]
        for step in rollout.empty_steps:
            assert "all 16 groups of one step were dropped: 16 had equal" in step.why
        state = json.loads(json.dumps(rollout.state_dict()))
        assert len(rollout.collect()) == 4 and rollout.empty_steps == []
    with FakeEngines(1) as engines, coordinator_over(engines) as rollout:
        rollout.load_state_dict(state)
        assert [step.has_passed for step in rollout.empty_steps] == [True, False]


def test_rewards_that_always_raise_stop_the_run_with_their_traceback():
    def reward(prompt, reply):
        raise KeyError("no such key")

    with (
        FakeEngines(2) as engines,
        coordinator_over(
            engines, reward, samples_per_prompt=2, prompts_per_step=4, max_refills=1
        ) as rollout,
        pytest.raises(
            RuntimeError, match=r"too few samples left(.|\n)*KeyError: 'no such key'$"
        ) as error,
    ):
        rollout.collect()
    assert f"{Path(__file__).name}" in str(error.value) and "episode.py" not in str(error.value)


def test_when_all_replicas_die_the_run_ends_with_their_error():
    with (
        FakeEngines(2, dies=((0, 5), (1, 9))) as engines,
        coordinator_over(engines, prompts_per_step=8, max_retries=100) as rollout,
        pytest.raises(RuntimeError, match=r"no engine works(.|\n)*dead for ever"),
    ):
        rollout.collect()


def test_the_samples_of_a_lost_replica_are_generated_by_another():
    """Answers that come from it later are ignored."""
    options = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_retries": 0}
    with FakeEngines(2) as engines, coordinator_over(engines, **options) as rollout:
        expected = [[s.turns for s in group.samples] for group in rollout.collect()]
    with FakeEngines(2) as engines, coordinator_over(engines, **options) as rollout:
        asked, post, late = Counter(), engines.post, []

        def losing(replica, name, key, request=None):
            asked[replica] += name == "submit"
            if replica == 1:
                late.append((key, request))
                if asked[1] == 3:
                    engines.on_report(1, "lost")
                    turns = [(k, i, made_turn(r, i)) for k, r in late for i in r.indices]
                    engines.on_report(1, "answers", EngineReport(turns, [], Load(0, 0, 1), 0))
            else:
                post(replica, name, key, request)

        engines.post = losing
        groups = rollout.collect()
        metrics = rollout.metrics()
    assert asked[0] == 8 and asked[1] >= 3
    assert [[s.turns for s in group.samples] for group in groups] == expected
    assert rollout._engines.loads[1] is None
    assert metrics["rollout/lost_engines"] == 1 and metrics["rollout/retried"] == 2 * asked[1]


def made_turn(request, index):
    """A turn of an engine that has no listener any more."""
    return Turn(
        prompt_ids=request.prompt_ids, token_ids=[index], logprobs=[0.0], finish_reason="stop",
        versions=[(0, 0)],
    )  # fmt: skip


def test_faults_arrive_with_their_traceback_and_no_thread_is_left():
    threads = threading.active_count()

    def play(chat, task):
        raise ZeroDivisionError("in the thread")

    with (
        FakeEngines(2) as engines,
        Coordinator(
            engines=engines, chat=FakeChat(), play=play, prompts=fake_prompts(),
            params=PARAMS, options=RolloutOptions(), seed=0,
        ) as rollout,
    ):  # fmt: skip
        asked = [next(fake_prompts())]
        for action in (
            rollout.collect,
            lambda: rollout.answer(asked, num_samples=1, params=PARAMS),
        ):
            with pytest.raises(ZeroDivisionError, match="in the thread") as caught:
                action()
            frames = [entry.name for entry in caught.traceback]
            assert "play" in frames
    assert threading.active_count() == threads


def test_a_lost_rank_ends_every_call_that_waits():
    source = fake_prompts(endless_every=1)
    with FakeEngines(2) as engines, coordinator_over(engines, source=source) as rollout:

        def lose_a_rank():
            wait_until(lambda: sum(len(s.under_way) for s in engines.services) == 3)
            engines.on_failure(RuntimeError("rank 1 died"))

        threading.Thread(target=lose_a_rank).start()
        with pytest.raises(RuntimeError, match="rank 1 died"):
            rollout.answer(itertools.islice(source, 3), num_samples=2, params=PARAMS)
        with pytest.raises(RuntimeError, match="rank 1 died"):
            rollout.collect()


def test_a_resumed_run_continues_with_ready_and_unfinished_groups():
    options = {"samples_per_prompt": 2, "prompts_per_step": 8, "max_staleness": 1}
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(engines, source=fake_prompts(endless_every=4), **options) as rollout,
    ):
        rollout.start()
        first = rollout.collect()
        wait_until(lambda: rollout.metrics()["rollout/groups_ready"] == 4)
        state = json.loads(json.dumps(rollout.state_dict()))
        num_seen = len(state["visits"])
        kept = [group["prompt"]["id"] for group in state["ready"]]
        under_way = [prompt["id"] for prompt, _ in state["unfinished"]]
        assert len(under_way) == len(kept) == 4
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(
            engines, source=fake_prompts(num_seen), deadline=1.0, **options
        ) as rollout,
    ):
        rollout.load_state_dict(state)
        second = rollout.collect()
        assert rollout.metrics()["rollout/aborted"] == 2 * sum(
            int(prompt_id[1:]) % 4 == 3 for prompt_id in under_way
        )
    ids = [group.prompt.id for group in first + second]
    assert len(set(ids)) == 16 and set(kept) <= set(ids)
    for group in second:
        for sample in group.samples:
            check_sample(sample)


def test_a_saved_position_in_prompts_is_not_ignored():
    state = {"visits": {}, "unfinished": [], "prompts": {"position": 3}}
    with pytest.raises(ValueError, match="a plain iterator cannot be moved"):
        PromptQueue(fake_prompts()).load_state_dict(state)


def test_prompts_that_end():
    source = iter(list(itertools.islice(fake_prompts(), 10)))
    with (
        FakeEngines(2) as engines,
        coordinator_over(engines, source=source, prompts_per_step=4) as rollout,
    ):
        assert [len(rollout.collect()) for _ in range(4)] == [4, 4, 2, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_prompt": 0}, "samples_per_prompt=0 must be at least 1"),
        ({"drop_equal": True, "samples_per_prompt": 1}, "drop_equal drops every group"),
        ({"min_group_reward": 0.9, "max_group_reward": 0.1}, "must not exceed"),
        ({"deadline": 0}, "deadline=0 must be above 0"),
        ({"max_staleness": float("inf")}, "max_staleness=inf must be a finite"),
        ({"min_group_reward": float("nan")}, "min_group_reward=nan must be a finite"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutOptions(**options)


def test_half_a_prompt_source_is_refused():
    class Half:
        def __next__(self): ...

        def state_dict(self): ...

        def load_state_dict(self, state): ...

    with pytest.raises(TypeError, match="Half has no next_of and no comes_again"):
        PromptQueue(Half())
