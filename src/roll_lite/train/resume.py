"""A train role's checkpoints, from the controller: all ranks write, the controller seals."""

from pathlib import Path
from typing import Any

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
    return read_manifest(folder).state["controller"]
