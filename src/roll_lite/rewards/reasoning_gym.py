"""Questions of reasoning-gym and their scores, as `rg:DATASET` or `rg:DATASET:option=value,...`.

The package is imported when it is used, and is no dependency of this one. A dataset has SIZE
questions, each of which is made from its index alone, so that any can be read at once.
"""

import hashlib
from difflib import get_close_matches
from functools import cache, lru_cache
from math import isclose
from typing import Any, Literal

from roll_lite.checks import UserError
from roll_lite.options import parse_spec
from roll_lite.types import Prompt

PREFIX = "rg:"
DOMAIN = "reasoning_gym"
SIZE = 1_000_000
HELD_OUT_ONE_IN = 4
MAX_ATTEMPTS = 1000
OPEN = "<answer>"
CLOSE = "</answer>"


def question(
    source: str, number: int, *, seed: int | str, split: Literal["train", "held_out"]
) -> Prompt:
    """A prompt of one split. Whether a question is held out depends on its text alone."""
    id = f"{source}/{split}/{seed}/{number}"
    for attempt in range(MAX_ATTEMPTS):
        index = _hash(f"{id}/{attempt}") % len(open_dataset(source))
        item = _item(source, index)
        if (_hash(item["question"]) % HELD_OUT_ONE_IN == 0) == (split == "held_out"):
            break
    else:
        raise UserError(f"data={source!r} has too few questions to hold out a part of them")
    text = f"{item['question']}\n\nGive the final answer as {OPEN} [your answer] {CLOSE}."
    return Prompt(
        id=id,
        messages=({"role": "user", "content": text},),
        domain=DOMAIN,
        ground_truth="" if item["answer"] is None else str(item["answer"]),
        extra={"source": source, "index": index},
    )


def reasoning_gym_answer(prompt: Prompt, reply: str) -> float:
    """The dataset's own score, from 0 to 1, of the last answer in tags.

    One is corrected: spell_backward is meant to give 0.8 for the right letters with more behind
    them, but gives the sum of their shares where rounding makes that other than exactly 1.
    """
    check_item(prompt)
    _, opened, rest = reply.rpartition(OPEN)
    answer, closed, _ = rest.partition(CLOSE)
    if not opened or not closed:
        return 0.0
    source = prompt.extra["source"]
    item = _item(source, prompt.extra["index"])
    score = float(open_dataset(source).score_answer(answer=answer.strip(), entry=item))
    if source.startswith(f"{PREFIX}spell_backward") and score != 1.0 and isclose(score, 1.0):
        return 0.8
    return score


def check_item(prompt: Prompt) -> None:
    if not {"source", "index"} <= prompt.extra.keys():
        raise UserError(
            f"prompt {prompt.id} has no source and index of reasoning-gym; name the dataset as "
            f"data, as in {PREFIX}spell_backward, or give the prompt another domain"
        )


@cache
def open_dataset(source: str) -> Any:
    """Raises ValueError for an unknown dataset or option, or if the package is missing."""
    name, options = parse_spec(source.removeprefix(PREFIX))
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"data={source!r} needs the package reasoning-gym ({error}); pip install reasoning-gym"
        ) from error
    if name not in DATASETS:
        similar = get_close_matches(name, DATASETS, n=5) or sorted(DATASETS)
        raise UserError(f"data={source!r} is not known; use one of {', '.join(similar)}")
    try:
        return reasoning_gym.create_dataset(name, **{"size": SIZE, "seed": 0} | options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"data={source!r}: {error}") from error


def import_reasoning_gym() -> None:
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=1024)
def _item(source: str, index: int) -> dict[str, Any]:
    return open_dataset(source)[index]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
