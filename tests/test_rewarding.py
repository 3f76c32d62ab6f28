"""Runs of recipes/rlvr.py with rewards in worker processes, of several domains, and a judge."""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from itertools import islice

import pytest
from support import worker_rewards
from support.launch import run_recipe
from support.models import make_reference, make_toy
from support.process_checks import sandbox_processes
from support.recipes import call_recipe
from support.runs import comparable, samples_of, steps_of

from roll_lite.checks import UserError
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.launch import Launch
from roll_lite.data.tasks import prompts
from roll_lite.options import from_flat
from roll_lite.planning import make_plan
from roll_lite.planning.render import render
from roll_lite.recipes import rlvr, sft
from roll_lite.reward_roles import judge_messages
from roll_lite.rewarding import RewardOptions, Rewards
from roll_lite.rewards.__main__ import main as rewards_command
from roll_lite.types import Prompt
from roll_lite.workers.failures import TooManyFailures

MATHS = [
    {"id": f"m{i}", "prompt": f"{i} + 1?", "domain": "math", "ground_truth": i + 1}
    for i in range(9)
]
CODE = [
    {
        "id": f"c{i}",
        "prompt": f"f(x) = x + {i}",
        "domain": "code",
        "tests": [{"code": f"assert f(1) == {1 + i}"}],
    }
    for i in range(9)
]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy that reads longer prompts."""
    return make_toy(tmp_path_factory.mktemp("models") / "toy", max_position_embeddings=1024)


def run(folder, run_dir, **changes):
    options = {
        "model": str(folder), "prompts_per_step": 8, "samples_per_prompt": 2, "max_tokens": 4,
        "eval_every": 100, "kv_cache_gib": 0.02, "steps": 3, "device": "cpu", "reward_workers": 2,
        "run_dir": str(run_dir),
    } | changes  # fmt: skip
    call_recipe(rlvr, from_flat(rlvr.Config, **options))
    return steps_of(run_dir)


def test_every_domain_has_its_share_and_its_parts(folder, tmp_path):
    maths = write_rows(tmp_path / "maths.jsonl", MATHS)
    code = write_rows(tmp_path / "code.jsonl", CODE)
    data = (f"{maths}@0.5", f"{code}@0.25", "instructions:2@0.25")
    for row in run(folder, tmp_path / "run", data=data, eval_prompts=2):
        shares = {d: row[f"rollout/{d}/share"] for d in ("math", "code", "instructions")}
        assert shares == {"math": 0.5, "code": 0.25, "instructions": 0.25}
        assert {"reward/math/boxed", "reward/code/unreadable", "reward/errors"} <= set(row)
        assert any(name.startswith("reward/instructions/") for name in row)
        assert row["reward/calls"] >= 16 and row["reward/errors"] == 0
    sampled = [s["domain"] for s in samples_of(tmp_path / "run", 3)]
    assert {d: sampled.count(d) for d in set(sampled)} == {"math": 8, "code": 4, "instructions": 4}


def test_a_run_names_prompts_that_nothing_passes(folder, tmp_path, capsys):
    """In events.jsonl, and its samples are those of a run that has nothing to try."""
    hollow = CODE[0] | {"id": "hollow", "tests": [{"code": "x = 1\nassert x"}]}
    data = (write_rows(tmp_path / "code.jsonl", [*CODE, hollow]),)
    first = run(folder, tmp_path / "first", data=data)
    assert rewards_command(["check", *data]) == 1  # tries what the run has left
    capsys.readouterr()
    assert comparable(run(folder, tmp_path / "second", data=data)) == comparable(first)
    assert [row["reward/calls"] for row in first] == [16] * 3
    lines = [json.loads(line) for line in (tmp_path / "second/events.jsonl").open()]
    named = [line for line in lines if line["event"] == "passed_by_nothing"]
    assert [(line["prompt_id"], line["domain"], line["step"]) for line in named] == [
        ("hollow", "code", 1)
    ]
    assert "1 of 10 prompts with tests are passed by a program" in capsys.readouterr().out


@pytest.fixture
def maths(tmp_path, monkeypatch):
    """Prompts of domain math; the run's reward for them is the one given."""

    def choose(reward):
        monkeypatch.setattr(rlvr.Config, "REWARDS", {"math": reward})
        return (write_rows(tmp_path / "maths.jsonl", MATHS),)

    return choose


def test_a_few_that_hang_or_crash_are_counted_and_the_run_goes_on(folder, tmp_path, maths):
    rows = run(
        folder, tmp_path / "run", data=maths(worker_rewards.sometimes_bad), steps=8,
        samples_per_prompt=8, reward_seconds=0.5, max_retries=0,
    )  # fmt: skip
    totals = {
        name: sum(row[f"reward/{name}"] for row in rows)
        for name in ("errors", "timeouts", "crashes")
    }
    assert totals["errors"] == totals["timeouts"] + totals["crashes"] > 0
    assert sum(row["rollout/failed"] for row in rows) == totals["errors"]
    assert [row["step"] for row in rows] == list(range(1, 9))


def test_a_reward_that_hangs_is_not_tried_again(folder, tmp_path, maths, capfd):
    rows = run(
        folder, tmp_path / "run", data=maths(worker_rewards.hangs_on_one), steps=2,
        reward_seconds=0.5,
    )  # fmt: skip
    names = ("reward/timeouts", "rollout/failed", "rollout/retried")
    timeouts, failed, retried = (sum(row[name] for row in rows) for name in names)
    assert timeouts == failed > 0 and retried == 0
    assert (
        "its process did not lack a processor, so it is not tried again" in capfd.readouterr().err
    )


@pytest.mark.slow
def test_sandboxes_that_are_killed_in_every_step_change_nothing(folder, tmp_path, maths):
    data, killed, has_ended = maths(worker_rewards.length_by_program), [], threading.Event()

    def kill_in_every_step():
        last = ""
        while not has_ended.wait(0.01):
            with suppress(OSError, IndexError):  # the run begins
                step = (tmp_path / "killed" / "phase").read_text().split()[1]
                if step != last and (found := sandbox_processes()):
                    last = step
                    killed.append(found)
                    for pid in found:
                        with suppress(ProcessLookupError):  # it has just ended
                            os.kill(pid, signal.SIGKILL)

    options = {"data": data, "steps": 4, "eval_every": 2, "eval_share": 0.5, "max_retries": 0}
    whole = run(folder, tmp_path / "whole", **options)
    killer = threading.Thread(target=kill_in_every_step)
    killer.start()
    try:
        rows = run(folder, tmp_path / "killed", **options)
    finally:
        has_ended.set()
        killer.join()
    assert len(killed) >= 4 and all(row["reward/errors"] == 0 for row in rows)
    assert comparable(rows) == comparable(whole)
    for step in range(1, 5):
        samples = [samples_of(tmp_path / name, step) for name in ("whole", "killed")]
        kept = [[(s["token_ids"], s["logprobs"], s["reward"]) for s in rows] for rows in samples]
        assert kept[0] == kept[1]


def test_when_half_of_them_fail_the_run_stops_and_shows_three(folder, tmp_path, maths):
    message = r"of the last \d+ rewards failed"
    with pytest.raises((UserError, TooManyFailures), match=message) as error:  # first step or later
        run(
            folder, tmp_path / "run", data=maths(worker_rewards.often_bad),
            samples_per_prompt=16, steps=20, max_refills=1000,
        )  # fmt: skip
    assert str(error.value).count("- prompt m") == 3
    assert 'worker_rewards.py", line' in str(error.value)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert len(events) > 10  # also those that were to be tried again
    for event in events:
        assert event["event"] == "sample" and "KeyError: 'no such word'" in event["error"]
        assert event["messages"][0]["content"].endswith("+ 1?")
        words = Prompt(id=event["prompt_id"], messages=(), domain="math", ground_truth="")
        with pytest.raises(KeyError):  # the reply is there in full
            worker_rewards.often_bad(words, event["reply"])


def test_domains_without_a_reward_are_named_before_anything_runs(folder, tmp_path):
    row = {"id": "p", "prompt": "?", "domain": "poetry", "ground_truth": ""}
    path = write_rows(tmp_path / "poetry.jsonl", [row])
    with pytest.raises(ValueError, match=r"no reward for domain 'poetry'.*known domains: addition"):
        run(folder, tmp_path / "run", data=(path,))
    with pytest.raises(ValueError, match=r"reward_model=.* has no tensor score\.weight"):
        run(folder, tmp_path / "run", reward_model=str(folder))
    with pytest.raises(ValueError, match="judge is given, but no prompt has domain judge"):
        run(folder, tmp_path / "run", judge=str(folder))


def test_the_ranks_of_a_judge_are_checked_against_its_own_model(tiny_folder, tmp_path, monkeypatch):
    """Two ranks cannot have equal parts of 3 heads; of the tiny model's 4 they can."""
    odd = tmp_path / "odd"
    make_reference("smollm2").save_pretrained(odd)
    monkeypatch.setattr("roll_lite.planning.read_launch", lambda: Launch(world_size=2))

    def plan(**changes):
        cfg = from_flat(
            rlvr.Config, model=str(tiny_folder), run_dir=str(tmp_path / "run"), **changes
        )
        return render(*make_plan(cfg, 20))

    for role, more in (("judge", {}), ("reference", {"kl_coef": 0.1})):
        device_map = f"train=all generate=all {role}=all,tp=2"
        assert f"\n{role}" in plan(device_map=device_map, **{role: str(tiny_folder)}, **more)
        with pytest.raises(ValueError, match=f"role {role}: tp=2 does not divide 3 attention hea"):
            plan(device_map=device_map, **{role: str(odd)}, **more)


@pytest.fixture
def judge_folder(tmp_path):
    """A small model that has learnt to say yes or no, though not which."""
    folder = make_toy(tmp_path / "small", max_position_embeddings=1024)
    verdicts = [
        {"prompt": list(judge_messages(question, "7")), "reply": reply}
        for question in islice(prompts("addition:1", seed=0), 20)
        for reply in ("yes", "no")
    ]
    cfg = from_flat(sft.Config, 
        model=str(folder), data=write_rows(tmp_path / "verdicts.jsonl", verdicts),
        steps=100, rows_per_step=8, lr=1e-2, device="cpu", run_dir=str(tmp_path / "judge"),
    )  # fmt: skip
    call_recipe(sft, cfg)
    return tmp_path / "judge" / "model"


def test_a_run_with_a_judge(folder, judge_folder, tmp_path):
    rows = [
        {"id": q.id, "prompt": list(q.messages), "domain": "judge", "ground_truth": q.ground_truth}
        for q in islice(prompts("addition:1", seed=1), 20)
    ]
    path = write_rows(tmp_path / "judged.jsonl", rows)
    (row,) = run(
        folder, tmp_path / "run", data=(path,), judge=str(judge_folder), judge_tokens=8,
        steps=1, max_retries=5,
    )  # fmt: skip
    samples = samples_of(tmp_path / "run", 1)
    assert len(samples) == 16 and {s["reward"] for s in samples} <= {0.0, 1.0}
    assert row["reward/judge"] == pytest.approx(row["reward/mean"])


OWN_FILE = """
def level(prompt, reply):
    return prompt.extra["level"] + len(reply) / 100

async def asked(prompt, reply):
    return float(len(reply))

REWARDS = {"level": level, "reverse": asked}
"""
LEVELS = [{"prompt": f"{i}?", "domain": "level", "level": i} for i in range(9)]


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own.py").write_text(OWN_FILE)
    return str(tmp_path / "own.py")


@pytest.mark.parametrize("reward_workers", [0, 2])
def test_rewards_of_a_file_and_extra_fields(toy_folder, tmp_path, own_file, reward_workers):
    """In a run that is resumed; one of them replaces a reward of the recipe."""
    data = (write_rows(tmp_path / "levels.jsonl", LEVELS), "reverse:2")
    options = {"data": data, "code": (own_file,), "reward_workers": reward_workers}
    options |= {"eval_every": 0, "prompts_per_step": 4, "max_staleness": 1.0}
    run(toy_folder, tmp_path / "run", steps=1, **options)
    rows = run(toy_folder, tmp_path / "run", steps=2, resume=True, **options)
    assert [row["reward/errors"] for row in rows] == [0, 0]
    for sample in samples_of(tmp_path / "run", 2):
        length = len(sample["reply"])
        if sample["domain"] == "level":
            level = int(sample["messages"][0]["content"].removesuffix("?"))
            assert sample["extra"] == {"level": level}
            assert sample["reward"] == pytest.approx(level + length / 100)
        else:
            assert sample["reward"] == length and sample["extra"] == {}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["code"] == [own_file]


def test_a_file_whose_rewards_no_prompt_asks_for_is_refused(toy_folder, tmp_path, own_file):
    data = (write_rows(tmp_path / "maths.jsonl", MATHS),)
    with pytest.raises(ValueError, match=r"own\.py has rewards for domain level and reverse, but"):
        run(toy_folder, tmp_path / "run", data=data, code=(own_file,))
    with pytest.raises(ValueError, match=r"code='nowhere\.py' is not a file; name a Python"):
        run(toy_folder, tmp_path / "run", code=("nowhere.py",))


@pytest.mark.slow
def test_rewards_of_a_file_under_torchrun(tiny_folder, tmp_path, own_file):
    data = write_rows(tmp_path / "levels.jsonl", LEVELS)
    run_recipe(
        "rlvr", "--model", tiny_folder, "--data", data, "reverse:2", "--code", own_file,
        "--steps", 1, "--device", "cpu", "--run-dir", tmp_path / "run", num_ranks=2,
    )  # fmt: skip
    (row,) = steps_of(tmp_path / "run")
    assert row["reward/errors"] == 0 and row["reward/calls"] > 0 and row["reward/level/mean"] > 1


def test_rewards_that_cannot_take_a_prompt_and_a_reply_are_named(tiny_folder, tmp_path):
    def as_in_trl(completions, **kwargs):
        return [0.0 for _ in completions]

    with (
        Cluster("generate=all", "cpu") as cluster,
        pytest.raises(
            ValueError, match=r"as_in_trl\(completions, \*\*kwargs\), must take \(prompt, reply\)"
        ),
    ):
        Rewards({}, {"mine": as_in_trl}, ["mine"], RewardOptions(), cluster)
