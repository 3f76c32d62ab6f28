"""Slots: which domains to train on, in the order in which prompts were drawn.

Every prompt that is drawn adds a slot of its domain, which any group of that domain may fill. When
a group is dropped its slot stays, so neither filters nor slow samples change the domains' shares.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from roll_lite.types import Group


@dataclass(slots=True)
class Slot:
    domain: str
    is_given_up: bool = False
    """Its group was dropped and is not replaced."""


class Slots:
    """A queue of slots. The groups of a domain fill its oldest slots."""

    def __init__(self, domains: Iterable[str] = (), given_up: Collection[int] = ()):
        """`given_up` are indices."""
        self._slots = [Slot(domain, i in given_up) for i, domain in enumerate(domains)]
        self._num_given_up = len(given_up)
        self._num_filled: Counter[str] = Counter()

    @property
    def domains(self) -> list[str]:
        """The domain of each slot, oldest first."""
        return [slot.domain for slot in self._slots]

    @property
    def given_up(self) -> list[int]:
        return [index for index, slot in enumerate(self._slots) if slot.is_given_up]

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, domain: str) -> None:
        """Append a vacant slot."""
        self._slots.append(Slot(domain))

    def fill(self, domain: str) -> None:
        """A group takes a vacant slot of its domain."""
        self._num_filled[domain] += 1

    def vacate(self, domain: str) -> None:
        """A group is gone; another may take its slot."""
        self._num_filled[domain] -= 1

    def give_up(self, domain: str, rank: int = -1) -> None:
        """A group is gone, and its slot stays empty: number `rank` of the domain's slots."""
        self._num_filled[domain] -= 1
        own = [slot for slot in self._slots if slot.domain == domain and not slot.is_given_up]
        own[rank].is_given_up = True
        self._num_given_up += 1

    def revive(self) -> None:
        """Slots that were given up may be filled again."""
        for slot in self._slots:
            slot.is_given_up = False
        self._num_given_up = 0

    def close(self, index: int) -> None:
        """Remove a vacant slot that nothing can fill."""
        del self._slots[index]

    def first_vacant(self) -> tuple[int, str | None]:
        """Index and domain of the first vacant slot; the end and None if there is none."""
        if self._num_filled.total() + self._num_given_up < len(self._slots):
            left = self._num_filled.copy()
            for index, slot in enumerate(self._slots):
                if not slot.is_given_up:
                    if not left[slot.domain]:
                        return index, slot.domain
                    left[slot.domain] -= 1
        return len(self._slots), None

    def first_kept(self) -> int | None:
        """Index of the oldest slot that was not given up."""
        return next((i for i, slot in enumerate(self._slots) if not slot.is_given_up), None)

    def match(self, num_slots: int, ready: Mapping[int, Group]) -> list[int] | None:
        """The oldest group of its domain for each of the oldest slots; None if one is missing."""
        wanted = [slot.domain for slot in self._slots[:num_slots] if not slot.is_given_up]
        if len(ready) < len(wanted):
            return None
        by_domain: defaultdict[str, deque[int]] = defaultdict(deque)
        for number in sorted(ready):
            by_domain[ready[number].prompt.domain].append(number)
        if any(len(by_domain[domain]) < count for domain, count in Counter(wanted).items()):
            return None
        return [by_domain[domain].popleft() for domain in wanted]

    def release(self, num_slots: int) -> int:
        """Remove the oldest slots with their groups; returns how many had been given up."""
        released = self._slots[:num_slots]
        del self._slots[:num_slots]
        self._num_filled.subtract(slot.domain for slot in released if not slot.is_given_up)
        num_given_up = sum(slot.is_given_up for slot in released)
        self._num_given_up -= num_given_up
        return num_given_up
