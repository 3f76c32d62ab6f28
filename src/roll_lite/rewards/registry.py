"""Rewards by the domain of the prompts that they score, and what they need of a prompt."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll_lite.rewards.choice import choice_answer, right_letter
from roll_lite.rewards.code import check_tests, passes_tests
from roll_lite.rewards.instructions import check_instructions, instructions_followed
from roll_lite.rewards.math import check_truth, math_answer
from roll_lite.types import Prompt, Reward

REWARDS: dict[str, Reward] = {
    "math": math_answer,
    "choice": choice_answer,
    "instructions": instructions_followed,
    "code": passes_tests,
}
"""The domains that `python -m roll_lite.rewards` knows; a new reward is one more line."""

CHECKS: dict[Reward, Callable[[Prompt], Any]] = {
    math_answer: check_truth,
    choice_answer: right_letter,
    instructions_followed: check_instructions,
    passes_tests: check_tests,
}
"""By reward: raises ValueError for a prompt whose replies it could not score."""


def check_prompts(prompts: Iterable[Prompt], rewards: Mapping[str, Reward]) -> None:
    """Refuse prompts that could not be scored, before anything is generated for them."""
    for prompt in prompts:
        reward = rewards.get(prompt.domain)
        reward = getattr(reward, "func", reward)  # with options it is a partial
        for known, check in CHECKS.items():
            if known is reward:
                check(prompt)
