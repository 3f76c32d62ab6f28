"""Rewards for questions whose answer is a text."""

from roll_lite.types import Prompt


def exact_match(prompt: Prompt, reply: str) -> float:
    """1 when the reply, without surrounding space, is the ground truth, else 0."""
    return float(reply.strip() == prompt.ground_truth)
