"""How much narrower intervals of an improvement are, where two checkpoints answer the same prompts.

python scripts/bench/paired.py runs/paired --run runs/quickstart-0-.../rlvr --steps 0 8 16 24

The run was started with --keep-every. The model that it started from is step 0. Each checkpoint is
evaluated greedily, and with several samples under two seeds. `noise` says whether the two sides of
a pair had the same random numbers. Evaluations that are in the folder are not repeated.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import tyro

from roll_lite.report.paired import Improvement, improvement_over
from roll_lite.report.reader import RunFolder

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Config:
    out: tyro.conf.Positional[Path]
    """Folder of the evaluations."""
    run: Path
    """Run folder with checkpoints of the steps."""
    steps: tuple[int, ...] = (0, 8, 16, 24)
    """Steps to evaluate; 0 is the model that the run started from."""
    prompts: int = 256
    """Held-out prompts."""
    samples: int = 8
    """Replies to each, at temperature 1, beside the greedy one."""


def main(cfg: Config) -> None:
    out = cfg.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ways = {"greedy": (1, 0), "seed-0": (cfg.samples, 0), "seed-1": (cfg.samples, 1)}
    for step in cfg.steps:
        for way, (samples, seed) in ways.items():
            evaluate(cfg, out / f"{step}-{way}", step, samples, seed)
    print("steps    samples  noise  improvement  paired  unpaired  unpaired / paired")
    for before, after in combinations(cfg.steps, 2):
        show(out, 1, "none", f"{before}-greedy", f"{after}-greedy")
        show(out, cfg.samples, "same", f"{before}-seed-0", f"{after}-seed-0")
        show(out, cfg.samples, "other", f"{before}-seed-0", f"{after}-seed-1")


def evaluate(cfg: Config, folder: Path, step: int, samples: int, seed: int) -> None:
    if (folder / "metrics.jsonl").exists():
        return
    options = json.loads((cfg.run / "config.json").read_text())
    command = ["evaluate", "--model", options["model"], "--data", *options["data"]]
    command += ["--max-tokens", options["max_tokens"], "--prompts", cfg.prompts]
    command += ["--samples", samples, "--seed", seed, "--run-dir", folder]
    if step:
        command += ["--checkpoint", cfg.run.resolve() / f"checkpoints/step-{step:08d}"]
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "roll_lite", *map(str, command)], cwd=ROOT, stdout=log,
            stderr=log, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def show(out: Path, samples: int, noise: str, before: str, after: str) -> None:
    found = improvement_over(RunFolder(out / before), RunFolder(out / after))
    assert isinstance(found, Improvement), (before, after)
    steps = f"{before.partition('-')[0]} to {after.partition('-')[0]}"
    print(
        f"{steps:9}{samples:7}  {noise:6}{found.mean:+12.4f}{found.half:8.4f}"
        f"{found.half_unpaired:10.4f}{found.half_unpaired / found.half:19.2f}"
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
