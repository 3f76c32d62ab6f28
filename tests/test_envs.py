"""What all games share: the conversation, seeds, bad input, metrics; the tool; the commands."""

import asyncio
import re

import pytest

from roll_lite.envs.__main__ import main, play_episode, random_agent
from roll_lite.envs.game import Game, answer_of, as_reply
from roll_lite.envs.guess import Guess
from roll_lite.envs.registry import ENVS, make_env
from roll_lite.envs.tool import PythonTool, call_of, draw_product

GAMES = [name for name in ENVS if name != "tool"]


@pytest.mark.parametrize("name", ENVS)
def test_a_group_opens_equally_and_seeds_differ(name):
    openings = [make_env(name).reset(seed) for seed in (5, 5, 6, 7)]
    assert openings[0] == openings[1]
    assert name == "guess" or openings[2] != openings[3]


@pytest.mark.parametrize("name", GAMES)
def test_an_episode_depends_on_nothing_but_the_seed(name):
    def steps(game, seed):
        agent = random_agent(3)
        taken, is_over = [game.reset(seed)], False
        while not is_over:
            taken.append(game.step(agent(game)))
            is_over = taken[-1][2] or taken[-1][3]
        return taken

    used = make_env(name)
    steps(used, 1)
    assert steps(used, 2) == steps(make_env(name), 2)


BAD = ["", "Up", "<answer>", "</answer>", "<answer></answer>", "<answer> nowhere </answer>",
       "</answer>Up<answer>", "<answer>" * 100_000, "x" * 1_000_000, "\x00<answer>\x00</answer>",
       "<answer>Up, Up</answer>"]  # fmt: skip


@pytest.mark.parametrize("name", GAMES)
def test_bad_input_costs_the_penalty_and_changes_nothing(name):
    game = make_env(name, max_steps=len(BAD))
    game.reset(0)
    before = game.observe()
    for reply in BAD:
        _, reward, terminated, truncated, info = game.step(reply)
        assert reward == game.invalid_reward and not terminated and game.observe() == before
    assert truncated
    assert info["parts"].items() >= {"success": 0, "valid": 0, "effective": 0}.items()


def reference_answer(reply):
    found = re.search(r"<answer>(.*?)</answer>", reply, re.DOTALL)
    return found and found[1].strip()


@pytest.mark.parametrize(
    "reply",
    [
        "<think>Left or right?</think><answer> Up\n</answer>",
        "<answer>Up</answer><answer>Down</answer>",
        "<answer>Up<answer>Down</answer></answer>",
        "</answer><answer>Up</answer>",
        "<answer>\n\n</answer>",
        "<ANSWER>Up</ANSWER>",
        "<answer>Up",
        "Up</answer>",
        "",
    ],
)
def test_the_first_answer_counts(reply):
    assert answer_of(reply) == reference_answer(reply)


def test_the_conversation():
    game = Guess(max_steps=2, max_tokens=32)
    (system, first), _ = game.reset(1)
    assert system["role"] == "system" and "reward" in system["content"]
    assert first["role"] == "user" and first["content"].startswith("Guess a number from 1 to 100.")
    wanted = ("Turn 1:", "No guess yet.", "<answer> [your answer] </answer>", "Actions left: 2.",
              "at most 32 tokens", "Decide the next action.")  # fmt: skip
    assert all(text in first["content"] for text in wanted)
    (second,), *_ = game.step(as_reply("1"))
    assert second["content"].startswith("Turn 2:\n1 is too low.") and second["role"] == "user"
    assert "Actions left: 1." in second["content"] and "Guess a number" not in second["content"]
    assert game.step(as_reply("2"))[:4] == ((), 0.0, False, True)


def test_halving_guesses_any_number_in_seven():
    turns = [play_episode(Guess(), lambda g: as_reply(g.solve()[0]), s) for s in range(150)]
    assert all(result["success"] == 1 and result["turns"] <= 7 for result in turns)


@pytest.mark.parametrize("field", ["max_steps", "max_tokens"])
def test_limits_are_checked(field):
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        Guess(**{field: 0})


def test_every_game_says_its_actions():
    for name in GAMES:
        game = make_env(name)
        game.reset(0)
        assert isinstance(game, Game)
        assert all(game.read(as_reply(action.upper())) for action in game.actions())


def tool_steps(tool, *replies):
    async def run():
        return [await tool.step(reply) for reply in replies]

    tool.reset(4)
    return asyncio.run(run())


def test_the_tool_runs_a_program_and_scores_the_answer(full):
    prompt = draw_product(4)
    question = prompt.messages[0]["content"].removeprefix("What is ").removesuffix("?")
    call, answer = tool_steps(
        PythonTool(), f"<python>print({question})</python>", rf"So \boxed{{{prompt.ground_truth}}}"
    )
    (message,), reward, *ends, info = call
    assert (reward, ends, info) == (0, [False, False], {})
    assert message["content"] == f"<output>\n{prompt.ground_truth}\n</output>\nRuns left: 0."
    assert answer[:4] == ((), 1.0, True, False)
    assert answer[4]["parts"]["tool_calls"] == 1


def test_the_tools_output_is_cut_and_its_errors_are_shown(full):
    tool = PythonTool(max_calls=3, max_output=20, seconds=0.5)
    calls = ["print('x' * 50)", "1 / 0", "while True: pass"]
    ends = tool_steps(tool, *(f"<python>{call}</python>" for call in calls))
    texts = [end[0][0]["content"] for end in ends]
    assert f"{'x' * 20}\n[30 more characters]" in texts[0] and "Runs left: 2." in texts[0]
    assert "Traceback" in texts[1]
    assert "[stopped: timeout limit]" in texts[2]


def test_a_call_too_many_is_the_answer():
    (end,) = tool_steps(PythonTool(max_calls=0), "<python>print(1)</python>")
    assert end[1:4] == (0.0, True, False)


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("<python>\nprint(1)\n</python>", "print(1)"),
        ("```python\nprint(1)\n```\n", "print(1)"),
        ("<python>1</python> <python>2</python>", "2"),
        (r"<python>1</python> It is \boxed{1}.", None),
        ("<python>1", None),
        ("no program", None),
        ("<python>" * 100_000, None),
    ],
)
def test_programs_of_replies(reply, program):
    assert call_of(reply) == program


def test_play_prints_the_episode(capsys):
    assert main(["play", "guess", "--agent", "solver", "--seed", "2"]) == 0
    printed = capsys.readouterr().out
    assert "--- system\nYou play a game" in printed and "<answer>50</answer>" in printed
    assert re.search(r"^success +1$", printed, re.MULTILINE)


def test_a_human_plays_from_the_keyboard(capsys, monkeypatch):
    typed = iter(["nothing", "50"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert main(["play", "guess", "--max-steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Your reply had no valid action." in printed and "valid       0.5" in printed


def test_bench_has_a_line_for_each_environment(capsys):
    assert main(["bench", "guess", "frozen_lake", "--episodes", "5", "--agent", "solver"]) == 0
    head, guess, lake = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["env", "episodes/s", "steps/s"]
    assert guess.split()[0] == "guess" and "100.0%" in guess and "100.0%" in lake


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["play", "chess"], "env='chess' is not known; use one of frozen_lake"),
        (["play", "tool", "--agent", "random"], "plays games only"),
        (["play", "tool", "--max-steps", "3"], "--max-steps is not read with tool"),
        (["bench", "guess", "--episodes", "0"], "episodes=0 must be at least 1"),
    ],
)
def test_bad_commands_name_the_remedy(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


RANDOM_PLAY = {  # success in percent within 10 and within 20 moves with ROLL's rules, tolerance
    "frozen_lake": (22.4, 28.1, 1.5),  # of 4,000 lakes
    "sokoban": (16.1, 24.1, 2.5),  # of 921 rooms x 5, so the standard error is about 1
    "sokoban_symbols": (17.4, 25.0, 2.5),
    "sokoban_8x8": (2.0, 5.0, 1.5),
    "sokoban_10x10": (3.2, 4.1, 1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM_PLAY)
def test_random_play_is_as_good_as_elsewhere(name):
    game, agent, num_episodes = make_env(name, max_steps=20), random_agent(0), 4000
    results = [play_episode(game, agent, seed) for seed in range(num_episodes)]
    *percents, tolerance = RANDOM_PLAY[name]
    for limit, percent in zip((10, 20), percents, strict=True):
        num_won = sum(result["success"] and result["turns"] <= limit for result in results)
        assert 100 * num_won / num_episodes == pytest.approx(percent, abs=tolerance)
