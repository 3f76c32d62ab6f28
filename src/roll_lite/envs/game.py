"""Games as conversations: a subclass has the rules, `Game` the messages, the limits, the metrics.

A game in twenty lines is guess.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from roll_lite.checks import at_least, finite
from roll_lite.envs.env import Observation
from roll_lite.types import FinishReason

SYSTEM = "You play a game. Win it with as high a reward as you can."
OPEN, CLOSE = "<answer>", "</answer>"


@dataclass(kw_only=True)
class Game(ABC):
    """An episode ends when `is_over`, or after `max_steps` replies, valid or not.

    The last step's `info["parts"]` has `success`, the shares of `valid` and of `effective` actions
    (those that changed what the player sees), and the number of `turns`.
    """

    max_steps: int = 10
    max_tokens: int = 64
    """Tokens that a reply may have, as the player is told; SamplingParams enforces it."""
    invalid_reward: float = 0.0
    """Reward for a reply without a valid action, which changes nothing in the game."""
    finish_reason: FinishReason = field(default="stop", init=False)

    is_over = is_won = False
    """A subclass sets these two in `start` and `act`, or makes them properties."""

    def __post_init__(self):
        at_least(1, self, "max_steps", "max_tokens")
        finite(self, "invalid_reward")

    @property
    @abstractmethod
    def instruction(self) -> str:
        """The rules, the meaning of each symbol, and the actions."""

    @abstractmethod
    def start(self, random: Random) -> None:
        """Begin an episode, in which everything random comes from `random`."""

    @abstractmethod
    def observe(self) -> str:
        """What the player sees."""

    @abstractmethod
    def actions(self) -> Sequence[str]:
        """The actions that are valid now."""

    @abstractmethod
    def act(self, action: str) -> float:
        """Take a valid action, as `actions` spells it; return the reward."""

    def solve(self) -> list[str]:
        """Actions that win from here, or the first of them; none if no solver knows any."""
        return []

    def read(self, reply: str) -> str | None:
        """The action of a reply, in any case; None if it has none that is valid."""
        answer = (answer_of(reply) or "").lower()
        return next((action for action in self.actions() if action.lower() == answer), None)

    def parts(self) -> dict[str, float]:
        """Metrics of the finished episode."""
        return {
            "success": float(self.is_won),
            "valid": self._num_valid / self._num_turns,
            "effective": self._num_effective / self._num_turns,
            "turns": float(self._num_turns),
        }

    def reset(self, seed: int) -> tuple[Observation, dict]:
        self._num_turns = self._num_valid = self._num_effective = 0
        self.start(Random(seed))
        first = f"{self.instruction}\n\n{self._turn_block()}"
        return ({"role": "system", "content": SYSTEM}, {"role": "user", "content": first}), {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict]:
        chosen = self.read(action)
        reward = self.invalid_reward if chosen is None else self._act(chosen)
        self._num_turns += 1
        truncated = self._num_turns >= self.max_steps and not self.is_over
        if self.is_over or truncated:
            return (), reward, self.is_over, truncated, {"parts": self.parts()}
        note = "Your reply had no valid action.\n" if chosen is None else ""
        return ({"role": "user", "content": note + self._turn_block()},), reward, False, False, {}

    def _act(self, action: str) -> float:
        before = self.observe()
        reward = self.act(action)
        self._num_valid += 1
        self._num_effective += self.observe() != before
        return reward

    def _turn_block(self) -> str:
        return (
            f"Turn {self._num_turns + 1}:\n{self.observe()}\n"
            f"Answer strictly in this format: {OPEN} [your answer] {CLOSE}\n"
            f"Actions left: {self.max_steps - self._num_turns}. "
            f"A response has at most {self.max_tokens} tokens.\nDecide the next action."
        )


def answer_of(reply: str) -> str | None:
    """The text between the first tags, stripped; None without them."""
    _, _, rest = reply.partition(OPEN)
    inside, closed, _ = rest.partition(CLOSE)
    return inside.strip() if closed else None


def as_reply(action: str) -> str:
    return f"{OPEN}{action}{CLOSE}"
