"""Checks of options, and options that follow from signatures."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from typing_extensions import Doc

from roll_lite.checks import check_choices, read_only_if
from roll_lite.options import choose, flatten, from_flat, unique_options, with_options_of


def ring(values, *, size: Annotated[int, Doc("its size.")] = 1):
    return "ring", values, size


def box(
    values, *, size: Annotated[int, Doc("its size.")] = 4, tall: Annotated[bool, Doc("")] = False
):
    return "box", values, size, tall


SHAPES = {"ring": ring, "box": box}


@dataclass(frozen=True, kw_only=True)
@with_options_of("shape", SHAPES)
class ShapeOptions:
    shape: str = "ring"
    """Which shape."""
    colour: Literal["red", "blue"] | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = ""
    shape: ShapeOptions = ShapeOptions(tall=False)


def test_a_function_gets_the_options_of_its_signature_and_its_own_defaults():
    assert choose(SHAPES, "shape", ShapeOptions())(0) == ("ring", 0, 1)
    assert choose(SHAPES, "shape", ShapeOptions(shape="box"))(0) == ("box", 0, 4, False)
    assert choose(SHAPES, "shape", ShapeOptions(shape="box", size=2, tall=True))(0) == (
        "box", 0, 2, True,
    )  # fmt: skip


def test_an_unknown_name_and_an_option_of_another_function_are_refused():
    with pytest.raises(ValueError, match="shape='disc' is not known; use one of ring, box"):
        choose(SHAPES, "shape", ShapeOptions(shape="disc"))
    with pytest.raises(ValueError, match="tall=True is not read by shape='ring', only by box"):
        choose(SHAPES, "shape", ShapeOptions(tall=True))


def test_literals_are_checked():
    check_choices(ShapeOptions(colour="red"))
    with pytest.raises(ValueError, match="colour='green' is not known; use one of red, blue"):
        check_choices(ShapeOptions(colour="green"))


def test_options_in_parts_are_flat_outside():
    cfg = from_flat(Config, name="a", size=3, colour="blue")
    assert cfg == Config(name="a", shape=ShapeOptions(size=3, colour="blue"))
    assert flatten(cfg) == {
        "name": "a", "shape": "ring", "colour": "blue", "size": 3, "tall": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="sizes: not among the options"):
        from_flat(Config, sizes=3)


def test_a_changed_option_that_nothing_reads_is_refused():
    read_only_if(False, "shape='box'", ShapeOptions(), "size", "colour")
    read_only_if(True, "shape='box'", ShapeOptions(size=5), "size")
    with pytest.raises(ValueError, match="size=5 is only read with shape='box'; leave it at None"):
        read_only_if(False, "shape='box'", ShapeOptions(size=5), "colour", "size")


def test_one_option_in_two_parts_is_refused_with_both_places():
    @dataclass(frozen=True)
    class Colours:
        tall: bool = False

    with pytest.raises(TypeError, match=r"tall is in ShapeOptions \(shape box\) and in Colours"):

        @unique_options
        @dataclass(frozen=True)
        class Both:
            shape: ShapeOptions = ShapeOptions()
            colours: Colours = Colours()

    with pytest.raises(TypeError, match=r"size is in ShapeOptions \(shape ring, box\) and in Own"):

        @unique_options
        @dataclass(frozen=True)
        class Own:
            shape: ShapeOptions = ShapeOptions()
            size: int = 1


def test_an_option_of_a_function_that_its_class_has_is_refused():
    with pytest.raises(TypeError, match="option tall of shape box is also a field of Clashing"):

        @with_options_of("shape", SHAPES)
        class Clashing:
            shape: str = "ring"
            tall: bool = False
