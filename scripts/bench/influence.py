"""Does `roll-lite influence` find wrong rewards? Some are planted, and the most harmful looked at.

export OMP_NUM_THREADS=1
python scripts/bench/influence.py runs/influence --words SFT/model --lakes SFT/model --seeds 0 1 2

The models are those of scripts/quickstart.sh after imitation: of words for the task `words`, of
FrozenLake for `lakes`. One reward in twenty is turned around, 1 - reward: of whole prompts, all
samples of a group alike (`prompt`), or of single samples (`sample`). Evaluations have right ones.

For each step the table has the share of planted ones among as many of the most harmful (precision),
the chance that a planted one is more harmful than another (AUC; 0.5 is chance), and both for the
planted that have an effect: a group of equal rewards teaches nothing, whatever the rewards are.
Runs are single processes with one thread.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Literal

import tyro

import roll_lite as rl
from roll_lite.envs.frozen_lake import FrozenLake
from roll_lite.proof import influence

ROOT = Path(__file__).parents[2]
LAKE = "size=3,style=short"
SHARE = 0.05
Unit = Literal["prompt", "sample"]


def is_wrong(name: str, share: float) -> bool:
    return Random(f"wrong {name}").random() < share


def reverse(prompt: rl.Prompt, reply: str, *, wrong: str = "prompt") -> rl.Score:
    """Whether the word is reversed; turned around for some prompts, or some replies to them."""
    right = float(reply.strip() == prompt.ground_truth)
    name = prompt.id if wrong == "prompt" else f"{prompt.id} {reply}"
    planted = "/train/" in prompt.id and is_wrong(name, SHARE)
    return rl.Score(value=1 - right if planted else right, parts={"planted": float(planted)})


class WrongLake(FrozenLake):
    """FrozenLake, whose last reward is turned around for some lakes, or some walks over them."""

    def __init__(self, *, wrong: str = "prompt", size: int = 4, style: str = "full"):
        super().__init__(size=size, style=style)
        self._wrong = wrong

    def reset(self, seed):
        self._name = str(seed)
        return super().reset(seed)

    def step(self, action):
        if self._wrong == "sample":
            self._name += f" {action}"
        observation, reward, terminated, truncated, info = super().step(action)
        planted = (terminated or truncated) and is_wrong(self._name, SHARE)
        info["last"]["planted"] = float(planted)
        reward += 1 - 2 * self.is_won if planted else 0
        return observation, reward, terminated, truncated, info


INLINE = {"reverse": reverse}  # this file is given with --code
ENVS = {"wrong_lake": WrongLake}


@dataclass(frozen=True)
class Config:
    out: tyro.conf.Positional[Path]
    """Folder of all runs."""
    words: Path | None = None
    """Model that has imitated reversing words."""
    lakes: Path | None = None
    """Model that has imitated a player of FrozenLake."""
    units: tuple[Unit, ...] = ("prompt", "sample")
    """What is planted in, each in runs of its own."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of every run."""
    steps: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 9)
    """Steps to look at, where prompts are planted."""
    sample_steps: tuple[int, ...] = (5,)
    """The same for samples; a step takes eight times as long."""


def main(cfg: Config) -> None:
    out = cfg.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    models = {name: m for name in ("words", "lakes") if (m := getattr(cfg, name))}
    for unit, (task, model) in product(cfg.units, models.items()):
        steps = cfg.steps if unit == "prompt" else cfg.sample_steps
        found = []
        for seed in cfg.seeds:
            run = out / f"{task}-{unit}-{seed}"
            if not (run / "model").exists():
                call(run, *command(task, unit, model, seed, max(steps), run))
            for step in steps:
                found.append(look(run, step, unit))
                print(f"{run.name:16} step {step:2}  {show(found[-1])}", flush=True)
        both = {n: [row[n] for row in found if row[n] is not None] for n in found[0]}
        means = {n: fmean(values) if values else None for n, values in both.items()}
        print(f"{task}-{unit:10} mean     {show(means)}", flush=True)


def command(task: str, unit: Unit, model: Path, seed: int, steps: int, run: Path) -> list:
    line = ["--model", model.resolve(), "--seed", seed, "--steps", steps, "--keep-every", 1]
    line += ["--eval-every", steps, "--eval-prompts", 128, "--run-dir", run]
    line += ["--code", __file__]
    if task == "words":
        return [
            "recipes/rlvr.py",
            *line,
            "--data",
            "reverse:5",
            "--wrong",
            unit,
            "--eval-prompts",
            128,
        ]
    data = ["--data", f"wrong_lake:{LAKE},wrong={unit}", "--eval-data", f"frozen_lake:{LAKE}"]
    more = ["--history", 0, "--max-tokens", 6, "--prompts-per-step", 24, "--env-workers", 1]
    return ["recipes/agentic.py", *line, *data, *more]


def call(run: Path, *arguments: object) -> None:
    """Run Python with one thread; the output goes to RUN.log."""
    with run.with_suffix(".log").open("a") as file:
        subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=ROOT, stdout=file,
            stderr=subprocess.STDOUT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def look(run: Path, step: int, unit: Unit) -> dict[str, float | None]:
    """Precision and AUC of what is planted in a step."""
    start = time.perf_counter()
    path = run / f"influence_{step:05d}.jsonl"
    by = "group" if unit == "prompt" else "sample"
    if not path.exists():
        with run.with_suffix(".log").open("a") as file, redirect_stdout(file):
            if influence.main([str(run), "--step", str(step), "--by", by]):
                raise SystemExit(f"{run} step {step} failed")
    rows = list(map(json.loads, path.read_text().splitlines()))
    planted = planted_in(run / "rollouts" / f"step_{step:05d}.jsonl", by)
    effects = [row["effect"] for row in rows]
    is_planted = [(row["prompt_id"], row["visit"], row.get("index")) in planted for row in rows]
    acts = [pair for pair in zip(effects, is_planted, strict=True) if pair[0]]
    return {
        "units": len(rows),
        "planted": sum(is_planted),
        "precision": precision(effects, is_planted),
        "auc": auc(effects, is_planted),
        "acting": sum(planted for _, planted in acts),
        "acting_auc": auc(*zip(*acts, strict=True)) if acts else None,
        "seconds": time.perf_counter() - start,
    }


def planted_in(path: Path, by: str) -> set[tuple]:
    found = set()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["parts"]["planted"]:
            found.add((row["prompt_id"], row["visit"], row["index"] if by == "sample" else None))
    return found


def precision(effects: list[float], is_planted: list[bool]) -> float | None:
    """The share that is planted among as many of the most harmful as are planted."""
    number = sum(is_planted)
    worst = sorted(zip(effects, is_planted, strict=True))[:number]
    return fmean(planted for _, planted in worst) if number else None


def auc(effects: list[float], is_planted: list[bool]) -> float | None:
    """How likely a planted one is more harmful than another; equal ones count half."""
    both = list(zip(effects, is_planted, strict=True))
    wrong = [effect for effect, planted in both if planted]
    others = [effect for effect, planted in both if not planted]
    pairs = [(a < b) + (a == b) / 2 for a in wrong for b in others]
    return fmean(pairs) if pairs else None


def show(row: dict[str, float | None]) -> str:
    return "  ".join(f"{n} {'-' if v is None else f'{v:.3g}'}" for n, v in row.items())


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
