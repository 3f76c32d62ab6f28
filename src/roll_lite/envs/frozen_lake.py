"""FrozenLake: walk over ice to the goal, around the holes. The dynamics are Gymnasium's."""

from collections import deque
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import NamedTuple

from roll_lite.checks import UserError, at_least
from roll_lite.envs.game import Cell, Game

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
ACTIONS = list(MOVES)


class Lake(NamedTuple):
    size: int
    holes: frozenset[Cell]
    start: Cell
    goal: Cell


def draw_lake(random: Random, size: int, p_frozen: float) -> Lake:
    """A lake with a path from its start to its goal; each cell is frozen with p_frozen."""
    cells = list(product(range(size), repeat=2))
    while True:
        start, goal = random.sample(cells, 2)
        holes = {cell for cell in cells if random.random() >= p_frozen} - {start, goal}
        lake = Lake(size, frozenset(holes), start, goal)
        if shortest_path(lake, start) is not None:
            return lake


def move(lake: Lake, cell: Cell, action: str) -> Cell:
    """The cell next to this one; at the edge, this one."""
    row, column = (place + change for place, change in zip(cell, MOVES[action], strict=True))
    return (row, column) if 0 <= row < lake.size and 0 <= column < lake.size else cell


def slips(action: str) -> list[str]:
    """On slippery ice one of these happens, each as likely: the action, or one at a right angle."""
    index = ACTIONS.index(action)
    return [ACTIONS[(index + turn) % 4] for turn in (-1, 0, 1)]


def shortest_path(lake: Lake, start: Cell) -> list[str] | None:
    """Actions that lead to the goal on ice that is not slippery; None if there is no path."""
    queue = deque([(start, [])])
    seen = {start}
    while queue:
        cell, path = queue.popleft()
        if cell == lake.goal:
            return path
        for action in ACTIONS:
            found = move(lake, cell, action)
            if found not in seen | lake.holes:
                seen.add(found)
                queue.append((found, [*path, action]))
    return None


@dataclass(kw_only=True)
class FrozenLake(Game):
    size: int = 4
    p_frozen: float = 0.8
    is_slippery: bool = False
    invalid_reward: float = -0.01

    def __post_init__(self):
        super().__post_init__()
        at_least(2, self, "size")
        if not 0 < self.p_frozen <= 1:
            raise UserError(f"p_frozen={self.p_frozen} must be above 0 and at most 1")

    @property
    def instruction(self) -> str:
        ice = "is slippery: you may move at a right angle to your action" * self.is_slippery
        return (
            "Walk over a frozen lake to the goal without falling into a hole. The ice "
            f"{ice or 'is not slippery'}.\n"
            "Symbols: P is you, _ is ice, O is a hole, G is the goal, X is you in a hole, "
            f"√ is you on the goal.\nActions: {', '.join(ACTIONS)}."
        )

    def start(self, random: Random) -> None:
        self._random = random
        self.lake = draw_lake(random, self.size, self.p_frozen)
        self.player = self.lake.start

    @property
    def is_won(self) -> bool:
        return self.player == self.lake.goal

    @property
    def is_over(self) -> bool:
        return self.is_won or self.player in self.lake.holes

    def observe(self) -> str:
        rows = range(self.size)
        return self.draw(
            [[self._symbol((row, column)) for column in rows] for row in rows],
            {"Holes": sorted(self.lake.holes), "Goal": [self.lake.goal], "You": [self.player]},
        )

    def _symbol(self, cell: Cell) -> str:
        is_hole = cell in self.lake.holes
        is_goal = cell == self.lake.goal
        if cell == self.player:
            return "X" if is_hole else "√" if is_goal else "P"
        return "O" if is_hole else "G" if is_goal else "_"

    def actions(self) -> list[str]:
        return ACTIONS

    def act(self, action: str) -> float:
        if self.is_slippery:
            action = self._random.choice(slips(action))
        self.player = move(self.lake, self.player, action)
        return float(self.is_won)

    def solve(self) -> list[str]:
        return shortest_path(self.lake, self.player) or []
