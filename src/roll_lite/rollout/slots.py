"""Slots: which domains to train on, in the order in which prompts were drawn.

Every prompt that is drawn adds a slot of its domain, which any group of that domain may fill. When
a group is dropped its slot stays, so neither filters nor slow samples change the domains' shares.

There may be a hundred thousand slots. Nothing here walks over them while samples end: slots have
numbers that grow, so those of a domain are a sorted list, in which a place is found by bisection.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence


class Slots:
    """A queue of slots. The groups of a domain fill its oldest slots."""

    def __init__(self, domains: Iterable[str] = (), given_up: Collection[int] = ()):
        """`given_up` are indices of slots whose groups were dropped and are not replaced."""
        self._domain_of: dict[int, str] = {}
        self._order: list[int] = []
        """The numbers of all slots, oldest first."""
        self._kept: defaultdict[str, list[int]] = defaultdict(list)
        """Those that were not given up, by domain."""
        self._given_up: list[int] = []
        self._groups: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of the groups that fill slots, by domain."""
        self._num_added = 0
        for index, domain in enumerate(domains):
            self.add(domain)
            if index in given_up:
                self._give_up(domain, -1)

    @property
    def domains(self) -> list[str]:
        """The domain of each slot, oldest first."""
        return [self._domain_of[slot] for slot in self._order]

    @property
    def given_up(self) -> list[int]:
        """Indices of the slots that were given up."""
        return [self._index(slot) for slot in self._given_up]

    def __len__(self) -> int:
        return len(self._order)

    def add(self, domain: str) -> None:
        """Append a vacant slot."""
        slot, self._num_added = self._num_added, self._num_added + 1
        self._domain_of[slot] = domain
        self._order.append(slot)
        self._kept[domain].append(slot)

    def fill(self, domain: str, group: int) -> None:
        """A group, whose number is larger than those of earlier ones, takes a vacant slot."""
        self._groups[domain].append(group)

    def vacate(self, domain: str, group: int) -> None:
        """A group is gone; another may take its slot."""
        self._remove(domain, group)

    def give_up(self, domain: str, group: int) -> None:
        """A group is gone, and the slot that it filled stays empty."""
        self._give_up(domain, self._remove(domain, group))

    def give_up_last(self, domain: str, group: int) -> None:
        """A group is gone, and the newest slot of its domain stays empty."""
        self._remove(domain, group)
        self._give_up(domain, -1)

    def revive(self) -> None:
        """Slots that were given up may be filled again."""
        for slot in self._given_up:
            insort(self._kept[self._domain_of[slot]], slot)
        self._given_up.clear()

    def close(self, index: int) -> None:
        """Remove a vacant slot that nothing can fill."""
        slot = self._order.pop(index)
        kept = self._kept[self._domain_of.pop(slot)]
        del kept[bisect_left(kept, slot)]

    def first_vacant(self) -> tuple[int, str | None]:
        """Index and domain of the first vacant slot; the end and None if there is none."""
        vacant = [
            (kept[num_filled], domain)
            for domain, kept in self._kept.items()
            if (num_filled := len(self._groups[domain])) < len(kept)
        ]
        if not vacant:
            return len(self._order), None
        slot, domain = min(vacant)
        return self._index(slot), domain

    def first_kept(self) -> int | None:
        """Index of the oldest slot that was not given up."""
        oldest = [kept[0] for kept in self._kept.values() if kept]
        return self._index(min(oldest)) if oldest else None

    def match(self, num_slots: int, ready: Mapping[str, Sequence[int]]) -> list[int] | None:
        """The oldest group of its domain for each of the oldest slots; None if one is missing.

        `ready` has the sorted numbers of complete groups by domain.
        """
        counts = {domain: self._num_among(num_slots, domain) for domain in self._kept}
        if any(len(ready.get(domain, ())) < count for domain, count in counts.items()):
            return None
        oldest = {domain: iter(ready.get(domain, ())) for domain in counts}
        given_up = set(self._given_up)
        wanted = [slot for slot in self._order[:num_slots] if slot not in given_up]
        return [next(oldest[self._domain_of[slot]]) for slot in wanted]

    def release(self, num_slots: int, taken: Collection[int] = ()) -> int:
        """Remove the oldest slots, and the groups that `match` gave for them.

        Returns how many of the slots had been given up.
        """
        gone = set(taken)
        for domain, kept in self._kept.items():
            del kept[: self._num_among(num_slots, domain)]
            self._groups[domain] = [n for n in self._groups[domain] if n not in gone]
        released = self._order[:num_slots]
        del self._order[:num_slots]
        for slot in released:
            del self._domain_of[slot]
        num_given_up = sum(slot not in self._domain_of for slot in self._given_up)
        del self._given_up[:num_given_up]
        return num_given_up

    def _remove(self, domain: str, group: int) -> int:
        """Returns the group's place among those of its domain."""
        rank = bisect_left(self._groups[domain], group)
        del self._groups[domain][rank]
        return rank

    def _give_up(self, domain: str, rank: int) -> None:
        insort(self._given_up, self._kept[domain].pop(rank))

    def _index(self, slot: int) -> int:
        return bisect_left(self._order, slot)

    def _num_among(self, num_slots: int, domain: str) -> int:
        """Slots of a domain that were not given up, among the oldest `num_slots`."""
        if num_slots >= len(self._order):
            return len(self._kept[domain])
        return bisect_left(self._kept[domain], self._order[num_slots])
