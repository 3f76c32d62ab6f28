"""What came of the prompts so far, for a function of yours that says which one comes next."""

from bisect import insort
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from roll_lite.types import Group, Sample


class Visits(NamedTuple):
    """The scored samples of a prompt, over all its visits."""

    num_samples: int
    num_passed: int
    last_rate: float
    """Share of the last visit's samples that passed."""
    step: int
    """`History.step` right after the last visit."""

    @property
    def rate(self) -> float:
        return self.num_passed / self.num_samples


NO_VISITS = Visits(0, 0, 0.0, 0)


class History(Mapping[str, Visits]):
    """Visits by prompt id. Groups that were dropped count too, samples that failed do not.

    It changes at the end of a step only, in the order in which prompts were drawn, so the order in
    which samples end changes nothing.
    """

    def __init__(self, pass_reward: float):
        """Passes are those of an evaluation: see `pass_rates`."""
        self._pass_reward = pass_reward
        self.step = 0
        """How many steps have been taken with this history."""
        self.num_drawn = 0
        """How many prompts the function has chosen. It differs at every call and is the same in a
        resumed run: random.Random(history.num_drawn) gives random numbers that can be repeated."""
        self._visits: dict[str, Visits] = {}
        self._ended: list[tuple[int, str, int, int]] = []
        """Groups that ended in this step, sorted: number, prompt id, samples, passed samples."""

    def __getitem__(self, prompt_id: str) -> Visits:
        if prompt_id not in self._visits:
            raise KeyError(f"prompt {prompt_id!r} has no samples yet: ask whether it is in history")
        return self._visits[prompt_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._visits)

    def __len__(self) -> int:
        return len(self._visits)

    def passes(self, sample: Sample) -> bool:
        return sample.score.passes(self._pass_reward)

    def note(self, number: int, group: Group) -> None:
        """A group has ended, and its samples are all scored; numbers are in the order of draws."""
        passed = list(filter(self.passes, group.samples))
        if group.samples:
            ended = number, group.prompt.id, len(group.samples), len(passed)
            insort(self._ended, ended, key=itemgetter(0))

    def update(self) -> None:
        """Between two steps: count the groups that have ended."""
        for _, prompt_id, num_samples, num_passed in self._ended:
            known = self._visits.get(prompt_id, NO_VISITS)
            self._visits[prompt_id] = Visits(
                num_samples=known.num_samples + num_samples,
                num_passed=known.num_passed + num_passed,
                last_rate=num_passed / num_samples,
                step=self.step,
            )
        self._ended.clear()

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "step": self.step,
            "num_drawn": self.num_drawn,
            "visits": dict(self._visits),
            "ended": [ended for _, *ended in self._ended],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.num_drawn = state["num_drawn"]
        self._visits = {prompt_id: Visits(*visits) for prompt_id, visits in state["visits"].items()}
        # Before the groups of this process, whose numbers begin at 0 again.
        self._ended = [(-1, *ended) for ended in state["ended"]]
