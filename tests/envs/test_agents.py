"""Traces are episodes that the solver wins, with the words that the player shows."""

import asyncio
from itertools import islice

import pytest

from roll_lite.data import read_dialogues
from roll_lite.envs.__main__ import main
from roll_lite.envs.agents import AgentChat, draw_traces, shares
from roll_lite.envs.frozen_lake import FrozenLake
from roll_lite.envs.play import EpisodeOptions
from roll_lite.envs.specs import ENVS, env_tasks, make_env


def drawn(spec, count, *, mistakes=0.0, history=None, envs=ENVS):
    options = EpisodeOptions(history=history)
    return list(draw_traces(spec, count, seed=0, mistakes=mistakes, options=options, envs=envs))


def replies_of(row):
    return [message["content"] for message in row if message["role"] == "assistant"]


def replayed(spec, rows):
    """What the player shows if the replies of the rows are given, task after task."""
    for task, row in zip(env_tasks(spec, 0), rows, strict=False):
        left = iter(replies_of(row))
        chat = AgentChat(lambda env, left=left: next(left))
        asyncio.run(chat.play(make_env(spec), task))
        assert next(left, None) is None
        yield chat


@pytest.mark.parametrize("spec", ["frozen_lake", "sokoban:style=short,max_steps=30", "shop"])
def test_traces_win_and_are_what_the_player_shows(spec):
    rows = drawn(spec, 15)
    played = list(replayed(spec, rows))
    assert [chat.turns[-1] for chat in played] == rows
    assert all(chat.results[-1].measurements["last"]["success"] == 1 for chat in played)


def test_mistakes_are_random_actions_and_the_trace_goes_on():
    spec = "sokoban:style=short,max_steps=30"
    clean, erring = drawn(spec, 24), drawn(spec, 24, mistakes=0.5)
    assert erring == drawn(spec, 24, mistakes=0.5)
    assert [row[0] for row in clean] == [row[0] for row in erring]  # the same tasks
    first = [(replies_of(a)[0], replies_of(b)[0]) for a, b in zip(clean, erring, strict=True)]
    assert 7 <= sum(a == b for a, b in first) <= 22  # 15 expected: half, and a quarter by chance
    played = list(replayed(spec, erring))
    assert [chat.turns[-1] for chat in played] == erring
    num_won = sum(chat.results[-1].measurements["last"]["success"] for chat in played)
    assert 0 < num_won < 24


def test_with_a_history_a_row_is_what_the_model_reads_in_a_turn():
    (whole,), rows = drawn("guess", 1), drawn("guess", 1, history=0)
    assert replies_of(whole) == [reply for row in rows for reply in replies_of(row)]
    assert all([m["role"] for m in row] == ["system", "user", "assistant"] for row in rows)
    assert all("Guess a number from 1 to 100." in row[1]["content"] for row in rows)
    later = drawn("guess", 1, history=2)
    assert [len(replies_of(row)) for row in later] == [3] * (len(rows) - 2)


class SeenLake(FrozenLake):
    seeds = []  # noqa: RUF012

    def reset(self, seed):
        self.seeds.append(seed)
        return super().reset(seed)


def test_held_out_seeds_never_appear():
    drawn("seen", 30, mistakes=0.1, envs={"seen": SeenLake})
    held_out = {task.seed for task in islice(env_tasks("seen", 0, "held_out"), 1000)}
    assert len(set(SeenLake.seeds)) == 30 and not held_out & set(SeenLake.seeds)
    assert SeenLake.seeds == [task.seed for task in islice(env_tasks("seen", 0), 30)]


def test_the_command_writes_rows_for_sft(tmp_path, capsys):
    out = tmp_path / "traces.jsonl"
    command = ["traces", "frozen_lake", "guess:highest=9@2", "--episodes", "9", "--out", str(out)]
    assert main(command) == 0
    assert "9 dialogues of 9 episodes" in capsys.readouterr().out
    rows = read_dialogues(out)
    assert sum("1 to 9" in row.messages[1]["content"] for row in rows) == 6


def test_shares_follow_the_weights():
    assert shares(["a", "b:x=1@2", "c@0.5"], 7) == {"a": 2, "b:x=1": 4, "c": 1}
    assert sum(shares(["a", "b", "c"], 10).values()) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["guess@x"], "env='guess@x': 'x' is not a weight above 0"),
        (["guess", "guess@2"], "names one twice"),
        (["tool"], "env='tool' has no solver"),
        (["sokoban_10x10:max_steps=1"], "its solver lost 1000 times; raise max_steps"),
        (["guess", "--mistakes", "2"], "mistakes=2.0 must be from 0 to 1"),
        (["guess", "--history", "-1"], "history=-1 must be at least 0"),
    ],
)
def test_bad_commands_name_the_remedy(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("roll_lite.envs.agents.MAX_LOSSES", 10)
    assert main(["traces", *arguments, "--out", str(tmp_path / "x")]) == 2
    assert message.replace("1000", "10") in capsys.readouterr().err
