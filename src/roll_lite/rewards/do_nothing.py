"""Prompts whose tests a program that does nothing passes, so that every program is right.

What was tried is kept in the user's cache folder under a digest of the tests, so it is tried once.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from roll_lite.rewards.registry import code_part
from roll_lite.types import AsyncReward, Prompt, Reward, Score

REPLY = "```python\npass\n```"
"""The empty program binds as little."""


class Trials:
    """Which prompts with tests of programs this reply passes, as far as it was tried."""

    def __init__(self, prompts: Iterable[Prompt], rewards: Mapping[str, Reward | AsyncReward]):
        """Only those whose domain has a reward for programs, perhaps in a weighted sum."""
        parts = {domain: code_part(reward) for domain, reward in rewards.items()}
        self._prompts: defaultdict[str, list[Prompt]] = defaultdict(list)
        """By the digest of their tests."""
        for prompt in prompts:
            if part := parts.get(prompt.domain):
                self._prompts[_digest(prompt, part)].append(prompt)
        self._has_passed = self._read()

    def __len__(self) -> int:
        return sum(map(len, self._prompts.values()))

    @property
    def left(self) -> dict[str, Prompt]:
        """One prompt for each digest of tests that were not tried."""
        known = self._has_passed
        return {name: prompts[0] for name, prompts in self._prompts.items() if name not in known}

    def passed(self, name: str) -> list[Prompt]:
        """The prompts with these tests, if the reply passes them."""
        return self._prompts[name] if self._has_passed.get(name) else []

    @property
    def all_passed(self) -> list[Prompt]:
        return [prompt for name in self._prompts for prompt in self.passed(name)]

    def add(self, name: str, score: Score) -> None:
        """Keep the score of the reply to a prompt that was left."""
        shares = {part.rpartition("/")[2]: value for part, value in score.parts.items()}
        self._has_passed[name] = shares["tests_passed"] == 1
        with suppress(OSError, RuntimeError):  # RuntimeError: no home. It is only tried again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"\n{name} {self._has_passed[name]:d}")  # behind a line that was torn

    def _read(self) -> dict[str, bool]:
        """A line that was torn names no tests, or no result."""
        with suppress(OSError, RuntimeError):
            rows = map(str.split, self._path.read_text(errors="replace").splitlines())
            return {row[0]: row[1] == "1" for row in rows if row[1:] in (["0"], ["1"])}
        return {}

    @property
    def _path(self) -> Path:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        name = _hash("".join(self._prompts).encode())
        return Path(caches, "roll_lite", "do_nothing", f"{name}.txt")


def _digest(prompt: Prompt, part: Reward) -> str:
    """A digest of the tests, how they are run, and the code that runs them."""
    how = sorted(getattr(part, "keywords", {}).items())
    text = json.dumps([_digest_of_code(), repr(how), prompt.tests], sort_keys=True)
    return _hash(text.encode())


@cache
def _digest_of_code() -> str:
    files = sorted(Path(__file__).parents[1].glob("sandbox/*.py"))
    texts = [path.read_bytes() for path in (*files, Path(__file__).with_name("code.py"))]
    return _hash(b"".join(texts))


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
