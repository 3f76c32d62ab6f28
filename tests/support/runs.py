"""Short runs of the recipes: their options, and what they leave in their folders."""

import json
from pathlib import Path

from roll_lite.options import from_flat
from roll_lite.recipes import sft
from roll_lite.report.reader import RunFolder
from support.recipes import call_recipe


def flags(values):
    """Options of a Config as a command line."""
    given = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        given += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else []
        values = value if isinstance(value, tuple) else [value]
        given += [] if isinstance(value, bool) else [f"--{flag}", *values]
    return given


def toy_options(folder, run_dir, **changes):
    return {
        "model": str(folder), "data": ("reverse:1",), "prompts_per_step": 8, "max_tokens": 4,
        "eval_prompts": 8, "eval_every": 100, "kv_cache_gib": 0.005, "lr": 1e-2, "steps": 30,
        "device": "cpu", "run_dir": str(run_dir),
    } | changes  # fmt: skip


SHORT = {
    "data": "reverse:2", "steps": 20, "rows_per_step": 4, "warmup_steps": 2,
    "eval_rows": 8, "eval_every": 10, "device": "cpu",
}  # fmt: skip


def sft_options(model, run_dir, **changes):
    return {"model": str(model), "run_dir": str(run_dir)} | SHORT | changes


def run_sft(values):
    call_recipe(sft, from_flat(sft.Config, **values))


def steps_of(run_dir):
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if (row := json.loads(line))["step"] > 0]


def samples_of(run_dir, step):
    lines = (Path(run_dir) / "rollouts" / f"step_{step:05d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def comparable(rows):
    """Without times, and evaluations, of which a run that ends early has one more."""
    ignored = ("time", "eval/", "train/tokens_per_second", "critic/tokens_per_second")
    ignored += ("reward/calls", "reward/seconds", "env/seconds", "colocated/")
    ignored += ("rollout/restored", "rollout/engine_", "rollout/tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(ignored)} for row in rows]


def losses(run_dir):
    return [loss for _, loss in RunFolder(run_dir).metric("loss/loss")]


def gain(steps):
    """Mean reward of the last three steps minus that of the first, before any update."""
    rewards = [metrics["reward/mean"] for metrics in steps]
    return sum(rewards[-3:]) / 3 - rewards[0]
