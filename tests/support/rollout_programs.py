"""Programs that test_rollout_ranks.py runs under torchrun: rollout_programs.py NAME RESULT_FILE."""

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.data.tasks import prompts
from roll_lite.engine.service import EngineService
from roll_lite.envs.play import question_player
from roll_lite.models.hf import load_model
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import SamplingParams
from support.fake_engines import FakeChat, FakeService, fake_prompts, playing

SOME_WORDS = SamplingParams(max_tokens=8)


class Service(EngineService):
    """An engine role that loads a folder's weights itself, in place of a trainer's."""

    def load(self, folder, version, running):
        weights = load_model(folder, shard=self.engine.model.shard)
        self.engine.load_weights(weights.named_parameters(), version, running)

    def die(self, rank):
        if self.place.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)


def length(prompt, reply):
    return float(len(reply))


def coordinator(engines, folder, num_tokens=16, play=None, **options):
    chat = Chat(folder)
    return Coordinator(
        engines=engines,
        chat=chat,
        play=play or question_player({"reverse": length}),
        prompts=prompts("reverse:4", seed=0),
        params=SamplingParams(max_tokens=num_tokens, stop_ids=chat.stop_ids),
        options=RolloutOptions(**options),
        seed=5,
    )


def fake_coordinator(engines, **options):
    return Coordinator(
        engines=engines,
        chat=FakeChat(),
        play=question_player({"fake": length}),
        prompts=fake_prompts(),
        params=SOME_WORDS,
        options=RolloutOptions(**options),
        seed=3,
    )


def synchronous(folder):
    """The samples of a few steps, which the number of ranks must not change."""
    rows = []
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role("generate", Service, folder=folder, kv_cache_gib=0.02)
        options = {"samples_per_prompt": 3, "prompts_per_step": 8, "drop_equal": True}
        with coordinator(engines, folder, **options) as rollout:
            for version in (1, 2, 3):
                for group in rollout.collect():
                    rows += [[s.prompt.id, s.token_ids, s.logprobs] for s in group.samples]
                engines.load(folder, version, "go_on")
            names = [thread.name for thread in threading.enumerate()]
        left = [thread.name for thread in threading.enumerate()]
    return {"rows": rows, "had_thread": "rollout" in names, "left": "rollout" in left}


class UnevenTalk:
    """Every second word is talked about for six turns, the others for one."""

    def __init__(self, prompt):
        self.prompt, self.num_turns = prompt, 0

    def reset(self, seed):
        return self.prompt.messages, {}

    def step(self, action):
        self.num_turns += 1
        word = self.prompt.messages[-1]["content"]
        is_over = self.num_turns == (6 if word in LONG else 1)
        return ({"role": "user", "content": "again"},), float(len(action)), is_over, False, {}


LONG = {p.messages[-1]["content"] for p in itertools.islice(prompts("reverse:4", seed=0), 1, 16, 2)}


def conversations(folder):
    """Conversations that move from an engine where samples wait to one that is idle."""
    moves = []
    with Cluster("generate=all", "cpu") as cluster:
        options = {"folder": folder, "kv_cache_gib": 0.02, "max_num_seqs": 3}
        engines = cluster.role("generate", EngineService, **options)
        with coordinator(
            engines, folder, play=playing(UnevenTalk), samples_per_prompt=2, prompts_per_step=16
        ) as rollout:
            choose = rollout._engines._next_replica

            def watch(home, request):
                moves.append(home != (replica := choose(home, request)))
                return replica

            rollout._engines._next_replica = watch
            samples = [sample for group in rollout.collect() for sample in group.samples]
    rows = [[s.prompt.id, s.token_ids, s.logprobs] for s in samples]
    return {"rows": rows, "num_later": len(moves), "num_moved": sum(moves)}


def asynchronous(folder):
    """Generation during training, with every choice for running samples when weights update.

    Training takes no time, and an untrained model's replies have very different lengths: some
    samples are always running when weights update, however fast the machine is.
    """
    gaps, totals, states = [], Counter(), Counter()
    with Cluster("generate=1-2 train=0", "cpu") as cluster:
        engines = cluster.role("generate", Service, folder=folder, kv_cache_gib=0.02)
        options = {
            "samples_per_prompt": 2,
            "prompts_per_step": 6,
            "max_staleness": 1,
            "stale": "drop",
        }
        with coordinator(engines, folder, num_tokens=400, **options) as rollout:
            rollout.start()
            for version in range(1, 8):
                samples = [sample for group in rollout.collect() for sample in group.samples]
                gaps += [version - 1 - sample.turns[0].versions[0][1] for sample in samples]
                states.update(sample.state for sample in samples)
                engines.load(folder, version, ("go_on", "abort", "finish")[version % 3])
                rollout.set_version(version)
                totals.update(rollout.metrics())
    return {"gaps": gaps, "states": states, "totals": totals}


def many(folder):
    """Fake engines in real processes."""
    ids, totals = [], Counter()
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role(
            "generate", FakeService, max_delay=0.01, failure_rate=0.002, dies=((3, 100),)
        )
        options = {"samples_per_prompt": 8, "prompts_per_step": 125, "max_retries": 5}
        with fake_coordinator(engines, **options) as rollout:
            start = time.monotonic()
            for _ in range(10):
                ids += [[s.prompt.id, s.index] for g in rollout.collect() for s in g.samples]
            seconds = time.monotonic() - start
            totals.update(rollout.metrics())
    return {"ids": ids, "totals": totals, "seconds": seconds}


def dying(folder):
    """A rank is killed while `collect` waits for samples."""
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role("generate", Service, folder=folder, kv_cache_gib=0.02)
        with coordinator(engines, folder, num_tokens=400, prompts_per_step=64) as rollout:
            print("ready", flush=True)
            threading.Timer(0.5, lambda: engines.die.start(1)).start()
            rollout.collect()


def interrupted(folder):
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role("generate", FakeService, max_delay=1000.0)
        with fake_coordinator(engines, prompts_per_step=4) as rollout:
            (Path(folder).parent / "interrupted.json").touch()
            rollout.collect()


def main(name, result_file):
    result = globals()[name](str(Path(result_file).parent / "model"))
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:3])
