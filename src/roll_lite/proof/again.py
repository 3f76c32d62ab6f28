"""A recorded run computed again from one of its checkpoints, in a folder of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.proof.recorded import RecordedRun, described, rows
from roll_lite.report.config_file import RECIPE, STARTS
from roll_lite.report.contract import changes, contract_path
from roll_lite.report.digests import FILE
from roll_lite.report.records import encode

PACKAGE = Path(__file__).parents[1]
POLL_SECONDS = 0.1
LINES_OF_OUTPUT = 15


class AnotherContract(UserError):
    """What decides the bits here is not what it was: nothing can be compared."""


@contextmanager
def started_again(
    run: RecordedRun, checkpoint: int, folder: Path, options: Sequence[str] = ()
) -> Iterator[subprocess.Popen]:
    """The run's recipe, going on after a checkpoint of it, or from its start after step 0.

    The folder is made. The program is stopped at the end, if it still runs.
    """
    command, env = program_again(run, checkpoint, folder, options)
    with output_of(folder).open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()


def program_again(
    run: RecordedRun, checkpoint: int, folder: Path, options: Sequence[str] = (), **unflagged: Any
) -> tuple[list[str], dict[str, str]]:
    """Its command and environment; the folder is made. `unflagged` are options without a flag."""
    start = _options(run, checkpoint, folder, unflagged)
    command = [*_program(run, checkpoint), *start, *options]
    threads = run.contract_of(checkpoint)["machine"]["threads"]
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return command, os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": str(threads)}


def output_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.txt")


def _program(run: RecordedRun, checkpoint: int) -> list[str]:
    """Python or torchrun, and the recipe's file."""
    name = run.config[RECIPE]
    started = Path(run.config[STARTS][-1]["file"])
    file = started if started.is_file() else PACKAGE / "recipes" / f"{name}.py"
    if not file.is_file():
        raise UserError(f"{started}, the recipe of {run.folder}, is missing; put it there again")
    num_ranks = run.contract_of(checkpoint)["machine"]["ranks"]
    if num_ranks == 1:
        return [sys.executable, str(file)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, str(file)]


def _options(
    run: RecordedRun, checkpoint: int, folder: Path, unflagged: dict[str, Any]
) -> list[str]:
    folder.mkdir(parents=True)
    config = {name: value for name, value in run.config.items() if name != STARTS} | unflagged
    (folder / "config.json").write_text(json.dumps(config))
    if checkpoint == 0:
        return ["--config", str(folder / "config.json"), "--run-dir", str(folder)]
    for name in ("metrics.jsonl", FILE):
        kept = [row for row in rows(run.folder / name) if row["step"] <= checkpoint]
        (folder / name).write_text("".join(encode(row) + "\n" for row in kept))
    stored = run.checkpoints[checkpoint]
    copy = folder / "checkpoints" / stored.name
    try:
        shutil.copytree(stored, copy, copy_function=os.link)  # they are only read
    except OSError:  # another file system
        shutil.copytree(stored, copy, dirs_exist_ok=True)
    return ["--resume", str(folder)]


def follow(
    run: RecordedRun, process: subprocess.Popen, folder: Path, until: int
) -> Iterator[RecordedRun]:
    """The folder each time that it has another step, to `until`. Raises AnotherContract before the
    first step, and UserError if the program ends early."""
    seen = max((row["step"] for row in rows(folder / FILE)), default=-1)  # of the checkpoint
    is_checked = False
    while seen < until:
        has_ended = process.poll() is not None
        is_checked = is_checked or _check_contract(run, folder, until)
        newest = max((row["step"] for row in rows(folder / FILE)), default=-1)
        if is_checked and newest > seen:
            seen = newest
            yield RecordedRun(folder)
        if has_ended and seen < until:
            text = output_of(folder).read_text(errors="replace").splitlines()
            raise UserError(
                f"the run that computes step {until} again ended with exit code "
                f"{process.returncode}:\n" + "\n".join(text[-LINES_OF_OUTPUT:])
            )
        time.sleep(POLL_SECONDS)


def _check_contract(run: RecordedRun, folder: Path, step: int) -> bool:
    """False while the run in the folder has not begun."""
    path = folder / "config.json"
    starts = json.loads(path.read_text()).get(STARTS, []) if path.is_file() else []
    if not starts:
        return False
    name = starts[-1]["contract"]
    if name != (wanted := run.steps[step]["contract"]):
        here = json.loads(contract_path(folder, name).read_text())
        differ = changes(run.contract(wanted), here)
        raise AnotherContract(
            f"step {step} of {run.folder} was computed under contract {wanted}, and here it would "
            f"be {name}: bits may differ, so nothing was compared. What differs (there | here):\n"
            + "\n".join(f"  {line}" for line in described(differ))
        )
    return True
