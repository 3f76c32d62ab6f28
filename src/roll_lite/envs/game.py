"""Games as conversations: a subclass has the rules, `Game` the messages, the limits, the metrics.

A whole game is guess.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from roll_lite.checks import at_least, check_choices, finite
from roll_lite.envs.env import Observation

SYSTEM = "You play a game. Win it with as high a reward as you can."
OPEN = "<answer>"
CLOSE = "</answer>"
Cell = tuple[int, int]
"""Row and column, from the top left."""


@dataclass(kw_only=True)
class Game(ABC):
    """An episode ends when `is_over`, or after `max_steps` replies, valid or not.

    Its measurements are the `success` of the last state, and the shares of `valid` and of
    `effective` replies (those that changed what the player sees).
    """

    max_steps: int = 10
    max_tokens: int = 64
    """Tokens that a reply may have, as the player is told; SamplingParams enforces it."""
    invalid_reward: float = 0.0
    """Reward for a reply without a valid action, which changes nothing in the game."""
    style: Literal["full", "short"] = "full"
    """short: the player reads nothing but what he sees, and replies with the action alone. For tiny
    models that have imitated a solver."""
    view: Literal["board", "places"] = "board"
    """places: spaces between the cells of a board, and below it the row and column of each thing.
    Small models do not see where a thing is in a drawing whose cells their tokenizer joins."""

    is_over = is_won = False
    """A subclass sets these two in `start` and `act`, or makes them properties."""

    def __post_init__(self):
        at_least(1, self, "max_steps", "max_tokens")
        finite(self, "invalid_reward")
        check_choices(self)

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
        answer = (self.answer_of(reply) or "").lower()
        return next((action for action in self.actions() if action.lower() == answer), None)

    def answer_of(self, reply: str) -> str | None:
        return reply.strip() if self.style == "short" else answer_of(reply)

    def as_reply(self, action: str) -> str:
        return action if self.style == "short" else as_reply(action)

    def measure(self) -> dict[str, float]:
        """Measurements of the state; the last ones are those of the episode."""
        return {"success": float(self.is_won)}

    def draw(self, rows: Iterable[Iterable[str]], places: dict[str, Iterable[Cell]]) -> str:
        """A board as text; `places` are the cells (row, column) of each kind of thing."""
        if self.view == "board":
            return "\n".join(map("".join, rows))
        lines = [f"{thing}: {_name(cells)}." for thing, cells in places.items()]
        return "\n".join([*map(" ".join, rows), *lines])

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        self._num_steps = 0
        self.start(Random(seed))
        state = self.observe()
        if self.style == "short":
            return state, {"state": state}
        system = {"role": "system", "content": SYSTEM}
        turn = {"role": "user", "content": self._turn_block(state)}
        return (system, turn), {"state": state, "rules": self.instruction}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        chosen = self.read(action)
        before = self.observe()
        reward = self.invalid_reward if chosen is None else self.act(chosen)
        self._num_steps += 1
        state = self.observe()
        info = {
            "state": state,
            "mean": {"valid": float(chosen is not None), "effective": float(state != before)},
            "last": self.measure(),
        }
        truncated = self._num_steps >= self.max_steps and not self.is_over
        return self._turn_block(state), reward, self.is_over, truncated, info

    def _turn_block(self, state: str) -> str:
        if self.style == "short":
            return state
        return (
            f"Turn {self._num_steps + 1}:\n{state}\n"
            f"Answer strictly in this format: {OPEN} [your answer] {CLOSE}\n"
            f"Actions left: {self.max_steps - self._num_steps}. "
            f"A response has at most {self.max_tokens} tokens.\nDecide the next action."
        )


def _name(cells: Iterable[Cell]) -> str:
    return "; ".join(f"row {row + 1}, column {column + 1}" for row, column in cells) or "none"


def answer_of(reply: str) -> str | None:
    """The text between the first tags, stripped; None without them."""
    _, _, rest = reply.partition(OPEN)
    inside, closed, _ = rest.partition(CLOSE)
    return inside.strip() if closed else None


def as_reply(action: str) -> str:
    return f"{OPEN}{action}{CLOSE}"
