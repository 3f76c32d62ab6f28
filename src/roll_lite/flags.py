"""The flags of a recipe, and its --help.

They are made from the fields of the Config and its parts and, where a part names a function, from
the signature of that function.
"""

import ast
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import tyro

from roll_lite.checks import UserError, changed
from roll_lite.cluster.launch import is_first_rank
from roll_lite.options import (
    FunctionOptions,
    OpenOptions,
    declared,
    flatten,
    has_flag,
    keywords,
    name_of,
    open_parts,
    where,
)
from roll_lite.other_names import ours
from roll_lite.own_files import is_own_function
from roll_lite.report.config_file import (
    packaged_recipe,
    recipe_name,
)

RESUME = """--resume RUN_DIR continues a run with its own options
--resume auto starts the run of --run-dir, or continues it
"""
ALSO = """--config FILE starts with the options of a config.json; those given beside it win
--debug prints tracebacks
"""
OURS = ("config", "debug", "help")
"""Flags of every recipe that are no options of its Config."""


class Flag(NamedTuple):
    """An option of the command line."""

    name: str
    kind: Any
    default: Any
    help: str


def all_flags(base: Any) -> dict[str, list[Flag]]:
    """The flags of a Config by the titles of its parts; its own come first, without a title."""
    flags = {"": _flags_of(base)}
    for each in fields(base):
        if is_dataclass(part := getattr(base, each.name)):
            flags[each.name] = _flags_of(part)
    return {title: found for title, found in flags.items() if found}


def _flags_of(part: Any) -> list[Flag]:
    """The flags of a Config or one of its parts, then those of its functions."""
    hints = get_type_hints(type(part), include_extras=True)
    helps = field_docs(type(part))
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
        if value is None:
            value = getattr(part, "open_defaults", {}).get(name)
        flags.append(Flag(name, kind, value, helps.get(name, "")))
    if isinstance(part, OpenOptions):
        values = part.values
        for name, known in part.keywords.items():
            is_named = isinstance(part, FunctionOptions)
            owner = getattr(part, part.CHOICE) if is_named else name_of(part.owners[name])
            flags.append(Flag(name, known.kind, values[name], f"{owner}: {known.help}"))
    return flags


@cache
def field_docs(config: type) -> dict[str, str]:
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
                found[item.target.id] = " ".join(text.split())
    return found


def read_flags(
    base: Any, flags: Mapping[str, Sequence[Flag]], args: Sequence[str], doc: str, *, is_short: bool
) -> dict[str, Any]:
    """The values of all flags, as tyro reads them."""
    hidden = flags if is_short else {}
    if is_short:
        flags = {"": _common_flags(base, flags)}
    own = []
    for title, listed in flags.items():
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
    options = {
        "prog": f"roll-lite {name}" if name else None,
        "description": _description(type(base), doc, hidden),
    }
    command = make_dataclass("Options", own, kw_only=True)

    def parse() -> Any:
        return tyro.cli(command, args=args, config=(tyro.conf.OmitArgPrefixes,), **options)

    if is_first_rank():
        return flatten(_noting_errors(parse))
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        return flatten(parse())


def _noting_errors(parse: Callable[[], Any]) -> Any:
    """What is printed of an error is noted on the SystemExit too: it may have to come again."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return parse()
    except SystemExit as end:
        end.add_note(printed.getvalue())
        raise
    finally:
        print(printed.getvalue(), end="", file=sys.stderr, flush=True)


def _common_flags(base: Any, flags: Mapping[str, Sequence[Flag]]) -> list[Flag]:
    """Those of COMMON in its order; options of functions follow the flag that names the function
    or its file."""
    places = {name: place for place, name in enumerate(base.COMMON)}
    for _, part in open_parts(base):
        place = places[part.CHOICE if isinstance(part, FunctionOptions) else "code"]
        places |= dict.fromkeys(part.keywords, place)
    listed = [flag for each in flags.values() for flag in each if flag.name in places]
    return sorted(listed, key=lambda flag: places[flag.name])


def _description(config: type, doc: str, hidden: Mapping[str, Sequence[Flag]]) -> str:
    resume = RESUME if "resume" in names_of_parts(config) else ""
    num_flags = sum(len(flags) for flags in hidden.values())
    more = f"--help all shows all {num_flags} options\n" if hidden else ""
    return f"{doc.split(chr(10) * 2)[0]}\n\n{resume}{ALSO}{more}"


def names_of_parts(config: type) -> set[str]:
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


def refuse_clashes(base: Any, flags: Mapping[str, Sequence[Flag]]) -> None:
    """Refuse a function's option whose name another option has."""
    names = [flag.name for listed in flags.values() for flag in listed]
    names += [*_arguments(type(base)), *OURS]
    owners = [pair for _, part in open_parts(base) for pair in part.owners.items()]
    clashes = [(name, owner) for name, owner in owners if names.count(name) > 1]
    # Of two functions, the user's is to change.
    for name, owner in sorted(clashes, key=lambda pair: not is_own_function(pair[1])):
        raise UserError(
            f"{where(owner)}: option {name} of {name_of(owner)} is also another option of the "
            "recipe; rename it in the function"
        )


def explain_unknown(base: Any, flags: Mapping[str, Sequence[Flag]], args: Sequence[str]) -> None:
    """Refuse what is no flag, but an argument, an option of another function or what another
    library calls one of ours, and say so."""
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
    of_functions = {*_function_options(base)}
    options = known | of_functions | _arguments(type(base))
    lines = filter(None, (ours(arg, options, known | of_functions) for arg in args))
    if text := "\n".join(dict.fromkeys(lines)):
        raise UserError(text)


def _function_options(base: Any) -> Iterator[str]:
    """The options of all functions that a recipe's options may name, whichever they name now."""
    for _, part in open_parts(base):
        for function in getattr(part, "TABLE", {}).values():
            yield from keywords(function)


def _names(arg: str) -> set[str]:
    """The options that an argument may be for: --no-drop-equal is for drop_equal."""
    if not arg.startswith("--"):
        return set()
    name = arg.removeprefix("--").partition("=")[0].replace("-", "_")
    return {name, name.removeprefix("no_")}


def is_given(args: Sequence[str], name: str) -> bool:
    return any(name in _names(arg) for arg in args)


def values_after(args: Sequence[str], name: str) -> list[str]:
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
