"""Kills a run again and again, has it recover, and compares it with a run that was left alone.

python scripts/chaos/faults.py --kills 200 -- recipes/rlvr.py --model models/tiny --steps 8 \
        --checkpoint-every 1
python scripts/chaos/faults.py --kills 200 --ranks 4 -- recipes/agentic.py --device-map \
        "train=0-1 generate=2-3" --max-staleness 1 ...      # asynchronous: counts samples instead

Victims are each rank, the supervisor and a worker of rewards or environments, their sandboxes, and
torchrun's agent; faults are signals, no memory and a full disk; the line `phase` of the run folder
says when. A run that ends is resumed; one that is complete is compared, and the next begins, until
enough faults were injected. faults.jsonl in --out has all of them, and events.jsonl of each run has
its own.
Exit code 1: a run did not recover, was another than the one left alone, or left something behind.
"""

import argparse
import fcntl
import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from run_compare import differences, unaccounted
from run_processes import LIMITS, SIGNALS, Program, inject, launch

FAULTS = (*SIGNALS, *LIMITS)
PHASES = {"generating": "generate", "stepping": "environment", "scoring": "score", "end": "export"}
"""Names of phases and of samples' states in the line of a run, where they differ from ours."""
PAUSE_SECONDS = 3.0
"""For processes that no other process watches: stopped, then continued."""
POLL_SECONDS = 0.002
MAX_MISSES = 3
"""Steps in which a phase was over before its fault came; then comes another fault."""
SHOWN_PROBLEMS = 20
MAX_RESTARTS = 1000
"""Restarts by torchrun; under python the script itself gives the command again."""
SURVIVED, RESTARTED, HUNG = "survived", "restarted", "hung"


class Now(NamedTuple):
    """What a run is doing."""

    pid: int
    step: int
    phases: tuple[str, ...]
    """The recipe's own, and those of its samples."""


STARTING = Now(0, 0, ("start",))


class Target(NamedTuple):
    phase: str
    victim: str
    fault: str


@dataclass
class Fault:
    """One that was injected, and what became of the run."""

    phase: str
    victim: str
    fault: str
    pid: int
    run_pid: int
    """Process of rank 0, where the recipe runs; 0 while it starts."""
    step: int
    time: float
    phases: tuple[str, ...]
    """At the moment of the fault."""
    landed: str
    """What shows that it did: gone, stopped, delivered, ignored, or the limit."""
    outcome: str = ""
    """survived, restarted by torchrun, ended with a code, or hung."""
    ended_s: float | None = None
    """Until the last process of the run was gone; of a run that torchrun restarts: rank 0."""
    recovered_s: float | None = None
    """Until the next step was recorded, or the run was complete."""
    problems: list[str] = field(default_factory=list)


class Campaign:
    """Runs of one command, one after the other."""

    def __init__(self, args: argparse.Namespace):
        self.num_ranks, self.num_kills = args.ranks, args.kills
        self.folder, self.recipe, self.max_runs = Path(args.out), args.command, args.runs
        self.chosen = [Target(*text.split("/")) for text in args.targets]
        self.random, self.end = random.Random(args.seed), time.monotonic() + 60 * args.minutes
        self.guard, self.gone_within = args.guard, args.gone_within
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self.num_runs = 0
        self.seconds: dict[str, float] = {}
        """How long each phase takes, by its name."""
        self.temp = (self.folder / "temp").resolve()
        self.temp.mkdir(parents=True)

    def start(self, run_dir: Path) -> Program:
        """Starts the run or resumes it: the same line does both."""
        command = [*launch(self.num_ranks, MAX_RESTARTS), *self.recipe]
        command += ["--run-dir", str(run_dir), "--resume", "auto"]
        output = self.folder / f"{run_dir.name}.txt"
        self.program = Program.start(command, self.num_ranks, output, self.temp)
        return self.program

    @property
    def is_enough(self) -> bool:
        return len(self.faults) >= self.num_kills or time.monotonic() > self.end

    def watch_reference(self) -> list[Target]:
        """The run that is left alone. Returns all that can be done to such a run, shuffled."""
        run_dir, seen, spans = self.folder / "reference", defaultdict(set), defaultdict(list)
        program = self.start(run_dir)
        began, last, looked_at = time.monotonic(), STARTING, 0.0
        while program.process.poll() is None:
            now, clock = read_now(run_dir, program), time.monotonic()
            if now != last:
                for phase in last.phases:
                    spans[phase].append(clock - began)
                last, began = now, clock
            if clock > looked_at + 0.5:
                seen[now.phases[0]] |= program.victims().keys()
                looked_at = clock
            time.sleep(POLL_SECONDS)
        for phase in last.phases:
            spans[phase].append(time.monotonic() - began)
        if program.process.returncode:
            sys.exit(f"the run fails when it is left alone: see {self.folder}/reference.txt")
        self.problems += [f"{run_dir}: {text}" for text in self.left_behind(program, run_dir)]
        self.seconds = {phase: median(found) for phase, found in spans.items()}
        self.seconds["start"] = max(spans["start"])  # its line comes when most of it is over
        print("phases:", ", ".join(f"{p} {s:.2f} s" for p, s in self.seconds.items()))
        victims = set().union(*seen.values())
        print("victims:", ", ".join(sorted(victims)), flush=True)
        product = itertools.product(self.seconds, sorted(victims), FAULTS)
        once = {phase: seen[phase] for phase in ("start", "export")}  # not all live then
        targets = [
            target
            for target in map(Target._make, product)
            if target.victim in once.get(target.phase, victims)
            # Programs inherit the limits of their sandbox, and fail by them.
            and not (target.victim.startswith("sandbox") and target.fault in LIMITS)
        ]
        self.random.shuffle(targets)
        return self.chosen or targets

    def run(self) -> None:
        targets = deque(self.watch_reference())
        while not self.is_enough and self.num_runs < self.max_runs:
            self.num_runs += 1
            run_dir, before = self.folder / f"run-{self.num_runs:03d}", len(self.faults)
            problem = self.complete(run_dir, targets)
            faults = self.faults[before:]
            write_faults(self.folder / "faults.jsonl", faults)
            write_faults(run_dir / "events.jsonl", faults)  # now: a resume drops what comes late
            self.problems += [
                f"{f.fault} {f.victim} {f.phase}: {p}" for f in faults for p in f.problems
            ]
            found = [problem] if problem else self.compared(run_dir)
            self.problems += [f"{run_dir}: {text}" for text in found]
            verdict = f"{len(found)} problems: {found[0]}" if found else "as if left alone"
            print(f"{run_dir.name}: {len(faults)} faults, {verdict}", flush=True)
            if not found:
                shutil.rmtree(run_dir)

    def compared(self, run_dir: Path) -> list[str]:
        if json.loads((run_dir / "config.json").read_text()).get("max_staleness"):
            return unaccounted(run_dir, self.folder / "reference")
        return differences(run_dir, self.folder / "reference")

    def complete(self, run_dir: Path, targets: deque[Target]) -> str | None:
        """Start, harm and resume a run until it is complete. Returns why that failed, if so."""
        program, fault, is_fresh = self.start(run_dir), None, True
        while True:
            target = None if self.is_enough else next_target(targets, is_fresh)
            placed = self.place(program, run_dir, target, fault) if target else None
            if placed:
                self.faults.append(fault := placed)
                if self.chosen:  # each of them once
                    targets.remove(target)
                code = self.settle(program, run_dir, fault)
            elif target and program.process.poll() is None:  # missed too often
                is_fresh = False
                continue
            else:
                code = self.wait_for_end(program, run_dir, fault)
            if code is None:
                is_fresh = False
                continue
            # After SIGTERM, for one, a run may record a step before it ends.
            is_late = (
                not placed
                and code != 0
                and fault is not None
                and fault.outcome in (SURVIVED, RESTARTED)
            )
            left = self.left_behind(program, run_dir)
            if placed or is_late:
                self.note_end(fault, code, left)
            elif code or left:
                return "; ".join([f"ended with {code} without a fault", *left])
            if code == 0:
                if fault and fault.recovered_s is None:
                    fault.recovered_s = time.time() - fault.time
                return None
            program, is_fresh = self.start(run_dir), True

    def place(
        self, program: Program, run_dir: Path, target: Target, last: Fault | None
    ) -> Fault | None:
        """Inject the fault in its phase; None if the program ends before, or it is missed often."""
        # Chosen ones come at once: a random moment may be after the end of the phase.
        delay = 0.0 if self.chosen else self.random.random() * self.seconds[target.phase]
        tried: set[tuple[int, int]] = set()
        while program.process.poll() is None and len(tried) < MAX_MISSES:
            note_recovery(run_dir, last)
            is_there = program.find(target.victim)  # first: a search takes longer than some phases
            now = read_now(run_dir, program)
            if target.phase == "start" and now is not STARTING and "start" not in now.phases:
                return None  # it comes once
            if is_there and target.phase in now.phases and now[:2] not in tried:
                tried.add(now[:2])
                time.sleep(delay)
                if fault := self.fire(program, run_dir, target):
                    return fault
                delay /= 4  # the phase was over: again in the next step
            time.sleep(POLL_SECONDS)
        return None

    def fire(self, program: Program, run_dir: Path, target: Target) -> Fault | None:
        victim, now = program.find(target.victim), read_now(run_dir, program)
        if victim is None or target.phase not in now.phases:
            return None
        fired = time.time()
        try:
            landed, self.undo = inject(victim, target.fault)
        except (ProcessLookupError, PermissionError):  # it has ended, or has another user
            return None
        fault = Fault(*target, victim.pid, now.pid, now.step, fired, now.phases, landed)
        fault.problems += [] if landed else ["it did not land"]
        return fault

    def settle(self, program: Program, run_dir: Path, fault: Fault) -> int | str | None:
        """Wait until the run has recorded a step (None) or has ended (the exit code)."""
        is_unwatched = fault.victim == "agent" or (self.num_ranks == 1 and fault.victim == "rank 0")
        if fault.fault == "SIGSTOP" and is_unwatched:
            time.sleep(PAUSE_SECONDS)
            self.undo()
        code = self.wait_for_end(program, run_dir, fault, or_recovery=True)
        self.undo()
        if code is None:
            fault.outcome = RESTARTED if is_gone(program, fault) else SURVIVED
            if fault.outcome == RESTARTED and fault.ended_s is None:  # after it recorded a step
                fault.ended_s, fault.recovered_s = time.time() - fault.time, None
            self.print(fault)
        return code

    def wait_for_end(
        self, program: Program, run_dir: Path, fault: Fault | None, *, or_recovery: bool = False
    ) -> int | str | None:
        """The exit code; None if the run has recovered from the fault, where that is enough."""
        end = time.monotonic() + self.guard
        while program.process.poll() is None:
            if note_recovery(run_dir, fault) and or_recovery:
                return None
            if or_recovery and fault.ended_s is None and is_gone(program, fault):
                fault.ended_s = time.time() - fault.time
            program.notice()
            if time.monotonic() > end:
                program.kill_all()
                program.process.wait()
                return HUNG
            time.sleep(0.02)
        return program.process.returncode

    def note_end(self, fault: Fault, code: int | str, left: list[str]) -> None:
        fault.outcome = HUNG if code == HUNG else f"ended with {code}"
        if code == HUNG:
            fault.problems.append(f"neither ended nor went on within {self.guard:.0f} s")
        fault.problems += left
        fault.ended_s, fault.recovered_s = self.gone_at - fault.time, None
        self.print(fault)

    def left_behind(self, program: Program, run_dir: Path) -> list[str]:
        """Processes, locks, shared memory and temporary files of a program that has ended."""
        end = time.monotonic() + self.gone_within
        lock = run_dir / ".lock"  # a process that has lost its first thread may hold it a moment
        while (program.alive() or not can_lock(lock)) and time.monotonic() < end:
            time.sleep(0.02)
        alive = program.alive()
        self.gone_at = time.time()
        problems = [f"process {p.pid} is left: {p.command[-120:]}" for p in alive]
        program.kill_all()
        if not can_lock(lock):
            problems.append("the run folder is still locked")
        for path in [*self.temp.iterdir(), *program.shared_memory()]:
            if not path.name.startswith("torchelastic_"):  # torchrun's own, empty
                problems.append(f"{path.name} is left in {path.parent.name}")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return problems

    def print(self, fault: Fault) -> None:
        ended = "" if fault.ended_s is None else f" in {fault.ended_s:.1f} s"
        what = f"{len(self.faults):4}  {fault.fault:8} {fault.victim:10} {fault.phase:11}"
        print(f"{what} step {fault.step:2}  {fault.outcome}{ended}", *fault.problems, flush=True)


def next_target(targets: deque[Target], is_fresh: bool) -> Target | None:
    """The first that can be reached: only a program that was just started is starting."""
    found = next((t for t in targets if is_fresh or t.phase != "start"), None)
    if found:
        targets.remove(found)
        targets.append(found)  # whether it is hit or missed, the others come first
    return found


def read_now(run_dir: Path, program: Program) -> Now:
    """What the program is doing: starting, until it has written the line itself."""
    try:
        pid, step, phase, *states = (run_dir / "phase").read_text().split()
        now = Now(int(pid), int(step), tuple(PHASES.get(p, p) for p in (phase, *states)))
    except (OSError, ValueError):  # not there yet
        return STARTING
    return now if program.is_alive(now.pid) else STARTING


def note_recovery(run_dir: Path, fault: Fault | None) -> bool:
    """Whether a step was recorded since the fault; the first time sets how long that took."""
    path = run_dir / "metrics.jsonl"
    if not fault or not path.exists() or path.stat().st_mtime <= fault.time:
        return False
    *_, last = path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")
    recorded = json.loads(last)["time"] if last else 0.0
    # What it recorded before it ended is no recovery.
    is_recovered = recorded > fault.time + (fault.ended_s or 0.0)
    if is_recovered and fault.recovered_s is None:
        fault.recovered_s = recorded - fault.time
    return is_recovered


def is_gone(program: Program, fault: Fault) -> bool:
    """Whether the process that ran the recipe at the time of the fault has ended."""
    return fault.run_pid > 0 and not program.is_alive(fault.run_pid)


def can_lock(path: Path) -> bool:
    if not path.exists():
        return True
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def write_faults(path: Path, faults: Sequence[Fault]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"event": "fault", **asdict(f)}) + "\n" for f in faults)


def table(faults: Sequence[Fault]) -> Iterator[str]:
    """By phase, victim and fault: how many, how many recovered, and the longest times."""
    titles = f"{'fired':>6}{'recovered':>10}{'ended s':>9}{'recovery s':>11}"
    yield f"{'phase':12}{'victim':12}{'fault':9}{titles}"
    cells = defaultdict(list)
    for fault in faults:
        cells[fault.phase, fault.victim, fault.fault].append(fault)
    for (phase, victim, kind), found in sorted(cells.items()):
        recovered = sum(not f.problems for f in found)
        ended = max((f.ended_s for f in found if f.ended_s is not None), default=None)
        times = max((f.recovered_s for f in found if f.recovered_s is not None), default=None)
        shown = [
            f"{'' if s is None else format(s, '.1f'):>{w}}" for s, w in ((ended, 9), (times, 11))
        ]
        yield f"{phase:12}{victim:12}{kind:9}{len(found):6}{recovered:10}{''.join(shown)}"


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="faults to inject")
    parser.add_argument("--ranks", type=int, default=1, help="1: python; more: torchrun")
    parser.add_argument("--seed", type=int, default=0, help="of victims, faults and moments")
    parser.add_argument("--minutes", type=float, default=1e6, help="inject nothing after these")
    parser.add_argument(
        "--guard", type=float, default=900.0, help="seconds after which a run counts as hung"
    )
    parser.add_argument(
        "--gone-within", type=float, default=15.0,
        help="seconds in which all processes of a run that has ended must be gone",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=10**6, help="at most so many runs")
    parser.add_argument(
        "--targets", nargs="*", default=[], help="instead of random ones, as 'train/rank 0/SIGKILL'"
    )
    parser.add_argument("--out", default=time.strftime("runs/chaos-%Y%m%d-%H%M%S"))
    parser.add_argument("command", nargs="+", help="after --: recipe and its options")
    return parser.parse_args(arguments)


def main() -> None:
    campaign = Campaign(read_options())
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        campaign.run()
    finally:
        campaign.program.kill_all()
    print("\n".join(table(campaign.faults)))
    longest = max((f.ended_s or 0.0 for f in campaign.faults), default=0.0)
    text = f"{len(campaign.faults)} faults in {campaign.num_runs} runs; the longest end took "
    print("\n".join(campaign.problems[:SHOWN_PROBLEMS]))
    print(
        f"{text}{longest:.1f} s;",
        f"{len(campaign.problems)} problems" if campaign.problems else "all is well",
    )
    sys.exit(bool(campaign.problems))


if __name__ == "__main__":
    main()
