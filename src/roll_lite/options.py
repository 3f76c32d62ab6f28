"""Options in parts, and options that follow from the signatures of functions.

The Config of a recipe has the options of its parts as fields; on the command line they are flat.

A table such as LOSSES maps names to functions whose keyword-only parameters are their options:

    def cispo(logprobs_R, ..., *, clip_low: Annotated[float, Doc("...")] = 0.2): ...

Such an option exists once, in the signature: fields, flags, help and the refusal of options that
the chosen function does not read follow from it.

A spec names a thing with its options in one word: `frozen_lake:size=8,style=short`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import Doc

from roll_lite.checks import UserError, changed, check_choices

T = TypeVar("T")
_CHOSEN = "_chosen"


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
    """All options by name, those of the parts included."""
    flat: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        flat |= flatten(value) if is_dataclass(value) else {field.name: value}
    return flat


def unique_options(config: type[T]) -> type[T]:
    """Decorates a Config, above @dataclass: refuses an option that two of its parts have."""
    places: dict[str, str] = {}
    for field in fields(config):
        part = field.default
        for name, place in _places(config, field.name, part).items():
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
    read_by = getattr(part, "read_by", {})
    return {
        field.name: f"{type(part).__name__}{read_by.get(field.name, '')}" for field in fields(part)
    }


def from_flat(config: type[T], *, check: bool = True, **options: Any) -> T:
    """A Config from flat names, as on the command line and in config.json.

    Without `check` its values may be wrong, which is for defaults of the command line.
    """
    # JSON has lists where options are tuples.
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
    values = {}
    for field in fields(config):
        if is_dataclass(part := field.default):
            given = {name: options.pop(name) for name in flatten(part) if name in options}
            own = {f.name: getattr(part, f.name) for f in fields(part)} | given
            values[field.name] = replace(part, **given) if check else _unchecked(type(part), own)
        elif field.name in options:
            values[field.name] = options.pop(field.name)
    if options:
        named = ", ".join([*list(options)[:3], *(["..."] if len(options) > 3 else [])])
        raise UserError(f"{named}: not among the options of this recipe; see its --help")
    return config(**values) if check else _unchecked(config, values)


def mark_chosen(config: T, names: Iterable[str]) -> T:
    """Note that these options of a Config were not given, but chosen; config.json says so."""
    object.__setattr__(config, _CHOSEN, tuple(names))
    return config


def chosen_names(config: Any) -> tuple[str, ...]:
    return getattr(config, _CHOSEN, ())


def _unchecked(config: type[T], values: dict[str, Any]) -> T:
    """An instance without the checks of its `__post_init__`."""
    instance = object.__new__(config)
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        object.__setattr__(instance, field.name, values.get(field.name, default))
    return instance


class Keyword(NamedTuple):
    """An option of a function: one of its keyword-only parameters."""

    kind: Any
    default: Any
    help: str


@cache
def keywords(function: Callable) -> dict[str, Keyword]:
    """The options of a function by name; the help of one is the Doc in its Annotated type."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if name not in hints or parameter.default is parameter.empty:
            raise TypeError(
                f"option {name} of {function.__name__} needs a type and a default, as in "
                f'{name}: Annotated[float, Doc("what it does.")] = 1.0'
            )
        hint = hints[name]
        kind, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        docs = [item.documentation for item in more if isinstance(item, Doc)]
        found[name] = Keyword(kind, parameter.default, " ".join(docs))
    return found


def with_options_of(field: str, table: Mapping[str, Callable]) -> Callable[[type], type]:
    """Decorates a class, below @dataclass, whose `field` names a function of the table.

    Adds a field for each option of the functions, after `field`. Where functions have different
    defaults for an option, the field's default is None, which leaves it to the function.
    """

    def add_fields(cls: type) -> type:
        own_fields = cls.__annotations__
        cls.__annotations__ = {field: Literal[tuple(table)]}
        cls.read_by = {n: f" ({field} {', '.join(r)})" for n, r in _readers(table).items()}
        for name, readers in _readers(table).items():
            if name in own_fields:
                raise TypeError(
                    f"option {name} of {field} {readers[0]} is also a field of {cls.__name__}; "
                    "rename it in the function"
                )
            kind, default, text = keywords(table[readers[0]])[name]
            defaults = {reader: keywords(table[reader])[name].default for reader in readers}
            if len(set(defaults.values())) > 1:
                own = ", ".join(f"{value} for {reader}" for reader, value in defaults.items())
                kind = kind | None
                default = None
                text = f"{text} None is {own}."
            help_text = f"{', '.join(readers)}: {text}"
            cls.__annotations__[name] = Annotated[kind, Doc(help_text)]
            setattr(cls, name, default)
        cls.__annotations__ |= {n: hint for n, hint in own_fields.items() if n != field}
        return cls

    return add_fields


def choose(table: Mapping[str, Callable], field: str, options: Any) -> Callable:
    """The function that `options.field` names, with its options filled in.

    An option that was changed and that this function does not read is refused.
    """
    check_choices(options)
    name = getattr(options, field)
    function = table[name]
    for option, value, default in changed(options, _readers(table)):
        if option not in keywords(function):
            raise UserError(
                f"{option}={value!r} is not read by {field}={name!r}, only by "
                f"{', '.join(_readers(table)[option])}; leave it at {default!r}"
            )
    values = {option: getattr(options, option) for option in keywords(function)}
    return partial(function, **{o: value for o, value in values.items() if value is not None})


def _readers(table: Mapping[str, Callable]) -> dict[str, list[str]]:
    """For each option, the names of the functions that read it."""
    readers: dict[str, list[str]] = {}
    for name, function in table.items():
        for option in keywords(function):
            readers.setdefault(option, []).append(name)
    return readers
