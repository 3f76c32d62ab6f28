"""Environments of other packages: Gymnasium, TextArena, OpenEnv, and reasoning-gym's questions.

Their packages are imported when they are used, and are no dependencies of this one.
"""

import asyncio
import json
import random as global_random
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from roll_lite.envs.env import Observation
from roll_lite.envs.game import Game, answer_of
from roll_lite.types import Prompt


@dataclass(kw_only=True)
class Adapted(Game):
    """A game whose rules are in another package. It is won if the rewards sum to more than 0."""

    def start(self, random: Random) -> None:
        self._return, self.is_over = 0.0, False
        self.begin(random.getrandbits(31))

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Start the package's episode."""

    @property
    def is_won(self) -> bool:
        return self.is_over and self._return > 0

    def actions(self) -> list[str]:
        return []

    def read(self, reply: str) -> str | None:
        """Any text, unless the actions have names: whether it is valid is for the package."""
        return super().read(reply) if self.actions() else answer_of(reply)


@dataclass(kw_only=True)
class GymnasiumGame(Adapted):
    """An object with Gymnasium's `reset` and `step`, by names of actions or by any text."""

    env: Any
    rules: str
    action_names: Mapping[str, Any] | None = None
    """The environment's actions by the names that the player uses; None if actions are text."""
    describe: Callable[[Any], str] = str
    """The text that the player sees of an observation."""

    @property
    def instruction(self) -> str:
        return f"{self.rules}\nActions: {', '.join(self.actions()) or 'any text'}."

    def begin(self, seed: int) -> None:
        self._observation, _ = self.env.reset(seed=seed)

    def observe(self) -> str:
        return self.describe(self._observation)

    def actions(self) -> list[str]:
        return list(self.action_names or ())

    def act(self, action: str) -> float:
        taken = self.action_names[action] if self.action_names else action
        self._observation, reward, terminated, truncated, _ = self.env.step(taken)
        self.is_over, self._return = terminated or truncated, self._return + float(reward)
        return float(reward)


@dataclass(kw_only=True)
class TextArenaGame(Adapted):
    """A game of TextArena for one player, by its id, such as GuessTheNumber-v0.

    TextArena draws from Python's global generator; here each game has a generator of its own, which
    takes the place of the global one while the game runs.
    """

    id: str

    @property
    def instruction(self) -> str:
        return self._rules

    def begin(self, seed: int) -> None:
        import textarena

        self._generator = Random(seed).getstate()
        with self._own_generator():
            self._env = textarena.make(self.id)
            self._env.reset(num_players=1, seed=seed)
            self._told = ""
            self._rules, self._seen = self._read_messages(), "The game begins."

    def observe(self) -> str:
        return self._seen

    def act(self, action: str) -> float:
        with self._own_generator():
            self.is_over, _ = self._env.step(action)
            self._seen = "The game is over." if self.is_over else self._read_messages()
        self._return = float((self._env.state.rewards or {}).get(0, 0)) if self.is_over else 0.0
        return self._return

    def _read_messages(self) -> str:
        """What the game has said since the last call; it repeats all that was said before."""
        _, text = self._env.get_observation()
        new, self._told = text.removeprefix(self._told), text
        return new.strip()

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        theirs = global_random.getstate()
        global_random.setstate(self._generator)
        try:
            yield
        finally:
            self._generator = global_random.getstate()
            global_random.setstate(theirs)


@dataclass(kw_only=True)
class OpenEnvGame(Adapted):
    """An environment of an OpenEnv server, over a WebSocket of its own for each episode.

    Observations are shown as JSON. An action is a JSON object of the server's schema; where the
    schema requires one field only, its text is enough.
    """

    url: str
    """Without a path, such as http://localhost:8000."""
    rules: str

    @property
    def instruction(self) -> str:
        return f"{self.rules}\nAn action is JSON of this schema: {json.dumps(self._schema)}"

    def begin(self, seed: int) -> None:
        from websockets.sync.client import connect

        with urllib.request.urlopen(f"{self.url}/schema") as answer:
            self._schema = json.load(answer)["action"]
        address = f"ws{self.url.removeprefix('http')}/ws"
        self._closing = ExitStack()
        self._socket = self._closing.enter_context(connect(address, max_size=100 << 20))
        self._request("reset", {"seed": seed})

    def observe(self) -> str:
        return json.dumps(self._observation)

    def read(self, reply: str) -> str | None:
        answer, required = answer_of(reply), self._schema.get("required", [])
        if not answer:
            return None
        try:
            action = json.loads(answer)
        except (ValueError, RecursionError):
            action = answer
        if not isinstance(action, dict) and len(required) == 1:
            action = {required[0]: action}
        is_action = isinstance(action, dict) and action.keys() >= set(required)
        return json.dumps(action) if is_action else None

    def act(self, action: str) -> float:
        return self._request("step", json.loads(action))

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict]:
        result = await asyncio.to_thread(super().step, action)
        if not result[0]:
            self._closing.close()
        return result

    def _request(self, kind: str, data: dict[str, Any]) -> float:
        """Send a message, and take the observation that answers it; return the reward."""
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        if answer["type"] == "error":
            raise RuntimeError(f"{self.url} answered {kind} with an error: {answer['data']}")
        data = answer["data"]
        self._observation, self.is_over = data["observation"], data["done"]
        self._return += data["reward"] or 0.0
        return data["reward"] or 0.0


def reasoning_gym_prompts(name: str, *, size: int, seed: int, **config: Any) -> list[Prompt]:
    """Questions of a reasoning-gym dataset, such as spell_backward; `config` is the dataset's."""
    import reasoning_gym

    items = reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
    return [_prompt(f"{name}-{seed}-{index}", item) for index, item in enumerate(items)]


def _prompt(id: str, item: dict[str, Any]) -> Prompt:
    question = f"{item['question']}\n\nGive the answer as <answer> [your answer] </answer>."
    return Prompt(
        id=id,
        messages=({"role": "user", "content": question},),
        domain="reasoning_gym",
        ground_truth=str(item["answer"]),
        extra={"item": item},
    )


def reasoning_gym_answer(prompt: Prompt, reply: str) -> float:
    """The dataset's own score of the first answer in tags, from 0 to 1."""
    item = prompt.extra["item"]
    score = _score_function(item["metadata"]["source_dataset"])
    return float(score(answer=answer_of(reply), entry=item))


@cache
def _score_function(name: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)
