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
from functools import partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import Doc

from roll_lite.checks import Bound, UserError, check_choice, check_choices, choices_of

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
    values = {}
    for each in fields(config):
        if is_dataclass(part := each.default):
            given = {name: options.pop(name) for name in declared(part) if name in options}
            if isinstance(part, OpenOptions):
                known = _unchecked(type(part), vars(part) | given).keywords
                given["options"] = {n: v for n, v in part.kept_with(given).items() if n in known}
                given["options"] |= {n: options.pop(n) for n in known if n in options}
            own = vars(part) | given
            values[each.name] = type(part)(**own) if check else _unchecked(type(part), own)
        elif each.name in options:
            values[each.name] = options.pop(each.name)
    if options:
        for part in values.values():
            if isinstance(part, FunctionOptions):
                part.refuse_unread(options)
        named = ", ".join([*list(options)[:3], *(["..."] if len(options) > 3 else [])])
        raise UserError(f"{named}: not among the options of this recipe; see its --help")
    return config(**values) if check else _unchecked(config, values)


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


def keywords(function: Callable) -> dict[str, Keyword]:
    """The options of a function by name; the help of one is the Doc in its Annotated type."""
    hints = hints_of(function)
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
        if not _is_saved_whole(kind):
            raise UserError(
                f"{where(function)}: option {name} of {name_of(function)} has type {hint}; an "
                "option is a bool, int, float, str or Literal, None, or a tuple of these"
            )
        found[name] = Keyword(kind, parameter.default, " ".join(docs), bounds)
    return found


def _is_saved_whole(kind: Any) -> bool:
    """Whether a value of this type is the same after config.json has had it."""
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_saved_whole, get_args(kind)))
    if get_origin(kind) is tuple:
        kind = next(iter(get_args(kind)))
    return kind in (bool, int, float, str, NoneType) or get_origin(kind) is Literal


def unwrapped(function: Callable) -> Callable:
    """The function of a partial."""
    return getattr(function, "func", function)


def facts_of(function: Callable, no_facts: T) -> T:
    """What stands above a function, as in @rl.LossFacts(by_sequence=True)."""
    found = getattr(function, "facts", None) or getattr(unwrapped(function), "facts", None)
    return found or no_facts


def hints_of(function: Callable) -> dict[str, Any]:
    """The types of a function's parameters, as far as they are given."""
    typed = unwrapped(function)
    if inspect.isclass(typed):
        typed = typed.__init__
    elif not inspect.isroutine(typed):
        typed = type(typed).__call__
    try:
        return get_type_hints(typed, include_extras=True)
    except NameError as error:
        raise UserError(
            f"{where(function)}: a type in the signature of {name_of(function)} cannot be read: "
            f"{error}; import it, not under TYPE_CHECKING alone, or leave the type out"
        ) from None


def name_of(function: Callable) -> str:
    function = unwrapped(function)
    return getattr(function, "__name__", repr(function))


def where(function: Callable) -> str:
    """File and line of a function or class, for errors."""
    function = inspect.unwrap(unwrapped(function))
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

    def kept_with(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Which of `options` stay where other options of this part are given."""
        return self.options

    def check_values(self) -> None:
        values = self.values
        for name, known in self.keywords.items():
            check_choice(name, values[name], choices_of(known.kind))
            for bound in known.bounds:
                bound.check(name, values[name])


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

    def kept_with(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of another function do not stay."""
        name = getattr(self, self.CHOICE)
        return self.options if given.get(self.CHOICE, name) == name else {}

    def check_function(self) -> None:
        """Refuse an unknown name, and options that the function does not read."""
        check_choices(self)
        self.refuse_unread(self.options)
        for name in self.options:
            if name not in self.keywords:
                chosen = getattr(self, self.CHOICE)
                known = ", ".join(self.keywords) or "none"
                raise UserError(
                    f"{name}={self.options[name]!r} is not an option of {self.CHOICE}={chosen!r}; "
                    f"its options are {known}"
                )
        self.check_values()

    def refuse_unread(self, options: Mapping[str, Any], *, as_flags: bool = False) -> None:
        """Refuse options that only other functions of the table read, and say which."""
        for name, value in options.items():
            readers = [kind for kind, function in self.TABLE.items() if name in keywords(function)]
            chosen = getattr(self, self.CHOICE)
            if readers and chosen not in readers:
                option = f"--{name.replace('_', '-')}" if as_flags else f"{name}={value!r}"
                raise UserError(
                    f"{option} is read by {self.CHOICE} {', '.join(readers)}; {self.CHOICE}="
                    f"{chosen!r} does not: choose one that reads it, or leave it out"
                )


def open_parts(config: Any) -> Iterator[tuple[str, OpenOptions]]:
    """The parts of a Config whose functions bring options, by the names of their fields."""
    for each in fields(config):
        part = each.default if isinstance(config, type) else getattr(config, each.name)
        if isinstance(part, OpenOptions):
            yield each.name, part


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What the Config of every recipe has."""

    chosen: Argument[Mapping[str, Any]] = field(default_factory=dict)
    """Options that have another value than was given, chosen for the model, the machine or what
    else was given, each with what it was before; None where nothing was given."""
    from_hub: Argument[Mapping[str, str]] = field(default_factory=dict)
    """Names on the Hugging Face Hub that were given, and what they stand for: the folder of a
    model's snapshot, the name of data with its commit."""

    COMMON: ClassVar[tuple[str, ...]] = ()
    """Options that --help shows, in this order; --help all shows the rest. Empty shows all."""

    def check_files(self) -> None:
        """Refuse files that are missing, and a folder with another run; the first rank does."""

    @property
    def open_defaults(self) -> Mapping[str, Any]:
        """What stands for options that are left open; parts may have such a property too."""
        return {}

    @property
    def default_kinds(self) -> Mapping[str, str]:
        """Options that depend on the model's size where they are not given, and how."""
        return {}

    @property
    def planned(self) -> Mapping[str, Any]:
        """Options of a plan of memory that the recipe calls otherwise; by the plan's names."""
        return {}

    @property
    def generated_at_once(self) -> Mapping[str, Any]:
        """Those of samples, where more are generated at once than a step trains on."""
        return {}
