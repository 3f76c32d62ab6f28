"""Agentic reinforcement learning: the loop of rlvr.py on episodes of several turns.

python recipes/agentic.py --model models/tiny --data frozen_lake:style=short
python recipes/agentic.py --data frozen_lake sokoban@2 --advantage gigpo --history 2
python recipes/agentic.py --data mine --code my_envs.py         # an environment of your own
python -m pdb recipes/agentic.py --env-workers 0 ...    # one process: break in an environment

An environment is a class like `Doors` below, or a coroutine: docs/howto/environment.md.
"""

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import ClassVar

import roll_lite as rl
from roll_lite import command
from roll_lite.recipes import rlvr


class Doors:
    """Your own environment looks like this: text in, text out. `breakpoint()` works here."""

    def reset(self, seed):
        self.prize, self.num_opened = Random(seed).randint(1, 3), 0
        return "A prize is behind door 1, 2 or 3. Reply with the number of a door.", {}

    def step(self, reply):
        self.num_opened += 1
        is_won = reply.strip() == str(self.prize)
        info = {"last": {"success": is_won}, "mean": {"valid": reply.strip() in ("1", "2", "3")}}
        return "Wrong. Try another door.", float(is_won), is_won, self.num_opened == 3, info


@rl.unique_options
@dataclass(frozen=True, kw_only=True)
class Config(rlvr.Config):
    data: tuple[str, ...] = ("frozen_lake",)
    """What to learn: environments with their options, files and tasks, mixed by weight, as in
    frozen_lake:size=8@0.3 sokoban@0.7. `roll-lite envs bench` lists environments."""
    run_dir: str = field(default_factory=partial(rl.default_folder, "agentic"))
    """Folder for config.json, metrics.jsonl, events.jsonl, rollouts/, checkpoints/ and model/."""

    PREFIX: ClassVar = "agentic"
    ENVS: ClassVar = rl.ENVS | {"doors": Doors}
    SHOWN: ClassVar = {
        "reward/mean": "reward", "eval/pass@1": "eval", "eval/reward": "eval reward",
        "reward/success": "success", "rollout/turns": "turns", "reward/valid": "valid",
        "env/errors": "env errors",
    } | rlvr.Config.SHOWN  # fmt: skip


if __name__ == "__main__":
    command.run(rlvr.main, Config, __doc__, rlvr.plan)
