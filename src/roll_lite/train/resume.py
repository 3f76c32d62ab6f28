"""A train role's checkpoints, from the controller: all ranks write, the controller seals."""

from pathlib import Path
from typing import Any, Protocol

from roll_lite.cluster.role import RoleHandle
from roll_lite.train.checkpoint import Checkpoints
from roll_lite.train.manifest import read_manifest


def save_checkpoint(
    checkpoints: Checkpoints,
    trainer: RoleHandle,
    step: int,
    state: dict[str, Any],
    score: float | None = None,
) -> Path:
    """Write model, optimizer and schedule of the role, and the controller's own `state` (JSON)."""
    partial = checkpoints.begin(step)
    try:
        records = trainer.write_checkpoint.options(collect="all")(str(partial))
        about = trainer.describe_checkpoint()
    except BaseException:
        checkpoints.abandon(step)
        raise
    return checkpoints.finish(
        step,
        [record for record in records if record is not None],
        architecture=about["architecture"],
        layout=about["layout"],
        kind=about["kind"],
        state={"trainer": about["progress"], "controller": state},
        score=score,
    )


def load_checkpoint(checkpoints: Checkpoints, trainer: RoleHandle) -> dict[str, Any] | None:
    """Go on from the newest whole checkpoint: its controller state, or None if there is none."""

    def verify_all(folder: Path) -> list[str]:
        found = trainer.verify_checkpoint.options(collect="all")(str(folder))
        return [problem for problems in found for problem in problems]

    folder = checkpoints.newest_whole(verify_all)
    if folder is None:
        return None
    trainer.read_checkpoint(str(folder))
    print(f"going on from {folder}", flush=True)
    return read_manifest(folder).state["controller"]


class Rows(Protocol):
    position: int
    """How many were taken."""


def save_step(checkpoints: Checkpoints, trainer: RoleHandle, step: int, rows: Rows) -> Path:
    """A checkpoint of a run that needs no more than its rows' position besides the trainer."""
    return save_checkpoint(checkpoints, trainer, step, {"step": step, "position": rows.position})


def resume_step(checkpoints: Checkpoints, trainer: RoleHandle, rows: Rows) -> int:
    """Go on from the newest whole checkpoint: the step it was written after, 0 if there is none."""
    state = load_checkpoint(checkpoints, trainer) or {"step": 0, "position": 0}
    rows.position = state["position"]
    return state["step"]
