"""Options in parts, and options that functions bring.

The Config of a recipe has the options of its parts as fields; on the command line they are flat.

A table such as LOSSES maps names to functions whose keyword-only parameters are their options:

    def cispo(logprobs_R, ..., *, clip_low: Annotated[float, Doc("...")] = 0.2): ...

Such an option stands once, in the signature. A part that names a function (FunctionOptions) has the
values that were given; flags, help and the refusal of other options follow from the signature.

A spec names a thing with its options in one word: `frozen_lake:size=8,style=short`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import Doc

from roll_lite.checks import Bound, UserError, check_choices

T = TypeVar("T")
Argument = Annotated[T, "no flag"]
"""The type of an option that few need. It has no flag: it is given where a recipe makes the part,
as in `scoring: rl.RewardOptions = rl.RewardOptions(judge_tokens=512)`."""


def parse_spec(spec: str) -> tuple[str, dict[str, bool | int | float | str]]:
    """`NAME:option=value,...` -> (name, options); values are true, false, numbers and texts."""
    name, _, rest = spec.partition(":")
    options = {}
    for text in rest.split(",") if rest else ():
        option, equals, value = text.partition("=")
        if not option or not equals or option in options:
            raise UserError(
                f"{spec!r}: {text!r} is not an option; write NAME:option=value,option=value, each "
                "option once, as in frozen_lake:size=8,style=short"
            )
        options[option] = _spec_value(value)
    return name, options


def _spec_value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def flatten(options: Any) -> dict[str, Any]:
    """All options by name, those of the parts and of their functions included."""
    flat: dict[str, Any] = {}
    for each in fields(options):
        value = getattr(options, each.name)
        if is_dataclass(value):
            flat |= flatten(value)
        elif isinstance(options, OpenOptions) and each.name == "options":
            flat |= options.values
        else:
            flat[each.name] = value
    return flat


def unique_options(config: type[T]) -> type[T]:
    """Decorates a Config, above @dataclass: refuses an option that two of its parts have."""
    places: dict[str, str] = {}
    for each in fields(config):
        for name, place in _places(config, each.name, each.default).items():
            if name in places:
                raise TypeError(
                    f"option {name} is in {places[name]} and in {place}, but on the command line "
                    "it can only be one of them; rename one"
                )
            places[name] = place
    return config


def _places(config: type, name: str, part: Any) -> dict[str, str]:
    """The class in which each option of a field is written: a part's, or the Config itself."""
    if not is_dataclass(part):
        return {name: config.__name__}
    return {name: type(part).__name__ for name in declared(part)}


def declared(part: Any) -> list[str]:
    """Names of the options that the class of a part declares, without those of functions."""
    is_open = isinstance(part, OpenOptions)
    return [each.name for each in fields(part) if not (is_open and each.name == "options")]


def from_flat(config: type[T], *, check: bool = True, **options: Any) -> T:
    """A Config from flat names, as on the command line and in config.json.

    Without `check` its values may be wrong, which is for defaults of the command line.
    """
    # JSON has lists where options are tuples.
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
    parts = {each.name: each.default for each in fields(config) if is_dataclass(each.default)}
    given = {name: _take(part, options) for name, part in parts.items()}
    for name, part in parts.items():
        if isinstance(part, FunctionOptions):  # which says whose they are
            strays = [n for n in options if unread(part.TABLE, part.CHOICE, n)]
            given[name]["options"] |= {n: options.pop(n) for n in strays}
    values = {}
    for name, part in parts.items():
        own = vars(part) | given[name]
        values[name] = type(part)(**own) if check else _unchecked(type(part), own)
    values |= {each.name: options.pop(each.name) for each in fields(config) if each.name in options}
    if options:
        named = ", ".join([*list(options)[:3], *(["..."] if len(options) > 3 else [])])
        raise UserError(f"{named}: not among the options of this recipe; see its --help")
    return config(**values) if check else _unchecked(config, values)


def _take(part: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a part and of its functions, which are removed from the flat ones."""
    given = {name: options.pop(name) for name in declared(part) if name in options}
    if isinstance(part, OpenOptions):
        known = _unchecked(type(part), vars(part) | given).owners
        given["options"] = {name: options.pop(name) for name in known if name in options}
    return given


def _unchecked(config: type[T], values: dict[str, Any]) -> T:
    """An instance without the checks of its `__post_init__`."""
    instance = object.__new__(config)
    for each in fields(config):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        object.__setattr__(instance, each.name, values.get(each.name, default))
    return instance


class Keyword(NamedTuple):
    """An option of a function: one of its keyword-only parameters."""

    kind: Any
    default: Any
    help: str
    bounds: tuple[Bound, ...] = ()


@cache
def keywords(function: Callable) -> dict[str, Keyword]:
    """The options of a function by name; the help of one is the Doc in its Annotated type."""
    typed = function.__init__ if inspect.isclass(function) else function
    hints = get_type_hints(typed, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if name not in hints or parameter.default is parameter.empty:
            raise UserError(
                f"{where(function)}: option {name} of {name_of(function)} needs a type and a "
                f'default, as in {name}: Annotated[float, Doc("what it does.")] = 1.0'
            )
        hint = hints[name]
        kind, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        docs = [item.documentation for item in more if isinstance(item, Doc)]
        bounds = tuple(item for item in more if isinstance(item, Bound))
        found[name] = Keyword(kind, parameter.default, " ".join(docs), bounds)
    return found


def name_of(function: Callable) -> str:
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__name__", repr(function))


def where(function: Callable) -> str:
    """File and line of a function or class, for errors."""
    function = inspect.unwrap(getattr(function, "func", function))
    try:
        file = inspect.getsourcefile(function)
        return f"{file} line {inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):  # a builtin, or the file has gone
        return name_of(function)


def has_flag(hint: Any) -> bool:
    return "no flag" not in getattr(hint, "__metadata__", ())


def flag_names(part: type) -> list[str]:
    """The declared options of a part that have flags; others may stand unread in a recipe."""
    hints = get_type_hints(part, include_extras=True)
    return [each.name for each in fields(part) if has_flag(hints[each.name])]


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """Options of a part, and those of functions that it uses."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the functions by name, as far as they were given."""

    @classmethod
    def of(cls, **flat: Any) -> Self:
        """From flat names, those of functions' options among them: of(loss="kimi", tau=0.5)."""
        names = [each.name for each in fields(cls)]
        own = {name: flat.pop(name) for name in names if name in flat}
        return cls(**own, options=flat)

    @property
    def owners(self) -> dict[str, Callable]:
        """The function of each option that functions have."""
        raise NotImplementedError

    @property
    def keywords(self) -> dict[str, Keyword]:
        """All options that the functions have."""
        return {name: keywords(function)[name] for name, function in self.owners.items()}

    @property
    def values(self) -> dict[str, Any]:
        """Their values, given or by default."""
        return {n: self.options.get(n, known.default) for n, known in self.keywords.items()}

    def check_values(self) -> None:
        for name, known in self.keywords.items():
            for bound in known.bounds:
                bound.check(name, self.options.get(name, known.default))


@dataclass(frozen=True, kw_only=True)
class FunctionOptions(OpenOptions):
    """Options of a part that names a function of a table."""

    TABLE: ClassVar[dict[str, Callable]]
    CHOICE: ClassVar[str]
    """The field that has the name; also what such a function is called."""

    @property
    def chosen(self) -> Callable:
        """The function, without its options."""
        name = getattr(self, self.CHOICE)
        if name not in self.TABLE:
            known = ", ".join(self.TABLE)
            raise UserError(
                f"{self.CHOICE}={name!r} is not known; use one of {known}, or name one of your "
                f"own in the {self.CHOICE.upper()}{'S' if self.CHOICE[-1] != 's' else 'ES'} of a "
                "file given with --code"
            )
        return self.TABLE[name]

    @property
    def owners(self) -> dict[str, Callable]:
        return dict.fromkeys(keywords(self.chosen), self.chosen)

    @property
    def function(self) -> Callable:
        """The function with its options."""
        return partial(self.chosen, **self.values)

    def check_function(self) -> None:
        """Refuse an unknown name, and options that the function does not read."""
        check_choices(self)
        for name, value in self.options.items():
            if name not in self.keywords:
                raise UserError(
                    f"{name}={value!r} {unread(self.TABLE, self.CHOICE, name) or 'is no option'}; "
                    f"{self.CHOICE}={getattr(self, self.CHOICE)!r} does not read it, so leave it out"
                )
        self.check_values()


def unread(table: Mapping[str, Callable], choice: str, option: str) -> str:
    """Which functions of a table read an option, for an error; empty if none does."""
    readers = [name for name, function in table.items() if option in keywords(function)]
    return f"is read by {choice} {', '.join(readers)}" if readers else ""


def open_parts(config: Any) -> Iterator[tuple[str, OpenOptions]]:
    """The parts of a Config whose functions bring options, by the names of their fields."""
    for each in fields(config):
        part = each.default if isinstance(config, type) else getattr(config, each.name)
        if isinstance(part, OpenOptions):
            yield each.name, part


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What the Config of every recipe has."""

    chosen: Argument[tuple[str, ...]] = ()
    """Options that were not given, but chosen for the model, the machine or what was given."""

    COMMON: ClassVar[tuple[str, ...]] = ()
    """Options that --help shows, where it does not show all."""

    @property
    def default_kinds(self) -> Mapping[str, str]:
        """Options that depend on the model's size where they are not given, and how."""
        return {}
