"""The command line of a recipe: options, saved options, and errors on one screen.

if __name__ == "__main__":
    command.run(main, Config, __doc__)
"""

import bdb
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from roll_lite import output
from roll_lite.checks import USER_ERROR, UserError
from roll_lite.cluster.errors import RoleError, exit_code_of, own_code_of
from roll_lite.cluster.launch import (
    end_torchrun,
    find_torchrun,
    is_first_rank,
    may_restart,
    print_last,
    read_launch,
)
from roll_lite.command_line import parse
from roll_lite.hub import missing_weights, snapshots
from roll_lite.options import flatten
from roll_lite.own_code import OwnCode
from roll_lite.planning.resolve import resolved
from roll_lite.processes import end_with_launcher, watch_lone_rank
from roll_lite.report.config_file import command_line
from roll_lite.stopping import Ended, Stopped

T = TypeVar("T")
USERS_FILES = (
    FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError
)  # fmt: skip
"""Errors of files that their user mends; another, such as a full disk, may not come again."""


def run(
    main: Callable[[T], Any], config: type[T], doc: str, plan: Callable[[T], int] | None = None
) -> None:
    """Parse and resolve the options and call `main`. Errors of the user's are shown without
    traceback, those of their own code with its lines first.

    `config.FIXED` are options that a resumed run must not change. `plan` prints what the option
    of this name asks for, and returns the exit code.
    """
    output.protect()
    end_with_launcher()  # early: torch, which takes seconds to import, is not loaded yet
    watch_lone_rank()
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    is_debugging = "--debug" in sys.argv
    cfg = None
    try:
        cfg = parse(config, doc, args, config.FIXED)
        if plan and cfg.plan:
            sys.exit(plan(cfg))
        cfg = resolved(cfg)
        _check_before_download(cfg)
        main(cfg)
    except SystemExit as end:
        if end.code == USER_ERROR:  # tyro cannot read an option, and has said why
            for text in getattr(end, "__notes__", ()):
                print_last(text)
            end_torchrun(USER_ERROR)
        raise
    except Stopped as stopped:
        _print_resume(cfg)
        sys.exit(128 + stopped.signum)
    except KeyboardInterrupt:
        if is_debugging:
            raise
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if bdb.BdbQuit in (type(error), type(error.__cause__)) and not _is_in_debugger():
            print("left the debugger: the run ends")
            _print_resume(cfg)
            sys.exit(1)
        own = own_code_of(error)
        resume = ""
        continues_itself = may_restart() and exit_code_of(error) != USER_ERROR
        if cfg is not None and _has_checkpoint(cfg) and not continues_itself:
            resume = f"To continue the run:\n    {command_line('--resume', cfg.run_dir)}"
        if not is_debugging and (text := _explain(error, own)):
            _exit_with(error, f"{text}\n{resume}" if own and resume else text)
        if resume:
            error.add_note(resume)
        raise


def _check_before_download(cfg: Any) -> None:
    """What recipes check once all ranks have met, earlier if weights are to be downloaded before:
    where the ranks are on one node, and end with the first."""
    launch = read_launch()
    is_wanted = any(missing_weights(folder) for folder in snapshots(flatten(cfg)))
    if is_wanted and launch.rank == 0 and launch.is_one_node:
        cfg.check_files()


def _print_resume(cfg: Any) -> None:
    if not is_first_rank():
        return
    if cfg is not None and _has_checkpoint(cfg):
        print(f"stopped; continue with\n    {command_line('--resume', cfg.run_dir)}", flush=True)
    else:
        print("stopped before the first step was complete: there is nothing to resume")


def _is_in_debugger() -> bool:
    """Whether this program runs in `python -m pdb`, which ends it itself."""
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_globals.get("__name__") != "bdb":
        frame = frame.f_back
    return frame is not None


def _has_checkpoint(cfg: Any) -> bool:
    return any(Path(f"{cfg.run_dir}/checkpoints").glob("step-*"))


def _explain(error: Exception, own: OwnCode | None) -> str:
    """What says enough without a traceback; empty where nothing does."""
    if isinstance(error, RoleError):
        text = str(own or _message(error.__cause__))
        # An end comes to all ranks at once: where does not matter.
        is_end = not text or isinstance(error.__cause__, Ended)
        return text if is_end else f"{text}\ncalled in {error.place}"
    is_named = isinstance(error, UserError) or (_is_of_file(error) and not (own and own.is_direct))
    return _message(error) if is_named or not own else str(own)


def _message(error: BaseException | None) -> str:
    """The message of an error that says what to change, or where the run ends; otherwise empty."""
    return str(error) if isinstance(error, UserError | Ended) or _is_of_file(error) else ""


def _is_of_file(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.filename is not None


def _exit_with(error: Exception, text: str) -> NoReturn:
    """Print what is wrong, on the first rank, and exit; torchrun ends if a restart cannot help."""
    # A full disk or a file server that is away may be better after a restart; a value is not.
    is_final = exit_code_of(error) == USER_ERROR
    is_restarted = may_restart() and not is_final
    under_torchrun = find_torchrun() is not None
    message = f"error: {text}\n\n--debug prints the traceback"
    if is_first_rank():
        print(f"\n{message}", file=sys.stderr, flush=True)
        if under_torchrun and not is_restarted:
            print(
                "torchrun prints a traceback of its own; the error is repeated below it",
                file=sys.stderr,
            )
            print_last(message)
    if is_final and under_torchrun:
        end_torchrun(USER_ERROR)  # returns on a rank that alone has the error
        if not is_first_rank():
            print(f"rank {read_launch().rank}: {message}", file=sys.stderr, flush=True)
            print_last(f"rank {read_launch().rank}: {message}")
    is_of_users_file = any(
        _is_of_file(each) and isinstance(each, USERS_FILES) for each in (error, error.__cause__)
    )
    sys.exit(USER_ERROR if is_final or is_of_users_file else 1)
