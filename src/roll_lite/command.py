"""The command line of a recipe: options, saved options, and errors on one screen.

if __name__ == "__main__":
    command.run(main, Config, __doc__)
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from roll_lite.checks import refuse_changes
from roll_lite.cluster.errors import RoleError
from roll_lite.cluster.launch import read_launch
from roll_lite.options import flatten, from_flat
from roll_lite.processes import command_of, end_with_launcher, launcher_pid
from roll_lite.report.config_file import (
    changes,
    command_line,
    packaged_recipe,
    read_options,
    recipe_name,
    to_json,
    written_by,
)
from roll_lite.stopping import Ended, Stopped
from roll_lite.train.checkpoint_folders import is_finished

T = TypeVar("T")
RESUME = """--resume RUN_DIR continues a run with its own options; --resume auto starts the run of
--run-dir, or continues it; """
AUTO = "auto"
ALSO = """Also: {resume}--config FILE starts with the options of a config.json (options on the
command line take precedence); --debug prints tracebacks."""
USER_ERROR = 2
"""Exit code where the user has to change something."""
LINGER_SECONDS = 5.0
"""Time for the first rank to end torchrun, which restarts all ranks as soon as one has exited."""


def run(main: Callable[[T], Any], config: type[T], doc: str) -> None:
    """Parse the options and call `main`. Errors of the user's are shown without traceback.

    `config.FIXED` are options that a resumed run must not change.
    """
    end_with_launcher()  # first: torch, which takes seconds to import, is not loaded yet
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    is_debugging = "--debug" in sys.argv
    cfg = None
    try:
        cfg = parse(config, doc, args, config.FIXED)
        main(cfg)
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


def parse(config: type[T], doc: str, args: Sequence[str], fixed: Iterable[str] = ()) -> T:
    """The options on the command line, over those of --resume or --config."""
    args, file = _take(list(args), "--config")
    args, folder = _take(args, "--resume")
    if file == "" or (file is not None and folder is not None):
        raise ValueError("--config needs a file, and not --resume beside it: that has its own")
    if file is not None:
        return _parse_over(config, doc, args, _saved(config, file, with_chosen=False))
    if folder is not None:
        return _parse_resumed(config, doc, args, folder, fixed)
    return _parse(config, doc, args)


def _parse_resumed(
    config: type[T], doc: str, args: Sequence[str], folder: str, fixed: Iterable[str]
) -> T:
    """The options of a run that is resumed; with --run-dir the same command may also start it.

    Exits if a run resumed with `auto` has finished: torchrun restarts the program also for a rank
    that dies when all work is done.
    """
    run_dir = _take([arg.replace("--run_dir", "--run-dir") for arg in args], "--run-dir")[1]
    if folder == AUTO and not run_dir:
        raise ValueError(
            "--resume auto needs --run-dir: a restart continues the run in that folder"
        )
    place = run_dir or folder
    if not place or (folder not in ("", AUTO) and Path(folder) != Path(place)):
        raise ValueError(
            f"--resume {folder} with --run-dir {run_dir}: name one run folder, as in "
            "--resume runs/mine"
        )
    path = Path(place) / "config.json"
    if path.exists():
        saved = _saved(config, path) | {"run_dir": place, "resume": True}
        cfg = _parse_over(config, doc, args, saved, fixed)
    elif run_dir:
        cfg = _parse(config, doc, [*args, "--resume"])
    else:
        raise ValueError(f"--resume {place}: there is no {path}; name a run folder")
    if folder == AUTO and is_finished(run_dir, cfg.steps):
        if _is_first_rank():
            print(f"the run in {run_dir} has finished, at step {cfg.steps}; --steps N goes on")
        sys.exit(0)
    return cfg


def _saved(config: type, path: str | Path, **options: bool) -> dict[str, Any]:
    """The options in a config.json that another run may take over."""
    saved = read_options(path, **options)
    recipe = written_by(path)
    here = recipe_name(config)
    known = {
        name
        for field in fields(config)
        for name in (flatten(field.default) if is_dataclass(field.default) else [field.name])
    }
    if recipe not in (None, here) and (unknown := sorted(saved.keys() - known)):
        raise ValueError(
            f"{path} was written by {recipe}.py, and {here}.py has no {', '.join(unknown[:3])}; "
            "use the recipe that wrote it"
        )
    return {name: value for name, value in saved.items() if name not in ("run_dir", "resume")}


def _parse_over(
    config: type[T],
    doc: str,
    args: Sequence[str],
    saved: dict[str, Any],
    fixed: Iterable[str] = (),
) -> T:
    """The options on the command line over saved ones; shows what differs."""
    default = from_flat(config, check=False, **saved)
    try:
        cfg = _parse(config, doc, args, default)
    except (TypeError, AssertionError) as error:  # checks and tyro trust the types of defaults
        raise ValueError(f"a saved option has a wrong type: {error}") from error
    now = to_json(cfg)
    if fixed:
        refuse_changes(Path(saved["run_dir"]), saved, {name: now[name] for name in fixed})
    if _is_first_rank():
        for name, (old, new) in changes(saved, now).items():
            print(f"changed: {name} {old} -> {new}", flush=True)
    return cfg


def _parse(config: type[T], doc: str, args: Sequence[str], default: T | None = None) -> T:
    options = {} if default is None else {"default": default}
    resume = RESUME if any(field.name == "checkpoints" for field in fields(config)) else ""
    options["description"] = f"{doc.split(chr(10) * 2)[0]}\n\n{ALSO.format(resume=resume)}"
    options["prog"] = f"roll-lite {name}" if (name := packaged_recipe()) else None

    def parse() -> T:
        return tyro.cli(config, args=args, config=(tyro.conf.OmitArgPrefixes,), **options)

    if _is_first_rank():
        return parse()
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        return parse()


def _print_resume(cfg: Any) -> None:
    if not _is_first_rank():
        return
    if _has_checkpoint(cfg):
        print(f"stopped; continue with\n    {command_line('--resume', cfg.run_dir)}", flush=True)
    else:
        print("stopped before the first step was complete: there is nothing to resume")


def _has_checkpoint(cfg: Any) -> bool:
    return any(Path(f"{cfg.run_dir}/checkpoints").glob("step-*"))


def _is_explained(error: Exception) -> bool:
    """Whether the message says what to change: our own checks raise such errors on purpose."""
    if isinstance(error, Ended):
        return True
    if not isinstance(error, RoleError | ValueError | OSError):
        return False
    if isinstance(error, RoleError):  # its text holds the traceback of the rank that failed
        return isinstance(error.__cause__, ValueError | OSError | Ended)
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(last.filename).is_relative_to(Path(__file__).parent)
    return is_ours and (isinstance(error, OSError) or (last.line or "").startswith("raise"))


def _exit_with(error: BaseException) -> NoReturn:
    if isinstance(error.__cause__, Ended):  # on all ranks at once: where does not matter
        error = error.__cause__
    if _is_first_rank():
        print(f"\nerror: {error}\n\n--debug prints the traceback", file=sys.stderr, flush=True)
    # A full disk or a file server that is away may be better after a restart; a value is not.
    if isinstance(error, ValueError) or isinstance(error.__cause__, ValueError):
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


def _is_first_rank() -> bool:
    return read_launch().rank == 0


def _take(args: list[str], flag: str) -> tuple[list[str], str | None]:
    """The arguments without a flag and its value: empty if it has none, None without the flag."""
    for place, arg in enumerate(args):
        if arg.startswith(f"{flag}="):
            return args[:place] + args[place + 1 :], arg.removeprefix(f"{flag}=")
        if arg == flag:
            value = args[place + 1 : place + 2]
            if value and not value[0].startswith("-"):
                return args[:place] + args[place + 2 :], value[0]
            return args[:place] + args[place + 1 :], ""
    return args, None
