"""Checkpoints of a run: every rank writes a file, the controller publishes the folder atomically.

    controller (RunState)                             every rank of a trainer
    partial = checkpoints.begin(step)            ->   record = write_shard(partial, rank, pieces)
    checkpoints.finish(step, records, ...)            (`abandon` instead, if a rank failed)
    folder = checkpoints.newest_whole(verify_all) ->  problems = verify(folder, part, num_parts)
                                                      read_pieces(folder, wanted)

`finish` writes manifest.json and renames `.step-00000010.partial` to `step-00000010`, so a folder
of that name is always complete.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from roll_lite.checks import UserError, at_least, refuse_changes
from roll_lite.report.run import Run
from roll_lite.stopping import StopRequest
from roll_lite.train.checkpoint_folders import Checkpoints, read_manifest

if TYPE_CHECKING:
    from roll_lite.cluster.role import RoleHandle


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints."""

    checkpoint_minutes: float = 10.0
    """Write a checkpoint when this much time has passed since the last; 0 turns that off. The last
    step writes one in any case, and so do Ctrl-C and SIGTERM."""
    checkpoint_every: int = 0
    """Write a checkpoint every N steps too."""
    export_every: int = 0
    """Write the model every N steps too, as a Hugging Face folder: exports/step-00000100 in
    run_dir. These folders are kept."""
    checkpoint_beside: bool = False
    """Write checkpoints while training goes on, from a copy in host memory: 12 bytes a parameter
    over all ranks. They are complete one step later; the last is not written so."""
    keep_last: int = 2
    """Checkpoints to keep, beside the one that evaluates best."""
    keep_every: int = 0
    """Write a checkpoint every N steps too, and keep these, for `roll-lite verify` and others to
    begin at. A checkpoint has 12 bytes a parameter."""
    resume: bool = False
    """Resume the run in run_dir, if it has a checkpoint; --resume RUN_DIR and --resume auto too."""

    def __post_init__(self):
        at_least(0, self, "checkpoint_minutes", "checkpoint_every", "export_every", "keep_every")
        at_least(1, self, "keep_last")


def refuse_links_out(run_dir: str | Path) -> None:
    """Raise ValueError for a link in a run folder that leads out of it: a run that goes on there
    would write to other folders. The run folder itself may be a link."""
    for folder, folders, files in os.walk(run_dir):
        if folder == str(run_dir):  # wandb links from its own folder to its cache
            folders[:] = [name for name in folders if name != "wandb"]
        for path in (Path(folder) / name for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(Path(run_dir).resolve()):
                raise UserError(
                    f"{path} is a link to {path.resolve()}, out of run_dir={run_dir}; replace it "
                    "by what it leads to, or resume with the run_dir that it leads to"
                )


@runtime_checkable
class Resumable(Protocol):
    """A part of the controller with state that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """Saves and resumes a run: its trainers, and the parts of the controller that have state."""

    def __init__(
        self,
        run_dir: str | Path,
        options: CheckpointOptions,
        trainers: Sequence[RoleHandle],
        parts: Mapping[str, Resumable],
        fixed: dict[str, Any],
        on_saved: Callable[[int], None] = lambda step: None,
    ):
        """Resumes, if the options say so. `fixed` are options that must not change then.

        `on_saved` is called with the step of every checkpoint that was written.
        """
        if options.resume:
            refuse_links_out(run_dir)
        kept = {"keep_last": options.keep_last, "keep_every": options.keep_every}
        self._checkpoints = Checkpoints(f"{run_dir}/checkpoints", **kept)
        self._options = options
        self._trainers = trainers
        self._parts = parts
        self._fixed = fixed
        self._on_saved = on_saved
        self.resumed_at = self._resume() if options.resume else None
        """The step of the checkpoint; 0 if there was none to resume from."""
        self.step = self._saved_step = self.resumed_at or 0
        """The last complete step: its weights are the trainers' now."""
        self._saved_at = time.monotonic()
        self._score: tuple[int, float | None] = (0, None)
        """The last step that ended, and its measurement."""
        self._pending: tuple[int, float, Callable[[], Path]] | None = None
        """A checkpoint that is being written: its step, the seconds that training waited for it so
        far, and what publishes it."""

    def keep_last_step(self, run: Run) -> None:
        """Write a checkpoint of the last complete step, if it has none: the run ends early."""
        self._publish(run)
        if self.step > self._saved_step:
            self._save(run)

    def save_again(self, run: Run, score: float | None) -> None:
        """Replace the checkpoint of the last complete step, which was measured after it."""
        self._score = self.step, score
        self._save(run)

    def end_step(
        self,
        run: Run,
        stop: StopRequest,
        step: int,
        score: float | None,
        *,
        is_last: bool = False,
    ) -> None:
        """Write a checkpoint if one is due; raises Stopped if the run is to stop.

        The checkpoint with the highest `score` is kept. `is_last` is for a run that ends before the
        last of its steps.
        """
        self.step = step
        self._score = step, score
        self._publish(run)
        is_last = is_last or stop.error or run.is_due(step, 0)
        if is_last or self._is_due(run):
            self._save(run, beside=self._options.checkpoint_beside and not is_last)
        stop.check()

    def _is_due(self, run: Run) -> bool:
        minutes = self._options.checkpoint_minutes
        is_time = minutes > 0 and time.monotonic() - self._saved_at > 60 * minutes
        every = (self._options.checkpoint_every, self._options.keep_every)
        return is_time or any(run.is_due(self.step, number) for number in every)

    def _save(self, run: Run, *, beside: bool = False) -> None:
        run.flush()  # a resumed run does not write them again
        start = time.monotonic()
        run.phase.enter("checkpoint", self.step)
        measured, score = self._score
        score = score if measured == self.step else None
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        state = {"step": self.step, "fixed": self._fixed, "parts": parts}
        finish = start_checkpoint(
            self._checkpoints, self._trainers, self.step, state, score, beside=beside
        )
        self._saved_step = self.step
        self._saved_at = time.monotonic()
        self._pending = self.step, self._saved_at - start, finish
        if not beside:
            self._publish(run)

    def _publish(self, run: Run) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self._pending is None:
            return
        (step, waited, finish), self._pending = self._pending, None
        start = time.monotonic()
        path = finish()
        seconds = waited + time.monotonic() - start
        num_bytes = sum(file.size for file in read_manifest(path).files)
        run.note("checkpoint", step=step, seconds=seconds, bytes=num_bytes)
        run.print(f"wrote {path}: {num_bytes / 1e9:.3g} GB in {seconds:.1f} s")
        self._on_saved(step)

    def _resume(self) -> int:
        """Load the newest complete checkpoint: its step, or 0 if there is none."""
        state = load_checkpoint(self._checkpoints, self._trainers, self._fixed)
        if state is None:
            return 0
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        return state["step"]


def start_checkpoint(
    checkpoints: Checkpoints,
    trainers: Sequence[RoleHandle],
    step: int,
    state: dict[str, Any],
    score: float | None = None,
    *,
    beside: bool = False,
) -> Callable[[], Path]:
    """Write the trainers' weights and optimizers, and the controller's `state` (plain JSON).

    This happens at once, or `beside` what the trainers do next. The function that is returned waits
    until all is written, and publishes it. The first trainer is the policy; its architecture,
    layout and kind are the checkpoint's.
    """
    partial = str(checkpoints.begin(step))
    with _abandoned_on_error(checkpoints, step):
        written = _call_all(trainers, "start_checkpoint" if beside else "write_checkpoint", partial)
        about = [trainer.describe_checkpoint() for trainer in trainers]
    progress = {part: done for one in about for part, done in one["progress"].items()}
    # A copy: what it was made of may change until the checkpoint is published.
    state = json.loads(json.dumps({"progress": progress, "controller": state}))

    def finish() -> Path:
        with _abandoned_on_error(checkpoints, step):
            records = _call_all(trainers, "finish_checkpoint") if beside else written
        return checkpoints.finish(
            step,
            [record for record in records if record is not None],
            architecture=about[0]["architecture"],
            layout=about[0]["layout"],
            kind=about[0]["kind"],
            state=state,
            score=score,
        )

    return finish


@contextmanager
def _abandoned_on_error(checkpoints: Checkpoints, step: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        checkpoints.abandon(step)
        raise


def _call_all(trainers: Sequence[RoleHandle], method: str, *args: Any) -> list[Any]:
    """The results of all ranks of all trainers."""
    calls = [getattr(trainer, method).options(collect="all") for trainer in trainers]
    return [result for call in calls for result in call(*args)]


def load_checkpoint(
    checkpoints: Checkpoints, trainers: Sequence[RoleHandle], fixed: dict[str, Any]
) -> dict[str, Any] | None:
    """Load the newest complete checkpoint: the controller's state, or None if there is none."""

    def verify_all(folder: Path) -> list[str]:
        found = trainers[0].verify_checkpoint.options(collect="all")(str(folder))
        return [problem for problems in found for problem in problems]

    folder = checkpoints.newest_whole(verify_all)
    if folder is None:
        print(
            f"{checkpoints.folder} has no checkpoint to resume from: starting a new run", flush=True
        )
        return None
    state = read_manifest(folder).state["controller"]
    refuse_changes(checkpoints.folder, state["fixed"], fixed)
    for trainer in trainers:
        trainer.read_checkpoint(str(folder))
    print(f"resuming from {folder}", flush=True)
    return state
