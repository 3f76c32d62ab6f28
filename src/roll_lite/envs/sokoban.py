"""Sokoban: push all boxes onto the targets."""

from dataclasses import dataclass
from random import Random
from typing import Any

from roll_lite.checks import UserError, at_least
from roll_lite.envs.env import Observation
from roll_lite.envs.game import Game
from roll_lite.envs.sokoban_rooms import push, room_of, shortest_solution

MEANINGS = (
    "a wall",
    "empty floor",
    "a target",
    "a box on a target",
    "a box",
    "you",
    "you on a target",
)
SYMBOLS = "#_O√XPS"
OTHER_SYMBOLS = "W.GCBA@"
"""For validation: do the skills carry over to symbols that training never showed?"""
STEP, BOX, SOLVED = -0.1, 1.0, 10.0
"""Rewards: for a step, for a box that reaches a target (-1 if it leaves one), for the solution."""


@dataclass(kw_only=True)
class Sokoban(Game):
    size: int = 6
    num_boxes: int = 1
    search_depth: int = 300
    """Depth of the search in reverse play that makes the room."""
    symbols: str = SYMBOLS
    """One for each of MEANINGS."""
    invalid_reward: float = -0.15

    def __post_init__(self):
        super().__post_init__()
        at_least(5, self, "size")
        at_least(1, self, "num_boxes")
        at_least(4, self, "search_depth")
        if len(set(self.symbols)) != len(MEANINGS) or len(self.symbols) != len(MEANINGS):
            raise UserError(f"symbols={self.symbols!r} must be {len(MEANINGS)} different symbols")

    @property
    def instruction(self) -> str:
        pairs = zip(self.symbols, MEANINGS, strict=True)
        return (
            "Push all boxes onto targets. You can push a box, not pull it, and only one at a "
            "time.\n"
            f"Symbols: {', '.join(f'{symbol} is {meaning}' for symbol, meaning in pairs)}.\n"
            f"Actions: {', '.join(self.actions())}. Each moves you one cell and pushes the box "
            "there."
        )

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        self._seed = seed
        return super().reset(seed)

    def start(self, random: Random) -> None:
        self.room = room_of(self._seed, self.size, self.num_boxes, self.search_depth)

    @property
    def is_over(self) -> bool:
        return self.room.is_solved

    @property
    def is_won(self) -> bool:
        return self.room.is_solved

    def observe(self) -> str:
        cells = [self._symbol(cell) for cell in range(self.size**2)]
        room = self.room
        things = {"Targets": room.targets, "Boxes": room.boxes, "You": [room.player]}
        return self.draw(
            [cells[i : i + self.size] for i in range(0, len(cells), self.size)],
            {name: [divmod(i, self.size) for i in sorted(found)] for name, found in things.items()},
        )

    def _symbol(self, cell: int) -> str:
        wall, empty, target, done, box, player, player_on_target = self.symbols
        room, is_target = self.room, cell in self.room.targets
        if cell not in room.floor:
            return wall
        if cell == room.player:
            return player_on_target if is_target else player
        if cell in room.boxes:
            return done if is_target else box
        return target if is_target else empty

    def actions(self) -> list[str]:
        return ["Up", "Down", "Left", "Right"]

    def act(self, action: str) -> float:
        before, self.room = self.room, push(self.room, self.room.steps[action])
        gained = len(self.room.boxes & self.room.targets) - len(before.boxes & before.targets)
        return STEP + BOX * gained + SOLVED * self.room.is_solved

    def solve(self) -> list[str]:
        return shortest_solution(self.room) or []
