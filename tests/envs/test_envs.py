"""What all games share: the conversation, seeds, bad input, metrics; the tool; the commands."""

import asyncio
import io
import json
import re
from functools import partial
from itertools import islice
from typing import get_args

import pytest
from support.paths import DOCS

from roll_lite.code_files import CodeOptions
from roll_lite.envs.__main__ import main
from roll_lite.envs.agents import AgentChat, game_class, random_agent, solver
from roll_lite.envs.game import Game, answer_of, as_reply
from roll_lite.envs.guess import Guess
from roll_lite.envs.play import EpisodeOptions
from roll_lite.envs.specs import (
    ENVS,
    Split,
    env_tasks,
    make_env,
    options_of,
    parse_env,
    required_options,
)
from roll_lite.envs.tool import call_of, draw_product, draw_row, python_tool
from roll_lite.own_files import need_table
from roll_lite.types import Prompt

GAMES = [name for name in ENVS if game_class(ENVS[name]) and not required_options(ENVS[name])]


@pytest.mark.parametrize("name", GAMES)
def test_a_group_opens_equally_and_seeds_differ(name):
    openings = [make_env(name)().reset(seed) for seed in (5, 5, 6, 7)]
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

    used = make_env(name)()
    steps(used, 1)
    assert steps(used, 2) == steps(make_env(name)(), 2)


BAD = ["", "Up", "<answer>", "</answer>", "<answer></answer>", "<answer> nowhere </answer>",
       "</answer>Up<answer>", "<answer>" * 100_000, "x" * 1_000_000, "\x00<answer>\x00</answer>",
       "<answer>Up, Up</answer>"]  # fmt: skip


@pytest.mark.parametrize("name", GAMES)
def test_bad_input_costs_the_penalty_and_changes_nothing(name):
    game = make_env(f"{name}:max_steps={len(BAD)}")()
    game.reset(0)
    before = game.observe()
    for reply in BAD:
        _, reward, terminated, truncated, info = game.step(reply)
        assert reward == game.invalid_reward and not terminated and game.observe() == before
        assert info["state"] == before and info["mean"] == {"valid": 0, "effective": 0}
    assert truncated and info["last"]["success"] == 0


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


def played(make, agent, seed=1, **options):
    task = Prompt(id="", messages=(), domain="test", ground_truth="", seed=seed)
    chat = AgentChat(agent)
    ending = asyncio.run(chat.play(make, task, EpisodeOptions(**options)))
    return chat, chat.measurements(ending)


def saying(*replies):
    """An agent with a script."""
    left = iter(replies)
    return lambda env: next(left)


def test_the_conversation():
    chat, _ = played(make_env("guess:max_steps=2,max_tokens=32"), saying("1", as_reply("1")))
    (system, first, _), (*again, second, _) = chat.turns
    assert system["role"] == "system" and "reward" in system["content"]
    assert first["role"] == "user" and first["content"].startswith("Guess a number from 1 to 100.")
    wanted = ("Turn 1:", "No guess yet.", "<answer> [your answer] </answer>", "Actions left: 2.",
              "at most 32 tokens", "Decide the next action.")  # fmt: skip
    assert all(text in first["content"] for text in wanted)
    assert again == chat.turns[0] and second["role"] == "user"
    assert second["content"].startswith("Turn 2:\nNo guess yet.")
    assert "Actions left: 1." in second["content"] and "Guess a number" not in second["content"]


def test_with_a_limited_history_the_rules_stay():
    chat, _ = played(Guess, saying(*map(as_reply, "123"), as_reply("50")), history=0, max_turns=3)
    system, *_ = chat.turns[0]
    assert [turn[0] for turn in chat.turns] == [system] * 3
    assert [len(turn) for turn in chat.turns] == [3] * 3
    assert "1 to 100" in chat.turns[2][1]["content"] and "2 is too" in chat.turns[2][1]["content"]


def test_short_style_is_the_bare_observation_and_the_bare_action():
    make = make_env("frozen_lake:style=short")
    chat, measured = played(make, solver)
    first, reply = chat.turns[0]
    assert first["role"] == "user" and re.fullmatch(r"([PO_G]{4}\n){3}[PO_G]{4}", first["content"])
    assert reply["content"] in ("Left", "Down", "Right", "Up")
    assert measured["success"] == measured["valid"] == 1
    assert played(make, saying(*[as_reply("Up")] * 10))[1]["valid"] == 0


@pytest.mark.parametrize(
    ("name", "symbols"),
    [
        ("frozen_lake", {"Holes": "O", "Goal": "G", "You": "P"}),
        ("sokoban", {"Targets": "O√S", "Boxes": "X√", "You": "PS"}),
    ],
)
def test_the_places_are_those_of_the_board(name, symbols):
    for seed in range(50):
        board = make_env(name)().reset(seed)[1]["state"].splitlines()
        state = make_env(f"{name}:view=places")().reset(seed)[1]["state"].splitlines()
        assert [line.replace(" ", "") for line in state[: len(board)]] == board
        for line, (thing, signs) in zip(state[len(board) :], symbols.items(), strict=True):
            found = [
                f"row {i}, column {j}"
                for i, row in enumerate(board, 1)
                for j, symbol in enumerate(row, 1)
                if symbol in signs
            ]
            assert line == f"{thing}: {'; '.join(found) or 'none'}."


def test_measurements_are_combined_over_the_episode():
    replies = ["no", as_reply("1"), as_reply("1"), as_reply("18")]
    _, measured = played(Guess, saying(*replies), seed=1)  # the number is 18
    assert measured == {"return": 1, "turns": 4, "valid": 0.75, "effective": 0.5, "success": 1}


def test_halving_guesses_any_number_in_seven():
    results = [played(Guess, solver, seed)[1] for seed in range(150)]
    assert all(result["success"] == 1 and result["turns"] <= 7 for result in results)


@pytest.mark.parametrize("field", ["max_steps", "max_tokens"])
def test_limits_are_checked(field):
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        Guess(**{field: 0})


def test_every_game_says_its_actions():
    for name in GAMES:
        game = make_env(name)()
        game.reset(0)
        assert isinstance(game, Game)
        assert all(game.read(as_reply(action.upper())) for action in game.actions())


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("guess", {}),
        ("sokoban:max_steps=20", {"max_steps": 20}),
        ("x:a=true,b=-0.5,c=text,d=2,e=", {"a": True, "b": -0.5, "c": "text", "d": 2, "e": ""}),
        ("openenv:url=http://localhost:8000", {"url": "http://localhost:8000"}),
    ],
)
def test_specs(spec, options):
    assert parse_env(spec) == (spec.partition(":")[0], options)
    assert [*map(type, parse_env(spec)[1].values())] == [*map(type, options.values())]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chess", "env='chess' is not known; use one of frozen_lake, "),
        ("frozen_lake:siz=8", "has no option 'siz'; its options are max_steps, .*size, p_frozen"),
        ("frozen_lake:size=large", "size='large' must be a whole number"),
        ("frozen_lake:size=4.5", "size=4.5 must be a whole number"),
        ("frozen_lake:is_slippery=1", "is_slippery=1 must be true or false"),
        ("frozen_lake:style=long", "style='long' must be one of full, short"),
        ("frozen_lake:size=1", "size=1 must be at least 2"),
        ("frozen_lake:size", "'size' is not an option; write NAME:option=value"),
        ("frozen_lake:size=4,size=5", "'size=5' is not an option"),
        ("openenv", "lacks url; write openenv:url=..."),
        ("tool:max_calls=few", "max_calls='few' must be a whole number"),
        ("tool:chat=1", "has no option 'chat'; its options are data, max_calls"),
    ],
)
def test_bad_specs_name_the_remedy(spec, message):
    with pytest.raises(ValueError, match=message):
        make_env(spec)


def test_a_spec_changes_a_variant_of_an_environment():
    game = make_env("sokoban_8x8:size=9,invalid_reward=-1")()
    assert (game.size, game.num_boxes, game.invalid_reward) == (9, 2, -1)


FILE = """
class Coin:
    def __init__(self, sides=2):
        self.sides = sides

    def reset(self, seed):
        return f"Guess a number below {self.sides}.", {}

    def step(self, action):
        return "", float(action == "0"), True, False, {}

async def echo(chat, task, word="tea"):
    reply = await chat([{"role": "user", "content": word}])
    return float(reply["content"] == word)

ENVS = {"coin": Coin, "echo": echo}
"""


def test_environments_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    envs = CodeOptions(code=(str(tmp_path / "mine.py"),)).envs
    coin, echo = make_env("coin:sides=6", envs), make_env("echo:word=rice", envs)
    chat, measured = played(coin, saying("0"))
    assert "below 6" in chat.turns[0][0]["content"] and measured == {"return": 1, "turns": 1}
    assert played(echo, saying("rice"))[1]["return"] == 1
    assert list(options_of(envs["echo"])) == ["word"]
    with pytest.raises(ValueError, match="use one of coin, echo"):
        make_env("guess", envs)


@pytest.mark.parametrize(("number", "name"), [(0, "guess_digit"), (1, "guess_agent")])
def test_the_environments_of_the_docs_play(number, name, tmp_path):
    page = DOCS / "howto" / "environment.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)[number]
    (tmp_path / "mine.py").write_text(code)
    make = make_env(f"{name}:highest=20,tries=20", need_table(tmp_path / "mine.py", "ENVS"))
    guesses = ["no", *map(str, range(1, 21))]
    chat, measured = played(make, saying(*guesses), seed=1)  # the number is 5
    assert chat.turns[2][-2]["content"] == "Too low."
    assert measured == {"return": 1, "turns": 6, "valid": 5 / 6, "success": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no ENVS; write ENVS = "),
        ("ENVS = {}", "has no ENVS; write ENVS = "),
        ("ENVS = [1]", "line 1: ENVS must be a dictionary from names to functions or classes"),
        ("\nENVS = {'a': 1}", "line 2: ENVS must be a dictionary from names to functions or"),
    ],
)
def test_a_file_without_environments_is_refused(tmp_path, capsys, text, message):
    (tmp_path / "mine.py").write_text(text)
    assert main(["bench", "--code", str(tmp_path / "mine.py")]) == 2
    assert re.search(rf"mine\.py {message}", capsys.readouterr().err)
    assert main(["bench", "--code", str(tmp_path / "missing.py")]) == 2
    assert "missing.py is not a file; name a Python file" in capsys.readouterr().err


def tasks_of(spec, seed, split, count=1000):
    return list(islice(env_tasks(spec, seed, split), count))


def test_tasks_are_endless_and_their_splits_share_no_seed():
    train, held_out = (tasks_of("sokoban:max_steps=20", 3, split) for split in get_args(Split))
    assert train == tasks_of("sokoban:max_steps=20", 3, "train")
    assert train[7].id == "sokoban:max_steps=20/train/3/7" and train[7].messages == ()
    assert train[7].domain == "sokoban:max_steps=20" and train[7].extra == {"split": "train"}
    seeds = [task.seed for task in (*train, *held_out, *tasks_of("sokoban", 4, "train"))]
    assert len(set(seeds)) == 3000 and all(0 <= seed < 2**63 for seed in seeds)
    assert {task.seed % 2 for task in train} == {0} and {task.seed % 2 for task in held_out} == {1}
    assert [t.seed for t in train] == [t.seed for t in tasks_of("sokoban", 3, "train")]


def tool_answers(*replies, **options):
    chat, measured = played(partial(python_tool, **options), saying(*replies), seed=4)
    return [turn[-2]["content"] for turn in chat.turns], measured


def test_the_tool_runs_a_program_and_scores_the_answer(full):
    prompt = draw_product(4)
    question = prompt.messages[0]["content"]
    product = question.removeprefix("What is ").removesuffix("?")
    answer = rf"So \boxed{{{prompt.ground_truth}}}"
    texts, measured = tool_answers(f"<python>print({product})</python>", answer)
    assert texts[0].startswith(f"{question}\n\nYou may run Python programs, 1 at most")
    assert texts[1] == f"<output>\n{prompt.ground_truth}\n</output>\nRuns left: 0."
    assert measured.items() >= {"return": 1, "tool_calls": 1, "tool_errors": 0}.items()
    assert tool_answers(answer)[1].items() >= {"return": 1, "tool_calls": 0, "turns": 1}.items()


def test_the_tools_output_is_cut_and_its_errors_are_shown(full):
    calls = ["print('x' * 50)", "1 / 0", "while True: pass"]
    replies = [f"<python>{call}</python>" for call in calls]
    options = {"max_calls": 3, "max_output": 20, "seconds": 0.5}
    (_, *texts), measured = tool_answers(*replies, "I do not know.", **options)
    assert f"{'x' * 20}\n[30 more characters]" in texts[0] and "Runs left: 2." in texts[0]
    assert "Traceback" in texts[1]
    assert "[stopped: timeout limit]" in texts[2]
    assert measured.items() >= {"return": 0, "tool_calls": 3, "tool_errors": 2}.items()


def test_a_call_too_many_is_the_answer():
    _, measured = tool_answers("<python>print(1)</python>", max_calls=0)
    assert measured.items() >= {"return": 0, "turns": 1, "tool_calls": 0}.items()


def test_held_out_tasks_of_the_tool_ask_rows_of_their_own(tmp_path):
    rows = [{"prompt": f"What is {n} + 1?", "ground_truth": n + 1} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, held_out = (
        {draw_row(str(tmp_path / "rows.jsonl"), t).ground_truth for t in tasks_of("tool", 0, split)}
        for split in get_args(Split)
    )
    assert not train & held_out
    assert len(train) > 150 and 5 < len(held_out) < 40 and len(train | held_out) > 190
    with pytest.raises(ValueError, match=r"line 1: .* is not a row with prompt and ground_truth"):
        (tmp_path / "bad.jsonl").write_text('{"prompt": "?"}')
        draw_row(str(tmp_path / "bad.jsonl"), next(env_tasks("tool", 0)))


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
    assert main(["play", "guess:max_steps=2"]) == 0
    printed = capsys.readouterr().out
    assert "<answer>nothing</answer>" in printed and "valid       0.5" in printed


@pytest.mark.parametrize("stdin", [None, io.StringIO()])
def test_without_a_keyboard_the_game_is_left(stdin, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["play", "guess"]) == 1
    assert capsys.readouterr().err == "\nstopped before the episode ended\n"


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
        (["bench", "guess", "--episodes", "0"], "episodes=0 must be at least 1"),
    ],
)
def test_bad_commands_name_the_remedy(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


RANDOM_PLAY = {  # success in percent within 10 and within 20 moves with ROLL's rules
    "frozen_lake": (22.4, 28.1),  # of 4,000 lakes
    "sokoban": (16.1, 24.1),  # of 921 rooms x 5; the standard error is 0.9, as rooms differ a lot
    "sokoban_symbols": (17.4, 25.0),
    "sokoban_8x8": (2.0, 5.0),
    "sokoban_10x10": (3.2, 4.1),
}


def distinct_rooms(make, num_rooms):
    """Seeds of the distinct rooms of each thousand: a tenth of the 6x6 rooms are repetitions."""
    for start in range(0, num_rooms, 1000):
        seeds = range(start, start + 1000)
        yield from {make().reset(seed)[1]["state"]: seed for seed in seeds}.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM_PLAY)
def test_random_play_is_as_good_as_elsewhere(name):
    make, agent = make_env(f"{name}:max_steps=20"), random_agent(0)
    # A standard error of at most 0.8, below that of the reference
    num_rooms = 2000 if name in ("sokoban_8x8", "sokoban_10x10") else 3000
    seeds = range(4000) if name == "frozen_lake" else distinct_rooms(make, num_rooms)
    results = [played(make, agent, seed)[1] for seed in seeds]
    for limit, percent in zip((10, 20), RANDOM_PLAY[name], strict=True):
        num_won = sum(result["success"] and result["turns"] <= limit for result in results)
        assert 100 * num_won / len(results) == pytest.approx(percent, abs=1.5)
