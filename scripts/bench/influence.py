"""Does `roll-lite influence` find wrong rewards? Some are planted, and the most harmful looked at.

export OMP_NUM_THREADS=1
python scripts/bench/influence.py runs/influence --words SFT/model --lakes SFT/model --seeds 0 1 2

The models are those of scripts/quickstart.sh after imitation: of words for the task `words`, of
FrozenLake for `lakes`. One reward in twenty is turned around, 1 - reward: of whole prompts, all
samples of a group alike (`prompt`), or of single samples (`sample`). Evaluations have right ones.

A line has the number of units and of those planted, the share of planted ones among as many of the
most harmful (precision), and how likely a planted one is more harmful than another of its step
(AUC; 0.5 is chance). The last lines are of all steps. Their p is the share of 100,000 random orders
within the steps that rank the planted as high. `acting` leaves out units without an effect: a group
of equal rewards teaches nothing, whatever the rewards are.

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
from typing import Literal

import numpy as np
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
        found, rewards = [], []
        for seed in cfg.seeds:
            run = out / f"{task}-{unit}-{seed}"
            if not (run / "model").exists():
                call(run, *command(task, unit, model, seed, max(steps), run))
            for step in steps:
                start = time.perf_counter()
                found.append(look(run, step, unit))
                rewards.append(look(run, step, unit, by="reward"))
                text = f"{described([found[-1]])}, {time.perf_counter() - start:.0f} s"
                print(f"{run.name} step {step}: {text}", flush=True)
        print(f"{task}-{unit}, {len(found)} steps: {described(found)}, p {chance(found):.2g}")
        acting = [[pair for pair in pairs if pair[0]] for pairs in found]
        print(f"{task}-{unit}, acting: {described(acting)}, p {chance(acting):.2g}")
        print(f"{task}-{unit}, by the lowest reward instead: {described(rewards)}", flush=True)


def command(task: str, unit: Unit, model: Path, seed: int, steps: int, run: Path) -> list:
    line = ["--model", model.resolve(), "--seed", seed, "--steps", steps, "--keep-every", 1]
    line += ["--eval-every", steps, "--eval-prompts", 128, "--run-dir", run]
    line += ["--code", __file__]
    if task == "words":
        return ["recipes/rlvr.py", *line, "--data", "reverse:5", "--wrong", unit]
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


Pairs = list[tuple[float, bool]]
"""A number of each unit of a step, lowest for the worst, and whether it is planted."""


def look(run: Path, step: int, unit: Unit, by: str = "effect") -> Pairs:
    path = run / f"influence_{step:05d}.jsonl"
    left_out = "group" if unit == "prompt" else "sample"
    if not path.exists():
        with run.with_suffix(".log").open("a") as file, redirect_stdout(file):
            if influence.main([str(run), "--step", str(step), "--by", left_out]):
                raise SystemExit(f"{run} step {step} failed")
    planted = planted_in(run / "rollouts" / f"step_{step:05d}.jsonl", left_out)
    rows = map(json.loads, path.read_text().splitlines())
    return [
        (row[by], (row["prompt_id"], row["visit"], row.get("index")) in planted) for row in rows
    ]


def planted_in(path: Path, by: str) -> set[tuple]:
    found = set()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["parts"]["planted"]:
            found.add((row["prompt_id"], row["visit"], row["index"] if by == "sample" else None))
    return found


def described(steps: list[Pairs]) -> str:
    """Precision and AUC over all steps."""
    counts = [sum(planted for _, planted in pairs) for pairs in steps]
    num_units, num_planted = sum(map(len, steps)), sum(counts)
    text = f"{num_units} units, {num_planted} planted"
    if not num_planted:
        return text
    both = list(zip(steps, counts, strict=True))
    hits = sum(planted for pairs, count in both for _, planted in sorted(pairs)[:count])
    by_chance = sum(count**2 / len(pairs) for pairs, count in both if pairs)
    precise = f"precision {hits / num_planted:.2f} (chance {by_chance / num_planted:.2f})"
    return f"{text}, {precise}, AUC {auc(steps):.2f}"


def auc(steps: list[Pairs]) -> float:
    """Over the pairs of a planted unit and another of the same step; equal effects count half."""
    found = total = 0.0
    for pairs in steps:
        others = np.array([effect for effect, planted in pairs if not planted])
        for effect in (effect for effect, planted in pairs if planted):
            found += (effect < others).sum() + (effect == others).sum() / 2
            total += len(others)
    return found / total if total else 0.5


def chance(steps: list[Pairs], num_orders: int = 100_000) -> float:
    """How often a random order within each step ranks the planted as high as this one."""
    random = np.random.default_rng(0)
    sums = np.zeros(num_orders)
    total = 0.0
    for pairs in steps:
        number = sum(planted for _, planted in pairs)
        if 0 < number < len(pairs):
            ranks = rankdata([-effect for effect, _ in pairs])  # the most harmful ranks highest
            keys = random.random((num_orders, len(pairs)), dtype=np.float32)
            sums += ranks[np.argpartition(keys, number - 1)[:, :number]].sum(axis=1)
            total += sum(rank for rank, (_, planted) in zip(ranks, pairs, strict=True) if planted)
    return float(((sums >= total - 1e-9).sum() + 1) / (num_orders + 1))


def rankdata(values: list[float]) -> np.ndarray:
    """Ranks from 1; equal values share theirs."""
    array = np.array(values)
    return np.array([(array < v).sum() + ((array == v).sum() + 1) / 2 for v in values])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
