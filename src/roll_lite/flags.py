"""The options of a recipe on the command line: flags, --help, and options that were saved."""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from roll_lite.checks import UserError, refuse_changes
from roll_lite.cluster.launch import is_first_rank
from roll_lite.options import flatten, from_flat
from roll_lite.report.config_file import (
    changes,
    packaged_recipe,
    read_options,
    recipe_name,
    to_json,
    written_by,
)
from roll_lite.train.checkpoint_folders import is_finished

T = TypeVar("T")
RESUME = """--resume RUN_DIR continues a run with its own options; --resume auto starts the run of
--run-dir, or continues it; """
AUTO = "auto"
ALSO = """Also: {resume}--config FILE starts with the options of a config.json (options on the
command line take precedence); --debug prints tracebacks."""


def parse(config: type[T], doc: str, args: Sequence[str], fixed: Iterable[str] = ()) -> T:
    """The options on the command line, over those of --resume or --config."""
    args, file = _take(list(args), "--config")
    args, folder = _take(args, "--resume")
    if file == "" or (file is not None and folder is not None):
        raise UserError("--config needs a file, and not --resume beside it: that has its own")
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
        raise UserError("--resume auto needs --run-dir: a restart continues the run in that folder")
    place = run_dir or folder
    if not place or (folder not in ("", AUTO) and Path(folder) != Path(place)):
        raise UserError(
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
        raise UserError(f"--resume {place}: there is no {path}; name a run folder")
    if folder == AUTO and is_finished(run_dir, cfg.steps):
        if is_first_rank():
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
        raise UserError(
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
        raise UserError(f"a saved option has a wrong type: {error}") from error
    now = to_json(cfg)
    if fixed:
        refuse_changes(Path(saved["run_dir"]), saved, {name: now[name] for name in fixed})
    if is_first_rank():
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

    if is_first_rank():
        return parse()
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        return parse()


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
