"""The options of a recipe on the command line: flags, --help, and options that were saved.

Flags are made from the fields of the Config and its parts and, where a part names a function, from
the signature of that function; so files of --code are imported and names such as --loss are read
first. Values that were not given are left to the Config.
"""

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import tyro

from roll_lite.checks import UserError, changed, refuse_changes
from roll_lite.cluster.launch import is_first_rank
from roll_lite.code_files import CodeOptions, load_code
from roll_lite.options import (
    FunctionOptions,
    OpenOptions,
    declared,
    flatten,
    from_flat,
    has_flag,
    keywords,
    name_of,
    open_parts,
    where,
)
from roll_lite.own_files import is_own
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
OURS = ("config", "debug", "help")
"""Flags of every recipe that are no options of its Config."""
ALSO = """Also: {resume}--config FILE starts with the options of a config.json (options on the
command line take precedence); --debug prints tracebacks."""


class Flag(NamedTuple):
    """An option of the command line."""

    name: str
    kind: Any
    default: Any
    help: str


def parse(config: type[T], doc: str, args: Sequence[str], fixed: Iterable[str] = ()) -> T:
    """The options on the command line, over those of --resume or --config."""
    args, file = _take(list(args), "--config")
    args, folder = _take(args, "--resume")
    if file == "" or (file is not None and folder is not None):
        raise UserError("--config needs a file, and not --resume beside it: that has its own")
    if file is not None:
        return _parse_over(config, doc, args, _saved(config, file))
    if folder is not None:
        return _parse_resumed(config, doc, args, folder, fixed)
    return _parse(config, doc, args, {})


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
            _name_changed_files(read_options(path), cfg)
    elif run_dir:
        cfg = _parse(config, doc, [*args, "--resume"], {})
    else:
        raise UserError(f"--resume {place}: there is no {path}; name a run folder")
    if folder == AUTO and is_finished(run_dir, cfg.steps):
        if is_first_rank():
            print(f"the run in {run_dir} has finished, at step {cfg.steps}; --steps N goes on")
        sys.exit(0)
    return cfg


def _saved(config: type, path: str | Path) -> dict[str, Any]:
    """The options in a config.json that were given, not chosen: another run may take them over."""
    saved = read_options(path, with_chosen=False)
    recipe = written_by(path)
    here = recipe_name(config)
    if recipe not in (None, here):
        load_code(saved.get("code", ()))
        if unknown := sorted(saved.keys() - _known(config, saved)):
            raise UserError(
                f"{path} was written by {recipe}.py, and {here}.py has no "
                f"{', '.join(unknown[:3])}; use the recipe that wrote it"
            )
    return {name: value for name, value in saved.items() if name not in ("run_dir", "resume")}


def _name_changed_files(before: Mapping[str, Any], cfg: Any) -> None:
    """Say which files of --code changed since the run was started; the journal notices too."""
    own = next((part for _, part in open_parts(cfg) if isinstance(part, CodeOptions)), None)
    if own is None:
        return
    old = dict(zip(before.get("code", ()), before.get("code_digests", ()), strict=False))
    now = dict(zip(own.code, own.open_defaults["code_digests"], strict=True))
    for path, digest in now.items():
        if path in old and old[path] != digest:
            print(f"changed: {path}; finished samples in the journal are dropped", flush=True)


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
            print(f"changed: {name} {saved[name]} is left out, which nothing reads", flush=True)
    return cfg


def _parse(config: type[T], doc: str, args: Sequence[str], saved: dict[str, Any]) -> T:
    named: dict[str, Any] = {}
    if "code" in _names_of_parts(config):
        given = _values(args, "code") if _is_given(args, "code") else saved.get("code", ())
        named["code"] = tuple(given)
        load_code(named["code"])
    named |= _named_functions(config, args)
    saved = _without_old_functions(config, args, saved)
    if saved.get("code"):  # whose functions may have had other options
        known = _known(config, saved | named)
        saved = {name: value for name, value in saved.items() if name in known}
    base = _base(config, saved | named)
    flags = _all_flags(base)
    _refuse_clashes(base, flags)
    is_help = not {"-h", "--help"}.isdisjoint(args)
    is_short = is_help and "all" not in args and bool(config.COMMON)
    if is_help:
        args = ["--help"]
    else:
        _explain_unknown(base, flags, args)
    found = _read(flags, args, _description(config, doc, flags if is_short else {}), is_short, base)
    given = {name: value for name, value in found.items() if _is_given(args, name)}
    return from_flat(config, **(saved | given))


def _base(config: type[T], options: Mapping[str, Any]) -> T:
    """The Config that the flags' defaults come from; it is not checked."""
    return from_flat(config, check=False, **options)


def _known(config: type, options: Mapping[str, Any]) -> Set[str]:
    """The names of all options, those of the functions included that these options name."""
    names = flatten(_base(config, {})).keys() & options.keys()
    return flatten(_base(config, {name: options[name] for name in names})).keys()


def _named_functions(config: type, args: Sequence[str]) -> dict[str, str]:
    """The functions that the command line names, as in --loss gspo."""
    chosen = {}
    for _, part in open_parts(config):
        given = _values(args, part.CHOICE) if isinstance(part, FunctionOptions) else []
        if given:
            chosen[part.CHOICE] = given[0]
    return chosen


def _without_old_functions(
    config: type, args: Sequence[str], saved: dict[str, Any]
) -> dict[str, Any]:
    """Saved options without those of a function in whose place the command line names another."""
    named = _named_functions(config, args)
    for _, part in open_parts(config):
        choice = getattr(part, "CHOICE", "")
        old = saved.get(choice)
        if choice in named and old in part.TABLE and old != named[choice]:
            gone = keywords(part.TABLE[old])
            saved = {name: value for name, value in saved.items() if name not in gone}
    return saved


# Flags


def _all_flags(base: Any) -> dict[str, list[Flag]]:
    """The flags of a Config by the titles of its parts; its own come first, without a title."""
    flags = {"": _flags_of(base)}
    for each in fields(base):
        if is_dataclass(part := getattr(base, each.name)):
            flags[each.name] = _flags_of(part)
    return {title: found for title, found in flags.items() if found}


def _flags_of(part: Any) -> list[Flag]:
    """The flags of a Config or one of its parts, then those of its functions."""
    hints = get_type_hints(type(part), include_extras=True)
    helps = _field_docs(type(part))
    flags = []
    for name in declared(part):
        value = getattr(part, name)
        if not has_flag(hints[name]) or is_dataclass(value):
            continue
        kind = hints[name]
        if isinstance(part, FunctionOptions) and name == part.CHOICE:
            kind = Literal[tuple(part.TABLE)]
        elif kind == bool | None:
            kind = bool
            value = part.open_defaults[name] if value is None else value
        flags.append(Flag(name, kind, value, helps.get(name, "")))
    if isinstance(part, OpenOptions):
        values = part.values
        for name, known in part.keywords.items():
            text = f"{getattr(part, part.CHOICE)}: " if isinstance(part, FunctionOptions) else ""
            flags.append(Flag(name, known.kind, values[name], text + known.help))
    return flags


@cache
def _field_docs(config: type) -> dict[str, str]:
    """The text below each field of a class and of its bases."""
    found: dict[str, str] = {}
    for each in reversed(config.__mro__):
        if not is_dataclass(each):
            continue
        try:
            source = inspect.getsource(each)
        except OSError:  # a class of `python -c` has none
            continue
        body = ast.parse(textwrap.dedent(source)).body[0].body
        for item, following in zip(body, [*body[1:], None], strict=True):
            text = getattr(getattr(following, "value", None), "value", None)
            if isinstance(item, ast.AnnAssign) and isinstance(text, str):
                found[item.target.id] = inspect.cleandoc(text)
    return found


def _read(
    flags: dict[str, list[Flag]], args: Sequence[str], description: str, is_short: bool, base: Any
) -> dict[str, Any]:
    """The values of all flags, as tyro reads them."""
    shown = {*base.COMMON, *(f for _, part in open_parts(base) for f in part.keywords)}
    own = []
    for title, listed in flags.items():
        if is_short:
            listed = [flag for flag in listed if flag.name in shown]
        made = [
            (f.name, Annotated[f.kind, tyro.conf.arg(help=f.help)], field(default=f.default))
            for f in listed
        ]
        if not title:
            own += made
        elif made:
            part = make_dataclass(title, made, kw_only=True)
            kind = Annotated[part, tyro.conf.arg(help="")]  # else tyro searches for its source
            own.append((title, kind, field(default_factory=part)))
    name = packaged_recipe()
    options = {"prog": f"roll-lite {name}" if name else None, "description": description}
    command = make_dataclass("Options", own, kw_only=True)

    def parse() -> Any:
        return tyro.cli(command, args=args, config=(tyro.conf.OmitArgPrefixes,), **options)

    if is_first_rank():
        return flatten(parse())
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        return flatten(parse())


def _description(config: type, doc: str, hidden: Mapping[str, Sequence[Flag]]) -> str:
    resume = RESUME if "resume" in _names_of_parts(config) else ""
    num_flags = sum(len(flags) for flags in hidden.values())
    more = f"\n\n--help all shows all {num_flags} options." if hidden else ""
    return f"{doc.split(chr(10) * 2)[0]}\n\n{ALSO.format(resume=resume)}{more}"


def _names_of_parts(config: type) -> set[str]:
    return {name for f in fields(config) if is_dataclass(f.default) for name in declared(f.default)}


def _arguments(config: type) -> set[str]:
    """Options without a flag."""
    owners = [config, *(type(f.default) for f in fields(config) if is_dataclass(f.default))]
    return {
        name
        for owner in owners
        for name, hint in get_type_hints(owner, include_extras=True).items()
        if not has_flag(hint)
    }


def _refuse_clashes(base: Any, flags: Mapping[str, Sequence[Flag]]) -> None:
    """Refuse a function's option whose name another option has."""
    names = [flag.name for listed in flags.values() for flag in listed]
    names += [*_arguments(type(base)), *OURS]
    owners = [pair for _, part in open_parts(base) for pair in part.owners.items()]
    clashes = [(name, owner) for name, owner in owners if names.count(name) > 1]
    # Of two functions, the user's is to change.
    for name, owner in sorted(clashes, key=lambda pair: not is_own(pair[1])):
        raise UserError(
            f"{where(owner)}: option {name} of {name_of(owner)} is also another option of the "
            "recipe; rename it in the function"
        )


def _explain_unknown(base: Any, flags: Mapping[str, Sequence[Flag]], args: Sequence[str]) -> None:
    """Refuse what is no flag, but an argument or an option of another function, and say so."""
    known = {flag.name for listed in flags.values() for flag in listed}
    given = set().union(*(names for arg in args if known.isdisjoint(names := _names(arg))))
    for each in fields(base):
        part = getattr(base, each.name)
        for name in given & ({*declared(part)} if is_dataclass(part) else set()):
            kind = type(part).__name__
            own = (f"{n}={value!r}, " for n, value, _ in changed(each.default, declared(part)))
            raise UserError(
                f"{name} has no flag: it is an argument where the recipe makes its parts. In your "
                f"copy (roll-lite eject {recipe_name(type(base))} mine), in Config:\n"
                f"    {each.name}: rl.{kind} = rl.{kind}({''.join(own)}{name}=...)"
            )
        if isinstance(part, FunctionOptions):
            part.refuse_unread(dict.fromkeys(sorted(given)), as_flags=True)


def _names(arg: str) -> set[str]:
    """The options that an argument may be for: --no-drop-equal is for drop_equal."""
    if not arg.startswith("--"):
        return set()
    name = arg.removeprefix("--").partition("=")[0].replace("-", "_")
    return {name, name.removeprefix("no_")}


def _is_given(args: Sequence[str], name: str) -> bool:
    return any(name in _names(arg) for arg in args)


def _values(args: Sequence[str], name: str) -> list[str]:
    """What follows a flag on the command line, up to the next flag."""
    values: list[str] = []
    is_ours = False
    for arg in args:
        if arg.startswith("-"):
            is_ours = name in _names(arg)
            values += [arg.partition("=")[2]] if is_ours and "=" in arg else []
        elif is_ours:
            values.append(arg)
    return values


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
