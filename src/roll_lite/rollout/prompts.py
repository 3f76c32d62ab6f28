"""Where prompts come from, how often each has been sampled, and the seeds that follow."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from roll_lite.checks import UserError
from roll_lite.rollout.record import read_prompt, write_prompt
from roll_lite.types import Prompt


class PromptSource(Protocol):
    """An iterator of prompts that can be resumed and asked for a domain, such as data.Mixture."""

    def __next__(self) -> Prompt: ...

    def next_of(self, domain: str) -> Prompt | None:
        """A prompt to replace a dropped one of this domain; None if there is none."""

    def comes_again(self, prompt: Prompt) -> bool:
        """Whether the prompt may be drawn again, so that its visits have to be counted."""

    def state_dict(self) -> dict[str, Any] | None:
        """The position, as plain JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PlainPrompts:
    """A plain iterator as a PromptSource. It has no position that could be saved."""

    def __init__(self, prompts: Iterator[Prompt]):
        self._prompts = prompts

    def __next__(self) -> Prompt:
        return next(self._prompts)

    def next_of(self, domain: str) -> Prompt | None:
        """The next prompt, whatever its domain."""
        return next(self._prompts, None)

    def comes_again(self, prompt: Prompt) -> bool:
        return True

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise UserError(
            "the saved state has a position in its prompts, but a plain iterator cannot be moved "
            "there; resume with a prompt source like the one that was saved"
        )


@dataclass(frozen=True, slots=True)
class Visit:
    """One occasion on which a prompt is sampled. Every visit of a prompt has its own seed."""

    prompt: Prompt
    number: int


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on all parts and their order."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class PromptQueue:
    """Draws the prompts to sample next and numbers their visits."""

    def __init__(self, prompts: PromptSource | Iterator[Prompt]):
        methods = ("next_of", "comes_again", "state_dict", "load_state_dict")
        missing = [name for name in methods if not hasattr(prompts, name)]
        if 0 < len(missing) < len(methods):
            raise TypeError(
                f"{type(prompts).__name__} has no {' and no '.join(missing)}; a PromptSource has "
                f"all of {', '.join(methods)}, a plain iterator none"
            )
        self._source = PlainPrompts(prompts) if missing else prompts
        self._num_visits: Counter[str] = Counter()
        self._unfinished: list[Visit] = []
        """Visits that a stopped run had not finished; they come first."""

    def draw(self, domain: str | None) -> Visit | None:
        """The next visit; None when there are no more prompts.

        With a domain, to replace a dropped group, it is of that domain if the source can give one.
        """
        for place, visit in enumerate(self._unfinished):
            if domain in (None, visit.prompt.domain):
                return self._unfinished.pop(place)
        prompt = next(self._source, None) if domain is None else self._source.next_of(domain)
        return self._visit(prompt) if prompt else None

    def state_dict(self, running: list[Visit]) -> dict[str, Any]:
        """As plain JSON; `running` visits count as unfinished and are sampled again on resume."""
        unfinished = [*running, *self._unfinished]
        return {
            "visits": dict(self._num_visits),
            "unfinished": [[write_prompt(visit.prompt), visit.number] for visit in unfinished],
            "prompts": self._source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_visits = Counter(state["visits"])
        self._unfinished = [Visit(read_prompt(p), number) for p, number in state["unfinished"]]
        if state["prompts"] is not None:
            self._source.load_state_dict(state["prompts"])

    def _visit(self, prompt: Prompt) -> Visit:
        if not self._source.comes_again(prompt):
            return Visit(prompt, 0)
        self._num_visits[prompt.id] += 1
        return Visit(prompt, self._num_visits[prompt.id] - 1)
