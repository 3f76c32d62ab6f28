"""Which domains are to be trained on: slots, in the order in which prompts were drawn.

A slot is filled by a group of its domain, no matter which. When a group is dropped its slot stays,
so neither filters nor the length of replies change the shares of the domains.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping

from roll_lite.types import Group


class Slots:
    """Groups count for the oldest slots of their domain."""

    def __init__(self, domains: Iterable[str] = ()):
        self.domains = list(domains)
        """Of all slots, oldest first."""
        self._num_filled: Counter[str] = Counter()

    def fill(self, domain: str) -> None:
        """A group takes a vacant slot of its domain, or else a new one."""
        self._num_filled[domain] += 1
        if self._num_filled[domain] > self.domains.count(domain):
            self.domains.append(domain)

    def vacate(self, domain: str) -> None:
        """A group is gone."""
        self._num_filled[domain] -= 1

    def close(self, index: int) -> None:
        """Nothing will ever fill a vacant slot."""
        del self.domains[index]

    def first_vacant(self) -> tuple[int, str | None]:
        """Index and domain of the first vacant slot; if all are filled, of a new one: None."""
        if self._num_filled.total() < len(self.domains):
            left = self._num_filled.copy()
            for index, domain in enumerate(self.domains):
                if not left[domain]:
                    return index, domain
                left[domain] -= 1
        return len(self.domains), None

    def match(self, num_slots: int, ready: Mapping[int, Group]) -> list[int] | None:
        """For each of the oldest slots the oldest group of its domain; None while one lacks."""
        wanted = self.domains[:num_slots]
        if len(ready) < len(wanted):
            return None
        by_domain: defaultdict[str, deque[int]] = defaultdict(deque)
        for number in sorted(ready):
            by_domain[ready[number].prompt.domain].append(number)
        if any(len(by_domain[domain]) < count for domain, count in Counter(wanted).items()):
            return None
        return [by_domain[domain].popleft() for domain in wanted]

    def release(self, num_slots: int) -> None:
        """The oldest slots and the groups in them are used."""
        self._num_filled.subtract(self.domains[:num_slots])
        del self.domains[:num_slots]
