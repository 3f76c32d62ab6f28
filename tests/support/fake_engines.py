"""Fake engines: they answer after given delays, fail and die, and report it truthfully."""

import asyncio
import heapq
import itertools
import math
import random
import threading
import time
import traceback
from contextlib import contextmanager
from types import SimpleNamespace

from roll_lite.engine.request import EngineReport, Load, Request
from roll_lite.envs.play import EpisodeOptions, player, question_player
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.prompts import derive_seed
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Prompt, SamplingParams, Turn

PARAMS = SamplingParams(max_tokens=8)
ENDLESS = 9999  # a prompt that begins with this id never gets an answer


def fake_tokens(request, index):
    """The answer of a fake engine: it depends only on the request, like that of a real one."""
    r = random.Random(f"{request.seed} {index} {request.prompt_ids}")
    return [r.randrange(1000) for _ in range(r.randint(1, 4))]


class FakeService:
    """The interface of EngineService, without a model."""

    def __init__(
        self, place, max_delay=0.0, failure_rate=0.0, dies=(), seed=0, num_slots=None, endless=(),
        delay=None, clock=time.monotonic,
    ):  # fmt: skip
        """`dies`: (replica, number of answers after which it always raises).

        At most `num_slots` samples run at a time; the rest have no first token yet. Samples whose
        index is in `endless` never get an answer. `delay` of a request and an index is the time
        that a sample takes; by default it is random.
        """
        self.endless, self.clock = endless, clock
        self.delay = delay or (lambda request, index: self.random.random() * max_delay)
        self.place, self.max_delay, self.failure_rate = place, max_delay, failure_rate
        self.random = random.Random(f"{seed} {place.replica}")
        self.lifetime = dict(dies).get(place.replica)
        self.policy_version, self.reported_version, self.num_answered = 0, 0, 0
        self.num_slots, self.waiting, self.running = num_slots, [], {}
        self.under_way, self.heap, self.turns = {}, [], []
        self.counter = itertools.count()

    def version(self):
        return self.policy_version

    def load(self, version, restart=False):
        """New weights; running samples continue under them, or are aborted."""
        self.policy_version = version
        for key in list(self.under_way) if restart else ():
            self.receive("abort", key)

    def receive(self, name, key, request=None):
        if name == "submit":
            self.under_way[key] = request, set(request.indices)
            self.waiting += [(key, index) for index in request.indices]
        elif key in self.under_way:
            request, left = self.under_way.pop(key)
            self.waiting = [(k, i) for k, i in self.waiting if k != key]
            self.turns += [(key, i, self.make_turn(request, key, i, "abort")) for i in left]
        self.begin()

    def begin(self):
        while self.waiting and (self.num_slots is None or len(self.running) < self.num_slots):
            key, index = self.waiting.pop(0)
            self.running[key, index] = self.policy_version
            request = self.under_way[key][0]
            if request.prompt_ids[0] != ENDLESS and index not in self.endless:
                due = self.clock() + self.delay(request, index)
                heapq.heappush(self.heap, (due, next(self.counter), key, index))

    def work(self):
        try:
            self.answer()
        except LookupError:
            keys = list(self.under_way)
            for things in (self.under_way, self.heap, self.waiting, self.running):
                things.clear()
            self.report()
            self.place.report("failed", keys, traceback.format_exc())
        self.report()
        if self.heap and self.max_delay:
            time.sleep(max(0.0, min(self.heap[0][0] - time.monotonic(), 0.002)))
        return bool(self.heap)

    def answer(self):
        now = self.clock()
        while self.heap and self.heap[0][0] <= now:
            _, _, key, index = heapq.heappop(self.heap)
            if key not in self.under_way:
                continue
            self.num_answered += 1
            if self.lifetime is not None and self.num_answered > self.lifetime:
                raise LookupError("dead for ever")
            if self.random.random() < self.failure_rate:
                raise LookupError("a bad moment")
            request, left = self.under_way[key]
            self.turns.append((key, index, self.make_turn(request, key, index, "stop")))
            left.remove(index)
            if not left:
                del self.under_way[key]
            self.begin()

    def make_turn(self, request, key, index, reason):
        ids = fake_tokens(request, index)
        version = self.running.pop((key, index), self.policy_version)
        versions = [(0, version)]
        if len(ids) > 1 and version != self.policy_version:
            versions.append((1, self.policy_version))
        return Turn(
            prompt_ids=request.prompt_ids,
            token_ids=ids,
            logprobs=[-1.0] * len(ids),
            finish_reason=reason,
            versions=versions,
        )

    def report(self):
        version = self.policy_version
        load = Load(len(self.running), len({key for key, _ in self.waiting}), 1)
        is_new = version != self.reported_version
        if self.turns or is_new:
            firsts = [(*sample, first) for sample, first in self.running.items()] if is_new else ()
            self.place.report("answers", EngineReport(self.turns, [], load, version, firsts))
            self.turns, self.reported_version = [], version


class FakeEngines:
    """A role handle whose replicas are threads of this process."""

    is_alone = False

    def __init__(self, num_replicas, **options):
        self.role = SimpleNamespace(num_replicas=num_replicas)
        self.on_report = self.on_failure = None
        self.inboxes = [[] for _ in range(num_replicas)]
        self.changed = [threading.Condition() for _ in range(num_replicas)]
        self.is_stopping = False
        self.services = [self.make(replica, options) for replica in range(num_replicas)]
        self.threads = [threading.Thread(target=self.run, args=(r,)) for r in range(num_replicas)]
        for thread in self.threads:
            thread.start()

    def make(self, replica, options):
        def report(*args):
            if listener := self.on_report:
                listener(replica, *args)

        return FakeService(SimpleNamespace(replica=replica, report=report), **options)

    def run(self, replica):
        service, changed, is_busy = self.services[replica], self.changed[replica], False
        while not self.is_stopping:
            with changed:
                if not is_busy:
                    changed.wait_for(lambda: self.inboxes[replica] or self.is_stopping)
                messages, self.inboxes[replica] = self.inboxes[replica], []
            for name, args in messages:
                getattr(service, name)(*args)
            is_busy = service.work()

    def put(self, replica, name, args):
        with self.changed[replica]:
            self.inboxes[replica].append((name, args))
            self.changed[replica].notify()

    def post(self, replica, *message):
        self.put(replica, "receive", message)

    def load(self, version, restart=False):
        for replica in range(self.role.num_replicas):
            self.put(replica, "load", (version, restart))

    def version(self):
        return 0

    def listen(self, on_report, on_failure):
        self.on_report, self.on_failure = on_report, on_failure

    def stop_listening(self):
        self.on_report = self.on_failure = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.is_stopping = True
        for changed in self.changed:
            with changed:
                changed.notify()
        for thread in self.threads:
            thread.join()


class SimulatedEngines:
    """A role handle of one replica in a world of one, with a clock that runs ahead of the real one.

    Between two events the coordinator does all it can do: messages take no time.
    """

    is_alone = True

    def __init__(self, **options):
        self.role = SimpleNamespace(num_replicas=1)
        self.now, self.until, self.on_report = 0.0, math.inf, None
        place = SimpleNamespace(replica=0, report=lambda *args: self.on_report(0, *args))
        self.service = FakeService(place, clock=lambda: self.now, **options)

    def pump(self):
        if not asyncio.get_running_loop()._ready:  # no callback waits
            due = self.service.heap[0][0] if self.service.heap else math.inf
            self.now = max(self.now, min(due, self.until))
            if self.now == self.until:
                self.is_over.set()
        self.service.work()
        return True

    def wait(self, rollout, seconds):
        """Let simulated time pass, as a training step does."""
        self.until, self.is_over = self.now + seconds, asyncio.Event()
        rollout._loop.run(self.is_over.wait())
        self.until = math.inf

    def post(self, replica, *message):
        self.service.receive(*message)

    def load(self, version):
        self.service.load(version)

    def version(self):
        return 0

    def listen(self, on_report, on_failure):
        self.on_report = on_report

    def stop_listening(self):
        self.on_report = lambda *report: None


class FakeChat:
    stop_ids = ()

    def encode(self, messages, tools=None):
        return [int(word) for message in messages for word in message["content"].split()]

    encode_quoted = encode

    def encode_ahead(self, conversations):
        pass

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))

    def continue_with(self, token_ids, messages):
        return token_ids + self.encode(messages)


def fake_prompts(start=0, endless_every=0):
    """Prompts p0, p1, ...; every `endless_every`-th never gets an answer."""
    for i in itertools.count(start):
        first = ENDLESS if endless_every and i % endless_every == endless_every - 1 else 1
        yield Prompt(
            id=f"p{i}",
            messages=({"role": "user", "content": f"{first} {i}"},),
            domain="fake",
            ground_truth="",
        )


def playing(make_env):
    """A player of environments that are made from their prompt."""

    async def play(chat, task):
        return await player(lambda: make_env(task), "test", EpisodeOptions())(chat, task)

    return play


@contextmanager
def coordinator_over(
    engines, reward=lambda prompt, reply: 0.0, source=None, seed=3, keep=None, **options
):
    with Coordinator(
        engines=engines,
        chat=FakeChat(),
        play=question_player({"fake": reward}),
        prompts=fake_prompts() if source is None else source,
        params=PARAMS,
        options=RolloutOptions(**options),
        seed=seed,
        keep=keep,
    ) as rollout:
        yield rollout


def check_sample(sample, visit=0, seed=3):
    """Its tokens are those of its own request, whichever replica generated it."""
    seed = derive_seed(seed, sample.prompt.id, visit)
    request = Request(prompt_ids=sample.turns[0].prompt_ids, params=PARAMS, seed=seed)
    assert sample.turns[0].token_ids == fake_tokens(request, sample.index)
    assert sample.reply == FakeChat().decode(sample.turns[0].token_ids)


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
