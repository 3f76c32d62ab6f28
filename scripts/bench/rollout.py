"""Processor time that the coordinator needs for a sample: to start it, score it and return it.

python scripts/bench/rollout.py
python scripts/bench/rollout.py --journal --model models/tiny --reward-workers 4 --in-flight 1000

Engines answer in the coordinator's thread, some samples at a time, in random order, so only its own
work is measured. All samples of a step are in flight at once, and a step more with staleness 1.
The second command adds what a run has besides: a tokenizer, a journal and reward workers, whose own
processor time is not counted. The last line is JSON.
"""

import json
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import tyro

from roll_lite.chat import Chat
from roll_lite.engine.request import EngineReport, Load
from roll_lite.envs.play import question_player
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.event_loop import rare_collections
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Prompt, SamplingParams, Turn
from roll_lite.workers.pool import RewardWorkers


@dataclass(kw_only=True)
class Config:
    in_flight: tuple[int, ...] = (1_000, 10_000, 50_000, 160_000)
    """Samples of a step."""
    samples_per_prompt: int = 8
    """Group size."""
    replicas: int = 4
    """Engine replicas."""
    reply_tokens: int = 20
    """Length of every reply."""
    at_a_time: int = 64
    """Answers in a report of an engine."""
    min_samples: int = 20_000
    """Samples that are timed, after those of a first step, which are not."""
    journal: bool = False
    """Keep a journal, in a temporary folder, of which a checkpoint a step removes the old part."""
    model: str | None = None
    """Folder of a tokenizer for prompts and replies; without one they are not encoded."""
    reward_workers: int = 0
    """Processes that score; 0 scores inline."""


class QuickEngines:
    """Stands in for the engines' RoleHandle; the replicas answer when they are pumped."""

    is_alone = True

    def __init__(self, cfg: Config):
        self.role = SimpleNamespace(num_replicas=cfg.replicas)
        self._at_a_time, self._random, self.policy_version = cfg.at_a_time, random.Random(0), 0
        self._reply = list(range(cfg.reply_tokens)), [-1.0] * cfg.reply_tokens
        self._turns = [[] for _ in range(cfg.replicas)]
        self._reported = [0] * cfg.replicas

    def version(self) -> int:
        return 0

    def listen(self, on_report, on_failure) -> None:
        self._on_report = on_report

    def stop_listening(self) -> None:
        self._on_report = lambda *report: None

    def post(self, replica: int, name: str, key: int, request=None) -> None:
        if name == "abort":
            return
        token_ids, logprobs = self._reply
        for index in request.indices:
            turn = Turn(
                prompt_ids=request.prompt_ids,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason="stop",
                versions=[(0, self.policy_version)],
            )
            self._turns[replica].append((key, index, turn))

    def pump(self) -> bool:
        for replica in range(len(self._turns)):
            if self._turns[replica]:
                self._answer_some(replica)
        return any(self._turns)

    def _answer_some(self, replica: int) -> None:
        turns, done, first = self._turns[replica], [], []
        if self._reported[replica] < self.policy_version:  # tell the versions of what goes on
            self._reported[replica] = self.policy_version
            first = [(key, index, turn.versions[0][1]) for key, index, turn in turns]
        for _ in range(min(self._at_a_time, len(turns))):
            other = self._random.randrange(len(turns))
            turns[other], turns[-1] = turns[-1], turns[other]
            done.append(turns.pop())
        report = EngineReport(done, [], Load(0, 0, 0), self.policy_version, first)
        self._on_report(replica, "answers", report)


class PlainChat:
    """No tokenizer, whose time would be measured too."""

    def encode(self, messages, tools=None) -> list[int]:
        return list(range(100))

    def encode_ahead(self, conversations) -> None:
        pass

    def decode(self, token_ids) -> str:
        return "a reply"


def endless_prompts():
    for i in count():
        messages = ({"role": "user", "content": f"What is {i} + {2 * i}? Reason step by step."},)
        yield Prompt(id=str(i), messages=messages, domain="bench", ground_truth="")


def score(prompt: Prompt, reply: str) -> float:
    """In half of the groups all samples have the same reward."""
    return random.random() if int(prompt.id) % 2 else 1.0


MODES = {
    "plain": {},
    "drop equal": {"drop_equal": True, "max_refills": 2},
    "staleness 1": {"max_staleness": 1.0, "stale": "drop"},
    "staleness 1, drop equal": {"max_staleness": 1.0, "stale": "drop", "drop_equal": True},
}


def time_mode(cfg: Config, in_flight: int, mode: dict) -> float:
    """Microseconds of processor time a sample, of those that were started."""
    engines = QuickEngines(cfg)
    options = RolloutOptions(
        prompts_per_step=in_flight // cfg.samples_per_prompt,
        samples_per_prompt=cfg.samples_per_prompt,
        samples_per_replica=10**9,
        deadline=600,
        **mode,
    )
    with ExitStack() as exits:
        reward = score
        if cfg.reward_workers:
            workers = RewardWorkers({"bench": score}, num_workers=cfg.reward_workers)
            reward = exits.enter_context(workers).score
        # As in the recipes; and what is left of the last measurement is collected.
        exits.enter_context(rare_collections(options.max_samples_in_flight))
        rollout = exits.enter_context(
            Coordinator(
                engines=engines,
                chat=Chat(cfg.model) if cfg.model else PlainChat(),
                play=question_player({"bench": reward}),
                prompts=endless_prompts(),
                params=SamplingParams(max_tokens=cfg.reply_tokens),
                options=options,
                seed=0,
            )
        )
        if cfg.journal:
            folder = exits.enter_context(TemporaryDirectory())
            rollout.open_journal(folder, made_with="", resumed_at=0, weights=str)
        if options.max_staleness:
            rollout.start()
        num_samples, start = 0, 0.0
        for version in count():
            if version == 1:
                num_samples, start = 0, time.process_time()
            elif num_samples >= cfg.min_samples:
                break
            rollout.collect()
            engines.policy_version = version + 1
            rollout.set_version(version + 1)
            rollout.forget(version + 1)
            num_samples += rollout.metrics()["rollout/started"]
            rollout.dropped()
        return 1e6 * (time.process_time() - start) / num_samples


def main(cfg: Config) -> dict[str, dict[int, float]]:
    print("us a sample" + "".join(f"{n:>10,}" for n in cfg.in_flight) + "  in flight")
    table: dict[str, dict[int, float]] = {}
    for name, mode in MODES.items():
        table[name] = {}
        for in_flight in cfg.in_flight:
            table[name][in_flight] = time_mode(cfg, in_flight, mode)
        print(f"{name:<24}" + "".join(f"{value:>10.0f}" for value in table[name].values()))
    return table


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))))
