"""Checks of options that stand in one flat dataclass."""

from dataclasses import dataclass

import pytest

from roll_lite.checks import filled_from, read_only_if


@dataclass(kw_only=True)
class Options:
    kind: str = "a"
    size: int = 1
    other: float = 0.0


@dataclass(kw_only=True)
class Config:
    size: int = 2
    kind: str = "not for options"
    more: str = ""


def test_options_are_filled_by_name():
    assert filled_from(Options, Config(size=5), kind="b") == Options(kind="b", size=5)


def test_a_changed_option_that_nothing_reads_is_refused():
    read_only_if(False, "kind='b'", Config(), "size", "more")
    read_only_if(True, "kind='b'", Config(size=5), "size")
    with pytest.raises(ValueError, match="size=5 is only read with kind='b'; leave it at 2"):
        read_only_if(False, "kind='b'", Config(size=5), "more", "size")
