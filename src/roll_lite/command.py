"""The command line of a recipe: options, saved options, and errors on one screen.

if __name__ == "__main__":
    command.run(main, Config, __doc__, fixed=FIXED)
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from roll_lite.checks import refuse_changes
from roll_lite.cluster.errors import RoleError
from roll_lite.cluster.rendezvous import read_launch
from roll_lite.options import from_flat
from roll_lite.report.run import changes, command, read_options, to_json
from roll_lite.stopping import Ended, Stopped

T = TypeVar("T")
ALSO = """Also: --resume RUN_DIR continues a run with its own options; --config FILE starts with
the options of a config.json (options given beside them win); --debug prints tracebacks."""
RENAMED = {
    "task": "data",
    "validation_data": "eval_data",
    "validate_every": "eval_every",
    "validation_dialogues": "eval_rows",
    "validation_pairs": "eval_rows",
    "validation_rows": "eval_rows",
    "dialogues_per_step": "rows_per_step",
    "pairs_per_step": "rows_per_step",
}
"""Options by names of earlier versions, which are still understood."""
USER_ERROR = 2
"""Exit code where the user has to change something."""


def run(main: Callable[[T], Any], config: type[T], doc: str, fixed: Iterable[str] = ()) -> None:
    """Parse the options and call `main`. Errors of the user's are shown without traceback.

    `fixed` are options that a resumed run must not change.
    """
    args, is_debugging = _without(sys.argv[1:], "--debug")
    try:
        cfg = parse(config, doc, args, fixed)
        main(cfg)
    except Stopped as stopped:
        _print_resume(cfg)
        sys.exit(128 + stopped.signum)
    except KeyboardInterrupt:
        if is_debugging:
            raise
        sys.exit(128 + signal.SIGINT)
    except (Ended, RoleError, ValueError, OSError) as error:
        if is_debugging or not _is_explained(error):
            raise
        _exit_with(error)


def parse(config: type[T], doc: str, args: Sequence[str], fixed: Iterable[str] = ()) -> T:
    """The options on the command line, over those of --resume or --config."""
    args, file = _take(_renamed(args), "--config", required=True)
    rest, folder = _take(args, "--resume")
    folder = folder or _run_dir(rest) if rest != args else None
    given: dict[str, Any] = {}
    if file is not None:
        given = {n: v for n, v in _read(file).items() if n not in ("run_dir", "resume")}
    elif folder is not None and (Path(folder) / "config.json").exists():
        given = _read(Path(folder) / "config.json") | {"run_dir": folder, "resume": True}
        args = rest
    elif folder is not None and _run_dir(rest) is None:
        raise ValueError(f"--resume {folder}: there is no {folder}/config.json; name a run folder")
    cfg = _parse(config, doc, args, from_flat(config, **given) if given else None)
    if given:
        _show_changes(given, cfg, fixed if file is None else ())
    return cfg


def _parse(config: type[T], doc: str, args: Sequence[str], default: T | None) -> T:
    options = {} if default is None else {"default": default}
    description = f"{doc.split(chr(10) * 2)[0]}\n\n{ALSO}"

    def parse() -> T:
        flat = (tyro.conf.OmitArgPrefixes,)
        return tyro.cli(config, args=args, description=description, config=flat, **options)

    if _is_first_rank():
        return parse()
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        return parse()


def _read(path: str | Path) -> dict[str, Any]:
    """The options of a config.json, by today's names; without what was not set."""
    options = read_options(path)
    known = {name: value for name, value in options.items() if name not in RENAMED}
    old = {RENAMED[n]: v for n, v in options.items() if n in RENAMED and v is not None}
    return known | old


def _renamed(args: Sequence[str]) -> list[str]:
    """The arguments with today's names; prints a note for each old one."""
    found = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in RENAMED:
            new = "--" + RENAMED[name].replace("_", "-")
            if _is_first_rank():
                print(f"note: {flag} is called {new} now", file=sys.stderr)
            flag = new
        found.append(flag + equals + value)
    return found


def _show_changes(before: dict[str, Any], cfg: Any, fixed: Iterable[str]) -> None:
    now = json.loads(to_json(cfg))
    if fixed:
        folder = Path(before["run_dir"])
        refuse_changes(folder, before, {name: now[name] for name in fixed if name in before})
    if _is_first_rank():
        for name, (old, new) in changes(before, now).items():
            print(f"changed: {name} {old} -> {new}", flush=True)


def _print_resume(cfg: Any) -> None:
    if not _is_first_rank():
        return
    if any(Path(f"{cfg.run_dir}/checkpoints").glob("step-*")):
        print(f"stopped; continue with\n    {command('--resume', cfg.run_dir)}", flush=True)
    else:
        print("stopped before the first step was complete: there is nothing to resume")


def _is_explained(error: BaseException) -> bool:
    """Whether the message says what to change: our own checks raise such errors on purpose."""
    if isinstance(error, Ended):
        return True
    if isinstance(error, RoleError):  # its text holds the traceback of the rank that failed
        return isinstance(error.__cause__, ValueError | OSError)
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(last.filename).is_relative_to(Path(__file__).parent)
    return is_ours and (isinstance(error, OSError) or (last.line or "").startswith("raise"))


def _exit_with(error: BaseException) -> NoReturn:
    if _is_first_rank():
        print(f"\nerror: {error}\n\n--debug prints the traceback", file=sys.stderr, flush=True)
    sys.exit(1 if isinstance(error, Ended) else USER_ERROR)


def _is_first_rank() -> bool:
    return read_launch().rank == 0


def _without(args: list[str], flag: str) -> tuple[list[str], bool]:
    return [arg for arg in args if arg != flag], flag in args


def _take(args: list[str], flag: str, required: bool = False) -> tuple[list[str], str | None]:
    """The arguments without a flag and its value; the value may be missing unless `required`."""
    for place, arg in enumerate(args):
        if arg.startswith(f"{flag}="):
            return args[:place] + args[place + 1 :], arg.removeprefix(f"{flag}=")
        if arg == flag:
            value = args[place + 1 : place + 2]
            if value and not value[0].startswith("-"):
                return args[:place] + args[place + 2 :], value[0]
            if required:
                raise ValueError(f"{flag} needs a value")
            return args[:place] + args[place + 1 :], None
    return args, None


def _run_dir(args: list[str]) -> str | None:
    return _take([arg.replace("--run_dir", "--run-dir") for arg in args], "--run-dir")[1]
