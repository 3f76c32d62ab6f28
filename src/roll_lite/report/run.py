"""The folder of a run.

config.json      the options, and their history: every start with its command and changes
contracts/       what decides the bits of a run, for each start that differs in it
metrics.jsonl    one line per step
digests.jsonl    one line per step: digests of what it was made of and of what came of it
events.jsonl     one line per dropped sample, with prompt, reply, state changes and the reason (in
                 the state `filtered` only for steps whose rollouts are written); one line per
                 checkpoint, resume, and prompt whose tests a program that does nothing passes
rollouts/        step_*.jsonl: one line per sample that was trained on, as in records.py;
                 eval_*.jsonl: one line per sample of an evaluation, as text
phase            what the run is doing now: process, step, phase, states of samples
tensorboard/     the metrics, if the package tensorboard is installed
"""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from roll_lite import output
from roll_lite.checks import UserError
from roll_lite.files import own_content
from roll_lite.progress import PhaseFile, ProgressBar, terminal_width
from roll_lite.report.config_file import to_json, write_config, written_by
from roll_lite.report.contract import Contract, write_contract
from roll_lite.report.digests import FILE, DigestLines
from roll_lite.report.overview import Hints
from roll_lite.report.reader import JsonLines, parse_line
from roll_lite.report.records import (
    NOT_TRAINED,
    Writer,
    answer_lines,
    dropped_lines,
    encode,
    rollout_lines,
)
from roll_lite.report.terminal import StepTable, repeats
from roll_lite.report.trackers import OpenTracker, TrackedRun, Trackers
from roll_lite.types import Group, Sample

LOCK = ".lock"
NO_CONTRACT: Contract = {}
NO_RANKS: Mapping[str, Sequence[Sequence[int]]] = {}


class Run:
    """Records every step, and prints one line for it."""

    def __init__(
        self,
        folder: str | Path,
        config: Any,
        *,
        num_steps: int,
        shown: dict[str, str],
        contract: Contract = NO_CONTRACT,
        resumed_at: int | None = None,
        trackers: Sequence[OpenTracker] = (),
        ranks: Mapping[str, Sequence[Sequence[int]]] = NO_RANKS,
    ):
        """`shown` maps the metrics of the console to their titles, the most important first.

        `contract` is what decides the bits of a run of several steps. A run that is `resumed_at` a
        step keeps the records up to that step. `trackers` get the metrics too. `ranks` are those of
        each replica of each role.
        """
        self.folder = Path(folder)
        self._shown = shown
        self._lock = lock_folder(self.folder)
        self._writer = Writer()
        last_step = -1
        if resumed_at is not None:
            last_step = self._drop_records_after(resumed_at)
        else:
            refuse_old_run(self.folder)
        place = f"{folder} is at step {resumed_at} of {num_steps}"
        if resumed_at and resumed_at > num_steps:
            raise UserError(f"{place}; resume with more steps")
        print(f"run folder: {self.folder}", flush=True)
        if resumed_at and resumed_at == num_steps:
            print(f"{place}: nothing is left to train; --steps N goes on", flush=True)
        about = {"shown": shown, "ranks": ranks}
        if contract:
            about["contract"] = write_contract(self.folder, contract)
        run_id = write_config(self.folder, config, resumed_at, **about)
        self._digests = DigestLines(self.folder, about.get("contract", ""))
        self.phase = PhaseFile(self.folder / "phase", step=resumed_at or 0)
        self._hints = Hints()
        self._bar = ProgressBar(num_steps, "steps", done=resumed_at or 0)
        self._table = StepTable(shown)
        self._num_steps = num_steps
        tracked = TrackedRun(run_id, self.folder, to_json(config), resumed_at)
        self._trackers = Trackers(trackers, tracked, last_step)
        if resumed_at is not None:
            self.note("resumed", step=resumed_at)

    def is_due(self, step: int, every: int) -> bool:
        return is_due(step, every, self._num_steps)

    def is_missing(self, metric: str, step: int, every: int) -> bool:
        """Whether a metric that is due at the step has not been recorded."""
        if step and not self.is_due(step, every):
            return False
        rows = (parse_line(line) for _, line in JsonLines(self.folder / "metrics.jsonl"))
        return not any(row["step"] == step and metric in row for row in rows)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step, and print those of the console line."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(encode({"step": step, "time": time.time(), **metrics}) + "\n")
        self._trackers.log(step, metrics)
        self._bar.reach(step)
        self._note_lost_output(step)
        if any(name in metrics for name in self._shown):
            self.print("\n".join(self._step_lines(step, metrics)))
        for hint in self._hints.read(metrics):
            self.print(f"hint: {hint}")
            self.note("hint", step=step, text=hint)

    def _note_lost_output(self, step: int) -> None:
        for stream, error in output.newly_lost():
            self.note("output_lost", step, stream=stream, error=error)
            lost = f"{stream} cannot be written ({error}): what is printed there is lost"
            print(f"warning: {lost}; the run goes on", file=sys.stderr, flush=True)

    def _step_lines(self, step: int, metrics: dict[str, float]) -> list[str]:
        """The row of a table; where the output is not a terminal, a line of names and values."""
        if sys.stdout.isatty():
            return self._table.lines(step, metrics, terminal_width())
        parts = [
            f"{label} {metrics[name]:.4g}"
            for name, label in self._shown.items()
            if name in metrics and not repeats(name, metrics)
        ]
        return [f"step {step}  " + "  ".join(parts)]

    def print(self, text: str) -> None:
        """Print a line above the progress bar."""
        print(text, flush=True)
        self._bar.draw()

    def note(self, event: str, step: int, **more: Any) -> None:
        """Record an event."""
        row = {"event": event, "step": step, "time": time.time(), **more}
        self._write_events([encode(row) + "\n"])
        self.flush()  # events are rare

    def note_samples(
        self, step: int, dropped: Iterable[tuple[Sample, str]], *, with_filtered: bool = True
    ) -> None:
        """Record samples that are not trained on, and why; perhaps without those in the state
        `filtered` (by a filter, stale or surplus), which may be most samples of a run."""
        if not with_filtered:
            dropped = [(sample, why) for sample, why in dropped if sample.state != "filtered"]
        self._write_events(dropped_lines(step, dropped))

    def _write_events(self, lines: Iterable[str]) -> None:
        self._writer.append(self.folder / "events.jsonl", lines)

    def _drop_records_after(self, step: int) -> int:
        """Drop the records of steps that will be repeated; returns the last that was recorded."""
        last_step = -1
        for name in ("metrics.jsonl", "digests.jsonl", "events.jsonl"):
            path = self.folder / name
            path.touch()
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with path.open("rb") as lines, partial.open("wb") as kept:  # may be gigabytes
                for number, line in enumerate(lines, 1):
                    at = _step_of(line)
                    if at is None and line.endswith(b"\n"):
                        print(f"warning: line {number} of {path} is damaged, and is dropped")
                    # A line that was cut off when the last run ended is newer than its checkpoint.
                    # A resume at step 0 repeats everything, also the metrics before training.
                    if at is not None and 0 < step >= at:
                        kept.write(line)
                    last_step = max(last_step, -1 if at is None else at)
            partial.rename(path)
        return last_step

    def check_folder(self) -> None:
        """UserError if the folder was removed or moved: a restart would begin the run anew."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.folder / LOCK)):
                return
        raise UserError(
            f"run_dir={self.folder} was removed or moved while the run wrote to it; put it back "
            "and resume the run, or start it again"
        )

    def flush(self) -> None:
        """Returns when all records so far are on disk; they are written beside the steps."""
        self._writer.flush()

    def close(self) -> None:
        """No step follows; the recipe may still export the model."""
        try:
            self._writer.close()
        finally:
            self.phase.enter("end")
            self._bar.close()
            self._trackers.close()
            self._lock.close()

    def write_rollouts(
        self,
        step: int,
        groups: list[Group],
        advantages: Mapping[int, list[float]] = NOT_TRAINED,
        entropies: Mapping[int, list[float]] = NOT_TRAINED,
        mismatches: Mapping[int, list[float]] = NOT_TRAINED,
        *,
        is_recorded: bool = True,
    ) -> None:
        """Record all samples in full, or only their digest; what training says of them is by the
        sample's number."""
        lines = rollout_lines(groups, advantages, entropies, mismatches)
        lines = self._digests.passing("samples", lines)
        if is_recorded:
            self._trackers.log_samples(step, "samples", groups)
            self._write_samples(f"step_{step:05d}", lines)
        else:
            self._writer.read(lines)

    def write_answers(self, step: int, groups: list[Group], *, is_recorded: bool = True) -> None:
        """Record the text and the rewards of an evaluation's samples, if there are any, or only
        their digest."""
        lines = self._digests.passing("answers", answer_lines(groups))
        if groups and is_recorded:
            self._trackers.log_samples(step, "eval_samples", groups)
            self._write_samples(f"eval_{step:05d}", lines)
        elif groups:
            self._writer.read(lines)

    def write_digests(
        self, step: int, digests: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        """Record the digests of a step, after its samples, answers and metrics."""
        lines = self._digests.of_step(step, digests, metrics)
        self._writer.append(self.folder / FILE, lines)

    def _write_samples(self, name: str, lines: Iterable[str]) -> None:
        (self.folder / "rollouts").mkdir(exist_ok=True)
        self._writer.write(self.folder / "rollouts" / f"{name}.jsonl", lines)


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether the step is a multiple of `every`, or the last; 0 means the last only."""
    return step == num_steps or (every > 0 and step % every == 0)


def refuse_old_run(folder: str | Path) -> None:
    """Raise ValueError if a new run would overwrite the records of another."""
    if (Path(folder) / "metrics.jsonl").exists():
        config = Path(folder) / "config.json"
        is_evaluation = config.is_file() and written_by(config) == "evaluate"
        resume = f", or continue that run with --resume {folder}"
        raise UserError(
            f"run_dir={folder} holds the records of an earlier run; name another folder or remove "
            f"it{'' if is_evaluation else resume}"
        )


def lock_folder(folder: Path) -> TextIO:
    """Keep other programs from writing to a run folder until this file is closed.

    The system itself forgets the lock of a process that ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own_content(folder / LOCK)
    file = (folder / LOCK).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(
            f"run_dir={folder} is being written by another program ({file.read().strip()}); wait "
            "until it has ended, or name another folder"
        ) from None
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def default_folder(recipe: str) -> str:
    return time.strftime(f"runs/{recipe}-%Y%m%d-%H%M%S")


def _step_of(line: bytes) -> int | None:
    """The step of a record; None if it cannot be read."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"}\n") else None
    except (ValueError, TypeError, KeyError):  # ValueError: neither JSON nor text
        return None
    return step if isinstance(step, int) else None
