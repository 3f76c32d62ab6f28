"""All options of all recipes as a page.

python scripts/options_page.py > docs/reference/options.md
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from roll_lite.flags import field_docs
from roll_lite.options import FunctionOptions, declared, from_flat, has_flag, keywords
from roll_lite.recipes import agentic, distill, dpo, evaluate, rlvr, sft

Rows = dict[tuple[str, Any, str], dict[str, Any]]  # name, type and meaning; defaults by owner
NOTED = ("chosen", "from_hub")  # by the program; docs/reference/run-folder.md has them
WORDS = {bool: "on or off", int: "integer", float: "number", str: "text"}
HEAD = """# Options

`scripts/options_page.py` makes this page from the code, and a test compares the two.

- `roll-lite RECIPE --help` shows the options that most runs use. `--help all` shows all flags.
- A flag is given as `--name VALUE`. Several values follow one flag with spaces between them.
- A flag that is on or off is given as `--name` or `--no-name`.
- An option without dashes has no flag. Edit a copy of the recipe (`roll-lite eject RECIPE mine`): its Config makes the part
  in the heading, as in `scoring: rl.RewardOptions = rl.RewardOptions(judge_tokens=512)`.
- The default None is left open. The meaning says what stands in for it.
- Every recipe also has `--config FILE`, which starts with the options of a config.json, and `--debug`, which prints whole
  tracebacks. Options that are given beside `--config` win.
- A file of `--code` may bring options of its own ([how](../howto/algorithm.md))."""  # noqa: E501


def page() -> str:
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for recipe in (rlvr, agentic, sft, dpo, distill, evaluate):
        name = recipe.__name__.rpartition(".")[2]
        config = from_flat(recipe.Config, check=False)
        own = "rlvr and agentic" if isinstance(config, rlvr.Config) else name
        found[f"Options of {own}"][name] = config
        for each in fields(config):
            if is_dataclass(part := getattr(config, each.name)):
                found[f"`{each.name}`: rl.{type(part).__name__}"][name] = part
    return "\n".join([HEAD, *(line for item in found.items() for line in section(*item))])


def section(title: str, parts: dict[str, Any]) -> Iterator[str]:
    """The options of a part, which several recipes may have, and those of its functions."""
    yield f"\n## {title}\n\nIn {', '.join(parts)}.\n"
    part = next(iter(parts.values()))
    hints, helps = get_type_hints(type(part), include_extras=True), field_docs(type(part))
    rows: Rows = defaultdict(dict)
    for name in (n for n in declared(part) if n not in NOTED and n in helps):
        hint = Literal[*part.TABLE] if name == getattr(part, "CHOICE", "") else hints[name]
        flag = f"--{name.replace('_', '-')}" if has_flag(hints[name]) else name
        rows[flag, hint, helps[name]] = {owner: getattr(p, name) for owner, p in parts.items()}
    yield from table(rows)
    if isinstance(part, FunctionOptions):
        rows = defaultdict(dict)
        for chosen, function in part.TABLE.items():
            for name, known in keywords(function).items():
                rows[f"--{name.replace('_', '-')}", known.kind, known.help][chosen] = known.default
        yield f"\nRead by some `--{part.CHOICE}` only:\n"
        yield from table(rows, says_all=True)


def table(rows: Rows, says_all: bool = False) -> Iterator[str]:
    """Says of a default who has it where not all have the same one."""
    yield "| option | value | default | meaning |\n|---|---|---|---|"
    for (name, hint, meaning), by_owner in rows.items():
        owners = defaultdict(list)
        for owner, value in by_owner.items():
            owners[shown(value)].append(owner)
        defaults = [f"{text} ({', '.join(names)})" for text, names in owners.items()]
        default = next(iter(owners)) if len(owners) == 1 and not says_all else "; ".join(defaults)
        meaning = re.sub(r"([|<])", r"\\\1", meaning)
        yield f"| `{name}` | {value_of(hint)} | {default} | {meaning} |"


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    text = re.sub(r"\d{8}-\d{6}", "DATE-TIME", text)
    return "must be given" if value is MISSING else f"`{text}`" if text else "none"


def value_of(hint: Any) -> str:
    kinds = [each for each in get_args(hint) if each is not NoneType]
    if get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in kinds)
    several = " ..." if get_origin(hint) is tuple else ""
    return WORDS.get(hint) or value_of(kinds[0]) + several


if __name__ == "__main__":
    print(page())
