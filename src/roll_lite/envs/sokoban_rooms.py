"""Rooms for Sokoban: a random walk digs the floor, then boxes are pulled off their targets.

Pulling is play in reverse, so every room can be solved. A cell is a number, row * width + column.
Walls surround the floor, so no step leaves the room.
"""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import NamedTuple

from roll_lite.checks import UserError

TURN_PROBABILITY = 0.35
"""That the walk draws a new direction before a step."""
STEPS_PER_SIDE = 3.4
"""Steps of the walk, for each cell of a side."""
MAX_DRAWS = 1000
DIGS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
"""Cells around the walk that one step digs, as changes of row and column."""


class Room(NamedTuple):
    width: int
    floor: frozenset[int]
    """All cells that are not walls."""
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets

    @property
    def steps(self) -> dict[str, int]:
        return {"Up": -self.width, "Down": self.width, "Left": -1, "Right": 1}


def push(room: Room, step: int) -> Room:
    """The room after a step of the player, who pushes a box if one is in the way."""
    ahead, beyond = room.player + step, room.player + 2 * step
    if ahead not in room.floor:
        return room
    if ahead not in room.boxes:
        return room._replace(player=ahead)
    if beyond not in room.floor or beyond in room.boxes:
        return room
    return room._replace(player=ahead, boxes=room.boxes - {ahead} | {beyond})


def shortest_solution(room: Room) -> list[str] | None:
    """Breadth-first search; None if no sequence of actions solves the room."""
    queue, seen = deque([(room, ())]), {room[3:]}
    while queue:
        found, path = queue.popleft()
        if found.is_solved:
            return list(path)
        for action, step in room.steps.items():
            after = push(found, step)
            if after[3:] not in seen:
                seen.add(after[3:])
                queue.append((after, (*path, action)))
    return None


@lru_cache(maxsize=256)
def room_of(seed: int, size: int, num_boxes: int, search_depth: int) -> Room:
    """The samples of a group begin in the same room, which takes milliseconds to make."""
    return draw_room(Random(seed), size, num_boxes, search_depth)


def draw_room(random: Random, size: int, num_boxes: int, search_depth: int) -> Room:
    """A room of size x size with all boxes off their targets; others are drawn again."""
    for _ in range(MAX_DRAWS):
        floor = _dig(random, size)
        if len(floor) <= num_boxes + 1:
            continue
        player, *targets = random.sample(sorted(floor), num_boxes + 1)
        solved = Room(size, floor, frozenset(targets), frozenset(targets), player)
        room, distance = _pull_boxes(solved, search_depth)
        if distance > 0:
            return _walk_away(random, room, 0.8 if distance == 1 else 0.5)
    raise UserError(
        f"size={size} with num_boxes={num_boxes} and search_depth={search_depth} gave no room in "
        f"{MAX_DRAWS} draws; use a larger size, fewer boxes or a deeper search"
    )


def _dig(random: Random, size: int) -> frozenset[int]:
    """The floor along a random walk that stays off the outer walls."""
    directions, floor, inside = ((1, 0), (0, 1), (-1, 0), (0, -1)), set(), range(1, size - 1)
    direction = random.choice(directions)
    row, column = random.randrange(1, size), random.randrange(1, size)
    for _ in range(int(STEPS_PER_SIDE * size)):
        if random.random() < TURN_PROBABILITY:
            direction = random.choice(directions)
        row = min(max(row + direction[0], 1), size - 2)
        column = min(max(column + direction[1], 1), size - 2)
        dug = ((row + down, column + right) for down, right in random.choice(DIGS))
        floor |= {r * size + c for r, c in dug if r in inside and c in inside}
    return frozenset(floor)


class _Reverse(NamedTuple):
    """A state of reverse play."""

    player: int
    boxes: tuple[int, ...]
    """In the order of the targets they come from."""
    last_pulled: int | None
    num_swaps: int
    """How often another box was pulled than before, counting the first."""


def _pull_boxes(solved: Room, search_depth: int) -> tuple[Room, int]:
    """The best room that depth-first reverse play finds, and how far its boxes are from home.

    The score is that distance times the swaps between boxes, for states with all targets free.
    """
    home = tuple(sorted(solved.targets))
    stack, seen = [(_Reverse(solved.player, home, None, 0), 1)], set()
    best, best_score = stack[0][0], 0
    while stack:
        state, depth = stack.pop()
        key = state.player, frozenset(state.boxes)
        if depth >= search_depth or key in seen:
            continue
        seen.add(key)
        score = state.num_swaps * _distance(home, state.boxes, solved.width)
        if score > best_score and solved.targets.isdisjoint((state.player, *state.boxes)):
            best, best_score = state, score
        stack += [(after, depth + 1) for after in reversed([*_pulls(solved, state)])]
    room = solved._replace(player=best.player, boxes=frozenset(best.boxes))
    return room, _distance(home, best.boxes, solved.width)


def _pulls(room: Room, state: _Reverse) -> Iterator[_Reverse]:
    """The states after each step; a box behind the player always follows."""
    player, boxes, last, num_swaps = state
    for step in room.steps.values():
        if player + step not in room.floor or player + step in boxes:
            continue
        if player - step not in boxes:
            yield state._replace(player=player + step)
            continue
        index = boxes.index(player - step)
        moved = (*boxes[:index], player, *boxes[index + 1 :])
        yield _Reverse(player + step, moved, index, num_swaps + (index != last))


def _distance(home: tuple[int, ...], boxes: tuple[int, ...], width: int) -> int:
    """Sum of the Manhattan distances of the boxes from their targets."""
    pairs = [(divmod(a, width), divmod(b, width)) for a, b in zip(home, boxes, strict=True)]
    return sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in pairs)


def _walk_away(random: Random, room: Room, probability: float) -> Room:
    """With this probability, move the player one to three cells, touching no cell twice."""
    if random.random() > probability:
        return room
    seen = {room.player}
    while len(seen) <= 3:
        free = room.floor - room.boxes - seen
        cells = [room.player + s for s in room.steps.values() if room.player + s in free]
        if not cells:
            break
        room = room._replace(player=random.choice(cells))
        seen.add(room.player)
        if random.random() > 0.5:
            break
    return room
