"""Runs a recipe for thousands of steps and says what grows: memory, handles, threads, step time.

python scripts/chaos/soak.py -- recipes/rlvr.py --model models/tiny --steps 3000 ...
python scripts/chaos/soak.py --ranks 4 -- recipes/rlvr.py --max-staleness 1 \
        --device-map "train=0-1 generate=2-3" --steps 3000 ...
python scripts/chaos/soak.py --minutes 20 --stop-every 7 -- recipes/rlvr.py --steps 100000 ...

The last form stops the run with SIGTERM every 7 minutes and resumes it, until 20 have passed. With
--out the folder of an earlier call goes on, where commands may only take minutes.

Prints, for each start and process, the slope per 1,000 steps over the second half of the start's
steps with its 95% confidence interval, from a straight line through the means of 20 equal parts:
neighbouring samples are alike, and a line through all of them would look surer than it is. Then it
counts the samples and names those that were lost or repeated. Linux only.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from run_compare import damaged, failed, lost_or_repeated
from run_processes import Process, Program, launch

PARTS = 20
T_QUANTILE = 2.101
"""Student's t with PARTS - 2 degrees of freedom: 95% lie within."""

Points = list[tuple[float, float]]
"""(step, value)."""


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


def gpu_memory() -> dict[str, float]:
    """MB in use on each GPU, by whoever uses it; empty without GPUs."""
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return {f"GPU {number}: MB": float(line) for number, line in enumerate(lines)}


def soak(
    program: Program, run_dir: Path, every: float, minutes: float
) -> tuple[dict[str, Points], bool]:
    """Measurements by name until the program ends, and whether it was stopped after the minutes."""
    points = defaultdict(list)
    end = time.monotonic() + 60 * minutes
    is_stopped = False
    while program.process.poll() is None:
        time.sleep(every)
        if time.monotonic() > end and not is_stopped:
            is_stopped = True
            program.process.send_signal(signal.SIGTERM)
        step = current_step(run_dir)
        if not step:
            continue
        found = {
            f"{name}: {unit}": value
            for name, process in program.victims().items()
            for unit, value in measure(process).items()
        }
        for name, value in (found | gpu_memory()).items():
            points[name].append((step, value))
    return points, is_stopped


def current_step(run_dir: Path) -> int:
    """0 before the first step and after the last."""
    try:
        _, step, phase, *_ = (run_dir / "phase").read_text().split()
    except (OSError, ValueError):
        return 0
    return 0 if phase == "end" else int(step)


def rows(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_slopes(start: int, points: dict[str, Points]) -> None:
    first, last = (
        pick(step for found in points.values() for step, _ in found) for pick in (min, max)
    )
    print(f"\nstart {start}: steps {first:g} to {last:g}")
    print(f"{'':24}{'at the end':>12}{'per 1,000 steps of the second half':>40}")
    for name, found in sorted(points.items()):
        late = [point for point in found if point[0] > (first + last) / 2]
        if len(late) < 2 * PARTS:
            print(f"{name:24} only {len(late)} measurements in the second half")
            continue
        per_step, error = slope(late)
        interval = f"{1000 * per_step:+.3g} +- {1000 * error:.2g}"
        print(f"{name:24}{fmean(v for _, v in late[-PARTS:]):12.4g}{interval:>40}")


def print_samples(run_dir: Path) -> None:
    """How many were trained on, and what became of others. Needs --rollouts-every 1."""
    metrics = rows(run_dir)
    names = ("rollout/trained_samples", "rollout/started", "rollout/aborted", "rollout/retried")
    counted = {name: sum(row.get(name, 0) for row in metrics) for name in names}
    print("\nsamples:", ", ".join(f"{name} {value:g}" for name, value in counted.items()))
    problems = [*damaged(run_dir), *lost_or_repeated(run_dir)]
    problems = [found for found in problems if not found.startswith("journal ")]  # it was stopped
    for place, key, index in failed(run_dir):
        problems.append(f"{place}: sample {index} of {key} failed")
    print(*(problems or ["none lost, repeated or failed"]), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="1: python; more: torchrun")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then the run is stopped")
    parser.add_argument("--stop-every", type=float, default=math.inf, help="minutes of one start")
    parser.add_argument("--out", default=time.strftime("runs/soak-%Y%m%d-%H%M%S"))
    parser.add_argument("command", nargs="+", help="after --: recipe and its options")
    args = parser.parse_args()
    folder = Path(args.out)
    (folder / "temp").mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    command = [*launch(args.ranks), *args.command, "--run-dir", str(run_dir), "--resume", "auto"]
    start = len([*folder.glob("start-*.txt")])
    step = max((row["step"] for row in rows(run_dir)), default=0)
    end = time.monotonic() + 60 * args.minutes
    is_stopped = True
    while is_stopped and time.monotonic() < end:
        start += 1
        temp = (folder / "temp").resolve()
        program = Program.start(command, args.ranks, folder / f"start-{start}.txt", temp)
        minutes = min(args.stop_every, (end - time.monotonic()) / 60)
        points, is_stopped = soak(program, run_dir, args.every, minutes)
        code = program.process.returncode  # of torchrun, 1 where it was stopped
        if code and not is_stopped:
            sys.exit(f"the run ended with {code}: see {folder}/start-{start}.txt")
        is_stopped = code != 0
        new = [row for row in rows(run_dir) if row["step"] > step and "time/step" in row]
        for name in ("time/step", "train/peak_gib"):
            if found := [(row["step"], row[name]) for row in new if name in row]:
                points[name] = found
        step = max((row["step"] for row in new), default=step)
        if points:  # else it was stopped before its first step
            print_slopes(start, points)
    print_samples(run_dir)


if __name__ == "__main__":
    main()
