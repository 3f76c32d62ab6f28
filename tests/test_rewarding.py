"""Runs of recipes/rlvr.py with rewards in worker processes, of several domains, and a judge."""

import json
from itertools import islice

import pytest
import rlvr
import sft
import worker_rewards
from conftest import make_reference, make_toy
from test_rlvr import samples_of, steps_of

from roll_lite.cluster.rendezvous import Launch
from roll_lite.options import from_flat
from roll_lite.rewards.judge import judge_messages
from roll_lite.tasks import prompts
from roll_lite.workers.failures import RewardsBroken

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


def run(folder, run_dir, **changes):
    options = {
        "model": str(folder), "prompts_per_step": 8, "samples_per_prompt": 2, "max_tokens": 4,
        "eval_every": 100, "kv_cache_gib": 0.1, "steps": 3, "device": "cpu", "reward_workers": 2,
        "run_dir": str(run_dir),
    } | changes  # fmt: skip
    rlvr.main(from_flat(rlvr.Config, **options))
    return steps_of(run_dir)


def test_every_domain_has_its_share_and_its_parts(tiny_folder, tmp_path):
    maths = write_rows(tmp_path / "maths.jsonl", MATHS)
    code = write_rows(tmp_path / "code.jsonl", CODE)
    data = (f"{maths}@0.5", f"{code}@0.25", "instructions:2@0.25")
    for row in run(tiny_folder, tmp_path / "run", data=data, eval_prompts=2):
        shares = {d: row[f"rollout/{d}/share"] for d in ("math", "code", "instructions")}
        assert shares == {"math": 0.5, "code": 0.25, "instructions": 0.25}
        assert {"reward/math/boxed", "reward/code/unreadable", "reward/errors"} <= set(row)
        assert any(name.startswith("reward/instructions/") for name in row)
        assert row["reward/calls"] >= 16 and row["reward/errors"] == 0
    sampled = [s["domain"] for s in samples_of(tmp_path / "run", 3)]
    assert {d: sampled.count(d) for d in set(sampled)} == {"math": 8, "code": 4, "instructions": 4}


@pytest.fixture
def maths(tmp_path, monkeypatch):
    """Prompts of domain math; the run's reward for them is the one given."""

    def choose(reward):
        monkeypatch.setattr(rlvr, "REWARDS", {"math": reward})
        return (write_rows(tmp_path / "maths.jsonl", MATHS),)

    return choose


def test_a_few_that_hang_or_crash_are_counted_and_the_run_goes_on(tiny_folder, tmp_path, maths):
    rows = run(
        tiny_folder, tmp_path / "run", data=maths(worker_rewards.sometimes_bad), steps=8,
        samples_per_prompt=8, reward_seconds=0.5, max_retries=0,
    )  # fmt: skip
    totals = {
        name: sum(row[f"reward/{name}"] for row in rows)
        for name in ("errors", "timeouts", "crashes")
    }
    assert totals["errors"] == totals["timeouts"] + totals["crashes"] > 0
    assert sum(row["rollout/failed"] for row in rows) == totals["errors"]
    assert [row["step"] for row in rows] == list(range(1, 9))


def test_when_half_of_them_fail_the_run_stops_and_shows_three(tiny_folder, tmp_path, maths):
    with pytest.raises(RewardsBroken, match=r"of the last \d+ rewards failed") as error:
        run(
            tiny_folder, tmp_path / "run", data=maths(worker_rewards.often_bad),
            samples_per_prompt=16, steps=20, max_refills=1000,
        )  # fmt: skip
    assert str(error.value).count("- prompt m") == 3


def test_domains_without_a_reward_are_named_before_anything_runs(tiny_folder, tmp_path):
    row = {"id": "p", "prompt": "?", "domain": "poetry", "ground_truth": ""}
    path = write_rows(tmp_path / "poetry.jsonl", [row])
    with pytest.raises(ValueError, match=r"no reward for domain 'poetry'.*known domains: addition"):
        run(tiny_folder, tmp_path / "run", data=(path,))
    with pytest.raises(ValueError, match=r"reward_model=.* has no tensor score\.weight"):
        run(tiny_folder, tmp_path / "run", reward_model=str(tiny_folder))
    with pytest.raises(ValueError, match="judge is given, but no prompt has domain judge"):
        run(tiny_folder, tmp_path / "run", judge=str(tiny_folder))


def test_the_ranks_of_a_judge_are_checked_against_its_own_model(tiny_folder, tmp_path, monkeypatch):
    """Of the tiny model's vocabulary two ranks cannot have equal parts; of the other's they can."""
    even = tmp_path / "even"
    make_reference("qwen3", vocab_size=200).save_pretrained(even)
    monkeypatch.setattr("roll_lite.cluster.cluster.read_launch", lambda: Launch(world_size=2))

    def plan(**changes):
        cfg = from_flat(
            rlvr.Config, model=str(tiny_folder), run_dir=str(tmp_path / "run"), **changes
        )
        return rlvr.describe_plan(cfg)

    for role, more in (("judge", {}), ("reference", {"kl_coef": 0.1})):
        device_map = f"train=all generate=all {role}=all,tp=2"
        assert f"\n{role}" in plan(device_map=device_map, **{role: str(even)}, **more)
        with pytest.raises(ValueError, match=f"role {role}: tp=2 does not divide .* vocabulary"):
            plan(device_map=device_map, **{role: str(tiny_folder)}, **more)


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
        steps=100, dialogues_per_step=8, lr=1e-2, device="cpu", run_dir=str(tmp_path / "judge"),
    )  # fmt: skip
    sft.main(cfg)
    return tmp_path / "judge" / "model"


def test_a_run_with_a_judge(tiny_folder, judge_folder, tmp_path):
    rows = [
        {"id": q.id, "prompt": list(q.messages), "domain": "judge", "ground_truth": q.ground_truth}
        for q in islice(prompts("addition:1", seed=1), 20)
    ]
    path = write_rows(tmp_path / "judged.jsonl", rows)
    (row,) = run(
        tiny_folder, tmp_path / "run", data=(path,), judge=str(judge_folder), judge_tokens=8,
        steps=1, max_retries=5,
    )  # fmt: skip
    samples = samples_of(tmp_path / "run", 1)
    assert len(samples) == 16 and {s["reward"] for s in samples} <= {0.0, 1.0}
    assert row["reward/judge"] == pytest.approx(row["reward/mean"])
