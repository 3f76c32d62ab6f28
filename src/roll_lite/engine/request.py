"""A request, the sequences that it generates, and the report of an engine that serves requests."""

import hashlib
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from roll_lite.checks import UserError
from roll_lite.models.config import ModelConfig
from roll_lite.types import FinishReason, SamplingParams, Turn

OnTurn = Callable[[int, Turn], None]
"""Called with a sample's index and its turn as soon as the sample ends."""
Decode = Callable[[list[int]], str]
"""Token ids as text."""
Key = Hashable
"""What the sender of a request calls it."""
MAX_STOP_IDS = 8
MAX_EXPERTS = 256
"""That a byte can name."""
HALF_CHARACTER = "\ufffd"  # what a part of a character's bytes is decoded as
TAIL_MARGIN = 8  # characters that a text cut out of a longer one may have wrong at its beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt_ids: list[int]
    params: SamplingParams
    num_samples: int = 1
    """The prompt is computed once and forked into this many samples."""
    seed: int | None = None
    """The same seed and prompt give the same samples. Equal seeds give the same noise to different
    prompts; None is a seed of the prompt's own."""
    wanted: tuple[int, ...] | None = None
    """Indices of the samples to generate, if some are known already; None means all."""

    @property
    def noise_seed(self) -> int:
        if self.seed is not None:
            return self.seed
        digest = hashlib.blake2b(np.array(self.prompt_ids, np.int64).tobytes(), digest_size=8)
        return int.from_bytes(digest.digest()) >> 1

    @property
    def indices(self) -> range | tuple[int, ...]:
        return range(self.num_samples) if self.wanted is None else self.wanted


def check_request(
    request: Request, config: ModelConfig, *, cache_tokens: int, has_decoder: bool
) -> None:
    """Refuse a request that does not fit the model or a KV cache of `cache_tokens`."""
    ids = request.prompt_ids
    params = request.params
    if not ids:
        raise UserError("prompt_ids is empty; a request needs at least one token")
    if not 0 <= min(ids) <= max(ids) < config.vocab_size:
        raise UserError(
            f"prompt_ids holds {min(ids)}..{max(ids)}; the vocabulary has ids "
            f"0..{config.vocab_size - 1}"
        )
    if len(params.stop_ids) > MAX_STOP_IDS:
        raise UserError(f"stop_ids has {len(params.stop_ids)} ids; use at most {MAX_STOP_IDS}")
    if request.num_samples < 1:
        raise UserError(f"num_samples={request.num_samples} must be at least 1")
    indices = request.indices
    known = set(range(request.num_samples))
    if not indices or not known.issuperset(indices) or len(set(indices)) < len(indices):
        raise UserError(
            f"wanted={request.wanted} must name some of the samples 0..{request.num_samples - 1}, "
            "each once"
        )
    if len(ids) + params.max_tokens > min(config.max_positions, cache_tokens):
        raise UserError(
            f"{len(ids)} prompt tokens + max_tokens={params.max_tokens} exceed the "
            f"model's {config.max_positions} positions or the cache's {cache_tokens} tokens; "
            "shorten the request or raise kv_cache_gib"
        )
    if params.stop and not has_decoder:
        raise UserError(f"stop={params.stop!r} needs text; give the engine Engine(decode=...)")


def check_recordable(config: ModelConfig) -> None:
    """Refuse a model whose experts a byte cannot name."""
    if config.experts is None:
        raise UserError("records_experts=True, but the model has no experts; leave it out")
    if config.experts.num_experts > MAX_EXPERTS:
        raise UserError(
            f"router='replay' records an expert in a byte, so at most {MAX_EXPERTS} of a layer, "
            f"and the model has num_experts={config.experts.num_experts}; use router=own"
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sample being generated. Once it runs, the KV cache holds all its tokens but the last."""

    request_id: int
    index: int
    params: SamplingParams
    noise_key: tuple[int, int]
    prompt_ids: list[int]
    length: int = 0
    """Tokens so far, including the prompt."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in the pages."""
    followers: list["Sequence"] = field(default_factory=list)
    """Samples of the same prompt, to be forked from this one after its prefill."""
    finish_reason: FinishReason | None = None
    is_suspect: bool = False
    """Its logits were not finite once: it shares no pages any more."""
    last_pages: list[int] = field(default_factory=list)
    """Once it has ended: the pages that it had, until `experts` is read from them."""
    experts: bytes = b""
    """Those of each token but the last, if they are recorded."""
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _new: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Token ids and logprobs from the device that are not yet in the lists above."""

    def __post_init__(self):
        self._token_ids = list(self.prompt_ids)
        self.length = len(self.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """The prompt, then the sampled tokens."""
        self._flush()
        return self._token_ids

    @property
    def num_sampled(self) -> int:
        return self.length - len(self.prompt_ids)

    @property
    def max_length(self) -> int:
        return len(self.prompt_ids) + self.params.max_tokens

    def extend(self, token_ids: np.ndarray, logprobs: np.ndarray, policy_version: int) -> None:
        """Append sampled tokens; only the last of them can end the turn."""
        if len(token_ids) == 0:
            return
        if not self.versions or self.versions[-1][1] != policy_version:
            self.versions.append((self.num_sampled, policy_version))
        self._new.append((token_ids, logprobs))
        self.length += len(token_ids)
        self.num_computed = self.length - 1
        if token_ids[-1] in self.params.stop_ids:
            self.finish_reason = "stop"
        elif self.length == self.max_length:
            self.finish_reason = "length"

    def truncate(self, num_sampled: int) -> None:
        """Keep only the first `num_sampled` sampled tokens."""
        self._flush()
        del self._token_ids[len(self.prompt_ids) + num_sampled :]
        del self._logprobs[num_sampled:]
        self.length = len(self._token_ids)
        self.num_computed = min(self.num_computed, self.length)

    def turn(self) -> Turn:
        self._flush()
        return Turn(
            prompt_ids=list(self.prompt_ids),
            token_ids=self._token_ids[len(self.prompt_ids) :],
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            versions=[run for run in self.versions if run[0] < self.num_sampled],
            experts=self.experts,
        )

    def _flush(self) -> None:
        """Converting once, when a sequence ends, is cheaper than after every burst."""
        for token_ids, logprobs in self._new:
            self._token_ids += token_ids.tolist()
            self._logprobs += logprobs.tolist()
        self._new.clear()


@dataclass(slots=True, eq=False)
class Handle:
    """A submitted request. `turns[i]` is None until sample i has ended, and if it is not wanted."""

    id: int
    sequences: list[Sequence]
    turns: list[Turn | None]
    on_turn: OnTurn | None

    @property
    def is_done(self) -> bool:
        return all(self.turns[sequence.index] is not None for sequence in self.sequences)


class Load(NamedTuple):
    num_running: int
    num_waiting: int
    """Requests, of one or several samples, that have not started."""
    num_free_pages: int


class EngineReport(NamedTuple):
    """What an engine reports after a step."""

    turns: list[tuple[Key, int, Turn]]
    """Finished samples: the request's key, the sample's index, its turn."""
    refused: list[tuple[Key, str]]
    """Requests that the engine cannot serve, and why."""
    load: Load
    policy_version: int
    first_versions: Collection[tuple[Key, int, int]] = ()
    """Only when the policy version is new: (key, index, version of the first token) of every sample
    that continues. Samples not listed start under the new version."""


def find_stop(sequence: Sequence, num_new: int, decode: Decode) -> int | None:
    """How many sampled tokens there are up to the one that completes a stop text; None if none of
    the last `num_new` does. Only the end of a long reply is decoded."""
    token_ids = sequence.token_ids
    stops = sequence.params.stop
    num_old = sequence.length - num_new
    start = _tail_start(sequence, num_old, max(map(len, stops)) + TAIL_MARGIN, decode)

    def has_stop(text: str) -> bool:
        return any(stop in text for stop in stops)

    whole = decode(token_ids[start:])
    if not has_stop(whole) and not whole.endswith(HALF_CHARACTER):
        return None
    ends = range(num_old + 1, sequence.length + 1)
    end = next((end for end in ends if has_stop(decode(token_ids[start:end]))), None)
    return None if end is None else end - len(sequence.prompt_ids)


def _tail_start(sequence: Sequence, end: int, num_characters: int, decode: Decode) -> int:
    """Where to begin decoding in order to see the last characters before `end`.

    Special tokens have no text, and a character may take several tokens: begin earlier then.
    """
    first = len(sequence.prompt_ids)
    num_tokens = num_characters
    while (start := end - num_tokens) > first:
        text = decode(sequence.token_ids[start:end])
        if len(text) >= num_characters and not text.startswith(HALF_CHARACTER):
            return start
        num_tokens *= 2
    return first
