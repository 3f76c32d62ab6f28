"""recipes/agentic.py: a small model learns to walk over a lake of two by two cells."""

import dataclasses
import fcntl
import json
from pathlib import Path

import pytest
from support.forked_ranks import run_ranks
from support.launch import run_torchrun
from support.paths import RECIPES
from support.recipes import call_recipe

from roll_lite.envs.__main__ import main as envs
from roll_lite.options import from_flat
from roll_lite.recipes import agentic, evaluate, rlvr, sft
from roll_lite.report.config_file import read_options

LAKE = "frozen_lake:size=2,style=short,max_steps=2"
BASE = {
    "data": (LAKE,), "history": 0, "max_tokens": 6, "env_workers": 1, "device": "cpu",
    "prompts_per_step": 16, "samples_per_prompt": 8, "kv_cache_gib": 0.01, "lr": 1e-3,
    "eval_prompts": 64, "eval_samples": 2, "rollouts_every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def walker(small_folder, shared_folder):
    """A model that has imitated a solver who makes many mistakes."""
    run_dir = shared_folder / "walker"
    with (shared_folder / "walker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker makes it, or has made it
        if not (run_dir / "model").exists():
            traces = str(shared_folder / "traces.jsonl")
            arguments = ["--episodes", "600", "--mistakes", "0.5", "--history", "0"]
            assert envs(["traces", LAKE, *arguments, "--out", traces]) == 0
            options = {
                "model": str(small_folder), "data": traces, "steps": 100, "rows_per_step": 64,
                "warmup_steps": 5, "lr": 1e-2, "eval_every": 0, "run_dir": str(run_dir),
            }  # fmt: skip
            call_recipe(sft, from_flat(sft.Config, **options))
    return str(run_dir / "model")


@pytest.fixture
def train(walker, tmp_path):
    def run(folder="run", **options):
        options = BASE | {"model": walker, "run_dir": str(tmp_path / folder)} | options
        rates = call_recipe(rlvr, from_flat(agentic.Config, **options))
        return rates, metrics_of(tmp_path / folder)

    return run


def metrics_of(folder):
    """Of each step; an evaluation before the first has a row of its own."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss/loss" in row]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"advantage": "gigpo"}, marks=pytest.mark.slow),
        pytest.param({"advantage": "agentic_reinforce", "gamma": 0.9}, marks=pytest.mark.slow),
    ],
    ids=["grpo", "gigpo", "agentic_reinforce"],
)
def test_it_learns_on_held_out_seeds(train, options):
    rates, rows = train(steps=9, lr=2e-3, eval_prompts=32, **options)
    assert rates[-1] > rates[0] + 0.15
    last = rows[-1]
    assert last["env/errors"] == 0 and 1 <= last["rollout/turns"] <= 10
    assert last["rollout/sequences"] == last["rollout/turns"]  # without a history
    assert last["eval/end_terminated"] + last.get("eval/end_truncated", 0) == pytest.approx(1)
    assert 0 <= last["reward/valid"] <= 1 and last["eval/success"] == rates[-1]


@pytest.mark.slow
def test_with_the_wrong_sign_it_does_not_learn(train, monkeypatch):
    def flipped(*arguments):
        sequences = prepare(*arguments)
        return [dataclasses.replace(s, advantages=[-a for a in s.advantages]) for s in sequences]

    prepare = rlvr.prepare
    monkeypatch.setattr(rlvr, "prepare", flipped)
    rates, _ = train(steps=8)
    assert rates[-1] < rates[0] - 0.05


def test_a_resumed_run_is_the_same(train, tmp_path):
    options = {"eval_every": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "eval_prompts": 8}
    _, whole = train("whole", steps=4, **options)
    train("parts", steps=2, schedule="constant", **options)
    _, parts = train("parts", steps=4, resume=True, **options)

    def essence(rows):
        names = ("reward/mean", "loss/loss", "loss/grad_norm", "eval/pass@1", "rollout/turns")
        return [{name: row.get(name) for name in names} for row in rows]

    assert essence(parts) == essence(whole)
    assert read_options(tmp_path / "parts" / "config.json")["history"] == 0


def test_environments_are_mixed_by_share(train):
    other = "frozen_lake:size=3,style=short"
    _, rows = train(steps=2, data=(f"{LAKE}@3", other), eval_every=0)
    for row in rows:
        assert row[f"rollout/{LAKE}/share"] == 0.75 and row[f"rollout/{other}/share"] == 0.25
        assert {f"reward/{LAKE}/success", f"reward/{other}/success"} <= row.keys()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_environment_of_the_recipe_and_one_of_a_file_play_in_workers(
    tiny_folder, tmp_path, num_ranks
):
    (tmp_path / "mine.py").write_text(MINE)
    start = run_torchrun if num_ranks > 1 else run_ranks
    start(
        num_ranks, RECIPES / "agentic.py", "--model", tiny_folder,
        "--data", "doors", "mine:goal=2", "--steps", 1, "--code", tmp_path / "mine.py",
        "--prompts-per-step", 4, "--samples-per-prompt", 4,
        "--eval-every", 0, "--device", "cpu", "--kv-cache-gib", 0.1, "--run-dir",
        tmp_path / "run", "--reward-norm", "batch", "--device-map", "train=all generate=all",
    )  # fmt: skip
    (row,) = metrics_of(tmp_path / "run")
    assert row["env/episodes"] == 16 and row["env/errors"] == row["rollout/failed"] == 0
    assert row["reward/mine:goal=2/mean"] <= 1 and "reward/doors/valid" in row


MINE = """
async def mine(chat, task, *, goal: int):
    said = [{"role": "user", "content": f"say {goal} letters"}]
    reply = await chat(said)
    return float(len(reply["content"]) == goal)

ENVS = {"mine": mine}
"""


def test_evaluate_plays_the_same_held_out_tasks(walker, tmp_path):
    found = []
    for seed in (0, 1):
        options = {
            "model": walker, "data": (LAKE,), "history": 0, "max_tokens": 6, "prompts": 32,
            "seed": seed, "env_workers": 0, "device": "cpu", "kv_cache_gib": 0.01,
            "run_dir": str(tmp_path / str(seed)),
        }  # fmt: skip
        found.append(call_recipe(evaluate, from_flat(evaluate.Config, **options))["eval/pass@1"])
    assert found[0] == found[1] > 0  # greedy, so that seeds do not matter


class Broken:
    """Every third seed raises in its second turn."""

    def reset(self, seed):
        self.seed, self.num_steps = seed, 0
        return "go", {}

    def step(self, action):
        self.num_steps += 1
        if self.num_steps == 2 and self.seed // 2 % 3 == 0:
            raise ZeroDivisionError("in the environment")
        return "on", float(len(action) % 2), self.num_steps == 3, False, {}


@pytest.mark.slow
def test_failing_environments_are_counted_and_the_run_goes_on_until_they_are_too_many(
    train, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(agentic.Config.ENVS, "broken", Broken)
    options = {"data": ("broken",), "history": None, "env_workers": 0, "eval_every": 0}
    _, rows = train(steps=2, env_error_share=1.0, **options)
    failed = sum(row["env/errors"] for row in rows)
    assert failed == sum(row["rollout/failed"] for row in rows) > 0
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: in the environment" in shown and "turn 2" in shown
    with pytest.raises(Exception, match=r"more than .*0\.05") as broken:
        train("second", steps=9, env_error_share=0.05, **options)
    assert str(broken.value).count("- ") >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data": ("frozen_sea",)},
            "'frozen_sea' is neither .*; environments are frozen_lake",
        ),
        ({"data": ("frozen_lake:depth=3",)}, "has no option 'depth'"),
        ({"eval_share": 0.1}, "eval_share"),
        (
            {"overlong": "penalty", "overlong_buffer": 2},
            "overlong='penalty' applies",
        ),
        ({"advantage": "opd"}, "advantage='opd' needs a teacher"),
        ({"history": -1}, "history=-1 must be"),
    ],
)
def test_wrong_options_are_refused(walker, options, message):
    with pytest.raises(ValueError, match=message):
        from_flat(agentic.Config, **BASE | {"model": walker} | options)
