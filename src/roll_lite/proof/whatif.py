"""Go on with a run from one of its steps with other options, on the samples that it recorded.

roll-lite whatif RUN --from 40 --lr 2e-6 --loss cispo     # any options of roll-lite rlvr --help

A run of its own starts at the checkpoint of that step, or the nearest before; --from 0 is RUN's
start. Each step is trained on the samples that RUN recorded for it, until the new policy has moved
away from RUN's: whatif/kl shows how far it is, and --max-kl bounds it. From then on samples are
generated, for the same prompts. Options that change what is sampled, or how it is scored, begin
with that. Without other options the run is RUN again; `roll-lite report RUN FOLDER` compares them.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from roll_lite.checks import UserError
from roll_lite.files import read_json_object
from roll_lite.flags import is_given
from roll_lite.policy import PolicyConfig
from roll_lite.proof.again import own_starts, program_again
from roll_lite.proof.recorded import RecordedRun
from roll_lite.report.reader import step_of
from roll_lite.rollout.rollout_options import RolloutOptions


def main(arguments: list[str]) -> int:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(
        "roll-lite whatif", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="folder of a run of rlvr or agentic")
    help = "step to go on from; 0 is the start"
    parser.add_argument("--from", dest="step", type=int, required=True, metavar="STEP", help=help)
    parser.add_argument("--run-dir", type=Path, help="folder of the new run (RUN-whatif)")
    help = "no more recorded samples after a step with a higher KL, in nats a token (%(default)s)"
    parser.add_argument("--max-kl", type=float, default=RolloutOptions.max_kl, help=help)
    known, options = parser.parse_known_args(arguments)
    folder = known.run_dir or known.run.resolve().with_name(f"{known.run.resolve().name}-whatif")
    try:
        run = RecordedRun(known.run)
        start = start_of(run, known.step, options)
        if _never_began(folder):
            shutil.rmtree(folder)
        if folder.exists():
            raise UserError(f"--run-dir {folder} exists; name a folder that does not")
        recorded = {"recorded": str(known.run.resolve()), "max_kl": known.max_kl}
        command, env = program_again(
            run, start, folder, run.config_after(start) | recorded, options
        )
        if start:
            _copy_samples(run.folder / "rollouts", folder / "rollouts", start)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.execve(command[0], command, env)


def _copy_samples(recorded: Path, folder: Path, last: int) -> None:
    """Those of the steps that the new run has from its checkpoint."""
    folder.mkdir()
    for path in recorded.glob("*.jsonl"):
        if step_of(path.stem) <= last:
            shutil.copyfile(path, folder / path.name)


def _never_began(folder: Path) -> bool:
    """Whether it is of a what-if whose options were refused."""
    path = folder / "config.json"
    is_one = path.is_file() and "recorded" in read_json_object(path)
    return is_one and not own_starts(folder)


def start_of(run: RecordedRun, step: int, options: Sequence[str]) -> int:
    """The checkpoint to go on from; 0 is the run's start. Raises UserError for what cannot be."""
    if "samples_per_prompt" not in run.config or run.config.get("recorded"):
        raise UserError(
            f"{run.folder} is not of rlvr.py or agentic.py, or is a what-if itself; name a run "
            "that recorded its own samples"
        )
    if run.config["max_staleness"] or is_given(options, "max_staleness"):
        raise UserError(
            "max_staleness: samples of an asynchronous run are of several policies, and which a "
            "step has depends on time; whatif is for synchronous runs"
        )
    if not 0 <= step <= max(run.steps):
        raise UserError(f"--from {step}: the run has steps 0 to {max(run.steps)}")
    start = max(number for number in (0, *run.checkpoints) if number <= step)
    if start < step:
        print(f"step {step} has no checkpoint (--keep-every); going on from step {start}")
    for name in PolicyConfig.FIXED:
        if start and is_given(options, name):
            raise UserError(f"{name} cannot change from step {start} on; use --from 0")
    return start
