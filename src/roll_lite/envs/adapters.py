"""Environments of other packages as games: Gymnasium, TextArena, and OpenEnv's servers.

Their packages are imported when they are used, and are no dependencies of this one:
`pip install "roll_lite[envs]"` installs them.
"""

import asyncio
import importlib
import json
import random as global_random
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

from roll_lite.checks import UserError
from roll_lite.envs.env import Observation
from roll_lite.envs.game import Game


def import_package(name: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"the package {name} cannot be imported ({error}); pip install {install}"
        ) from error


@dataclass(kw_only=True)
class Adapted(Game):
    """A game whose rules are in another package. It is won if the rewards sum to more than 0."""

    rules: str = ""
    """What the player is told beside the actions."""

    def start(self, random: Random) -> None:
        self._return = 0.0
        self.is_over = False
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
        return super().read(reply) if self.actions() else self.answer_of(reply)


@dataclass(kw_only=True)
class GymnasiumGame(Adapted):
    """An environment of Gymnasium, with discrete actions or with text."""

    id: str | Callable[[], Any]
    """Name of a registered environment, such as FrozenLake-v1; or a function that makes one."""
    action_names: str | Mapping[str, Any] = ""
    """Names of the actions 0, 1, ..., as in Left/Down/Right/Up, by default the numbers; or the
    actions by name."""
    describe: Callable[[Any], str] = str
    """The text that the player sees of an observation."""

    @property
    def instruction(self) -> str:
        rules = self.rules or f"Play {self.id}."
        return f"{rules}\nActions: {', '.join(self._actions) or 'any text'}."

    def begin(self, seed: int) -> None:
        if callable(self.id):
            self._env = self.id()
        else:
            self._env = import_package("gymnasium", "gymnasium").make(self.id)
        self._actions = self._named_actions()
        self._observation, _ = self._env.reset(seed=seed)

    def _named_actions(self) -> dict[str, Any]:
        """Actions by name; none if they are text."""
        if isinstance(self.action_names, Mapping):
            return dict(self.action_names)
        space = getattr(self._env, "action_space", None)
        if space is None or type(space).__name__ == "Text":
            return {}
        if type(space).__name__ != "Discrete":
            raise UserError(
                f"the actions of {self.id} are {space}, not discrete; name some of them"
            )
        numbers = range(int(space.start), int(space.start) + int(space.n))
        names = self.action_names.split("/") if self.action_names else list(map(str, numbers))
        if len(names) != len(numbers):
            raise UserError(
                f"action_names={self.action_names!r} must be {len(numbers)} names, joined by /"
            )
        return dict(zip(names, numbers, strict=True))

    def observe(self) -> str:
        return self.describe(self._observation)

    def actions(self) -> list[str]:
        return list(self._actions)

    def act(self, action: str) -> float:
        taken = self._actions[action] if self._actions else action
        self._observation, reward, terminated, truncated, _ = self._env.step(taken)
        self.is_over = terminated or truncated
        self._return = self._return + float(reward)
        return float(reward)

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


@dataclass(kw_only=True)
class TextArenaGame(Adapted):
    """A game of TextArena for one player, by its id, such as GuessTheNumber-v0.

    TextArena draws from Python's global generator; here each game has a generator of its own, which
    takes the place of the global one while the game runs.
    """

    id: str

    @property
    def instruction(self) -> str:
        return "\n".join(filter(None, (self.rules, self._told_first)))

    def begin(self, seed: int) -> None:
        textarena = import_package("textarena", "textarena")
        self._generator = Random(seed).getstate()
        with self._own_generator():
            self._env = textarena.make(self.id)
            self._env.reset(num_players=1, seed=seed)
            self._told = ""
            self._told_first = self._read_messages()
            self._seen = "The game begins."

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
        new = text.removeprefix(self._told)
        self._told = text
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
    _closing: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    @property
    def instruction(self) -> str:
        schema = f"An action is JSON of this schema: {json.dumps(self._schema)}"
        return "\n".join(filter(None, (self.rules, schema)))

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        return await asyncio.to_thread(super().reset, seed)

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        return await asyncio.to_thread(super().step, action)

    def close(self) -> None:
        self._closing.close()

    def begin(self, seed: int) -> None:
        client = import_package("websockets.sync.client", "websockets")
        with urllib.request.urlopen(f"{self.url}/schema") as answer:
            self._schema = json.load(answer)["action"]
        address = f"ws{self.url.removeprefix('http')}/ws"
        connection = client.connect(address, max_size=100 << 20)
        self._socket = self._closing.enter_context(connection)
        self._request("reset", {"seed": seed})

    def observe(self) -> str:
        return json.dumps(self._observation)

    def read(self, reply: str) -> str | None:
        answer = self.answer_of(reply)
        required = self._schema.get("required", [])
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

    def _request(self, kind: str, data: dict[str, Any]) -> float:
        """Send a message, and take the observation that answers it; return the reward."""
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        if answer["type"] == "error":
            raise RuntimeError(f"{self.url} answered {kind} with an error: {answer['data']}")
        data = answer["data"]
        self._observation = data["observation"]
        self.is_over = data["done"]
        self._return += data["reward"] or 0.0
        return data["reward"] or 0.0
