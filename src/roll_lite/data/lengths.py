"""Prompts that leave no room for a reply are found before anything runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from roll_lite.progress import ProgressBar
from roll_lite.types import Prompt

TEMPLATE_TOKENS = 1024
"""No chat template adds more to the tokens of the messages."""


@dataclass(frozen=True, kw_only=True)
class PromptLimit:
    """Prompts with at most `max_tokens` tokens; longer ones are refused or dropped."""

    max_tokens: int
    reason: str
    """Where the limit comes from, and what to change."""
    policy: Literal["error", "drop"]
    count: Callable[[Prompt], int]
    """Tokens of a prompt."""

    def __call__(self, prompts: list[Prompt]) -> list[Prompt]:
        """Those that fit, in order."""
        tokens = {prompt.id: self._tokens(prompt) for prompt in self._shown(prompts)}
        kept = [prompt for prompt in prompts if tokens[prompt.id] <= self.max_tokens]
        if len(kept) == len(prompts):
            return prompts
        longest = max(tokens, key=tokens.get)
        problem = (
            f"{len(prompts) - len(kept):,} of {len(prompts):,} prompts have more than "
            f"{self.max_tokens:,} tokens; the longest, {longest}, has {tokens[longest]:,}"
        )
        if self.policy == "error" or not kept:
            drop = "; or drop them with long_prompts=drop" if kept else ""
            raise ValueError(f"{problem}. {self.reason}{drop}")
        print(f"dropped: {problem}", flush=True)
        return kept

    def _tokens(self, prompt: Prompt) -> int:
        """Not counted where the text is so short that it fits: a token is at least a byte."""
        num_bytes = sum(len(message["content"].encode()) for message in prompt.messages)
        fits = num_bytes + TEMPLATE_TOKENS <= self.max_tokens
        return num_bytes if fits else self.count(prompt)

    def _shown(self, prompts: list[Prompt]) -> Iterator[Prompt]:
        with ProgressBar(len(prompts), "prompts") as bar:
            for prompt in prompts:
                yield prompt
                bar.advance()
