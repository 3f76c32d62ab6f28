"""Generated tasks: endless questions with known answers, split into train and held-out for good.

A task is named `kind:size`, e.g. `addition:2` (two-digit numbers), `reverse:5` (five letters),
`counting:8` (how often a letter stands in eight). Whether a question is held out depends on its
text alone, so no seed ever trains on a question that another evaluates on.
"""

import zlib
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Literal

from roll_lite.types import Prompt

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 10  # one question in ten is never trained on


def addition(random: Random, size: int) -> tuple[str, str]:
    low = 10 ** (size - 1) if size > 1 else 0
    a, b = (random.randrange(low, 10**size) for _ in range(2))
    return f"What is {a} + {b}?", str(a + b)


def reverse(random: Random, size: int) -> tuple[str, str]:
    word = "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=size))
    return f"Reverse {word}", word[::-1]


def counting(random: Random, size: int) -> tuple[str, str]:
    letter, *others = random.sample("abcdefghijklmnopqrstuvwxyz", 4)
    word = "".join(random.choices([letter, *others], weights=[3, 1, 1, 1], k=size))
    return f"How many {letter} in {word}?", str(word.count(letter))


TASKS: dict[str, Callable[[Random, int], tuple[str, str]]] = {
    "addition": addition,
    "reverse": reverse,
    "counting": counting,
}


def parse_task(task: str) -> tuple[str, int]:
    """`kind:size` -> (kind, size), or an error that names what is known."""
    kind, _, size = task.partition(":")
    if kind not in TASKS or not size.isdecimal() or int(size) < 1:
        known = ", ".join(f"{name}:N" for name in TASKS)
        raise ValueError(f"task={task!r} is not known; use one of {known} with N at least 1")
    return kind, int(size)


def prompts(task: str, *, seed: int | str, split: Split = "train") -> Iterator[Prompt]:
    """Prompt after prompt of one split, the same for the same seed."""
    kind, size = parse_task(task)
    random = Random(f"{task}/{split}/{seed}")
    for number in count():
        question, answer = _draw(kind, size, random, split)
        yield Prompt(
            id=f"{task}/{split}/{seed}/{number}",
            messages=({"role": "user", "content": question},),
            domain=kind,
            ground_truth=answer,
        )


def _draw(kind: str, size: int, random: Random, split: Split) -> tuple[str, str]:
    while True:
        question, answer = TASKS[kind](random, size)
        is_held_out = zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0
        if is_held_out == (split == "held_out"):
            return question, answer
