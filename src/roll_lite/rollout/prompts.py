"""Where prompts come from, how often each has been sampled, and the seeds that follow."""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from roll_lite.checks import UserError
from roll_lite.options import name_of, where
from roll_lite.rollout.history import History
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


Choose = Callable[[PromptSource, History], Prompt]
"""Says which prompt comes next: next(source), source.next_of(domain) or one of source.rows."""


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

    def __init__(
        self,
        prompts: PromptSource | Iterator[Prompt],
        choose: Choose | None = None,
        pass_reward: float = 1.0,
    ):
        """With `choose` it is that function which draws from the prompts."""
        methods = ("next_of", "comes_again", "state_dict", "load_state_dict")
        missing = [name for name in methods if not hasattr(prompts, name)]
        if 0 < len(missing) < len(methods):
            raise TypeError(
                f"{type(prompts).__name__} has no {' and no '.join(missing)}; a PromptSource has "
                f"all of {', '.join(methods)}, a plain iterator none"
            )
        self._source = PlainPrompts(prompts) if missing else prompts
        self.choose = choose
        self.history = History(pass_reward)
        """What `choose` gets to see; empty without it."""
        self._num_visits: Counter[str] = Counter()
        self._unfinished: list[Visit] = []
        """Visits that a stopped run had not finished; they come first."""

    def draw(self, domain: str | None) -> Visit | None:
        """The next visit; None when there are no more prompts.

        With a domain, to replace a dropped group, it is of that domain if the source can give one.
        `choose` is not told the domain: what it returns comes next.
        """
        for place, visit in enumerate(self._unfinished):
            if domain in (None, visit.prompt.domain):
                return self._unfinished.pop(place)
        if self.choose:
            prompt = self._chosen(self.choose)
        else:
            prompt = next(self._source, None) if domain is None else self._source.next_of(domain)
        return self._visit(prompt) if prompt else None

    def state_dict(self, running: list[Visit]) -> dict[str, Any]:
        """As plain JSON; `running` visits count as unfinished and are sampled again on resume."""
        unfinished = [*running, *self._unfinished]
        return {
            "visits": dict(self._num_visits),
            "unfinished": [[write_prompt(visit.prompt), visit.number] for visit in unfinished],
            "prompts": self._source.state_dict(),
            **({"history": self.history.state_dict()} if self.choose else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_visits = Counter(state["visits"])
        self._unfinished = [Visit(read_prompt(p), number) for p, number in state["unfinished"]]
        if state["prompts"] is not None:
            self._source.load_state_dict(state["prompts"])
        if self.choose and "history" in state:
            self.history.load_state_dict(state["history"])
        elif self.choose:
            print("warning: no prompts() chose before: its history begins now", file=sys.stderr)
        elif "history" in state:
            print("warning: no prompts() any more: the order of the data is used", file=sys.stderr)

    def _chosen(self, choose: Choose) -> Prompt:
        place = f"{where(choose)}: {name_of(choose)}()"
        try:
            prompt = choose(self._source, self.history)
        except StopIteration:  # it would end coroutines in a way of its own
            raise UserError(
                f"{place} raised StopIteration: there are no more prompts; return one of "
                "source.rows again, or name data that does not end"
            ) from None
        if not isinstance(prompt, Prompt):
            raise UserError(
                f"{place} returned {prompt!r:.100}, which is no Prompt; return next(source), "
                "source.next_of(domain) for one of source.domains, or one of source.rows"
            )
        domains = getattr(self._source, "domains", (prompt.domain,))
        if prompt.domain not in domains:
            raise UserError(
                f"{place} returned a prompt of domain {prompt.domain!r}, which the data does not "
                f"have; return one of {', '.join(domains)}"
            )
        self.history.num_drawn += 1
        return prompt

    def _visit(self, prompt: Prompt) -> Visit:
        if not self.choose and not self._source.comes_again(prompt):
            return Visit(prompt, 0)
        self._num_visits[prompt.id] += 1
        return Visit(prompt, self._num_visits[prompt.id] - 1)
