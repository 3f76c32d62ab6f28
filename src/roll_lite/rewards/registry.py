"""Rewards by the domain of the prompts that they score."""

from roll_lite.rewards.choice import choice_answer
from roll_lite.rewards.code import passes_tests
from roll_lite.rewards.instructions import instructions_followed
from roll_lite.rewards.math import math_answer
from roll_lite.types import Reward

REWARDS: dict[str, Reward] = {
    "math": math_answer,
    "choice": choice_answer,
    "instructions": instructions_followed,
    "code": passes_tests,
}
"""The domains that `python -m roll_lite.rewards` knows; a new reward is one more line."""
