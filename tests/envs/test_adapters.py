"""Environments of other packages as games; each test needs its package."""

import asyncio
import json
import random
import threading
from http import HTTPStatus

import pytest

from roll_lite.envs.adapters import GymnasiumGame, TextArenaGame, import_package
from roll_lite.envs.agents import AgentChat, random_agent
from roll_lite.envs.game import as_reply
from roll_lite.envs.play import EnvError
from roll_lite.envs.specs import env_tasks, make_env


def played(spec, agent):
    """An episode of the first task of an environment."""
    chat = AgentChat(agent)
    ending = asyncio.run(chat.play(make_env(spec), next(env_tasks(spec, 0))))
    return chat, chat.measurements(ending)


class Repeat:
    """A text environment with Gymnasium's interface: say the word again."""

    def reset(self, seed):
        self.word = random.Random(seed).choice(["tea", "rice", "salt"])
        return self.word, {}

    def step(self, action):
        return "", float(action == self.word), True, False, {}


@pytest.mark.parametrize("is_right", [True, False])
def test_a_text_environment_takes_any_answer(is_right):
    game = GymnasiumGame(id=Repeat, rules="Say it again.")
    (_, first), info = game.reset(3)
    word = first["content"].split("\n")[1]
    assert info["rules"] == "Say it again.\nActions: any text." and info["state"] == word
    assert GymnasiumGame(id=Repeat).reset(3)[0][1] == first
    _, reward, terminated, _, info = game.step(as_reply(word if is_right else "no"))
    assert terminated and reward == info["last"]["success"] == float(is_right)


NAMES = "Left/Down/Right/Up"


def test_a_gymnasium_environment_plays_by_names():
    gymnasium = pytest.importorskip("gymnasium")
    game = GymnasiumGame(
        id=lambda: gymnasium.make("FrozenLake-v1", is_slippery=False),
        rules="Reach the last cell.",
        action_names=NAMES,
        describe=lambda cell: f"You are in cell {cell}.",
    )
    _, info = game.reset(0)
    assert info["rules"] == "Reach the last cell.\nActions: Left, Down, Right, Up."
    assert info["state"] == "You are in cell 0."
    path = ["down", "Down", "RIGHT", "jump", "Right", "Down", "Right"]
    steps = [game.step(as_reply(action)) for action in path]
    assert [step[1] for step in steps] == [0, 0, 0, 0, 0, 0, 1]
    assert steps[2][4]["state"] == "You are in cell 9."
    assert [step[4]["mean"]["valid"] for step in steps] == [1, 1, 1, 0, 1, 1, 1]
    assert steps[-1][2] and steps[-1][4]["last"] == {"success": 1}
    game.close()


def test_a_registered_environment_by_its_spec():
    pytest.importorskip("gymnasium")
    chat, measured = played("gymnasium:id=Blackjack-v1,max_steps=30", random_agent(0))
    assert "Play Blackjack-v1.\nActions: 0, 1." in chat.turns[0][1]["content"]
    assert measured["valid"] == 1 and measured["return"] in (-1, 0, 1, 1.5)
    chat, _ = played(f"gymnasium:id=CliffWalking-v1,action_names={NAMES}", random_agent(0))
    assert (
        "Actions: Left, Down, Right, Up." in chat.turns[0][1]["content"] and len(chat.turns) == 10
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("id=Pendulum-v1", r"the actions of Pendulum-v1 are Box\(.*, not discrete"),
        ("id=CliffWalking-v1,action_names=Up/Down", "must be 4 names, joined by /"),
    ],
)
def test_actions_without_names_are_refused(spec, message):
    pytest.importorskip("gymnasium")
    with pytest.raises(EnvError, match=message):
        played(f"gymnasium:{spec}", random_agent(0))


def test_a_missing_package_names_the_remedy():
    with pytest.raises(ValueError, match=r"package nowhere cannot be imported .*pip install there"):
        import_package("nowhere", "there")


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
    assert "between 1 and 20" in openings[0][1]["rules"]
    random.setstate(before)
    low, high, won = 1, 20, None
    while won is None:
        guess = (low + high) // 2
        (observation, reward, terminated, _, info), again = (
            game.step(as_reply(f"[{guess}]")) for game in games
        )
        assert again == (observation, reward, terminated, False, info)
        assert "between 1 and 20" not in observation
        if terminated:
            won = info["last"]["success"]
        elif "lower" in observation:
            high = guess - 1
        else:
            low = guess + 1
    assert won == 1 and reward > 0 and random.getstate() == before


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
    spec = f"openenv:url={openenv_server},rules=Say something.,invalid_reward=-1"
    replies = iter(map(as_reply, ["hello", '{"message": "you"}', '{"other": 1}', "end"]))
    chat, measured = played(spec, lambda env: next(replies))
    first, *later = (turn[-2]["content"] for turn in chat.turns)
    assert '"required": ["message"]' in first
    assert first.startswith("Say something.") and '{"echo": ' in first
    assert '{"echo": "hello"}' in later[0] and '{"echo": "you"}' in later[1]
    assert [result.reward for result in chat.results] == [0.5, 0.5, -1, 0.5]
    assert measured["success"] == 1 and measured["valid"] == 0.75
    assert chat.turns[0] == played(spec, lambda env: as_reply("hello"))[0].turns[0]
    with pytest.raises(EnvError, match=r"openenv.*turn 1.*EXECUTION_ERROR"):
        played(spec, lambda env: as_reply("fail"))
