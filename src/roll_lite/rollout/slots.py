"""Which domains are to be trained on: slots, in the order in which prompts were drawn.

A slot is filled by a group of its domain, no matter which. When a group is dropped its slot stays,
so neither filters nor the length of replies change the shares of the domains.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping

from roll_lite.types import Group


class Slots:
    """Groups count for the oldest slots of their domain."""

    def __init__(self, domains: Iterable[str] = (), num_dropped: Mapping[str, int] | None = None):
        self.domains = list(domains)
        """Of all slots, oldest first."""
        self.num_dropped = Counter(num_dropped or {})
        """By domain: vacant slots whose groups were dropped. To fill one is a refill."""
        self._num_filled: Counter[str] = Counter()

    def add(self, domain: str) -> None:
        """The youngest slot, vacant."""
        self.domains.append(domain)

    def fill(self, domain: str) -> None:
        """A group takes a vacant slot of its domain."""
        self._num_filled[domain] += 1
        self._forget_dropped(domain)

    def vacate(self, domain: str, is_dropped: bool = False) -> None:
        """A group is gone."""
        self._num_filled[domain] -= 1
        self.num_dropped[domain] += is_dropped

    def close(self, index: int) -> None:
        """Nothing will ever fill a vacant slot."""
        self._forget_dropped(self.domains.pop(index))

    def is_refill(self, domain: str) -> bool:
        """Whether all groups that left vacant slots of a domain were dropped."""
        return self.num_dropped[domain] >= self._num_vacant(domain)

    def first_vacant(self, has_refills: bool = True) -> tuple[int, str | None]:
        """Index and domain of the first slot that may be filled; of a new one the domain is None.

        Without refills, those that dropped groups have left may not.
        """
        num_vacant = len(self.domains) - self._num_filled.total()
        if num_vacant > (0 if has_refills else self.num_dropped.total()):
            closed = set() if has_refills else set(filter(self.is_refill, self.num_dropped))
            left = self._num_filled.copy()
            for index, domain in enumerate(self.domains):
                if left[domain]:
                    left[domain] -= 1
                elif domain not in closed:
                    return index, domain
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

    def _num_vacant(self, domain: str) -> int:
        return self.domains.count(domain) - self._num_filled[domain]

    def _forget_dropped(self, domain: str) -> None:
        """One vacant slot less: those that others have left are filled first."""
        self.num_dropped[domain] = min(self.num_dropped[domain], self._num_vacant(domain))
