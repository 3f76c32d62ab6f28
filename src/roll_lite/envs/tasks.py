"""The tasks of an environment: endless seeds, in a train and a held-out split."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Literal

from roll_lite.envs.registry import parse_env
from roll_lite.types import Prompt

Split = Literal["train", "held_out"]


def env_tasks(spec: str, seed: int | str, split: Split = "train") -> Iterator[Prompt]:
    """Endless tasks of one split; to evaluate, give seed=0, whatever the seed of the run."""
    name, _ = parse_env(spec)
    for number in count():
        yield Prompt(
            id=f"{spec}/{split}/{seed}/{number}",
            messages=(),
            domain=spec,
            ground_truth="",
            extra={"split": split},
            seed=task_seed(name, seed, split, number),
        )


def task_seed(name: str, seed: int | str, split: Split, number: int) -> int:
    """63 bits. Options do not change it: variants of an environment play the same tasks.

    Seeds of held-out tasks are odd, the others even, so the splits never share one.
    """
    text = f"{name}/{split}/{seed}/{number}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2 << 1 | (split == "held_out")


def held_out_tasks(specs: Iterable[str], count: int) -> list[Prompt]:
    """`count` tasks of each environment to evaluate on, the same whatever the seed of a run."""
    return [task for spec in specs for task in islice(env_tasks(spec, 0, "held_out"), count)]
