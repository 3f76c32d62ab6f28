"""Rewards for questions whose answer is a number."""

import re
from decimal import Decimal

from roll_lite.types import Prompt

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(prompt: Prompt, reply: str) -> float:
    """1 when the last number of the reply is the ground truth, else 0."""
    numbers = _NUMBER.findall(reply)
    if not numbers:
        return 0.0
    return float(_value(numbers[-1]) == _value(prompt.ground_truth))


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
