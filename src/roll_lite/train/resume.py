"""Checkpoints of train roles, from the controller: all ranks write, the controller seals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from roll_lite.checks import refuse_changes
from roll_lite.cluster.role import RoleHandle
from roll_lite.train.checkpoint import Checkpoints
from roll_lite.train.manifest import read_manifest


class Resumable(Protocol):
    """A part of the controller that is not the same from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """All that a run needs to go on: its trainers, and the controller's parts by name."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainers: Sequence[RoleHandle],
        parts: Mapping[str, Resumable],
        fixed: dict[str, Any],
    ):
        """`fixed` are the options that a run has to be resumed with."""
        self._checkpoints, self._trainers, self._parts = checkpoints, trainers, parts
        self._fixed = fixed

    def save(self, step: int, *, higher: float | None = None, lower: float | None = None) -> Path:
        """Write a checkpoint. The best is kept: where a measurement is `higher`, or `lower`."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        state = {"step": step, "fixed": self._fixed, "parts": parts}
        score = higher if lower is None else -lower
        return save_checkpoint(self._checkpoints, self._trainers, step, state, score)

    def resume(self) -> int:
        """Go on from the newest whole checkpoint: the step it is of, 0 if there is none."""
        state = load_checkpoint(self._checkpoints, self._trainers, self._fixed)
        if state is None:
            return 0
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        return state["step"]


def save_checkpoint(
    checkpoints: Checkpoints,
    trainers: Sequence[RoleHandle],
    step: int,
    state: dict[str, Any],
    score: float | None = None,
) -> Path:
    """Write model, optimizer and schedule of the roles, and the controller's own `state` (JSON).

    The first role, the policy's, says what the checkpoint is.
    """
    partial = checkpoints.begin(step)
    try:
        records, progress = [], {}
        for trainer in trainers:
            records += trainer.write_checkpoint.options(collect="all")(str(partial))
            progress |= trainer.describe_checkpoint()["progress"]
        about = trainers[0].describe_checkpoint()
    except BaseException:
        checkpoints.abandon(step)
        raise
    return checkpoints.finish(
        step,
        [record for record in records if record is not None],
        architecture=about["architecture"],
        layout=about["layout"],
        kind=about["kind"],
        state={"progress": progress, "controller": state},
        score=score,
    )


def load_checkpoint(
    checkpoints: Checkpoints, trainers: Sequence[RoleHandle], fixed: dict[str, Any]
) -> dict[str, Any] | None:
    """Go on from the newest whole checkpoint: its controller state, or None if there is none.

    `fixed` are the options that a run has to be resumed with; the state has them too.
    """

    def verify_all(folder: Path) -> list[str]:
        found = trainers[0].verify_checkpoint.options(collect="all")(str(folder))
        return [problem for problems in found for problem in problems]

    folder = checkpoints.newest_whole(verify_all)
    if folder is None:
        print(f"{checkpoints.folder} holds nothing to go on from: a new run begins", flush=True)
        return None
    state = read_manifest(folder).state["controller"]
    refuse_changes(checkpoints.folder, state["fixed"], fixed)
    for trainer in trainers:
        trainer.read_checkpoint(str(folder))
    print(f"going on from {folder}", flush=True)
    return state
