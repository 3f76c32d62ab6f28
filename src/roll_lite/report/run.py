"""The folder of a run.

config.json      the options, and their history: every start with its command and changes
metrics.jsonl    one line per step
events.jsonl     one line per dropped sample, with prompt, reply, state changes and the reason; one
                 line per checkpoint and resume
rollouts/        step_*.jsonl: one line per sample that was trained on. token_ids holds, turn by
                 turn, the tokens read and then those sampled; logprobs and advantages belong to
                 the sampled (one advantage if all are equal, none if it was not trained on).
                 eval_*.jsonl: one line per sample of an evaluation, as text
phase            what the run is doing now: process, step, phase, states of samples
tensorboard/     the metrics, if the package tensorboard is installed
"""

import fcntl
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from roll_lite.progress import PhaseFile, ProgressBar, terminal_width
from roll_lite.report.config_file import to_json, write_config
from roll_lite.report.hints import Hints
from roll_lite.report.table import StepTable
from roll_lite.report.trackers import OpenTracker, TrackedRun, Trackers
from roll_lite.types import Group, Sample

LOCK = ".lock"
NOT_TRAINED: Mapping[int, list[float]] = {}
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
        resumed_at: int | None = None,
        trackers: Sequence[OpenTracker] = (),
        ranks: Mapping[str, Sequence[Sequence[int]]] = NO_RANKS,
    ):
        """`shown` maps the metrics of the console to their titles, the most important first.

        A run that is `resumed_at` a step keeps the records up to that step. `trackers` get the
        metrics too. `ranks` are those of each replica of each role.
        """
        self.folder, self._shown = Path(folder), shown
        self._lock, last_step = lock_folder(self.folder), -1
        if resumed_at is not None:
            last_step = self._drop_records_after(resumed_at)
        else:
            refuse_old_run(self.folder)
        place = f"{folder} is at step {resumed_at} of {num_steps}"
        if resumed_at and resumed_at > num_steps:
            raise ValueError(f"{place}; resume with more steps")
        print(f"run folder: {self.folder}", flush=True)
        if resumed_at and resumed_at == num_steps:
            print(f"{place}: nothing is left to train; --steps N goes on", flush=True)
        run_id = write_config(self.folder, config, resumed_at, shown=shown, ranks=ranks)
        self.phase = PhaseFile(self.folder / "phase", step=resumed_at or 0)
        self._hints = Hints()
        self._bar = ProgressBar(num_steps, "steps", done=resumed_at or 0)
        self._table = StepTable(shown)
        self._num_steps, self._width = num_steps, len(str(num_steps))
        tracked = TrackedRun(run_id, self.folder, to_json(config), resumed_at)
        self._trackers = Trackers(trackers, tracked, last_step)
        if resumed_at is not None:
            self.note("resumed", step=resumed_at)

    def is_due(self, step: int, every: int) -> bool:
        """Whether the step is a multiple of `every`, or the last; 0 means the last only."""
        return step == self._num_steps or (every > 0 and step % every == 0)

    def lacks(self, metric: str, step: int, every: int) -> bool:
        """Whether a metric that is due at the step has not been recorded."""
        if step and not self.is_due(step, every):
            return False
        path = self.folder / "metrics.jsonl"
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return not any(row["step"] == step and metric in row for row in rows)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step, and print those of the console line."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(_line({"step": step, "time": time.time(), **metrics}))
        self._trackers.log(step, metrics)
        self._bar.reach(step)
        if any(name in metrics for name in self._shown):
            self.print("\n".join(self._step_lines(step, metrics)))
        for hint in self._hints.read(metrics):
            self.print(f"hint: {hint}")
            self.note("hint", step=step, text=hint)

    def _step_lines(self, step: int, metrics: dict[str, float]) -> list[str]:
        """The row of a table; where the output is not a terminal, a line of names and values."""
        if sys.stdout.isatty():
            return self._table.lines(step, metrics, terminal_width())
        parts = [
            f"{label} {metrics[name]:.4g}" for name, label in self._shown.items() if name in metrics
        ]
        return [f"step {step:>{self._width}}  " + "  ".join(parts)]

    def print(self, text: str) -> None:
        """Print a line above the progress bar."""
        print(text, flush=True)
        self._bar.draw()

    def note(self, event: str, step: int, **more: Any) -> None:
        """Record an event."""
        self._write_events([{"event": event, "step": step, "time": time.time(), **more}])

    def note_samples(self, step: int, dropped: Iterable[tuple[Sample, str]]) -> None:
        """Record samples that are not trained on, and why."""
        self._write_events(
            {"event": "sample", "step": step, "why": why, **_history(sample)}
            for sample, why in dropped
        )

    def _write_events(self, rows: Iterable[dict[str, Any]]) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.writelines(map(_line, rows))

    def _drop_records_after(self, step: int) -> int:
        """Drop the records of steps that will be repeated; returns the last that was recorded."""
        last_step = -1
        for name in ("metrics.jsonl", "events.jsonl"):
            path = self.folder / name
            path.touch()
            partial = path.with_suffix(".partial")
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

    def close(self) -> None:
        """No step follows; the recipe may still export the model."""
        self.phase.enter("end")
        self._bar.close()
        self._trackers.close()
        self._lock.close()

    def write_rollouts(
        self, step: int, groups: list[Group], advantages: Mapping[int, list[float]] = NOT_TRAINED
    ) -> None:
        """Record all samples of the groups in full; `advantages` are by the sample's number."""
        samples = enumerate(sample for group in groups for sample in group.samples)
        rows = ({**_text(s), **_tokens(s), **_learnt(advantages.get(n))} for n, s in samples)
        self._write_samples(f"step_{step:05d}", rows)

    def write_answers(self, step: int, groups: list[Group]) -> None:
        """Record the text and the rewards of an evaluation's samples, if there are any."""
        if groups:
            samples = (sample for group in groups for sample in group.samples)
            self._write_samples(f"eval_{step:05d}", map(_text, samples))

    def _write_samples(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        (self.folder / "rollouts").mkdir(exist_ok=True)
        with (self.folder / "rollouts" / f"{name}.jsonl").open("w") as file:
            file.writelines(map(_line, rows))


def refuse_old_run(folder: str | Path) -> None:
    """Raise ValueError if a new run would overwrite the records of another."""
    if (Path(folder) / "metrics.jsonl").exists():
        raise ValueError(
            f"run_dir={folder} holds the records of an earlier run; name another folder, remove "
            "it or, if the recipe has --resume, continue that run"
        )


def lock_folder(folder: Path) -> TextIO:
    """Keep other programs from writing to a run folder until this file is closed.

    The system itself forgets the lock of a process that ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"run_dir={folder} is being written by another program ({file.read().strip()}); wait "
            "until it has ended, or name another folder"
        ) from None
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def default_folder(recipe: str) -> str:
    return time.strftime(f"runs/{recipe}-%Y%m%d-%H%M%S")


def _line(row: dict[str, Any]) -> str:
    """JSON has neither NaN nor Infinity: they become null."""
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(json.loads(json.dumps(row)))) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: bytes) -> int | None:
    """The step of a record; None if it cannot be read."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"}\n") else None
    except (ValueError, TypeError, KeyError):  # ValueError: neither JSON nor text
        return None
    return step if isinstance(step, int) else None


def _history(sample: Sample) -> dict[str, Any]:
    """What a dropped sample was, and its state changes, each with its time and policy version."""
    return {
        "time": sample.events[-1].time,
        "prompt_id": sample.prompt.id,
        "index": sample.index,
        "state": sample.state,
        "domain": sample.prompt.domain,
        "messages": sample.prompt.messages,
        "reply": sample.reply,
        **_transcript(sample),
        "reward": sample.score.value if sample.score else None,
        "tokens": sample.num_sampled,
        "replicas": [turn.replica for turn in sample.turns],
        "events": sample.events,
        "error": sample.error,
    }


def _text(sample: Sample) -> dict[str, Any]:
    """A sample as text, with its score: all that scoring it again needs."""
    return {
        "prompt_id": sample.prompt.id,
        "domain": sample.prompt.domain,
        "index": sample.index,
        "state": sample.state,
        "messages": sample.prompt.messages,
        "reply": sample.reply,
        **_transcript(sample),
        "ground_truth": sample.prompt.ground_truth,
        "tests": sample.prompt.tests,
        "extra": sample.prompt.extra,
        "end": sample.end,
        "reward": sample.score.value if sample.score else None,
        "parts": sample.score.parts if sample.score else {},
        "error": sample.error,
    }


def _transcript(sample: Sample) -> dict[str, Any]:
    """The whole conversation, where it has several turns."""
    return {"transcript": sample.transcript} if len(sample.turns) > 1 else {}


def _tokens(sample: Sample) -> dict[str, Any]:
    """Ids and logprobs of all sequences end to end, in the order of `sequences`."""
    logprobs = [
        logprob
        for sequence in sample.sequences
        for number in sequence.turns
        for logprob in sample.turns[number].logprobs
    ]
    return {
        "token_ids": sample.token_ids,
        "logprobs": np.round(logprobs, 5).tolist(),
        "turns": [_turn(sample, number) for number in range(len(sample.turns))],
        **({"sequences": [s.turns for s in sample.sequences]} if len(sample.sequences) > 1 else {}),
        "events": sample.events,
    }


def _learnt(advantages: list[float] | None) -> dict[str, Any]:
    """Most estimators give all tokens of a sample the same advantage."""
    if not advantages:
        return {}
    is_one = len(set(advantages)) == 1
    return {"advantages": np.round(advantages[0] if is_one else advantages, 5).tolist()}


def _turn(sample: Sample, number: int) -> dict[str, Any]:
    turn = sample.turns[number]
    sequence = next(s for s in sample.sequences if number in s.turns)
    place = sequence.turns.index(number)
    before = sample.turns[sequence.turns[place - 1]] if place else None
    known = len(before.prompt_ids) + len(before.token_ids) if before else 0
    said = {"reward": turn.result.reward, "state": turn.state, **turn.result.measurements}
    return {
        "read": len(turn.prompt_ids) - known,
        "sampled": len(turn.token_ids),
        "finish": turn.finish_reason,
        "versions": turn.versions,
        "replica": turn.replica,
        **(said if len(sample.turns) > 1 else {}),
    }
