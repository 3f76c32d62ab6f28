"""Sokoban's rooms can be solved, and boxes move as a second implementation on the text says."""

import random as global_random
from random import Random

import pytest

from roll_lite.envs.game import as_reply
from roll_lite.envs.sokoban import OTHER_SYMBOLS, Sokoban
from roll_lite.envs.sokoban_rooms import Room, draw_room, shortest_solution
from roll_lite.envs.specs import make_env

NAMES = ("sokoban", "sokoban_symbols", "sokoban_8x8", "sokoban_10x10")
CHANGES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


@pytest.mark.parametrize("name", NAMES)
def test_every_room_is_solved(name):
    game = make_env(f"{name}:max_steps=100")()
    for seed in range(100 if game.num_boxes == 1 else 20):
        game.reset(seed)
        assert not game.room.boxes & game.room.targets
        assert len(game.room.boxes) == len(game.room.targets) == game.num_boxes
        total, path = 0.0, game.solve()
        for action in path:
            _, reward, terminated, _, info = game.step(as_reply(action))
            total += reward
        assert terminated and info["last"] == {"success": 1}
        assert total == pytest.approx(10 + game.num_boxes - 0.1 * len(path))


def test_walls_surround_every_room():
    for seed in range(50):
        room = draw_room(Random(seed), 6, 1, 300)
        assert all(0 < cell // 6 < 5 and 0 < cell % 6 < 5 for cell in room.floor)
        assert room.boxes | room.targets | {room.player} <= room.floor


FLOOR, OBJECT = {"_": False, "O": True}, {"P": "_", "S": "O", "X": "_", "√": "O"}


def pushed(rows, action):
    """The rows of a room after a step, from its text alone."""
    grid = {(r, c): symbol for r, text in enumerate(rows) for c, symbol in enumerate(text)}
    here = next(cell for cell, symbol in grid.items() if symbol in "PS")
    down, right = CHANGES[action]
    there, beyond = ((here[0] + n * down, here[1] + n * right) for n in (1, 2))
    if grid[there] in "X√":
        if grid[beyond] not in FLOOR:
            return rows
        grid[beyond] = "√" if FLOOR[grid[beyond]] else "X"
        grid[there] = OBJECT[grid[there]]
    if grid[there] not in FLOOR:
        return rows
    grid[there] = "S" if FLOOR[grid[there]] else "P"
    grid[here] = OBJECT[grid[here]]
    return ["".join(grid[r, c] for c in range(len(rows))) for r in range(len(rows))]


@pytest.mark.parametrize(("name", "num_rooms"), [("sokoban", 30), ("sokoban_8x8", 10)])
def test_the_text_moves_as_a_second_implementation_says(name, num_rooms):
    game, random = make_env(f"{name}:max_steps=60")(), Random(1)
    for seed in range(num_rooms):
        game.reset(seed)
        is_over = False
        while not is_over:
            action, before = random.choice(game.actions()), game.observe()
            wanted = "\n".join(pushed(before.split("\n"), action))
            _, reward, terminated, truncated, _ = game.step(as_reply(action))
            assert game.observe() == wanted
            is_solved = "X" not in wanted
            gained = wanted.count("√") - before.count("√")
            assert reward == pytest.approx(-0.1 + gained + 10 * is_solved)
            assert terminated == is_solved
            is_over = terminated or truncated


def in_a_corridor(**options):
    """A player, a box, two targets with a box on the second: P X O √ in a row."""
    game = Sokoban(**options)
    game.reset(0)
    floor = frozenset(range(7, 13))
    game.room = Room(14, floor, frozenset({9, 10}), frozenset({8, 10}), 7)
    return game


def test_rewards_of_a_step():
    game = in_a_corridor()
    assert game.step("<answer>push</answer>")[1] == -0.15
    assert game.step(as_reply("Up"))[1] == pytest.approx(-0.1)
    assert game.step(as_reply("right"))[1] == pytest.approx(-0.1 + 1 + 10)
    game = in_a_corridor()
    game.room = game.room._replace(boxes=frozenset({10, 11}), player=9)
    assert game.step(as_reply("Right"))[1] == pytest.approx(-0.1)  # two boxes do not move
    game.room = game.room._replace(boxes=frozenset({10}))
    assert game.step(as_reply("Right"))[1] == pytest.approx(-0.1 - 1)


def test_a_room_that_cannot_be_solved_has_no_solution():
    game = in_a_corridor()
    game.room = game.room._replace(boxes=frozenset({10, 12}), player=11)
    assert shortest_solution(game.room) is None and game.solve() == []


def test_other_symbols_show_the_same_room():
    ours, theirs = Sokoban(), Sokoban(symbols=OTHER_SYMBOLS)
    ours.reset(3), theirs.reset(3)
    table = str.maketrans("#_O√XPS", "W.GCBA@")
    assert ours.observe().translate(table) == theirs.observe()
    assert "W is a wall" in theirs.instruction and "@ is you on a target" in theirs.instruction


def test_rooms_need_no_global_state():
    before = global_random.getstate()
    game = Sokoban()
    first = game.reset(8)
    Sokoban().reset(9)
    global_random.seed(1)
    assert Sokoban().reset(8) == first
    global_random.setstate(before)
    game.reset(10)
    assert global_random.getstate() == before


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="symbols='ab' must be 7 different symbols"):
        Sokoban(symbols="ab")
    with pytest.raises(ValueError, match="num_boxes=0"):
        Sokoban(num_boxes=0)
    with pytest.raises(ValueError, match="gave no room in 1000 draws; use a larger size"):
        Sokoban(size=5, num_boxes=9, search_depth=4).reset(0)
