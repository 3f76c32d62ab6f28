"""Environments of other packages as games; each test needs its package."""

import asyncio
import json
import random
import threading
from http import HTTPStatus

import pytest

from roll_lite.envs.adapters import (
    GymnasiumGame,
    OpenEnvGame,
    TextArenaGame,
    reasoning_gym_answer,
    reasoning_gym_prompts,
)
from roll_lite.envs.game import as_reply


class Repeat:
    """A text environment with Gymnasium's interface: say the word again."""

    def reset(self, seed):
        self.word = random.Random(seed).choice(["tea", "rice", "salt"])
        return self.word, {}

    def step(self, action):
        return "", float(action == self.word), True, False, {}


@pytest.mark.parametrize("is_right", [True, False])
def test_a_text_environment_takes_any_answer(is_right):
    game = GymnasiumGame(env=Repeat(), rules="Say it again.")
    (_, first), _ = game.reset(3)
    word = game.env.word
    assert word in first["content"] and "Actions: any text." in first["content"]
    assert game.reset(3)[0][1] == first
    _, reward, terminated, _, info = game.step(as_reply(word if is_right else "no"))
    assert terminated and reward == info["parts"]["success"] == float(is_right)


def test_a_gymnasium_environment_plays_by_names():
    gymnasium = pytest.importorskip("gymnasium")
    names = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}
    game = GymnasiumGame(
        env=gymnasium.make("FrozenLake-v1", is_slippery=False),
        rules="Reach the last cell.",
        action_names=names,
        describe=lambda cell: f"You are in cell {cell}.",
    )
    (_, first), _ = game.reset(0)
    assert "Actions: Left, Down, Right, Up." in first["content"]
    assert "You are in cell 0." in first["content"]
    path = ["down", "Down", "RIGHT", "jump", "Right", "Down", "Right"]
    steps = [game.step(as_reply(action)) for action in path]
    assert [step[1] for step in steps] == [0, 0, 0, 0, 0, 0, 1]
    assert "You are in cell 9." in steps[2][0][0]["content"]
    assert steps[-1][2] and steps[-1][4]["parts"] == pytest.approx(
        {"success": 1, "valid": 6 / 7, "effective": 6 / 7, "turns": 7}
    )


def test_a_textarena_game_leaves_the_global_generator_alone():
    pytest.importorskip("textarena")
    before = random.getstate()
    openings, games = [], []
    for _ in range(2):
        game = TextArenaGame(id="GuessTheNumber-v0", max_steps=20)
        openings.append(game.reset(4))
        games.append(game)
        random.random()
    assert openings[0] == openings[1]
    assert "between 1 and 20" in openings[0][0][1]["content"]
    random.setstate(before)
    low, high, won = 1, 20, None
    while won is None:
        guess = (low + high) // 2
        (observation, reward, terminated, _, info), again = (
            game.step(as_reply(f"[{guess}]")) for game in games
        )
        assert again == (observation, reward, terminated, False, info)
        assert terminated or "between 1 and 20" not in observation[0]["content"]
        if terminated:
            won = info["parts"]["success"]
        elif "lower" in observation[0]["content"]:
            high = guess - 1
        else:
            low = guess + 1
    assert won == 1 and reward > 0 and random.getstate() == before


def test_reasoning_gym_scores_its_own_answers():
    pytest.importorskip("reasoning_gym")
    prompts = reasoning_gym_prompts("spell_backward", size=5, seed=1)
    assert prompts == reasoning_gym_prompts("spell_backward", size=5, seed=1)
    for prompt in prompts:
        assert reasoning_gym_answer(prompt, as_reply(prompt.ground_truth)) == 1
        assert reasoning_gym_answer(prompt, as_reply("?")) < 1
        assert reasoning_gym_answer(prompt, "no tags") == 0


@pytest.fixture
def openenv_server():
    """Echoes messages, with OpenEnv's messages; the third ends the episode."""
    server_module = pytest.importorskip("websockets.sync.server")
    schema = {"properties": {"message": {"type": "string"}}, "required": ["message"]}

    def respond(connection, request):
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps({"action": schema}))

    def serve(connection):
        num_steps, answer = 0, {}
        for text in connection:
            message = json.loads(text)
            if message["type"] == "reset":
                answer = {"observation": {"echo": message["data"]["seed"]}, "done": False}
                answer["reward"] = None
            elif message["data"]["message"] == "fail":
                error = {"message": "no", "code": "EXECUTION_ERROR"}
                connection.send(json.dumps({"type": "error", "data": error}))
                continue
            else:
                num_steps += 1
                echo = {"echo": message["data"]["message"]}
                answer = {"observation": echo, "reward": 0.5, "done": num_steps == 3}
            connection.send(json.dumps({"type": "observation", "data": answer}))

    with server_module.serve(serve, "localhost", 0, process_request=respond) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_an_openenv_server_by_its_messages(openenv_server):
    game = OpenEnvGame(url=openenv_server, rules="Say something.", invalid_reward=-1.0)
    assert game.reset(2) == game.reset(2) != game.reset(3)
    replies = ["hello", '{"message": "you"}', '{"other": 1}', "fail", "end"]
    steps = []
    for reply in replies:
        if reply == "fail":
            with pytest.raises(RuntimeError, match="EXECUTION_ERROR"):
                asyncio.run(game.step(as_reply(reply)))
        else:
            steps.append(asyncio.run(game.step(as_reply(reply))))
    assert [step[1] for step in steps] == [0.5, 0.5, -1.0, 0.5]
    assert '{"echo": "you"}' in steps[1][0][0]["content"]
    assert steps[-1][2] and steps[-1][4]["parts"]["turns"] == 4
