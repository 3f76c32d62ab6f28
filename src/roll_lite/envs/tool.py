"""A question with a Python tool: a reply that calls it reads the output, any other is scored."""

import asyncio
from collections.abc import Callable
from random import Random

from roll_lite.envs.env import Observation
from roll_lite.envs.question import Question
from roll_lite.rewards.maths import math_answer
from roll_lite.sandbox.sandbox import Isolation, Limits, Outcome, run_program
from roll_lite.types import AsyncReward, FinishReason, Message, Prompt, Reward

STOP = "</python>"
"""Give it to SamplingParams.stop, so that a turn ends with its call."""
_CALLS = (("<python>", STOP), ("```python\n", "```"))
"""What may enclose a program."""


def call_of(reply: str) -> str | None:
    r"""The last program of a reply; None if there is none, or a \boxed answer after it."""
    for opening, closing in _CALLS:
        _, opened, rest = reply.rpartition(opening)
        program, closed, after = rest.partition(closing)
        if opened and closed and r"\boxed" not in after:
            return program.strip()
    return None


def draw_product(seed: int) -> Prompt:
    """A product of two numbers that is tedious without a tool."""
    a, b = Random(seed).sample(range(1000, 10000), 2)
    question = {"role": "user", "content": f"What is {a} * {b}?"}
    return Prompt(
        id=f"product-{seed}", messages=(question,), domain="math", ground_truth=str(a * b)
    )


class PythonTool:
    """`draw_prompt` gives the question of a seed; for a question of a dataset, `lambda _: prompt`.

    The last step's parts have those of the reward, and the number of `tool_calls`.
    """

    def __init__(
        self,
        draw_prompt: Callable[[int], Prompt] = draw_product,
        reward: Reward | AsyncReward = math_answer,
        *,
        max_calls: int = 1,
        seconds: float = 5.0,
        max_output: int = 1000,
        isolation: Isolation = "full",
    ):
        self.draw_prompt, self.reward, self.max_calls = draw_prompt, reward, max_calls
        self.limits, self.max_output, self.isolation = (
            Limits(seconds=seconds),
            max_output,
            isolation,
        )
        self.finish_reason: FinishReason = "stop"

    def reset(self, seed: int) -> tuple[Observation, dict]:
        self._num_calls, self._question = 0, Question(self.draw_prompt(seed), self.reward)
        *earlier, last = self._question.prompt.messages
        rules = (
            f"You may run Python programs, {self.max_calls} at most: write one as <python> program "
            f"{STOP}, end your reply there, and you are shown what it prints. Otherwise "
            r"reply with the final answer in \boxed{}."
        )
        return (*earlier, last | {"content": f"{last['content']}\n\n{rules}"}), {}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict]:
        program = call_of(action)
        if program is None or self._num_calls == self.max_calls:
            return await self._score(action)
        options = {"isolation": self.isolation, "limits": self.limits}
        outcome = await asyncio.to_thread(run_program, program, **options)
        self._num_calls += 1
        return (self._shown(outcome),), 0.0, False, False, {}

    async def _score(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self._question.finish_reason = self.finish_reason
        *result, info = await self._question.step(reply)
        parts = info["parts"] | {"tool_calls": float(self._num_calls)}
        return *result, {"parts": parts}

    def _shown(self, outcome: Outcome) -> Message:
        """As a user's message, a role that every chat template has."""
        text = (outcome.stdout + outcome.stderr).strip() or "It printed nothing."
        if len(text) > self.max_output:
            text = f"{text[: self.max_output]}\n[{len(text) - self.max_output} more characters]"
        end = "" if outcome.kind in ("ok", "error") else f"\n[stopped: {outcome.kind} limit]"
        left = self.max_calls - self._num_calls
        return {"role": "user", "content": f"<output>\n{text}{end}\n</output>\nRuns left: {left}."}
