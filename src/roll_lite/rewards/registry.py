"""The reward of each domain, and the check that a prompt has what its reward needs."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from roll_lite.rewards.choice import choice_answer, right_letter
from roll_lite.rewards.code import check_isolation, check_tests, passes_tests
from roll_lite.rewards.combine import Weighted
from roll_lite.rewards.instructions import check_instructions, instructions_followed
from roll_lite.rewards.maths import check_truth, import_math_verify, math_answer
from roll_lite.rewards.reasoning_gym import (
    check_item,
    import_reasoning_gym,
    reasoning_gym_answer,
)
from roll_lite.types import Prompt, Reward

REWARDS: dict[str, Reward] = {
    "math": math_answer,
    "choice": choice_answer,
    "instructions": instructions_followed,
    "code": passes_tests,
    "reasoning_gym": reasoning_gym_answer,
}
"""Rewards by domain, as `roll-lite rewards` knows them; add new ones here."""

CHECKS: dict[Reward, Callable[[Prompt], Any]] = {
    math_answer: check_truth,
    choice_answer: right_letter,
    instructions_followed: check_instructions,
    passes_tests: check_tests,
    reasoning_gym_answer: check_item,
}
"""Checks by reward; a check raises ValueError for a prompt that its reward cannot score."""

IMPORTS: dict[Reward, Callable[[], Any]] = {
    math_answer: import_math_verify,
    reasoning_gym_answer: import_reasoning_gym,
}
"""What a reward imports at its first call, which takes seconds."""


def import_ahead(rewards: Iterable[Reward]) -> None:
    """Import what these rewards would import later; what fails to import, they report."""
    parts = [_function(part) for reward in rewards for part in _parts(reward)]
    for reward, import_it in IMPORTS.items():
        if any(part is reward for part in parts):
            with suppress(Exception):
                import_it()


def check_prompts(prompts: Iterable[Prompt], rewards: Mapping[str, Reward]) -> None:
    """Raise ValueError for the first prompt that its reward cannot score, here or at all."""
    domains = set()
    for prompt in prompts:
        domains.add(prompt.domain)
        reward = _function(rewards.get(prompt.domain))
        for known, check in CHECKS.items():
            if known is reward:
                check(prompt)
    for part in filter(None, (code_part(rewards.get(domain)) for domain in domains)):
        check_isolation(getattr(part, "keywords", {}).get("isolation", "full"))


def code_part(reward: Reward | None) -> Reward | None:
    """What runs tests of programs: a reward itself, or a part of a weighted sum."""
    return next((part for part in _parts(reward) if _function(part) is passes_tests), None)


def _function(reward: Reward | None) -> Reward | None:
    return getattr(reward, "func", reward)  # unwrap functools.partial


def _parts(reward: Reward | None) -> list[Reward | None]:
    """The rewards that a weighted sum adds up."""
    return [part for _, part, _ in reward.rewards] if isinstance(reward, Weighted) else [reward]
