"""Samples per second that the coordinator can start, score and return.

python scripts/bench_rollout.py

Engines answer at once, in the coordinator's thread, so only its own work is measured.
The last line is JSON.
"""

import json
import time
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import tyro

from roll_lite.engine.service import EngineReport, Load
from roll_lite.envs.question import question_player
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.options import RolloutOptions
from roll_lite.types import Prompt, SamplingParams, Turn


@dataclass(kw_only=True)
class Config:
    steps: int = 10
    """Timed collects, after a warm-up collect."""
    prompts_per_step: int = 256
    """Prompts per collect."""
    samples_per_prompt: int = 8
    """Group size."""
    replicas: int = 4
    """Engine replicas."""
    reply_tokens: int = 200
    """Length of every reply."""


class InstantEngines:
    """Stands in for the engines' RoleHandle; the replicas answer when they are pumped."""

    is_alone = True

    def __init__(self, cfg: Config):
        self.role = SimpleNamespace(num_replicas=cfg.replicas)
        self._reply = list(range(cfg.reply_tokens)), [-1.0] * cfg.reply_tokens
        self._turns = [[] for _ in range(cfg.replicas)]

    def version(self) -> int:
        return 0

    def listen(self, on_report, on_failure) -> None:
        self._on_report = on_report

    def stop_listening(self) -> None:
        self._on_report = lambda *report: None

    def post(self, replica: int, name: str, key: int, request) -> None:
        token_ids, logprobs = self._reply
        for index in request.indices:
            turn = Turn(
                prompt_ids=request.prompt_ids,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason="stop",
                versions=[(0, 0)],
            )
            self._turns[replica].append((key, index, turn))

    def pump(self) -> bool:
        for replica, turns in enumerate(self._turns):
            if turns:
                self._turns[replica] = []
                self._on_report(replica, "answers", EngineReport(turns, [], Load(0, 0, 0), 0))
        return any(self._turns)


class PlainChat:
    """No tokenizer, whose time would be measured too."""

    def encode(self, messages) -> list[int]:
        return list(range(100))

    def decode(self, token_ids) -> str:
        return "a reply"


def endless_prompts():
    for i in count():
        messages = ({"role": "user", "content": "?"},)
        yield Prompt(id=str(i), messages=messages, domain="bench", ground_truth="")


def main(cfg: Config) -> dict[str, float]:
    with Coordinator(
        engines=InstantEngines(cfg),
        chat=PlainChat(),
        play=question_player({"bench": lambda prompt, reply: 1.0}),
        prompts=endless_prompts(),
        params=SamplingParams(max_tokens=cfg.reply_tokens),
        options=RolloutOptions(
            prompts_per_step=cfg.prompts_per_step,
            samples_per_prompt=cfg.samples_per_prompt,
            deadline=60,
        ),
        seed=0,
    ) as rollout:
        rollout.collect()
        start = time.perf_counter()
        num_samples = 0
        for _ in range(cfg.steps):
            num_samples += sum(len(group.samples) for group in rollout.collect())
        seconds = time.perf_counter() - start
    print(f"{num_samples:,} samples in {seconds:.2f} s: {num_samples / seconds:,.0f} per second")
    return {"samples_per_second": num_samples / seconds}


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))))
