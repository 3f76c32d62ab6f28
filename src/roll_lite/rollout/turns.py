"""The model calls of a group's samples: which requests they become, and with which seeds."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Protocol

from roll_lite.engine.request import Request
from roll_lite.rollout.replicas import Asked, OnSample
from roll_lite.types import Sample, SamplingParams, Turn


class Ask(Protocol):
    def __call__(
        self,
        request: Request,
        futures: list[asyncio.Future],
        on_given: OnSample,
        on_retry: OnSample,
        near: Asked | None,
    ) -> Asked:
        """Have a request answered into the futures, near what an earlier one returned."""


class GroupTurns:
    """The turns of a group's samples. All begin alike, so the opening is read once and forked.

    The group stays with one replica, which has in its cache what a conversation began with.
    """

    def __init__(
        self,
        ask: Ask,
        num_samples: int,
        params: SamplingParams,
        seed: int,
        on_retry: Callable[[Sample], None],
    ):
        """`on_retry` is told of samples whose turn has to be generated again."""
        self.params, self.seed = params, seed
        self._ask, self._on_retry = ask, on_retry
        self._first = [asyncio.get_running_loop().create_future() for _ in range(num_samples)]
        self._samples: dict[int, tuple[Sample, Callable[[], None]]] = {}
        self._opening: list[int] | None = None
        self._home: Asked | None = None

    async def generate(
        self, sample: Sample, token_ids: list[int], on_given: Callable[[], None]
    ) -> Turn:
        """The sample's next turn; `on_given` is called when an engine has the request."""
        if not sample.turns and token_ids != (self._opening or token_ids):
            raise ValueError(
                f"sample {sample.index} of {sample.prompt.id} opens differently from its "
                "group; an environment must depend on nothing but the prompt and the seed"
            )
        self._samples[sample.index] = sample, on_given
        if not sample.turns:
            if self._opening is None:
                self._opening = token_ids
                self._submit(token_ids, self._first, self.seed, self._given, self._retry)
            elif self._home.replica is not None:
                on_given()
            return await self._first[sample.index]
        future = asyncio.get_running_loop().create_future()
        seed = derive_seed(self.seed, sample.index, len(sample.turns))
        index = sample.index
        self._submit(
            token_ids, [future], seed, lambda _: self._given(index), lambda _: self._retry(index)
        )
        return await future

    def first_version(self, sample: Sample) -> int | None:
        """Policy version of a sample's first token; None if it has none, as far as is known."""
        if sample.first_version is None and self._home is not None:
            return self._home.begun.get(sample.index)
        return sample.first_version

    def _submit(
        self,
        token_ids: list[int],
        futures: list[asyncio.Future],
        seed: int,
        on_given: OnSample,
        on_retry: OnSample,
    ) -> None:
        request = Request(
            prompt_ids=token_ids, params=self.params, num_samples=len(futures), seed=seed
        )
        asked = self._ask(request, futures, on_given, on_retry, self._home)
        self._home = self._home or asked

    def _given(self, index: int) -> None:
        if index in self._samples:  # the coroutines of others come later, or never
            _, on_given = self._samples[index]
            on_given()

    def _retry(self, index: int) -> None:
        if index in self._samples:
            sample, _ = self._samples[index]
            self._on_retry(sample)


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on all parts and their order."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
