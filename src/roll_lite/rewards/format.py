"""Rewards for the format of a reply, to add to a reward for its content (see combine.py).

They read only the reply. Set options with `functools.partial(length_target, words=200)`, which can
be sent to workers.
"""

import re

from roll_lite.checks import UserError
from roll_lite.types import Prompt

WORD = re.compile(r"[^\W_]\w*(?:['\u2019-]\w+)*")


def without_thinking(reply: str) -> str:
    """What follows the thinking block; nothing if the block has no end."""
    text = reply.rpartition("</think>")[2]
    return "" if text.lstrip().startswith("<think>") else text


def count_words(reply: str) -> int:
    return len(WORD.findall(reply))


def has_tags(prompt: Prompt, reply: str, *, tags: tuple[str, ...] = ("think", "answer")) -> float:
    """1 if the reply is these tags in order, each once, with text inside and none outside."""
    rest = reply.strip()
    for tag in tags:
        opening = f"<{tag}>"
        closing = f"</{tag}>"
        is_once = reply.count(opening) == 1 and reply.count(closing) == 1
        if not is_once or not rest.startswith(opening):
            return 0.0
        inside, _, rest = rest.removeprefix(opening).partition(closing)
        if not inside.strip():
            return 0.0
        rest = rest.lstrip()
    return float(not rest)


def matches(prompt: Prompt, reply: str, *, pattern: str) -> float:
    """1 if the whole reply matches a regular expression, in which . matches newlines too."""
    return float(re.fullmatch(pattern, reply.strip(), re.DOTALL) is not None)


def length_target(prompt: Prompt, reply: str, *, words: int = 200, tolerance: int = 100) -> float:
    """1 for a reply of `words` words, falling linearly to 0 at a difference of `tolerance`.

    As the exact length reward of L1 (Aggarwal and Welleck 2025, arXiv 2503.04697), which counts
    tokens and has no lower bound.
    """
    if words < 0 or tolerance <= 0:
        raise UserError(f"words={words} must be at least 0 and tolerance={tolerance} above 0")
    return max(0.0, 1 - abs(count_words(reply) - words) / tolerance)


def repetition_penalty(prompt: Prompt, reply: str, *, ngram: int = 4) -> float:
    """distinct / total - 1 over the n-grams of words: 0 without repetition, near -1 for a loop.

    The n-gram penalty of Yeo et al. 2025 (arXiv 2502.03373, appendix) in the form of open-r1, where
    (1 - distinct / total) is multiplied by the largest penalty: here the reward's weight.
    """
    if ngram < 1:
        raise UserError(f"ngram={ngram} must be at least 1")
    words = reply.lower().split()
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    return len({tuple(words[i : i + ngram]) for i in range(total)}) / total - 1
