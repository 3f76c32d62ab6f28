"""A recorded run computed again from one of its checkpoints, in a folder of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from roll_lite.checks import UserError
from roll_lite.proof.recorded import RecordedRun, described, rows
from roll_lite.report.config_file import RECIPE
from roll_lite.report.contract import changes
from roll_lite.report.digests import FILE

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
    command = [*_program(run, checkpoint), *_options(run, checkpoint, folder), *options]
    threads = run.contract_of(checkpoint)["machine"]["threads"]
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": str(threads)}
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


def output_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.txt")


def _program(run: RecordedRun, checkpoint: int) -> list[str]:
    """Python or torchrun, and the recipe's file."""
    name = run.config[RECIPE]
    started = Path(run.config["starts"][-1]["file"])
    file = started if started.is_file() else PACKAGE / "recipes" / f"{name}.py"
    if not file.is_file():
        raise UserError(f"{started}, the recipe of {run.folder}, is missing; put it there again")
    num_ranks = run.contract_of(checkpoint)["machine"]["ranks"]
    if num_ranks == 1:
        return [sys.executable, str(file)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, str(file)]


def _options(run: RecordedRun, checkpoint: int, folder: Path) -> list[str]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint == 0:
        return ["--config", str(run.folder / "config.json"), "--run-dir", str(folder)]
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl", FILE):
        shutil.copyfile(run.folder / name, folder / name)
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
    seen = -1
    is_checked = False
    while seen < until:
        has_ended = process.poll() is not None
        newest = max((row["step"] for row in rows(folder / FILE)), default=-1)
        starts = (folder / "config.json").is_file() and (folder / "contracts").is_dir()
        if starts and newest >= 0:
            again = RecordedRun(folder)
            is_checked = is_checked or _check_contract(run, again, until)
            if newest > seen:
                seen = newest
                yield again
        if has_ended and seen < until:
            text = output_of(folder).read_text(errors="replace").splitlines()
            raise UserError(
                f"the run that computes step {until} again ended with exit code "
                f"{process.returncode}:\n" + "\n".join(text[-LINES_OF_OUTPUT:])
            )
        time.sleep(POLL_SECONDS)


def _check_contract(run: RecordedRun, again: RecordedRun, step: int) -> bool:
    name = again.config["starts"][-1]["contract"]
    if name != (wanted := run.steps[step]["contract"]):
        differ = changes(run.contract(wanted), again.contract(name))
        raise AnotherContract(
            f"step {step} of {run.folder} was computed under contract {wanted}, and here it would "
            f"be {name}: bits may differ, so nothing was compared. What differs (there | here):\n"
            + "\n".join(f"  {line}" for line in described(differ))
        )
    return True
