"""FrozenLake moves as Gymnasium's does, and as a second implementation on the text does."""

from collections import Counter
from random import Random

import pytest

from roll_lite.envs.frozen_lake import ACTIONS, FrozenLake, Lake, draw_lake, move, slips
from roll_lite.envs.game import as_reply


def lakes():
    random = Random(5)
    while True:
        yield draw_lake(random, 4, 0.8)


def live_cells(lake):
    cells = [(row, column) for row in range(lake.size) for column in range(lake.size)]
    return [cell for cell in cells if cell not in lake.holes and cell != lake.goal]


def described(lake):
    """The lake as Gymnasium writes it."""
    symbols = {lake.start: "S", lake.goal: "G"} | dict.fromkeys(lake.holes, "H")
    rows = range(lake.size)
    return ["".join(symbols.get((row, column), "F") for column in rows) for row in rows]


def end_of(game, cell, action):
    game.player = cell
    reward = game.act(action)
    return game.player[0] * 4 + game.player[1], reward, game.is_over


@pytest.mark.parametrize(("is_slippery", "least"), [(False, 10_000), (True, 2_000)])
def test_the_dynamics_are_gymnasiums(is_slippery, least):
    toy_text = pytest.importorskip("gymnasium.envs.toy_text")
    game, num_pairs = FrozenLake(), 0
    for lake in lakes():
        game.lake = lake
        theirs = toy_text.FrozenLakeEnv(desc=described(lake), is_slippery=is_slippery).P
        for row, column in live_cells(lake):
            for index, action in enumerate(ACTIONS):
                taken = slips(action) if is_slippery else [action]
                ours, wanted = Counter(), Counter()
                for each in taken:
                    ours[end_of(game, (row, column), each)] += 1 / len(taken)
                for probability, *end in theirs[row * 4 + column][index]:
                    wanted[tuple(end)] += probability
                assert ours == pytest.approx(wanted)
                num_pairs += 1
        if num_pairs >= least:
            return


def walked(rows, action):
    """The rows of a lake after a step, from its text alone."""
    row = next(i for i, text in enumerate(rows) if "P" in text)
    column = rows[row].index("P")
    to_row = min(max(row + (action == "Down") - (action == "Up"), 0), len(rows) - 1)
    to_column = min(max(column + (action == "Right") - (action == "Left"), 0), len(rows) - 1)
    grid = [list(text.replace("P", "_")) for text in rows]
    grid[to_row][to_column] = {"_": "P", "O": "X", "G": "√"}[grid[to_row][to_column]]
    return ["".join(text) for text in grid]


def test_the_text_moves_as_a_second_implementation_says():
    game, random = FrozenLake(max_steps=1000), Random(1)
    for seed in range(60):
        game.reset(seed)
        while "P" in game.observe():
            action = random.choice(ACTIONS)
            wanted = walked(game.observe().split("\n"), action)
            _, reward, terminated, _, _ = game.step(as_reply(action))
            seen = game.observe()
            assert seen.split("\n") == wanted
            assert (reward, terminated) == (float("√" in seen), "P" not in seen)


def test_slippery_ice_is_the_action_or_a_right_angle_each_a_third():
    game, ends = FrozenLake(is_slippery=True, size=5), Counter()
    game.reset(0)
    game.lake = Lake(5, frozenset(), (0, 0), (4, 4))
    for _ in range(3000):
        game.player = (2, 2)
        game.act("Left")
        ends[game.player] += 1
    assert ends.keys() == {(2, 1), (1, 2), (3, 2)}
    assert min(ends.values()) > 900  # 1000 expected; the standard deviation is 26


def test_the_solver_wins_every_lake():
    game = FrozenLake()
    for seed in range(200):
        game.reset(seed)
        path = game.solve()
        assert len(path) >= 1  # start and goal differ
        for action in path:
            _, reward, terminated, _, info = game.step(as_reply(action))
            assert info["mean"] == {"valid": 1, "effective": 1}
            assert info["last"] == {"success": reward}
        assert terminated and reward == 1


def test_an_edge_stops_and_a_hole_ends():
    game = FrozenLake(size=2)
    game.reset(0)
    game.lake = Lake(2, frozenset({(0, 1)}), (0, 0), (1, 1))
    game.player = (0, 0)
    assert game.observe() == "PO\n_G"
    assert move(game.lake, (0, 0), "Up") == (0, 0)
    steps = [game.step(reply) for reply in (as_reply("Up"), "I go right.", as_reply("right"))]
    assert [step[1:4] for step in steps] == [
        (0, False, False), (-0.01, False, False), (0, True, False)
    ]  # fmt: skip
    assert [step[4]["state"] for step in steps] == ["PO\n_G", "PO\n_G", "_X\n_G"]
    assert [[*step[4]["mean"].values()] for step in steps] == [[1, 0], [0, 0], [1, 1]]
    assert all(step[4]["last"] == {"success": 0} for step in steps)


@pytest.mark.parametrize("options", [{"size": 1}, {"p_frozen": 0.0}, {"p_frozen": 1.5}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FrozenLake(**options)
