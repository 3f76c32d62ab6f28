"""The options of a recipe on the command line, over options that were saved.

Files of --code are imported and names such as --loss are read first, for flags depend on them.
Values that were not given are left to the Config.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

from roll_lite.checks import UserError, refuse_changes
from roll_lite.cluster.launch import is_first_rank, max_restarts
from roll_lite.code_files import CodeOptions, load_code
from roll_lite.flags import (
    all_flags,
    explain_unknown,
    is_given,
    names_of_parts,
    read_flags,
    refuse_clashes,
    values_after,
)
from roll_lite.hub_options import with_hub
from roll_lite.options import (
    FunctionOptions,
    facts_of,
    flatten,
    from_flat,
    keywords,
    open_parts,
)
from roll_lite.report.config_file import (
    changes,
    read_end,
    read_options,
    recipe_name,
    to_json,
    written_by,
)
from roll_lite.train.checkpoint_folders import is_finished

T = TypeVar("T")
AUTO = "auto"


def parse(config: type[T], doc: str, args: Sequence[str], fixed: Iterable[str] = ()) -> T:
    """The options on the command line, over those of --resume or --config."""
    args, file = _take(list(args), "--config")
    args, folder = _take(args, "--resume")
    if file == "" or (file is not None and folder is not None):
        raise UserError("--config needs a file, and not --resume beside it: that has its own")
    if folder is not None:
        return _parse_resumed(config, doc, args, folder, fixed)
    if file is not None:
        cfg = _parse_over(config, doc, args, _saved(config, file))
    else:
        cfg = _parse(config, doc, args, {})
    if "resume" in flatten(cfg) and (number := max_restarts()):
        raise UserError(
            f"--max-restarts {number} of torchrun without --resume: a restart could not continue "
            f"the run; add --run-dir and --resume {AUTO}, or leave out --max-restarts"
        )
    return cfg


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
        if is_first_rank():
            name_changed_files(read_options(path), cfg)
    elif run_dir:
        cfg = _parse(config, doc, [*args, "--resume"], {})
    else:
        raise UserError(f"--resume {place}: there is no {path}; name a run folder")
    if folder == AUTO and (end := _describe_end(path, cfg.steps)):
        if is_first_rank():
            print(f"the run in {run_dir} has finished, {end}")
        sys.exit(0)
    return cfg


def _describe_end(config: Path, steps: int) -> str:
    """Where a run has finished, and what goes on; empty if it has not."""
    if is_finished(config.parent, steps):
        return f"at step {steps}; --steps N goes on"
    end = read_end(config) if config.exists() else None
    if end and end["has_passed"] and is_finished(config.parent, end["step"]):
        return f"at step {end['step']}, as every sample passed; --resume {config.parent} goes on"
    return ""


def _saved(config: type, path: str | Path) -> dict[str, Any]:
    """The options in a config.json that were given, not chosen: another run may take them over."""
    saved = read_options(path, with_chosen=False)
    recipe = written_by(path)
    here = recipe_name(config)
    if recipe not in (None, here):
        load_code(saved.get("code", ()))
        if unknown := sorted(saved.keys() - known_options(config, saved)):
            raise UserError(
                f"{path} was written by {recipe}.py, and {here}.py has no "
                f"{', '.join(unknown[:3])}; use the recipe that wrote it"
            )
    return {name: value for name, value in saved.items() if name not in ("run_dir", "resume")}


def name_changed_files(before: Mapping[str, Any], cfg: Any) -> None:
    """Say which files of --code changed since the run was started; its journal is dropped then."""
    own = next((part for _, part in open_parts(cfg) if isinstance(part, CodeOptions)), None)
    for path in own.changed_files(before) if own else ():
        print(f"changed: {path}", flush=True)


def _parse_over(
    config: type[T],
    doc: str,
    args: Sequence[str],
    saved: dict[str, Any],
    fixed: Iterable[str] = (),
) -> T:
    """The options on the command line over saved ones; shows what differs."""
    try:
        cfg = _parse(config, doc, args, saved)
    except (TypeError, AssertionError) as error:  # checks and tyro trust the types of defaults
        raise UserError(f"a saved option has a wrong type: {error}") from error
    now = to_json(cfg)
    if fixed:
        refuse_changes(Path(saved["run_dir"]), saved, {name: now[name] for name in fixed})
    if is_first_rank():
        for name, (old, new) in changes(saved, now).items():
            print(f"changed: {name} {old} -> {new}", flush=True)
        for name in sorted(saved.keys() - now.keys()):
            print(f"dropped: {name} {saved[name]}, which nothing reads now", flush=True)
    return cfg


def _parse(config: type[T], doc: str, args: Sequence[str], saved: dict[str, Any]) -> T:
    named: dict[str, Any] = {}
    if "code" in names_of_parts(config):
        given = values_after(args, "code") if is_given(args, "code") else saved.get("code", ())
        named["code"] = tuple(given)
        load_code(named["code"])
    named |= _named_functions(config, args)
    saved = _without_old_functions(config, args, saved)
    if saved.get("code"):  # whose functions may have had other options
        known = known_options(config, saved | named)
        saved = {name: value for name, value in saved.items() if name in known}
    base = _base(config, saved | named)
    flags = all_flags(base)
    refuse_clashes(base, flags)
    is_help = not {"-h", "--help"}.isdisjoint(args)
    is_short = is_help and "all" not in args and bool(config.COMMON)
    if is_help:
        args = ["--help"]
    else:
        explain_unknown(base, flags, args)
    found = read_flags(base, flags, args, doc, is_short=is_short)
    given = {name: value for name, value in found.items() if is_given(args, name)}
    options = saved | given
    return from_flat(config, **options | with_hub(flatten(_base(config, options))))


def _base(config: type[T], options: Mapping[str, Any]) -> T:
    """The Config that the flags' defaults come from; it is not checked."""
    return from_flat(config, check=False, **options)


def known_options(config: type, options: Mapping[str, Any]) -> Set[str]:
    """The names of all options, those of the functions included that these options name."""
    names = flatten(_base(config, {})).keys() & options.keys()
    return flatten(_base(config, {name: options[name] for name in names})).keys()


def _named_functions(config: type, args: Sequence[str]) -> dict[str, str]:
    """The functions that the command line names, as in --loss gspo."""
    chosen = {}
    for _, part in open_parts(config):
        given = values_after(args, part.CHOICE) if isinstance(part, FunctionOptions) else []
        if given:
            chosen[part.CHOICE] = given[0]
    return chosen


def _without_old_functions(
    config: type, args: Sequence[str], saved: dict[str, Any]
) -> dict[str, Any]:
    """Saved options without those of a function in whose place the command line names another, and
    without those for which that has defaults of its own."""
    named = _named_functions(config, args)
    for _, part in open_parts(config):
        if not isinstance(part, FunctionOptions):
            continue
        old = saved.get(part.CHOICE)
        new = named.get(part.CHOICE, old)
        if old in part.TABLE and new in part.TABLE and old != new:
            defaults = getattr(facts_of(part.TABLE[new], None), "advantage_defaults", {})
            gone = keywords(part.TABLE[old]).keys() | defaults.keys()
            saved = {name: value for name, value in saved.items() if name not in gone}
    return saved


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
