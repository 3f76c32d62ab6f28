"""The engine on tensor-parallel ranks against the engine on one; and their lockstep."""

import json
import queue
import random
import threading
import time

import pytest
import torch
from support.forked_ranks import run_ranks
from support.launch import run_torchrun
from support.models import make_reference
from support.paths import SUPPORT
from support.tensor_parallel_program import run_workload

from roll_lite.engine.engine import Engine
from roll_lite.engine.parallel_engine import Lockstep
from roll_lite.models.config import shape_config, tp_sizes
from roll_lite.models.hf import load_model
from roll_lite.models.tensor_parallel import TensorShard

PROGRAM = SUPPORT / "tensor_parallel_program.py"
SECONDS = 60  # a rank that waits longer is taken to wait for ever


CASES = [
    ("qwen3", 2, {"vocab_size": 199, "num_key_value_heads": 1}),
    pytest.param("qwen2_moe", 2, {"ep": 1}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 2, {"ep": 2}, marks=pytest.mark.slow),
    pytest.param("qwen2_moe", 4, {"ep": 2}, marks=pytest.mark.slow),
    pytest.param("qwen2.5", 2, {"vocab_size": 200}, marks=pytest.mark.slow),
    pytest.param("qwen2.5", 4, {"vocab_size": 199}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "size", "changes"), CASES)
def test_many_ranks_answer_like_one(family, size, changes, tmp_path):
    ep = changes.pop("ep", 1)
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        make_reference(family, seed=seed, **changes).save_pretrained(folder)
    start = run_torchrun if size == 4 else run_ranks
    start(size, PROGRAM, *folders, tmp_path / "store", out := tmp_path / "out.json", ep)
    results, num_preempted = json.loads(out.read_text())
    assert num_preempted > 0
    engine = Engine(load_model(folders[0]), kv_cache_gib=6e-4, page_size=4, burst=3)
    expected = json.loads(json.dumps(run_workload(engine, folders)))
    # How far a sample is when the weights change may depend on room in the cache.
    comparable = [(g, e) for g, e in zip(results, expected, strict=True) if g[3] == e[3]]
    assert len(comparable) > len(results) / 2
    for (ids, logprobs, reason, _), (exact_ids, exact_logprobs, exact_reason, _) in comparable:
        assert (ids, reason) == (exact_ids, exact_reason)
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(exact_logprobs), rtol=0, atol=2e-5
        )


def load_ranks(folder, size):
    return [load_model(folder, shard=TensorShard(rank, size, None)) for rank in range(size)]


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 2), (2, 4), (1, 8)])
def test_each_rank_loads_its_queries_and_the_keys_they_need(kv_heads, size, tmp_path):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "num_hidden_layers": 2}
    reference = make_reference("qwen2.5", **sizes)
    reference.save_pretrained(tmp_path)
    attention = reference.model.layers[1].self_attn
    for rank, model in enumerate(load_ranks(tmp_path, size)):
        queries = range(rank * 8 // size, (rank + 1) * 8 // size)
        keys = sorted({head * kv_heads // 8 for head in queries})
        for kind, got in (
            ("weight", model.blocks[1].attention.qkv),
            ("bias", model.blocks[1].attention.qkv_bias),
        ):
            q, k, v = (
                getattr(getattr(attention, f"{name}_proj"), kind).unflatten(0, (-1, 8))
                for name in "qkv"
            )
            assert torch.equal(got[:, :-2].flatten(0, 1), q[queries])
            assert torch.equal(got[:, -2], k[keys]) and torch.equal(got[:, -1], v[keys])


def test_padding_is_no_entry_of_the_vocabulary(tmp_path):
    """9 rows on 4 ranks, of 3 rows each: the last has nothing else."""
    make_reference("qwen3", vocab_size=9).save_pretrained(tmp_path)
    whole, hidden = load_model(tmp_path), -1e20 * torch.rand(5, 64)
    with torch.no_grad():
        logits = torch.cat([model.logits(hidden) for model in load_ranks(tmp_path, 4)], 1)
        assert logits.shape[1] == 12 and (logits[:, 9:] == -torch.inf).all()
        torch.testing.assert_close(logits[:, :9], whole.logits(hidden))


def test_a_size_that_cannot_work_is_refused_with_those_that_do(tmp_path):
    make_reference("qwen2.5", num_key_value_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tp=3 does not divide 8 attention heads; use one of 1, 2"):
        load_ranks(tmp_path, 3)
    known = {"smollm2-135m": [1, 3], "qwen2.5-7b": [1, 2, 4], "qwen3-0.6b": [1, 2, 4, 8, 16]}
    assert {name: tp_sizes(shape_config(name)) for name in known} == known


class Channel:
    """A broadcast from the first rank to the other; both ends meet, as in gloo."""

    def __init__(self):
        self.queue, self.taken = queue.Queue(), queue.Queue()

    def send(self, message):
        self.queue.put(message)
        self.taken.get(timeout=SECONDS)

    def receive(self):
        message = self.queue.get(timeout=SECONDS)
        self.taken.put(None)
        return message


class FakeEngine:
    """What Lockstep needs of a TensorParallelEngine; work is a number of steps that is left."""

    def __init__(self, channel, is_first):
        self.channel, self.is_first, self.left, self.num_steps = channel, is_first, 0, 0

    def step(self):
        self.channel.send("step")
        self.left -= 1
        self.num_steps += 1

    def pause(self, pause):
        self.channel.send(pause)

    def follow(self):
        while (message := self.channel.receive()) == "step":
            self.num_steps += 1
        return message


def run_thread(engine, inbox, num_messages, meet, errors):
    """The loop of a worker thread: posts, then the call that is due, or else work."""
    lockstep, num_run, calls, is_busy = Lockstep(engine), 0, set(), False
    try:
        while num_messages or calls or is_busy:
            while num_messages and not (is_busy and inbox.empty()):
                kind, number = inbox.get(timeout=SECONDS)
                num_messages, is_busy = num_messages - 1, True
                if kind == "post":
                    lockstep.count_post()
                    engine.left += number
                else:
                    calls.add(number)
            if num_run + 1 in calls:
                num_run += 1
                calls.remove(num_run)
                lockstep.pause_for_call(num_run)
                meet.wait(timeout=SECONDS)  # the collective inside of the call
                engine.left += num_run % 2  # a call may leave work, too
                is_busy = True
            elif engine.is_first:
                is_busy = engine.left > 0
                engine.step() if is_busy else lockstep.settle()
            else:
                is_busy = lockstep.may_have_work
                if is_busy:
                    lockstep.follow()
    except Exception as error:
        errors.append(error)
        meet.abort()


def deliver(messages, inbox, seed, last_delay):
    """Everything in order, but each message after a time of its own."""
    r = random.Random(seed)
    for message in messages[:-1]:
        if r.random() < 0.5:
            time.sleep(r.random() * 0.006)
        inbox.put(message)
    time.sleep(last_delay)
    inbox.put(messages[-1])


def make_messages(seed):
    """Posts that bring work and calls; nothing comes after the last to help a rank that waits."""
    r, calls = random.Random(seed), iter(range(1, 62))
    kinds = ["post", "call"] * 30
    r.shuffle(kinds)
    kinds += ["call"] if seed % 2 else ["post", "post"]
    return [(kind, r.randrange(1, 4) if kind == "post" else next(calls)) for kind in kinds]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_never_wait_for_each_other_for_ever(seed):
    messages = make_messages(seed)
    channel, meet, errors = Channel(), threading.Barrier(2), []
    engines = [FakeEngine(channel, is_first) for is_first in (True, False)]
    threads = []
    for rank, engine in enumerate(engines):
        inbox, last_delay = queue.Queue(), 0.0 if rank else 0.05  # the leader hears of it later
        run = (engine, inbox, len(messages), meet, errors)
        threads.append(threading.Thread(target=run_thread, args=run, daemon=True))
        delivery = (messages, inbox, f"{seed} {rank}", last_delay)
        threads.append(threading.Thread(target=deliver, args=delivery, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert not errors and not any(thread.is_alive() for thread in threads)
    brought = sum(number for kind, number in messages if kind == "post")
    left_by_calls = sum(number % 2 for kind, number in messages if kind == "call")
    assert engines[0].num_steps == engines[1].num_steps == brought + left_by_calls
