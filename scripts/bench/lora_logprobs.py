"""Logprobs of the engine against the trainer's with LoRA on a CPU: one copy of the weights, or two.

python scripts/bench/lora_logprobs.py --copies one --dtype bf16 --seed 0

The tiny model, adapters of rank 16 after ten updates on random tokens, 64 replies of 64 tokens. The
last line is JSON.
"""

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.places import Place
from roll_lite.engine.request import Request
from roll_lite.models.config import LoraOptions, read_config
from roll_lite.models.tiny import build_tiny
from roll_lite.roles import Roles
from roll_lite.sync import WeightSync
from roll_lite.train.batch import pack
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.scorer import score_over_ranks
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.trainer import Trainer
from roll_lite.types import SamplingParams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class Config:
    copies: Literal["one", "two"] = "one"
    """Copies of the frozen weights; adapters are merged into the second."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What both compute in."""
    seed: int = 0
    """Of tokens and samples."""


class Speaking(WeightSync):
    def replies(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        params = SamplingParams(max_tokens=64)
        requests = [Request(prompt_ids=p, params=params, seed=i) for i, p in enumerate(prompts)]
        turns = [turn for (turn,) in self.engine.generate(requests)]
        return [(turn.token_ids, turn.logprobs) for turn in turns]


def sequence(prompt: list[int], reply: list[int]) -> TrainingSequence:
    mask = [False] * len(prompt) + [True] * len(reply)
    return TrainingSequence(token_ids=prompt + reply, loss_mask=mask)


def main(cfg: Config) -> None:
    Place.dtype = property(lambda place: DTYPES[cfg.dtype])
    draw = random.Random(cfg.seed)
    folder = build_tiny(Path(tempfile.mkdtemp()) / "tiny")
    vocabulary = range(1, read_config(folder).vocab_size)

    def tokens(num: int) -> list[int]:
        return draw.choices(vocabulary, k=num)

    with Cluster("train=0 generate=0", "cpu") as cluster:
        roles = Roles(cluster)
        roles._has_one_copy = lambda: cfg.copies == "one"
        options = {"loss": sft_loss, "schedule": Schedule(lr=3e-3), "lora": LoraOptions(rank=16)}
        trainer = roles.add("train", Trainer, folder=folder, **options)
        roles.add_engines(folder=folder, kv_cache_gib=0.05)
        sync = cluster.role("sync", Speaking)
        batch = pack([sequence(tokens(5), tokens(40)) for _ in range(16)], 2000)
        for _ in range(10):
            trainer.step(batch)
        sync.sync(1)
        prompts = [tokens(12) for _ in range(64)]
        replies = sync.replies(prompts)
        read = [sequence(prompt, ids) for prompt, (ids, _) in zip(prompts, replies, strict=True)]
        scored = score_over_ranks(trainer.logprobs, read, 4000)
    pairs = zip(scored, replies, strict=True)
    differences = [
        abs(a - b) for own, (_, said) in pairs for a, b in zip(own[12:], said, strict=True)
    ]
    found = {"largest": max(differences), "mean": sum(differences) / len(differences)}
    found["equal"] = differences.count(0.0) / len(differences)
    print(json.dumps(vars(cfg) | {"tokens": len(differences)} | found))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
