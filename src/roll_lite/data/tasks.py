"""Generated tasks: endless questions with known answers, in a train and a held-out split.

A task is named `kind:size`: `addition:2` (two-digit numbers), `reverse:5` (five letters),
`counting:8` (how often a letter occurs among eight), `instructions:3` (write a text under three
constraints, which are the prompt's tests; the ground truth is an example). Whether a question is
held out depends only on its text, so no seed trains on a question that another evaluates on.

`rg:spell_backward` or `rg:spell_backward:min_word_len=5,max_word_len=8` are questions of the
package reasoning-gym (rewards/reasoning_gym.py).
"""

import zlib
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any, Literal, NamedTuple

from roll_lite.checks import UserError
from roll_lite.rewards import reasoning_gym
from roll_lite.rewards.instruction_prompts import MAX_CONSTRAINTS, draw_instructions
from roll_lite.types import Prompt

Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 10  # one question in ten is never trained on


class Example(NamedTuple):
    question: str
    answer: str
    careless: str
    """A plausible wrong answer; right in rare cases."""
    tests: tuple[dict[str, Any], ...] = ()


def addition(random: Random, size: int) -> Example:
    low = 10 ** (size - 1) if size > 1 else 0
    a, b = (random.randrange(low, 10**size) for _ in range(2))
    return Example(f"What is {a} + {b}?", str(a + b), careless=str(_add_without_carry(a, b)))


def _add_without_carry(a: int, b: int) -> int:
    digits = zip(str(a)[::-1], str(b)[::-1], strict=False)
    return sum((int(x) + int(y)) % 10 * 10**place for place, (x, y) in enumerate(digits))


def reverse(random: Random, size: int) -> Example:
    word = "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=size))
    return Example(f"Reverse {word}", word[::-1], careless=word[:0:-1])


def counting(random: Random, size: int) -> Example:
    letter, *others = random.sample("abcdefghijklmnopqrstuvwxyz", 4)
    word = "".join(random.choices([letter, *others], weights=[3, 1, 1, 1], k=size))
    count = word.count(letter)
    return Example(f"How many {letter} in {word}?", str(count), careless=str(count + 1))


def instructions(random: Random, size: int) -> Example:
    drawn = draw_instructions(random, size)
    careless = f"Here is a text about {drawn.topic}."
    return Example(drawn.question, drawn.reply, careless, drawn.tests)


TASKS: dict[str, Callable[[Random, int], Example]] = {
    "addition": addition,
    "reverse": reverse,
    "counting": counting,
    "instructions": instructions,
}
LARGEST = {"instructions": MAX_CONSTRAINTS}


def is_task(source: str) -> bool:
    """Whether a source of data has the form of a task; write ./addition:2 for such a file."""
    kind, colon, _ = source.partition(":")
    return bool(colon) and (kind in TASKS or is_reasoning_gym(source))


def is_reasoning_gym(source: str) -> bool:
    return source.startswith(reasoning_gym.PREFIX)


def parse_task(task: str) -> tuple[str, int]:
    """`kind:size` -> (kind, size); raises ValueError for an unknown task."""
    kind, _, size = task.partition(":")
    if is_reasoning_gym(task):
        raise UserError(f"task={task!r} has questions only, no replies to imitate; use it in RL")
    if kind not in TASKS or not size.isdecimal() or int(size) < 1:
        known = ", ".join(f"{name}:N" for name in TASKS)
        raise UserError(f"task={task!r} is not known; use one of {known} with N at least 1")
    if int(size) > LARGEST.get(kind, int(size)):
        raise UserError(f"task={task!r} is too large; use {kind}:N with N up to {LARGEST[kind]}")
    return kind, int(size)


def check_task(task: str) -> None:
    """Raise ValueError for an unknown task."""
    if is_reasoning_gym(task):
        reasoning_gym.open_dataset(task)
    else:
        parse_task(task)


def prompts(task: str, *, seed: int | str, split: Split = "train") -> Iterator[Prompt]:
    """Endless prompts of one split, determined by the seed."""
    if is_reasoning_gym(task):
        yield from (reasoning_gym.question(task, n, seed=seed, split=split) for n in count())
    for prompt, _ in demonstrations(task, seed=seed, split=split):
        yield prompt


def demonstrations(
    task: str, *, seed: int | str, split: Split = "train", careless: float = 0.0
) -> Iterator[tuple[Prompt, str]]:
    """Prompts with a reply to imitate; `careless` is the share of mostly wrong replies."""
    kind, size = parse_task(task)
    random = Random(f"{task}/{split}/{seed}")
    teacher = Random(f"teacher/{task}/{seed}")
    for number in count():
        drawn = _draw(kind, size, random, split)
        prompt = Prompt(
            id=f"{task}/{split}/{seed}/{number}",
            messages=({"role": "user", "content": drawn.question},),
            domain=kind,
            ground_truth=drawn.answer,
            tests=drawn.tests,
        )
        yield prompt, drawn.careless if teacher.random() < careless else drawn.answer


def _draw(kind: str, size: int, random: Random, split: Split) -> Example:
    while True:
        drawn = TASKS[kind](random, size)
        is_held_out = zlib.crc32(drawn.question.encode()) % HELD_OUT_ONE_IN == 0
        if is_held_out == (split == "held_out"):
            return drawn
