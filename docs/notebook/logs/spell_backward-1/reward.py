"""A reward for spell_backward: the share of letters in their place; an extra one is a wrong one."""

from roll_lite.types import Prompt


def letters_in_place(prompt: Prompt, reply: str) -> float:
    answer, closed, _ = reply.rpartition("<answer>")[2].partition("</answer>")
    if not closed:
        return 0.0
    answer, right = answer.strip().lower(), prompt.ground_truth.lower()
    num_right = sum(said == letter for said, letter in zip(answer, right, strict=False))
    return num_right / max(len(answer), len(right))


REWARDS = {"reasoning_gym": letters_in_place}
