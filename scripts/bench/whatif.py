"""Settings ranked by `roll-lite whatif` and by whole runs: the two orders, and what each took.

python scripts/bench/whatif.py runs/whatif --model runs/quickstart-0-.../sft/model

The model is the quickstart's after imitation. A run with the default options is recorded. Then each
setting is tried on it from a step, and by a whole run. Runs are single processes with one thread,
one after the other; those that are done in the folder are not repeated. Processor seconds are less
than seconds of the clock where other programs use the machine.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import tyro

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "lr-x2": ("--lr", "6e-4"),
    "lr-4th": ("--lr", "7.5e-5"),
    "cispo": ("--loss", "cispo"),
    "no-std": ("--no-divide-by-std",),
    "kl": ("--kl-coef", "0.1"),
    "updates-4": ("--updates-per-step", "4"),
}
RECORDED = "recorded"


@dataclass(frozen=True)
class Config:
    out: tyro.conf.Positional[Path]
    """Folder of all runs."""
    model: Path
    """Where all runs start."""
    start: int = 8
    """Step from which settings are tried, with a checkpoint of the recorded run; 0 is its start."""
    steps: int = 24
    """Steps of all runs."""
    max_kl: float | None = None
    """The bound of whatif, if it is not the default."""
    seed: int = 0
    """Seed of all runs."""
    parts: tuple[str, ...] = ("whole", "whatif")
    """What to run; the table has what is there."""


def main(cfg: Config) -> None:
    out = cfg.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    whole = ["rlvr", "--model", cfg.model.resolve(), "--data", "reverse:5", "--seed", cfg.seed]
    whole += ["--steps", cfg.steps, "--eval-every", 2, "--eval-prompts", 512]
    whole += ["--max-tokens", 16]
    call(out / RECORDED, *whole, "--keep-every", 4)
    tried = f"from-{cfg.start}" + (f"-kl-{cfg.max_kl}" if cfg.max_kl is not None else "")
    bound = [] if cfg.max_kl is None else ["--max-kl", cfg.max_kl]
    for name, options in SETTINGS.items():
        if "whole" in cfg.parts:
            call(out / f"{name}-whole", *whole, *options)
        if "whatif" in cfg.parts:
            again = ["whatif", out / RECORDED, "--from", cfg.start, *bound]
            call(out / f"{name}-{tried}", *again, *options)
    for kind in ("whole", tried):
        if all((out / f"{name}-{kind}.json").is_file() for name in SETTINGS):
            print_kind(out, kind, cfg.start)


def call(folder: Path, *arguments: object) -> None:
    """A run in its folder, unless it is done; its output and its times lie beside it."""
    times = folder.with_name(f"{folder.name}.json")
    if times.is_file():
        return
    command = [sys.executable, "-m", "roll_lite", *map(str, arguments), "--run-dir", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{folder.name} failed: {log.name}")
    seconds = {"seconds": time.monotonic() - start, "cpu_seconds": used.ru_utime + used.ru_stime}
    times.write_text(json.dumps(seconds))


def print_kind(out: Path, kind: str, start: int) -> None:
    """The settings, best first, by the mean pass rate after the step from which they are tried."""
    scores = {name: score(out / f"{name}-{kind}", start) for name in SETTINGS}
    taken = {name: json.loads((out / f"{name}-{kind}.json").read_text()) for name in SETTINGS}
    print(kind)
    for name in sorted(SETTINGS, key=lambda name: -scores[name]):
        rates = rates_of(out / f"{name}-{kind}")
        curve = " ".join(f"{rate:.3f}" for step, rate in rates.items() if step > start)
        seconds = " ".join(f"{value:5.0f}" for value in taken[name].values())
        print(f"  {name:10} mean {scores[name]:.4f}  s, cpu s {seconds}  {curve}")
    total = {n: sum(each[n] for each in taken.values()) for n in ("seconds", "cpu_seconds")}
    print(f"  all of them: {total['seconds']:.0f} s, {total['cpu_seconds']:.0f} cpu s")
    if kind != "whole" and (out / f"{next(iter(SETTINGS))}-whole.json").is_file():
        wholes = [score(out / f"{name}-whole", start) for name in SETTINGS]
        print(f"  rank correlation with whole runs: {spearman(wholes, [*scores.values()]):.2f}")


def rates_of(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval/pass@1"] for row in rows if "eval/pass@1" in row}


def score(run: Path, start: int) -> float:
    return fmean(rate for step, rate in rates_of(run).items() if step > start)


def spearman(a: list[float], b: list[float]) -> float:
    """Of numbers that all differ, from 1 (the same order) to -1."""
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    squares = sum((x - y) ** 2 for x, y in zip(*ranks, strict=True))
    return 1 - 6 * squares / (len(a) * (len(a) ** 2 - 1))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
