"""A recorded run computed again from one of its checkpoints, in a folder of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.files import read_json_object
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
    run: RecordedRun, checkpoint: int, folder: Path, left_out: Collection[str]
) -> Iterator[subprocess.Popen]:
    """The run's recipe, going on after a checkpoint of it, or from its start after step 0. Options
    that are left out have their defaults.

    The folder is made. The program is stopped at the end, if it still runs.
    """
    config = run.config_after(checkpoint)
    config = {name: value for name, value in config.items() if name not in left_out}
    command, env = program_again(run, checkpoint, folder, config)
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
    run: RecordedRun,
    checkpoint: int,
    folder: Path,
    config: Mapping[str, Any],
    options: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """Its command and environment; the folder is made. `options` come over those of `config`."""
    machine = run.contract_of(min(checkpoint + 1, max(run.steps)))["machine"]
    start = _options(run, checkpoint, folder, config)
    command = [*_program(run, machine["ranks"]), *start, *options]
    threads = machine["threads"]
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return command, os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": str(threads)}


def output_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.txt")


def _program(run: RecordedRun, num_ranks: int) -> list[str]:
    """Python or torchrun, and the recipe's file."""
    name = run.config[RECIPE]
    started = Path(run.config[STARTS][-1]["file"])
    file = started if started.is_file() else PACKAGE / "recipes" / f"{name}.py"
    if not file.is_file():
        raise UserError(f"{started}, the recipe of {run.folder}, is missing; put it there again")
    if num_ranks == 1:
        return [sys.executable, str(file)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, str(file)]


def _options(
    run: RecordedRun, checkpoint: int, folder: Path, config: Mapping[str, Any]
) -> list[str]:
    folder.mkdir(parents=True)
    content = {**config, STARTS: _starts(run, checkpoint)}
    (folder / "config.json").write_text(json.dumps(content))
    if checkpoint == 0:
        return ["--config", str(folder / "config.json"), "--run-dir", str(folder)]
    for name in ("metrics.jsonl", FILE):
        kept = [row for row in rows(run.folder / name) if row["step"] <= checkpoint]
        (folder / name).write_text("".join(encode(row) + "\n" for row in kept))
    shutil.copytree(contract_path(run.folder, "").parent, contract_path(folder, "").parent)
    stored = run.checkpoints[checkpoint]
    copy = folder / "checkpoints" / stored.name
    try:
        shutil.copytree(stored, copy, copy_function=os.link)  # they are only read
    except OSError:  # another file system
        shutil.copytree(stored, copy, dirs_exist_ok=True)
    return ["--resume", str(folder)]


def _starts(run: RecordedRun, checkpoint: int) -> list[dict[str, Any]]:
    """Those of the steps that are copied, of a run with an id of its own."""
    starts = [start for start in run.config[STARTS] if start["step"] < checkpoint]
    about = {"id": uuid.uuid4().hex, "copied": True}
    return [start | about for start in starts]


def own_starts(folder: Path) -> list[dict[str, Any]]:
    """Those that were not copied."""
    path = folder / "config.json"
    config = read_json_object(path) if path.is_file() else {}
    return [start for start in config.get(STARTS, []) if not start.get("copied")]


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
    starts = own_starts(folder)
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
