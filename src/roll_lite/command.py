"""The command line of a recipe: options, saved options, and errors on one screen.

if __name__ == "__main__":
    command.run(main, Config, __doc__)
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from roll_lite.checks import UserError
from roll_lite.cluster.errors import RoleError
from roll_lite.cluster.launch import is_first_rank, read_launch
from roll_lite.flags import parse
from roll_lite.planning.resolve import resolved
from roll_lite.processes import command_of, end_with_launcher, launcher_pid
from roll_lite.report.config_file import command_line
from roll_lite.stopping import Ended, Stopped

T = TypeVar("T")
USER_ERROR = 2
"""Exit code where the user has to change something."""
LINGER_SECONDS = 5.0
"""Time for the first rank to end torchrun, which restarts all ranks as soon as one has exited."""


def run(
    main: Callable[[T], Any], config: type[T], doc: str, plan: Callable[[T], int] | None = None
) -> None:
    """Parse and resolve the options and call `main`. Errors of the user's are shown without
    traceback.

    `config.FIXED` are options that a resumed run must not change. `plan` prints what the option
    of this name asks for, and returns the exit code.
    """
    end_with_launcher()  # first: torch, which takes seconds to import, is not loaded yet
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    is_debugging = "--debug" in sys.argv
    cfg = None
    try:
        cfg = parse(config, doc, args, config.FIXED)
        if plan and cfg.plan:
            sys.exit(plan(cfg))
        main(resolved(cfg))
    except SystemExit as end:
        if end.code == USER_ERROR:  # tyro cannot read an option
            _end_restarts()
        raise
    except Stopped as stopped:
        _print_resume(cfg)
        sys.exit(128 + stopped.signum)
    except KeyboardInterrupt:
        if is_debugging:
            raise
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not is_debugging and _is_explained(error):
            _exit_with(error)
        if cfg is not None and _has_checkpoint(cfg):
            error.add_note(f"To continue the run:\n    {command_line('--resume', cfg.run_dir)}")
        raise


def _print_resume(cfg: Any) -> None:
    if not is_first_rank():
        return
    if _has_checkpoint(cfg):
        print(f"stopped; continue with\n    {command_line('--resume', cfg.run_dir)}", flush=True)
    else:
        print("stopped before the first step was complete: there is nothing to resume")


def _has_checkpoint(cfg: Any) -> bool:
    return any(Path(f"{cfg.run_dir}/checkpoints").glob("step-*"))


def _is_explained(error: Exception) -> bool:
    """Whether the message says what to change."""
    cause = error.__cause__ if isinstance(error, RoleError) else error
    is_of_file = isinstance(cause, OSError) and cause.filename is not None
    return isinstance(cause, UserError | Ended) or is_of_file


def _exit_with(error: BaseException) -> NoReturn:
    if isinstance(error.__cause__, Ended):  # on all ranks at once: where does not matter
        error = error.__cause__
    if is_first_rank():
        print(f"\nerror: {error}\n\n--debug prints the traceback", file=sys.stderr, flush=True)
    # A full disk or a file server that is away may be better after a restart; a value is not.
    if isinstance(error, UserError) or isinstance(error.__cause__, UserError):
        _end_restarts()
    sys.exit(1 if isinstance(error, Ended) else USER_ERROR)


def _end_restarts() -> None:
    """Have torchrun end now, if it would only run into the same error again."""
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if num_restarts >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return
    if read_launch().local_rank > 0:
        time.sleep(LINGER_SECONDS)
        return
    launcher = launcher_pid()
    with suppress(OSError):  # it has ended
        launched_by = command_of(launcher)
        if b"torchrun" in launched_by or b"torch.distributed.run" in launched_by:
            os.kill(launcher, signal.SIGTERM)  # other processes may have adopted this one
