"""Runs a recipe for thousands of steps and says what grows: memory, handles, threads, step time.

python scripts/chaos/soak.py -- recipes/rlvr.py --model models/tiny --steps 3000 ...
python scripts/chaos/soak.py --ranks 4 -- recipes/rlvr.py --max-staleness 1 \
        --device-map "train=0-1 generate=2-3" --steps 3000 ...

Prints, for each rank, the slope per 1,000 steps over the second half of the run with its 95%
confidence interval, from a straight line through the means of 20 equal parts: neighbouring samples
are alike, and a line through all of them would look surer than it is. Linux only.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from run_processes import Process, Program, launch

PARTS = 20
T_QUANTILE = 2.101
"""Student's t with PARTS - 2 degrees of freedom: 95% lie within."""


def measure(process: Process) -> dict[str, float]:
    """Measurements of a process, which may end meanwhile: empty then."""
    folder = Path(f"/proc/{process.pid}")
    try:
        status = dict(
            line.split(":", 1) for line in folder.joinpath("status").read_text().splitlines()
        )
        return {
            "MB": int(status["VmRSS"].split()[0]) / 1024,
            "handles": len(os.listdir(folder / "fd")),
            "threads": int(status["Threads"]),
        }
    except (OSError, KeyError):
        return {}


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Per step, and half the width of its 95% confidence interval."""
    size = len(points) / PARTS
    parts = [points[round(i * size) : round((i + 1) * size)] for i in range(PARTS)]
    x, y = ([fmean(point[axis] for point in part) for part in parts] for axis in (0, 1))
    mean_x, mean_y = fmean(x), fmean(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    found = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residuals = [b - mean_y - found * (a - mean_x) for a, b in zip(x, y, strict=True)]
    error = math.sqrt(sum(r * r for r in residuals) / (PARTS - 2) / spread)
    return found, T_QUANTILE * error


def soak(program: Program, run_dir: Path, every: float) -> dict[str, list[tuple[float, float]]]:
    """Points (step, value) by name, until the program ends."""
    points = defaultdict(list)
    while program.process.poll() is None:
        time.sleep(every)
        step = current_step(run_dir)
        for name, process in program.victims().items() if step else ():
            for unit, value in measure(process).items():
                points[f"{name}: {unit}"].append((step, value))
    return points


def current_step(run_dir: Path) -> int:
    """0 before the first step and after the last."""
    try:
        _, step, phase, *_ = (run_dir / "phase").read_text().split()
    except (OSError, ValueError):
        return 0
    return 0 if phase == "end" else int(step)


def step_times(run_dir: Path) -> list[tuple[float, float]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["time/step"]) for row in rows if "time/step" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="1: python; more: torchrun")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--out", default=time.strftime("runs/soak-%Y%m%d-%H%M%S"))
    parser.add_argument("command", nargs="+", help="after --: recipe and its options")
    args = parser.parse_args()
    folder = Path(args.out)
    (folder / "temp").mkdir(parents=True)
    command = [*launch(args.ranks), *args.command, "--run-dir", str(folder / "run")]
    program = Program.start(command, args.ranks, folder / "run.txt", (folder / "temp").resolve())
    points = soak(program, folder / "run", args.every)
    if program.process.returncode:
        sys.exit(f"the run ended with {program.process.returncode}: see {folder}/run.txt")
    points["step time s"] = step_times(folder / "run")
    last = max(step for step, _ in points["step time s"])
    print(f"{'':24}{'at the end':>12}{'per 1,000 steps of the second half':>40}")
    for name, found in sorted(points.items()):
        late = [point for point in found if point[0] > last / 2]
        if len(late) < 2 * PARTS:
            print(f"{name:24} only {len(late)} measurements in the second half")
            continue
        per_step, error = slope(late)
        interval = f"{1000 * per_step:+.3g} +- {1000 * error:.2g}"
        print(f"{name:24}{fmean(v for _, v in late[-PARTS:]):12.4g}{interval:>40}")


if __name__ == "__main__":
    main()
