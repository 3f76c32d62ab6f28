"""A request, and the sequences that answer it."""

from dataclasses import dataclass, field

from roll_lite.types import FinishReason, SamplingParams, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt_ids: list[int]
    params: SamplingParams
    num_samples: int = 1
    """The prompt is computed once and forked into this many samples."""
    seed: int = 0
    """Names the request's random numbers: the same seed and prompt give the same samples."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sample being generated. Its cache holds every token but the last, once it runs."""

    request_id: int
    index: int
    params: SamplingParams
    noise_key: tuple[int, int]
    token_ids: list[int]
    """The prompt, then what was sampled."""
    num_prompt_tokens: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in the pages."""
    followers: list["Sequence"] = field(default_factory=list)
    """Samples of the same prompt that wait to be forked from this one's prefill."""
    finish_reason: FinishReason | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_length(self) -> int:
        return self.num_prompt_tokens + self.params.max_tokens

    def extend(self, token_ids: list[int], logprobs: list[float], policy_version: int) -> None:
        """Append what was sampled; only its last token can end the turn."""
        if token_ids and (not self.versions or self.versions[-1][1] != policy_version):
            self.versions.append((self.num_sampled, policy_version))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.num_computed = len(self.token_ids) - 1
        if self.token_ids[-1] in self.params.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_length:
            self.finish_reason = "length"

    def turn(self) -> Turn:
        return Turn(
            prompt_ids=self.token_ids[: self.num_prompt_tokens],
            token_ids=self.token_ids[self.num_prompt_tokens :],
            logprobs=list(self.logprobs),
            finish_reason=self.finish_reason,
            versions=list(self.versions),
        )
