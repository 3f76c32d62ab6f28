"""Checks of options, and options that follow from signatures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pytest
from typing_extensions import Doc

from roll_lite.checks import Above, AtLeast, UserError, check_choices, read_only_if
from roll_lite.options import (
    FunctionOptions,
    Keyword,
    flatten,
    from_flat,
    keywords,
    name_of,
    unique_options,
    where,
)

if TYPE_CHECKING:
    from somewhere import Tensor

Size = Annotated[int, Doc("Its size."), AtLeast(1)]


def ring(values, *, size: Size = 1, hole: Annotated[float | None, Doc(""), Above(0)] = None):
    return "ring", values, size, hole


def box(values, *, size: Size = 4, tall: bool = False, lid: Literal["no", "yes"] = "no"):
    return "box", values, size, tall, lid


def ball(values):
    return "ball", values


SHAPES = {"ring": ring, "box": box, "ball": ball}


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(FunctionOptions):
    shape: str = "ring"
    """Which shape."""
    colour: Literal["red", "blue"] | None = None

    TABLE: ClassVar[dict[str, Callable]] = SHAPES
    CHOICE: ClassVar[str] = "shape"

    def __post_init__(self):
        self.check_function()


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = ""
    shape: ShapeOptions = ShapeOptions()


@dataclass(frozen=True, kw_only=True)
class BoxConfig:
    shape: ShapeOptions = ShapeOptions.of(shape="box", size=5, tall=True)


def test_a_function_gets_the_options_of_its_signature_and_its_own_defaults():
    assert ShapeOptions().function(0) == ("ring", 0, 1, None)
    assert ShapeOptions(shape="box").function(0) == ("box", 0, 4, False, "no")
    given = ShapeOptions.of(shape="box", colour="red", size=2, tall=True)
    assert given.function(0) == ("box", 0, 2, True, "no")
    assert given == ShapeOptions(shape="box", colour="red", options={"size": 2, "tall": True})
    assert given.values == {"size": 2, "tall": True, "lid": "no"}
    assert ShapeOptions(shape="ball").function(0) == ("ball", 0)


def test_options_of_a_function_have_types_defaults_help_and_bounds():
    assert keywords(ring)["size"] == Keyword(int, 1, "Its size.", (AtLeast(1),))
    assert keywords(box)["tall"] == Keyword(bool, False, "")
    assert keywords(ball) == {}


def test_an_unknown_name_and_an_option_of_another_function_are_refused():
    message = (
        "shape='disc' is not known; use one of ring, box, ball, or name one of your own in the "
        "SHAPES of a file given with --code"
    )
    with pytest.raises(UserError, match=message):
        ShapeOptions(shape="disc")
    with pytest.raises(
        UserError, match="tall=True is read by shape box; shape='ring' does not: choose"
    ):
        ShapeOptions.of(tall=True)
    with pytest.raises(UserError, match="size=2 is read by shape ring, box; shape='ball' does not"):
        ShapeOptions.of(shape="ball", size=2)
    with pytest.raises(
        UserError, match="sise=2 is not an option of shape='box'; its options are size, tall, lid"
    ):
        ShapeOptions.of(shape="box", sise=2)


def test_values_are_checked():
    check_choices(ShapeOptions(colour="red"))
    with pytest.raises(UserError, match="colour='green' is not known; use one of red, blue"):
        ShapeOptions(colour="green")
    with pytest.raises(UserError, match="size=0 must be at least 1"):
        ShapeOptions.of(size=0)
    with pytest.raises(UserError, match=r"hole=0.0 must be above 0"):
        ShapeOptions.of(hole=0.0)
    with pytest.raises(UserError, match="lid='open' is not known; use one of no, yes"):
        ShapeOptions.of(shape="box", lid="open")


def test_options_in_parts_are_flat_outside():
    cfg = from_flat(Config, name="a", size=3, colour="blue")
    assert cfg == Config(name="a", shape=ShapeOptions.of(size=3, colour="blue"))
    flat = {"name": "a", "shape": "ring", "colour": "blue", "size": 3, "hole": None}
    assert flatten(cfg) == flat
    assert flatten(from_flat(Config, **flat)) == flat
    with pytest.raises(UserError, match="sizes: not among the options"):
        from_flat(Config, sizes=3)
    with pytest.raises(UserError, match="tall=True is read by shape box; shape='ring' does not"):
        from_flat(Config, tall=True)


def test_the_options_that_a_part_has_by_default_stay_with_its_function():
    values = {"shape": "box", "colour": None, "size": 5, "tall": True, "lid": "no"}
    assert flatten(from_flat(BoxConfig)) == values
    assert flatten(from_flat(BoxConfig, size=6, colour="red")) == values | {
        "size": 6, "colour": "red",
    }  # fmt: skip
    assert from_flat(BoxConfig, shape="ring").shape == ShapeOptions(shape="ring")


def test_a_changed_option_that_nothing_reads_is_refused():
    read_only_if(False, "shape='box'", ShapeOptions(), "shape", "colour")
    read_only_if(True, "shape='box'", ShapeOptions(colour="red"), "colour")
    with pytest.raises(
        UserError, match="colour='red' is only read with shape='box'; leave it at None"
    ):
        read_only_if(False, "shape='box'", ShapeOptions(colour="red"), "shape", "colour")


def test_one_option_in_two_parts_is_refused_with_both_places():
    @dataclass(frozen=True)
    class Paints:
        colour: bool = False

    with pytest.raises(TypeError, match=r"colour is in ShapeOptions and in Paints"):

        @unique_options
        @dataclass(frozen=True)
        class Both:
            shape: ShapeOptions = ShapeOptions()
            paints: Paints = Paints()

    with pytest.raises(TypeError, match=r"colour is in ShapeOptions and in Own"):

        @unique_options
        @dataclass(frozen=True)
        class Own:
            shape: ShapeOptions = ShapeOptions()
            colour: int = 1


def test_wrong_signatures_are_named_with_their_place():
    def untyped(values, *, size=1): ...

    def needed(values, *, size: int): ...

    for function in (untyped, needed):
        with pytest.raises(UserError, match="needs a type and a default") as error:
            keywords(function)
        assert str(error.value).startswith(f"{where(function)}: option size of {name_of(function)}")
        assert f"test_options.py line {function.__code__.co_firstlineno}:" in str(error.value)

    def unread(values: "Tensor", *, size: int = 1): ...

    with pytest.raises(UserError, match="name 'Tensor' is not defined; import it") as error:
        keywords(unread)
    assert str(error.value).startswith(f"{where(unread)}: a type in the signature of unread")


def test_callables_of_all_kinds_have_options():
    class Made:
        def __init__(self, *, size: int = 1): ...

        def __call__(self, values, *, tall: bool = True): ...

    assert keywords(Made) == {"size": Keyword(int, 1, "")}
    assert keywords(Made()) == {"tall": Keyword(bool, True, "")}
    assert keywords(partial(box, tall=True))["tall"] == Keyword(bool, True, "")
    assert where(partial(box, tall=True)) == where(box) and name_of(partial(box)) == "box"
