"""How many rewards failed, and when that is too many to go on."""

from collections import Counter, deque

from roll_lite.types import Prompt
from roll_lite.workers.calls import Failure
from roll_lite.workers.errors import RewardsBroken

WINDOW = 200
"""Replies over which the share of errors is taken."""
MIN_REPLIES = 50
"""As long as there were fewer, errors are only counted."""
NUM_EXAMPLES = 3
_COUNTED = {"raised": (), "timeout": ("timeouts",), "crash": ("crashes",)}


class Tally:
    def __init__(self, max_error_share: float):
        if not 0 <= max_error_share <= 1:
            raise ValueError(f"max_error_share={max_error_share} must be from 0 to 1 (never)")
        self._max_error_share = max_error_share
        self._counts: Counter[str] = Counter()
        self._replies: deque[tuple[str, str, bool]] = deque(maxlen=WINDOW)
        """Prompt, reply, and whether its reward failed."""
        self._failed: set[tuple[str, str]] = set()
        """Those of the replies whose reward failed: tried again, they are still one reply."""
        self._examples: deque[str] = deque(maxlen=NUM_EXAMPLES)

    def record(self, prompt: Prompt, reply: str, seconds: float, failure: Failure | None) -> None:
        """Count a call. RewardsBroken, and nothing else, says that going on is pointless."""
        self._counts["calls"] += 1
        self._counts["seconds"] += seconds
        if failure:
            self._counts.update(("errors", *_COUNTED[failure.kind]))
        if (prompt.id, reply) not in self._failed:
            self._note(prompt.id, reply, failure)
        share = len(self._failed) / len(self._replies)
        if len(self._replies) >= MIN_REPLIES and share > self._max_error_share:
            raise RewardsBroken(
                f"{len(self._failed)} of the last {len(self._replies)} rewards failed, more than "
                f"max_error_share={self._max_error_share}. The last of them:\n"
                + "\n".join(self._examples)
            )

    def _note(self, prompt_id: str, reply: str, failure: Failure | None) -> None:
        if len(self._replies) == WINDOW and self._replies[0][2]:
            self._failed.discard(self._replies[0][:2])
        self._replies.append((prompt_id, reply, failure is not None))
        if failure:
            self._failed.add((prompt_id, reply))
            self._examples.append(f"- prompt {prompt_id}, reply {reply[:80]!r}: {failure.summary}")

    def metrics(self) -> dict[str, float]:
        """Since the last call: calls, their seconds altogether, and how many failed.

        Errors are all failures; timeouts and crashes are those among them.
        """
        counts, self._counts = self._counts, Counter()
        names = ("calls", "seconds", "errors", "timeouts", "crashes")
        return {f"reward/{name}": counts[name] for name in names}
