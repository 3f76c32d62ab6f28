"""Programs that test_service.py runs under torchrun: service_programs.py NAME RESULT_FILE."""

import json
import pickle
import queue
import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from roll_lite.cluster.cluster import Cluster
from roll_lite.engine.request import Request
from roll_lite.engine.service import EngineService
from roll_lite.models.hf import load_model
from roll_lite.types import SamplingParams

NUM_REQUESTS = 24


def make_requests():
    r = random.Random(1)
    return [
        Request(
            prompt_ids=[r.randrange(1, 40) for _ in range(r.randint(1, 90))],
            params=SamplingParams(max_tokens=r.randint(1, 30)),
            num_samples=1 + i % 3,
            seed=i,
        )
        for i in range(NUM_REQUESTS)
    ]


class Bell:
    """A role of its own on some of the engine's ranks."""

    def __init__(self, place):
        self.place = place

    def ring(self, seconds=0.0):
        time.sleep(seconds)
        total = torch.ones(1)
        dist.all_reduce(total, group=self.place.group)
        return int(total)


class Service(EngineService):
    def load(self, folder, version, running):
        """The weights that it has already, as a new version: answers stay the same."""
        weights = load_model(folder, shard=self.engine.model.shard)
        self.engine.load_weights(weights.named_parameters(), version, running)

    def ring(self):
        """A collective of all engine ranks, which hangs if one of them still follows."""
        total = torch.ones(1)
        dist.all_reduce(total, group=self.place.group)
        return int(total)


class Mailbag:
    """What the engines have reported, as the controller's listener sees it."""

    def __init__(self, handle):
        self.turns, self.refused, self.failures = {}, {}, queue.Queue()
        self.seen_twice, self.changed = [], threading.Condition()
        handle.listen(self.on_report, self.failures.put)

    def on_report(self, replica, kind, answers, text=""):
        with self.changed:
            for key, index, turn in answers.turns:
                if (key, index) in self.turns:
                    self.seen_twice.append((key, index))
                self.turns[key, index] = turn
            self.refused.update(answers.refused)
            self.changed.notify()

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, timeout=600), (len(self.turns), self.refused)


def interleaved(folder):
    """Requests and calls, to all ranks of a replica and to some, in any order."""
    with Cluster("generate=all,tp=2 follower=1 leader=2 middle=1-2") as cluster:
        engines = cluster.role("generate", Service, folder=folder, kv_cache_gib=0.01)
        bells = [cluster.role(name, Bell) for name in ("follower", "leader", "middle")]
        mail, r, calls = Mailbag(engines), random.Random(0), []
        for key, request in enumerate(make_requests()):
            engines.post(key % 2, "submit", key, request)
            for _ in range(r.randrange(4)):
                role = r.choice([engines, *bells])
                calls.append((len(role.role.ranks), role.ring.start()))
            if key % 5 == 4:
                running = ("go_on", "finish")[key % 2]
                calls.append((None, engines.load.start(folder, key, running)))
            if r.random() < 0.3:
                time.sleep(0.05)
        long = Request(prompt_ids=[1], params=SamplingParams(max_tokens=500), seed=0)
        engines.post(0, "submit", "aborted", long)
        engines.post(0, "abort", "aborted")
        long = Request(prompt_ids=[1], params=SamplingParams(max_tokens=10**6))
        engines.post(1, "submit", "refused", long)
        bells[0].ring(0.3)  # the leader has work, and has to wait for its follower
        num_samples = 1 + sum(request.num_samples for request in make_requests())
        mail.wait_for(lambda: len(mail.turns) == num_samples and mail.refused)
        time.sleep(0.2)  # idle ranks sleep, and wake again
        again = [engines.ring(), bells[0].ring(), engines.version()]
        answers = [[str(k), i, t.token_ids, t.finish_reason] for (k, i), t in mail.turns.items()]
        return {
            "answers": answers,
            "rings": [[expected, call.result()] for expected, call in calls],
            "again": again,
            "refused": list(mail.refused.items()),
            "seen_twice": mail.seen_twice,
        }


def stop_texts(folder):
    """The replies to the requests of a file, from two tensor-parallel ranks."""
    requests = pickle.loads(Path(folder).with_name("requests.pickle").read_bytes())
    with Cluster("generate=all,tp=2", "cpu") as cluster:
        engines = cluster.role("generate", EngineService, folder=folder, kv_cache_gib=0.01)
        mail = Mailbag(engines)
        for key, request in enumerate(requests):
            engines.post(0, "submit", key, request)
        mail.wait_for(lambda: len(mail.turns) == len(requests))
        return [mail.turns[key, 0].token_ids for key in range(len(requests))]


class Faulty:
    """Works a while on its own, then raises."""

    def __init__(self, place):
        self.place, self.left = place, 0

    def receive(self, name):
        self.left = 3 if name == "begin" else 1 / 0

    def work(self):
        self.left -= 1
        if self.left == 0:
            raise LookupError(f"no luck on {self.place.rank}")
        return self.left > 0

    def hang(self):
        self.work = lambda: time.sleep(60)

    def answer(self):
        return 1


def faulty(message):
    """An object raises while no call waits for it, and the recipe is elsewhere."""
    with Cluster("train=all") as cluster:
        train = cluster.role("train", Faulty)
        failures = queue.Queue()
        train.listen(lambda *_: None, failures.put)
        print("ready", flush=True)
        train.post(1, message)
        raise failures.get(timeout=600)


def hanging():
    """A rank works on its own and never comes back; a call has to wait for it."""
    with Cluster("train=all") as cluster:
        train = cluster.role("train", Faulty)
        train.hang()
        print("ready", flush=True)
        train.answer.options(deadline=1)()


def main(name, result_file):
    programs = {
        "interleaved": lambda: interleaved(str(Path(result_file).parent / "model")),
        "stop_texts": lambda: stop_texts(str(Path(result_file).parent / "model")),
        "work_raises": lambda: faulty("begin"),
        "hanging": hanging,
        "receive_raises": lambda: faulty("nonsense"),
    }
    Path(result_file).write_text(json.dumps(programs[name]()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
