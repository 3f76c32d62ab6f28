"""Where the seconds go between the loss of a rank and the next recorded step.

taskset -c 0,1 python scripts/chaos/recovery.py --ranks 4 --kills 5 -- recipes/rlvr.py \
        --model models/tiny --data reverse:2 --prompts-per-step 4 --samples-per-prompt 2 \
        --max-tokens 4 --eval-every 0 --steps 1000 --checkpoint-every 1 --reward-workers 1

Kills one rank after the other, looks at the processes of the run from outside, and prints the
seconds until every milestone, what the new ranks had computed until then, and what imports cost.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

from run_processes import Process, Program, launch

TICKS = os.sysconf("SC_CLK_TCK")
POLL_SECONDS = 0.1  # a look at all processes takes time of the same cores
SETTLED_STEPS = 3
"""Recorded before the first kill and between two."""
IMPORTS = (
    "sys",
    "torch",
    "torch, torch.distributed.fsdp",
    "torch, torch.distributed.fsdp, torch._dynamo",  # FSDP imports it when it is first used
    "torch, torch.distributed.fsdp, torch._dynamo, roll_lite.train.trainer, roll_lite.players",
    "transformers",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="rank 0, 1, ... in turn")
    parser.add_argument("command", nargs="+", help="after --: recipe and its options")
    args = parser.parse_args()
    folder = Path(mkdtemp(prefix="roll_lite-recovery-"))
    run_dir, temp = folder / "run", folder / "temp"
    temp.mkdir()
    command = [*launch(args.ranks, args.kills), *args.command]
    command += ["--run-dir", str(run_dir), "--resume", "auto"]
    program = Program.start(command, args.ranks, folder / "output.txt", temp)
    tables = []
    try:
        for kill in range(args.kills):
            wait(lambda wanted=SETTLED_STEPS * (kill + 1): num_steps(run_dir) >= wanted, program)
            tables.append(recover(program, run_dir, kill % args.ranks))
            print(f"kill {kill + 1} of {args.kills}: {tables[-1]['a step recorded'][0]:.1f} s")
    finally:
        program.kill_all()
    print(f"\n{'median of the kills':44}{'wall s':>8}{'CPU s of all new ranks':>24}")
    for name in tables[0]:
        wall, cpu = (median(table[name][k] for table in tables) for k in (0, 1))
        print(f"{name:44}{wall:8.1f}{cpu:24.1f}")
    for names in IMPORTS:
        print(f"import {names}: {import_seconds(names):.1f} CPU s")
    print(f"output: {folder}/output.txt")


def recover(program: Program, run_dir: Path, rank: int) -> dict[str, tuple[float, float]]:
    """Kill a rank; seconds until each milestone, and the CPU seconds that new ranks had then."""
    old = {p.pid for p in ranks_of(program)}
    victim, before = program.victims()[f"rank {rank}"], num_steps(run_dir)
    os.kill(victim.pid, signal.SIGKILL)
    began = time.monotonic()
    milestones: dict[str, Callable[[list[Process]], bool]] = {
        "the old ranks have ended": lambda new: not any(program.is_alive(pid) for pid in old),
        "torchrun has started the first new one": lambda new: bool(new),
        "all import torch": lambda new: count(new, "libtorch_cpu") >= program.num_ranks,
        "rank 0 has loaded the checkpoint": lambda new: in_step(run_dir, new),
        "a step recorded": lambda new: num_steps(run_dir) > before,
    }
    table = {}
    for name, is_reached in milestones.items():

        def is_done(is_reached: Callable[[list[Process]], bool] = is_reached) -> bool:
            return is_reached([p for p in ranks_of(program) if p.pid not in old])

        wait(is_done, program)
        new = [p for p in ranks_of(program) if p.pid not in old]
        table[name] = time.monotonic() - began, sum(map(cpu_seconds, new))
    return table


def import_seconds(names: str) -> float:
    """CPU seconds of a process that does nothing else."""
    before = os.times()
    subprocess.run([sys.executable, "-c", f"import {names}"], check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def wait(is_done: Callable[[], bool], program: Program) -> None:
    while not is_done():
        if program.process.poll() is not None:
            raise SystemExit("the run has ended: give it more --steps")
        time.sleep(POLL_SECONDS)


def ranks_of(program: Program) -> list[Process]:
    """Ranks and their monitors."""
    return [p for p in program.alive() if p.rank is not None and "recipes" in p.command]


def count(processes: list[Process], library: str) -> int:
    return sum(library in _read(f"/proc/{process.pid}/maps") for process in processes)


def cpu_seconds(process: Process) -> float:
    fields = _read(f"/proc/{process.pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def in_step(run_dir: Path, new: list[Process]) -> bool:
    """Whether the line `phase` is of a new process, past its start."""
    fields = _read(f"{run_dir}/phase").split()
    return len(fields) > 2 and fields[2] != "start" and int(fields[0]) in {p.pid for p in new}


def num_steps(run_dir: Path) -> int:
    return _read(f"{run_dir}/metrics.jsonl").count("\n")


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:  # not there yet, or no more
        return ""


if __name__ == "__main__":
    main()
