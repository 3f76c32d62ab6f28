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
    """Refuses or drops prompts that leave no room for a reply of `reply_tokens`."""

    count: Callable[[Prompt], int]
    """Tokens of a prompt."""
    longest_sample: int
    """Tokens of a prompt and its reply."""
    reply_tokens: int
    policy: Literal["error", "drop"]

    @property
    def max_tokens(self) -> int:
        """Of a prompt."""
        return self.longest_sample - self.reply_tokens

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
            raise ValueError(
                f"{problem}. A sample has at most {self.longest_sample:,} tokens, the least of the "
                "model's positions, tokens_per_microbatch and what kv_cache_gib holds; raise it, "
                f"or lower max_tokens={self.reply_tokens}{drop}"
            )
        print(f"dropped: {problem}", flush=True)
        return kept

    def _tokens(self, prompt: Prompt) -> int:
        """Not counted where the text is so short that it fits: a token is at least a byte. An
        environment writes its messages later."""
        if not prompt.is_question:
            return 0
        num_bytes = sum(len(message["content"].encode()) for message in prompt.messages)
        if num_bytes + TEMPLATE_TOKENS <= self.max_tokens:
            return num_bytes
        try:
            return self.count(prompt)
        except ValueError as error:  # such as roles that the chat template refuses
            raise ValueError(f"{prompt.id}: {error}") from None

    def _shown(self, prompts: list[Prompt]) -> Iterator[Prompt]:
        with ProgressBar(len(prompts), "reading", "prompts") as bar:
            for prompt in prompts:
                yield prompt
                bar.advance()
