"""An engine on tensor-parallel ranks: tensor_parallel_program.py FIRST SECOND STORE RESULT_FILE.

FIRST and SECOND are folders of models; the weights of the second come while samples are under way.
"""

import json
import os
import random
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from roll_lite.engine import sampler
from roll_lite.engine.parallel_engine import TensorParallelEngine
from roll_lite.engine.request import Request
from roll_lite.models.hf import load_model
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.types import SamplingParams

SECONDS = 300  # a rank that waits longer is taken to wait for ever


def make_requests():
    r = random.Random(3)
    options = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.05, "top_k": 40},
        {"temperature": 1e30},  # all entries are as likely, and padding would be, too
    ]
    return [
        Request(
            prompt_ids=[r.randrange(1, 199) for _ in range(r.randint(1, 40))],
            params=SamplingParams(max_tokens=r.randint(1, 25), stop_ids=(7, 8), **options[i % 6]),
            num_samples=1 + i % 3,
            seed=i,
        )
        for i in range(20)
    ]


def run_workload(engine, folders):
    """Answers before and after new weights, with samples under way and one request aborted."""
    first = engine.generate(make_requests())
    handles = [engine.submit(request) for request in make_requests()]
    engine.abort(handles[3].id)
    for _ in range(6):
        engine.step()
    if isinstance(engine, TensorParallelEngine):
        engine.pause()
    load_other(engine, folders)
    while engine.has_work:
        engine.step()
    turns = [t for group in first for t in group] + [t for h in handles for t in h.turns]
    return [[t.token_ids, t.logprobs, t.finish_reason, t.versions] for t in turns]


def load_other(engine, folders):
    weights = load_model(folders[1], shard=engine.model.shard)
    engine.load_weights(weights.named_parameters(), policy_version=4)


def main(first, second, store, out, ep):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sampler.CANDIDATES = 8  # too few for some rows
    rank, folders = int(os.environ["RANK"]), (first, second)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=SECONDS),
    )
    shard = TensorShard.of(dist.group.WORLD, int(ep))
    model = load_model(folders[0], shard=shard)
    engine = TensorParallelEngine(
        model, control=dist.new_group(backend="gloo"), kv_cache_gib=3e-4, max_prefill_tokens=50,
        page_size=4, burst=3,
    )  # fmt: skip
    if rank == 0:
        results = run_workload(engine, folders)
        engine.pause()
        with open(out, "w") as file:
            json.dump([results, engine.scheduler.num_preempted], file)
    else:
        engine.follow()
        load_other(engine, folders)
        engine.follow()
    assert not engine.has_work
    assert engine.pool.num_free == engine.pool.num_pages
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
