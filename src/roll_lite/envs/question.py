"""A question as an environment of one turn: the reply is scored, and the episode is over."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace

from roll_lite.envs.env import Observation
from roll_lite.types import AsyncReward, FinishReason, Prompt, Reward, Score


class Question:
    step_state = "scoring"

    def __init__(self, prompt: Prompt, reward: Reward | AsyncReward):
        self.prompt, self.reward = prompt, reward
        self.finish_reason: FinishReason = "stop"

    def reset(self, seed: int) -> tuple[Observation, dict]:
        return self.prompt.messages, {}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict]:
        prompt = self.prompt
        if self.finish_reason == "length":  # for rewards that must not guess what was cut off
            prompt = replace(prompt, extra=prompt.extra | {"finish_reason": "length"})
        score = self.reward(prompt, action)
        if inspect.isawaitable(score):
            score = await score
        score = Score.of(score)
        return (), score.value, True, False, {"parts": score.parts}


def question_maker(rewards: Mapping[str, Reward | AsyncReward]) -> Callable[[Prompt], Question]:
    """A function that makes the environment of a prompt, with the reward of its domain."""

    def make(prompt: Prompt) -> Question:
        if prompt.domain not in rewards:
            raise ValueError(
                f"prompt {prompt.id} has domain={prompt.domain!r}, which has no reward; "
                f"known domains: {', '.join(sorted(rewards))}"
            )
        return Question(prompt, rewards[prompt.domain])

    return make
