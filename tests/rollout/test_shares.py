"""Every step has the domains that were drawn, however many groups are dropped or slow."""

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from support.fake_engines import (
    PARAMS,
    FakeChat,
    FakeEngines,
    check_sample,
    fake_tokens,
    playing,
    wait_until,
)

from roll_lite.data import Mixture
from roll_lite.engine.request import Request
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.groups import Slots
from roll_lite.rollout.prompts import derive_seed
from roll_lite.rollout.record import write_group, write_prompt
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Prompt


class Nature(NamedTuple):
    """How prompts of a domain behave."""

    weight: float
    seconds: float
    """Longest time of a sample."""
    dropped: float
    """Share of groups whose rewards are equal."""
    broken: float
    """Share of groups whose samples all raise."""


NATURES = {
    "slow": Nature(0.5, 0.03, 0.1, 0.05),
    "hard": Nature(0.3, 0.002, 0.7, 0.0),
    "fast": Nature(0.2, 0.0, 0.0, 0.1),
}


class Trial:
    """One turn that takes its time, and whose rewards depend on the prompt alone."""

    def __init__(self, prompt):
        self.prompt = prompt

    def reset(self, seed):
        return self.prompt.messages, {}

    async def step(self, action):
        nature, r = NATURES[self.prompt.domain], random.Random(self.prompt.id)
        await asyncio.sleep(nature.seconds * random.Random(action).random())
        draw = r.random()
        if draw < nature.broken:
            raise ArithmeticError("a bad reward")
        is_dropped = draw < nature.broken + nature.dropped
        return (), 0.0 if is_dropped else float(len(action)), True, False, {}


def write_files(folder, num_rows=600):
    for number, domain in enumerate(NATURES):
        rows = [
            {"id": f"{domain}/{i}", "prompt": f"{number + 1} {i}", "domain": domain}
            for i in range(num_rows)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{domain}.jsonl").write_text(text)
    return tuple(f"{folder}/{d}.jsonl@{nature.weight}" for d, nature in NATURES.items())


@contextmanager
def running(source, num_replicas=3, seed=3, env=Trial, **options):
    options = {"samples_per_prompt": 3, "drop_equal": True, "max_retries": 0} | options
    with (
        FakeEngines(num_replicas, max_delay=0.004, seed=seed) as engines,
        Coordinator(
            engines=engines, chat=FakeChat(), play=playing(env), prompts=source, params=PARAMS,
            options=RolloutOptions(**options), seed=3,
        ) as rollout,
    ):  # fmt: skip
        yield rollout, engines


def domains_of(groups):
    return Counter(group.prompt.domain for group in groups)


MODES = {
    "synchronous": {},
    "aborts": {"extra_groups": 7},
    "asynchronous": {"max_staleness": 1},
}


def is_kept(prompt):
    """Whether a group of three is trained on, worked out without any concurrency."""
    nature, draw = NATURES[prompt.domain], random.Random(prompt.id).random()
    seed, token_ids = derive_seed(3, prompt.id, 0), FakeChat().encode(prompt.messages)
    request = Request(prompt_ids=token_ids, params=PARAMS, seed=seed)
    lengths = {len(FakeChat().decode(fake_tokens(request, index))) for index in range(3)}
    return draw >= nature.broken + nature.dropped and len(lengths) > 1


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_every_collect_has_exactly_the_shares(tmp_path, mode, seed):
    """Ten groups of weights 0.5, 0.3, 0.2 are 5, 3 and 2; nothing is lost or comes twice."""
    source, totals, groups = Mixture(write_files(tmp_path), seed=seed), Counter(), []
    with running(source, seed=seed, prompts_per_step=10, **MODES[mode]) as (rollout, engines):
        if mode == "asynchronous":
            rollout.start()
        for version in range(1, 13):
            step = rollout.collect()
            assert domains_of(step) == {"slow": 5, "hard": 3, "fast": 2}
            groups += step
            engines.load(version)
            rollout.set_version(version)
        # Until the groups that are generated ahead have filled their slots.
        wait_until(
            lambda: totals.update(m := rollout.metrics()) or m["rollout/groups_in_flight"] == 0
        )
        kept = rollout.state_dict()["ready"]
    samples = [sample for group in groups for sample in group.samples]
    ids = [(sample.prompt.id, sample.index) for sample in samples]
    ids_kept = [(group["prompt"]["id"], s["index"]) for group in kept for s in group["samples"]]
    assert len(ids + ids_kept) == len(set(ids + ids_kept))
    for sample in samples:
        assert sample.state == "done"
        check_sample(sample)
    ends = ("done", "filtered", "aborted", "failed", "stale")
    ended = sum(totals[f"rollout/{end}"] for end in ends) + len(ids_kept)
    assert totals["rollout/started"] == ended and totals["rollout/done"] == len(samples)
    assert totals["rollout/filtered"] > 100 and totals["rollout/failed"] > 0


def test_shares_that_do_not_divide_a_step_are_made_up_for(tmp_path):
    """After any number of steps of seven, also where surplus groups are aborted."""
    source, counts = Mixture(write_files(tmp_path), seed=5), Counter()
    with running(source, prompts_per_step=7, extra_groups=4) as (rollout, _):
        for step in range(1, 16):
            counts += domains_of(rollout.collect())
            for domain, nature in NATURES.items():
                assert abs(counts[domain] - nature.weight * 7 * step) < 1


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_replicas_change_nothing(tmp_path, num_replicas):
    """Which prompts replace dropped ones, and their order, do not depend on timing."""
    entries = write_files(tmp_path)
    with running(Mixture(entries, seed=1), num_replicas, prompts_per_step=10) as (rollout, _):
        ids = [group.prompt.id for _ in range(4) for group in rollout.collect()]
    reference, wanted = Mixture(entries, seed=1), []
    for _ in range(4):
        drawn = [next(reference) for _ in range(10)]
        kept = {domain: [] for domain in NATURES}
        for prompt in drawn:
            kept[prompt.domain] += [prompt.id] if is_kept(prompt) else []
        for domain, num_drawn in Counter(prompt.domain for prompt in drawn).items():
            while len(kept[domain]) < num_drawn:
                prompt = reference.next_of(domain)
                kept[domain] += [prompt.id] if is_kept(prompt) else []
        wanted += [kept[prompt.domain].pop(0) for prompt in drawn]
    assert ids == wanted


@pytest.mark.parametrize("mode", ["aborts", "asynchronous"])
def test_a_resumed_run_keeps_the_shares(tmp_path, mode):
    entries, counts, ids = write_files(tmp_path), Counter(), []
    state = None
    for part in range(3):
        source = Mixture(entries, seed=4)
        with running(source, seed=part, prompts_per_step=7, **MODES[mode]) as (rollout, _):
            if state:
                rollout.load_state_dict(state)
            if mode == "asynchronous":
                rollout.start()
            for step in range(3 * part + 1, 3 * part + 4):
                groups = rollout.collect()
                counts += domains_of(groups)
                ids += [group.prompt.id for group in groups]
                for domain, nature in NATURES.items():
                    assert abs(counts[domain] - nature.weight * 7 * step) < 1
            state = json.loads(json.dumps(rollout.state_dict()))
    assert len(ids) == len(set(ids)) == 63


def test_groups_of_the_oldest_slots_are_started_though_ready_groups_fill_the_step(tmp_path):
    """A state whose complete groups are all of other domains than the oldest slots."""
    source = Mixture(write_files(tmp_path), seed=0)
    slow, hard = (
        next(filter(is_kept, iter(lambda d=domain: source.next_of(d), None)))
        for domain in ("slow", "hard")
    )
    with running(source, prompts_per_step=6) as (rollout, _):
        prompts = [source.next_of("fast") for _ in range(6)]
        groups = rollout.answer(prompts, num_samples=3, params=PARAMS)
        state = rollout.state_dict()
    state["ready"] = [write_group(g) for g in groups if g.samples[0].state == "done"]
    state["unfinished"] = [[write_prompt(slow), 0], [write_prompt(hard), 0]]
    state["slots"] = ["hard", "slow"] + ["fast"] * len(state["ready"])
    assert len(state["ready"]) > 2
    with running(source, prompts_per_step=2) as (rollout, _):
        rollout.load_state_dict(json.loads(json.dumps(state)))
        assert [group.prompt for group in rollout.collect()] == [hard, slow]
        assert rollout.metrics()["rollout/aborted"] == 3 * len(state["ready"])


def two_domains(num_prompts):
    for i in range(num_prompts):
        domain = ("slow", "hard")[i % 2]
        message = {"role": "user", "content": f"1 {i}"}
        yield Prompt(id=f"p{i}", messages=(message,), domain=domain, ground_truth="")


def test_prompts_that_cannot_be_asked_for_a_domain():
    """The next prompt replaces what is dropped, of whichever domain, until they end."""
    kept = [prompt.id for prompt in two_domains(100) if is_kept(prompt)]
    with running(two_domains(100), prompts_per_step=8, max_refills=50) as (rollout, _):
        steps = list(iter(rollout.collect, []))
    ids = [group.prompt.id for groups in steps for group in groups]
    assert sorted(ids) == sorted(kept)
    assert [len(groups) for groups in steps[:-1]] == [8] * (len(steps) - 1)


@pytest.mark.parametrize("seed", range(3))
def test_without_refills_a_step_goes_on_with_what_is_left(tmp_path, seed):
    """A step has those of ten prompts that are kept; the next step draws ten again."""
    source, missing = Mixture(write_files(tmp_path), seed=seed), 0
    drawn = Mixture(write_files(tmp_path), seed=seed)
    with running(source, prompts_per_step=10, max_refills=0) as (rollout, _):
        for _ in range(8):
            kept = [prompt.id for prompt in itertools.islice(drawn, 10) if is_kept(prompt)]
            assert sorted(group.prompt.id for group in rollout.collect()) == sorted(kept)
            assert rollout.metrics().get("rollout/missing_groups", 0) == 10 - len(kept)
            missing += 10 - len(kept)
    assert missing > 0


@pytest.mark.parametrize("max_refills", [0, 1])
def test_refills_are_bounded_during_training(tmp_path, max_refills):
    """Groups started ahead for later steps are dropped as often, and not replaced more often."""
    source, totals, ahead = Mixture(write_files(tmp_path), seed=0), Counter(), []
    options = {"prompts_per_step": 10, "max_staleness": 1, "max_refills": max_refills}
    with running(source, **options) as (rollout, engines):
        rollout.start()
        for version in range(1, 9):
            totals["taken"] += len(rollout.collect())
            totals.update(metrics := rollout.metrics())
            ahead += [metrics["rollout/groups_in_flight"] + metrics["rollout/groups_ready"]]
            engines.load(version)
            rollout.set_version(version)
        totals.update(rollout.metrics())
    assert min(ahead) > 0  # however many were dropped, some are generated during training
    assert totals["taken"] + totals["rollout/missing_groups"] == 8 * 10
    new = totals["rollout/started"] // 3 - totals["rollout/refilled"]
    assert 8 * 10 + 20 <= new <= 8 * 10 + 20 + totals["rollout/stale"]  # these are replaced
    if max_refills:
        assert 0 < totals["rollout/refilled"] <= 9 * 10
    else:
        assert totals["rollout/refilled"] == 0 < totals["rollout/missing_groups"]


@pytest.mark.parametrize("mode", MODES)
def test_a_domain_that_teaches_nothing_leaves_its_places_empty(tmp_path, mode):
    """All groups of one domain are dropped: the other does not get its half of a step."""

    class Hopeless(Trial):
        async def step(self, action):
            is_hard = self.prompt.domain == "hard"
            return (), 0.0 if is_hard else random.Random(action).random(), True, False, {}

    write_files(tmp_path)
    source = Mixture([f"{tmp_path}/{domain}.jsonl" for domain in ("slow", "hard")], seed=0)
    options = {"prompts_per_step": 4, "max_refills": 2} | MODES[mode]
    with running(source, env=Hopeless, **options) as (rollout, engines):
        if mode == "asynchronous":
            rollout.start()
        for version in range(1, 6):
            assert domains_of(rollout.collect()) == {"slow": 2}
            engines.load(version)
            rollout.set_version(version)
            assert rollout.metrics()["rollout/missing_groups"] == 2


def test_when_nothing_is_left_the_reasons_name_the_domains(tmp_path):
    source = Mixture(write_files(tmp_path), seed=0)
    with (
        running(source, prompts_per_step=10, max_refills=1, max_group_reward=-1.0) as (rollout, _),
    ):
        assert rollout.collect() == []
        (step,) = rollout.empty_steps
    assert re.search(r"all 20 groups .*: \d+ of (slow|hard|fast) had ", step.why)


def test_slots_are_matched_with_the_oldest_groups_of_their_domain():
    slots = Slots("abac")
    for number, domain in enumerate("abac"):
        slots.fill(domain, number)
    assert slots.domains == list("abac") and slots.first_vacant() == (4, None)
    slots.vacate("a", 0)
    assert slots.first_vacant() == (2, "a")
    assert slots.match(2, {"a": [2], "b": [1], "c": [3]}) == [2, 1]
    assert slots.match(3, {"a": [2], "b": [1], "c": [3]}) is None
    slots.fill("a", 4)
    assert slots.release(2, [4, 1]) == 0  # group 2 is older, but still running
    assert slots.domains == list("ac") and slots.first_vacant() == (2, None)
    slots.vacate("a", 2)
    slots.close(slots.first_vacant()[0])
    assert slots.domains == ["c"] and slots.match(5, {"c": [3]}) == [3]


def test_slots_that_are_given_up_stay_empty_where_they_are():
    slots = Slots("abaa")
    for number, domain in enumerate("abaa"):
        slots.fill(domain, number)
    slots.give_up("a", 2)
    assert slots.given_up == [2] and slots.first_vacant() == (4, None)
    ready = {"a": [0, 3], "b": [1]}
    assert slots.match(3, ready) == [0, 1] and slots.match(4, ready) == [0, 1, 3]
    slots.vacate("a", 3)
    assert slots.first_vacant() == (3, "a")  # groups count for the oldest
    slots.fill("a", 4)
    assert slots.release(3, [0, 1]) == 1
    assert slots.domains == ["a"] and slots.first_vacant() == (1, None)
    slots.give_up_last("a", 4)
    assert slots.first_kept() is None and slots.match(1, {}) == []
    slots.revive()
    assert slots.first_kept() == 0 and slots.first_vacant() == (0, "a")


def plain_match(slots, num_slots, ready):
    """What `match` says, found by walking over all slots."""
    left = {domain: list(numbers) for domain, numbers in ready.items()}
    taken = []
    for index, domain in enumerate(slots.domains[:num_slots]):
        if index not in slots.given_up:
            if not left.get(domain):
                return None
            taken.append(left[domain].pop(0))
    return taken


def plain_vacant(slots, groups):
    left = {domain: len(numbers) for domain, numbers in groups.items()}
    for index, domain in enumerate(slots.domains):
        if index not in slots.given_up:
            if not left.get(domain):
                return index, domain
            left[domain] -= 1
    return len(slots), None


def test_slots_equal_a_walk_over_all_of_them():
    """Random fills, drops and takes of three domains."""
    for seed in range(20):
        r, slots, groups, ready = random.Random(seed), Slots(), {}, {}
        for number in range(200):
            index, domain = slots.first_vacant()
            assert (index, domain) == plain_vacant(slots, groups)
            if domain is None:
                domain = r.choice("abc")
                slots.add(domain)
            slots.fill(domain, number)
            groups.setdefault(domain, []).append(number)
            for domain, running in groups.items():
                for group in list(running):
                    match r.randrange(9):
                        case 0:
                            running.remove(group)
                            slots.vacate(domain, group)
                        case 1:
                            rank = running.index(group)
                            own = [i for i, d in enumerate(slots.domains) if d == domain]
                            own = [i for i in own if i not in slots.given_up]
                            running.remove(group)
                            slots.give_up(domain, group)
                            assert own[rank] in slots.given_up
                        case 2:
                            ready.setdefault(domain, []).append(group)
                    if domain in ready:
                        ready[domain] = sorted(set(ready[domain]) & set(running))
            num_slots = r.randrange(1, 6)
            taken = slots.match(num_slots, ready)
            assert taken == plain_match(slots, num_slots, ready)
            if taken is not None:
                num_given_up = sum(index < num_slots for index in slots.given_up)
                assert slots.release(num_slots, taken) == num_given_up
                for numbers in (*groups.values(), *ready.values()):
                    numbers[:] = [n for n in numbers if n not in taken]
            if r.random() < 0.02:
                slots.revive()
