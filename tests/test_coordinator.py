"""The coordinator over fake engines (many samples, every kind of trouble) and over real ones."""

import asyncio
import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engines import ENDLESS, FakeChat, FakeEngines, fake_prompts, fake_tokens
from test_cluster import GONE_SECONDS, Program, run_failing

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.engine.engine import Engine
from roll_lite.engine.sequence import Request
from roll_lite.engine.service import Answers, EngineService, Load
from roll_lite.envs.question import question_maker
from roll_lite.models.hf import load_model
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.options import RolloutOptions
from roll_lite.rollout.replicas import Replicas
from roll_lite.rollout.turns import derive_seed
from roll_lite.tasks import prompts
from roll_lite.types import SamplingParams, Turn

PARAMS = SamplingParams(max_tokens=8)
PROGRAMS = Path(__file__).parent / "rollout_programs.py"


@contextmanager
def coordinator_over(engines, reward=lambda prompt, reply: 0.0, source=None, seed=3, **options):
    with Coordinator(
        engines=engines,
        chat=FakeChat(),
        make_env=question_maker({"fake": reward}),
        prompts=fake_prompts() if source is None else source,
        params=PARAMS,
        options=RolloutOptions(**options),
        seed=seed,
    ) as rollout:
        yield rollout


def check_sample(sample, visit=0, seed=3):
    """Its tokens are those that its own request gives, whoever generated it."""
    seed = derive_seed(seed, sample.prompt.id, visit)
    request = Request(prompt_ids=sample.turns[0].prompt_ids, params=PARAMS, seed=seed)
    assert sample.turns[0].token_ids == fake_tokens(request, sample.index)
    assert sample.reply == FakeChat().decode(sample.turns[0].token_ids)


class Troubled:
    """A reward that raises now and then, which depends on the reply and the attempt alone."""

    def __init__(self):
        self.attempts, self.lock = Counter(), threading.Lock()

    def __call__(self, prompt, reply):
        with self.lock:
            self.attempts[prompt.id, reply] += 1
            attempt = self.attempts[prompt.id, reply]
        draw = random.Random(f"{prompt.id} {reply} {attempt}").random()
        if draw < 0.1:
            raise ArithmeticError("a bad reward")
        return float(draw > 0.5)


def test_ten_thousand_samples_none_lost_none_twice():
    """Delays, failures, a replica that dies, prompts without end, rewards that raise."""
    source = fake_prompts(endless_every=50)
    trouble = {"max_delay": 0.02, "failure_rate": 0.002, "dies": ((2, 300),)}
    handed_out, totals = [], Counter()
    with (
        FakeEngines(4, **trouble) as engines,
        coordinator_over(
            engines, Troubled(), source, samples_per_prompt=8, prompts_per_step=125,
            extra_prompts=10, drop_equal=True, deadline=0.6, max_retries=3,
        ) as rollout,
    ):  # fmt: skip
        for _ in range(10):
            groups = rollout.collect()
            assert len(groups) == 125
            ids = [int(group.prompt.id[1:]) for group in groups]
            assert ids == sorted(ids)
            handed_out += groups
            totals.update(rollout.metrics())
    samples = [sample for group in handed_out for sample in group.samples]
    ids = [(sample.prompt.id, sample.index) for sample in samples]
    assert len(ids) == len(set(ids)) and len(ids) > 9000
    for sample in samples:
        assert sample.state == "done" and sample.score is not None
        check_sample(sample)
    num_drawn = int(next(source).id[1:])
    assert totals["rollout/started"] == 8 * num_drawn
    ends = ("done", "filtered", "aborted", "failed", "stale")
    assert totals["rollout/started"] == sum(totals[f"rollout/{end}"] for end in ends)
    assert totals["rollout/done"] == len(samples)
    assert totals["rollout/aborted"] >= 8 * (num_drawn // 50 - 10)
    assert totals["rollout/failed"] > 0 and totals["rollout/retried"] > 100
    assert totals["rollout/refilled"] > 0 and totals["rollout/filtered"] > 0
    assert all(len(group.samples) >= 2 for group in handed_out)
    assert all(len({s.score.value for s in group.samples}) == 2 for group in handed_out)


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
    submitted = [[a[2] for a in letters if a[0] == "submit"] for letters in seen]
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
        engines.post = lambda replica, *letter: (
            asked.append((replica, letter)),
            post(replica, *letter),
        )
        with Coordinator(
            engines=engines, chat=FakeChat(), make_env=Talk, prompts=fake_prompts(), params=PARAMS,
            options=RolloutOptions(samples_per_prompt=2, prompts_per_step=9), seed=0,
        ) as rollout:  # fmt: skip
            groups = rollout.collect()
    assert all(len(s.turns) == 3 and s.score.value == 3.0 for g in groups for s in g.samples)
    homes = {}
    for replica, (_, _, request) in asked:
        homes.setdefault(request.prompt_ids[1], set()).add(replica)
    assert len(asked) == 9 * (1 + 2 * 2) and all(len(home) == 1 for home in homes.values())


def test_surplus_groups_are_aborted_or_kept():
    for surplus, staleness in (("abort", 0), ("keep", 1)):
        source = fake_prompts(endless_every=5)
        with (
            FakeEngines(2, max_delay=0.005) as engines,
            coordinator_over(
                engines, source=source, samples_per_prompt=2, prompts_per_step=8, extra_prompts=8,
                surplus=surplus, max_staleness=staleness,
            ) as rollout,
        ):  # fmt: skip
            groups = rollout.collect() + rollout.collect()
            assert len({group.prompt.id for group in groups}) == 16
            metrics = rollout.metrics()
            left = metrics["rollout/groups_in_flight"] + metrics["rollout/groups_ready"]
            if surplus == "abort":
                assert left == 0 and metrics["rollout/started"] == 2 * 2 * 16
                assert metrics["rollout/aborted"] == 2 * 16
                wait_until(lambda e=engines: not any(s.under_way for s in e.services))
            else:
                assert left == 8 and metrics["rollout/started"] == 2 * (16 + 8)
                assert metrics["rollout/aborted"] == 0


def wait_until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_too_many_refills_are_an_error_that_says_why():
    with (
        FakeEngines(2) as engines,
        coordinator_over(
            engines, samples_per_prompt=2, prompts_per_step=4, drop_equal=True, max_refills=3
        ) as rollout,
        pytest.raises(RuntimeError, match=r"13 groups .*: 13 had equal rewards; max_refills=3"),
    ):
        rollout.collect()


def test_rewards_that_always_raise_stop_the_run_with_their_traceback():
    def reward(prompt, reply):
        raise KeyError("no such key")

    with (
        FakeEngines(2) as engines,
        coordinator_over(
            engines, reward, samples_per_prompt=2, prompts_per_step=4, max_refills=1
        ) as rollout,
        pytest.raises(RuntimeError, match=r"too few samples left(.|\n)*KeyError: 'no such key'"),
    ):
        rollout.collect()


def test_when_all_replicas_die_the_run_ends_with_their_words():
    with (
        FakeEngines(2, dies=((0, 5), (1, 9))) as engines,
        coordinator_over(engines, prompts_per_step=8, max_retries=100) as rollout,
        pytest.raises(RuntimeError, match=r"no engine replica works(.|\n)*dead for ever"),
    ):
        rollout.collect()


def test_faults_arrive_with_their_traceback_and_no_thread_is_left():
    threads = threading.active_count()

    def make_env(prompt):
        raise ZeroDivisionError("in the thread")

    with FakeEngines(2) as engines:
        rollout = Coordinator(
            engines=engines, chat=FakeChat(), make_env=make_env, prompts=fake_prompts(),
            params=PARAMS, options=RolloutOptions(), seed=0,
        )  # fmt: skip
        asked = [next(fake_prompts())]
        for action in (
            rollout.collect,
            lambda: rollout.answer(asked, num_samples=1, params=PARAMS),
        ):
            with pytest.raises(ZeroDivisionError, match="in the thread") as caught:
                action()
            frames = [entry.name for entry in caught.traceback]
            assert "make_env" in frames
        rollout.close()
    assert threading.active_count() == threads


def test_a_lost_rank_ends_whoever_waits():
    source = fake_prompts(endless_every=1)
    with FakeEngines(2) as engines, coordinator_over(engines, source=source) as rollout:
        threading.Timer(0.2, lambda: engines.on_failure(RuntimeError("rank 1 died"))).start()
        with pytest.raises(RuntimeError, match="rank 1 died"):
            rollout.answer(itertools.islice(source, 3), num_samples=2, params=PARAMS)
        with pytest.raises(RuntimeError, match="rank 1 died"):
            rollout.collect()


@pytest.mark.parametrize("max_staleness", [0.5, 1, 2])
@pytest.mark.parametrize("restart", [False, True])
def test_asynchronous_samples_are_never_too_old(max_staleness, restart):
    """Versions come while groups are under way; what is handed out keeps the bound."""
    options = {"samples_per_prompt": 4, "prompts_per_step": 10, "max_staleness": max_staleness}
    totals, gaps, bound = Counter(), [], 10 * (1 + max_staleness)
    with (
        FakeEngines(3, max_delay=0.06) as engines,
        coordinator_over(engines, **options) as rollout,
    ):
        rollout.start()
        for version in range(1, 16):
            groups = rollout.collect()
            gaps += [version - 1 - s.turns[0].versions[0][1] for g in groups for s in g.samples]
            time.sleep(0.01)  # the training step
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


def test_what_is_left_of_a_group_after_an_abort_is_asked_again():
    """Samples that had not begun end under the new weights, after the others were aborted."""

    class Engines:
        role, posts = SimpleNamespace(num_replicas=1), []

        def post(self, replica, *letter):
            self.posts.append(letter)

    def turn(reason):
        return Turn(prompt_ids=[1], token_ids=[], logprobs=[], finish_reason=reason, versions=[])

    def answer(replicas, key, **reasons):
        turns = [(key, int(name[1:]), turn(reason)) for name, reason in reasons.items()]
        replicas._on_report(0, "answers", Answers(turns, [], Load(0, 0, 0), 1))

    async def run():
        engines, retried = Engines(), []
        replicas = Replicas(engines, RolloutOptions(), on_fault=pytest.fail)
        futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
        request = Request(prompt_ids=[1], params=SamplingParams(max_tokens=2), num_samples=3)
        asked = replicas.ask(request, futures, retried.append)
        begun = [(1, 0, 0), (1, 1, 0)]
        replicas._on_report(0, "answers", Answers([], [], Load(0, 0, 0), 1, begun))
        assert asked.begun == {0: 0, 1: 0}
        answer(replicas, 1, s0="abort", s1="abort")
        assert asked.begun == {}  # they begin again under whichever version there is then
        assert len(engines.posts) == 1  # the engine still has the third
        answer(replicas, 1, s2="stop")
        await asyncio.sleep(0)
        assert [letter[:2] for letter in engines.posts] == [("submit", 1), ("submit", 2)]
        assert retried == [0, 1]
        answer(replicas, 2, s0="stop", s1="length", s2="stop")
        assert [future.result().finish_reason for future in futures] == ["stop", "length", "stop"]

    asyncio.run(run())


def test_stale_samples_are_dropped_and_counted():
    with (
        FakeEngines(2) as engines,
        coordinator_over(
            engines, samples_per_prompt=2, prompts_per_step=4, max_staleness=1
        ) as rollout,
    ):
        rollout.start()
        first = rollout.collect()
        while rollout.metrics()["rollout/groups_ready"] < 4:  # no more come: they could not be used
            time.sleep(0.01)
        engines.load(5)
        rollout.set_version(5)
        second = rollout.collect()
        metrics = rollout.metrics()
    assert {s.first_version for g in first for s in g.samples} == {0}
    assert {s.first_version for g in second for s in g.samples} == {5}
    assert metrics["rollout/stale"] == 8 and metrics["rollout/max_staleness"] == 0


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_groups_that_have_become_too_old_give_way(max_staleness):
    """Every fourth prompt is never answered: in the end such groups would take all places."""
    source, groups, totals = fake_prompts(endless_every=4), [], Counter()
    options = {"samples_per_prompt": 2, "prompts_per_step": 4, "max_staleness": max_staleness}
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(engines, source=source, deadline=10, **options) as rollout,
    ):
        rollout.start()
        for version in range(1, 13):
            groups += rollout.collect()
            engines.load(version)
            rollout.set_version(version)
            totals.update(rollout.metrics())
        wait_until(lambda: all(s.reported_version == 12 for s in engines.services))
        metrics = rollout.metrics()
        totals.update(metrics)
        unfinished = [prompt["id"] for prompt, _ in rollout.state_dict()["unfinished"]]
        endless = set(filter(is_endless, unfinished))
        wait_until(lambda: num_endless(engines) == len(endless))  # the others were aborted there
        dropped = rollout.dropped()
    assert len(groups) == 48 and not any(is_endless(group.prompt.id) for group in groups)
    ids = [(s.prompt.id, s.index) for g in groups for s in g.samples]
    ids += [(s.prompt.id, s.index) for s, _ in dropped]
    assert len(ids) == len(set(ids))
    assert {(why, s.state) for s, why in dropped} == {("too old", "filtered")}
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


def test_groups_that_have_not_begun_are_not_too_old():
    """Two groups without end have all slots; the others wait, and begin under the new version."""
    source = itertools.chain(
        itertools.islice(fake_prompts(endless_every=1), 2), itertools.islice(fake_prompts(), 2, 99)
    )
    options = {"samples_per_prompt": 2, "prompts_per_step": 4, "max_staleness": 1}
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
        (prompt_id, "too old") for prompt_id in ("p0", "p0", "p1", "p1")
    ]


@pytest.mark.parametrize(("num_begun", "stale", "filtered"), [(4, 4, 0), (3, 3, 1), (2, 0, 0)])
def test_a_group_goes_on_as_long_as_two_of_its_samples_can_be_used(num_begun, stale, filtered):
    options = {"samples_per_prompt": 4, "prompts_per_step": 1, "max_staleness": 1}
    totals = Counter()
    with (
        FakeEngines(1, num_slots=num_begun) as engines,
        coordinator_over(engines, source=fake_prompts(endless_every=1), **options) as rollout,
    ):
        rollout.start()
        wait_until(lambda: len(engines.services[0].running) == num_begun)
        engines.load(2)
        rollout.set_version(2)
        while "rollout/engine_running" not in totals:  # until the engine has reported
            totals.update(rollout.metrics())
        under_way = [prompt["id"] for prompt, _ in rollout.state_dict()["unfinished"]]
        why = Counter(why for _, why in rollout.dropped())
    assert (totals["rollout/stale"], totals["rollout/filtered"]) == (stale, filtered)
    assert why == Counter({"too old": stale, "the others were too old": filtered})
    assert under_way == (["p1", "p2"] if stale else ["p0", "p1"])


def test_samples_that_begin_again_are_young_again():
    options = {"samples_per_prompt": 2, "prompts_per_step": 2, "max_staleness": 1}
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


def test_rewards_that_take_too_long_are_not_waited_for():
    """All tokens are there and nobody generates: the turns say how old they are."""

    async def reward(prompt, reply):
        await asyncio.sleep(0 if int(prompt.id[1:]) > 7 else 60)
        return 0.0

    options = {"samples_per_prompt": 2, "prompts_per_step": 4, "max_staleness": 1}
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


def test_a_resumed_run_goes_on_with_what_was_kept_and_under_way():
    options = {"samples_per_prompt": 2, "prompts_per_step": 8, "extra_prompts": 6,
               "surplus": "keep", "max_staleness": 1}  # fmt: skip
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(engines, source=fake_prompts(endless_every=4), **options) as rollout,
    ):
        first = rollout.collect()
        time.sleep(0.1)
        state = json.loads(json.dumps(rollout.state_dict()))
        num_seen = len(state["visits"])
        kept = [group["prompt"]["id"] for group in state["ready"]]
        under_way = [prompt["id"] for prompt, _ in state["unfinished"]]
        assert len(under_way) >= 3 and len(kept) + len(under_way) == 6
    options |= {"extra_prompts": 0, "surplus": "abort"}
    with (
        FakeEngines(2, max_delay=0.01) as engines,
        coordinator_over(
            engines, source=fake_prompts(num_seen), deadline=0.5, **options
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
        ({"surplus": "sell"}, "surplus='sell' is not known"),
        ({"surplus": "keep"}, "set max_staleness to 1 or more"),
        ({"drop_equal": True, "samples_per_prompt": 1}, "drop_equal drops every group"),
        ({"min_group_reward": 0.9, "max_group_reward": 0.1}, "must not exceed"),
        ({"deadline": 0}, "deadline=0 must be above 0"),
        ({"max_staleness": float("inf")}, "max_staleness=inf must be a finite"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutOptions(**options)


def test_alone_a_real_engine_gives_what_it_gives_by_itself(tiny_folder):
    """The engine asked directly, with the seeds that groups have; there is no thread."""
    chat, engine = Chat(tiny_folder), Engine(load_model(tiny_folder), kv_cache_gib=0.05)
    params = SamplingParams(max_tokens=12, stop_ids=chat.stop_ids)
    asked = list(itertools.islice(prompts("reverse:3", seed=0), 12))
    requests = [
        Request(
            prompt_ids=chat.encode(prompt.messages),
            params=params,
            num_samples=3,
            seed=derive_seed(7, prompt.id, 0),
        )
        for prompt in asked
    ]
    expected = engine.generate(requests)
    threads = threading.active_count()
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role("generate", EngineService, folder=tiny_folder, kv_cache_gib=0.05)
        with Coordinator(
            engines=engines,
            chat=chat,
            make_env=question_maker({"reverse": lambda prompt, reply: float(len(reply))}),
            prompts=prompts("reverse:3", seed=0),
            params=params,
            options=RolloutOptions(samples_per_prompt=3, prompts_per_step=6, deadline=60),
            seed=7,
        ) as rollout:
            groups = rollout.collect() + rollout.collect()
            assert threading.active_count() == threads
            (greedy,) = rollout.answer(
                asked[:1], num_samples=1, params=SamplingParams(max_tokens=4, temperature=0.0)
            )
    assert len(greedy.samples[0].turns[0].token_ids) <= 4
    assert [[s.turns for s in g.samples] for g in groups] == [[[t] for t in g] for g in expected]


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """Where programs write their results, with a model in it."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    return tmp_path


def program(name, num_ranks, folder):
    return Program(name, num_ranks, folder, programs=PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_real_engines_on_several_ranks_give_the_samples_of_one(folder, num_ranks):
    alone = program("synchronous", 1, folder).result()
    several = program("synchronous", num_ranks, folder).result()
    assert len(alone["rows"]) == 3 * 8 * 3
    assert several["rows"] == alone["rows"]
    assert not alone["had_thread"]
    assert several["had_thread"] and not several["left"]


@pytest.mark.slow
def test_real_engines_generate_beside_training(folder):
    result = program("asynchronous", 3, folder).result()
    assert len(result["gaps"]) == 7 * 6 * 2 and set(result["states"]) == {"done"}
    assert min(result["gaps"]) >= 0 and max(result["gaps"]) == 1
    assert result["totals"]["rollout/failed"] == 0 and result["totals"]["rollout/retried"] > 0


@pytest.mark.slow
def test_ten_thousand_samples_over_real_ranks(folder):
    result = program("many", 4, folder).result()
    totals = result["totals"]
    assert len(result["ids"]) == len(set(map(tuple, result["ids"]))) == totals["rollout/done"]
    assert totals["rollout/done"] + totals["rollout/failed"] == totals["rollout/started"] == 10000
    assert totals["rollout/retried"] > 0
    print(f"{10000 / result['seconds']:.0f} samples a second")


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_collect(folder):
    output = run_failing("dying", 2, folder, programs=PROGRAMS)
    assert re.search(r"RoleError: rank 1 \(generate; pid \d+ on .*\) died", output)


@pytest.mark.slow
def test_ctrl_c_ends_a_collect(folder):
    running = program("interrupted", 2, folder)
    running.wait_for(running.result_file.exists)
    time.sleep(0.5)
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.end(within=GONE_SECONDS) != 0
    assert "KeyboardInterrupt" in running.output()
