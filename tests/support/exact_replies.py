"""Greedy replies of tensor-parallel engines in fp32, against those of one: exact_replies.py MODEL
DEVICE. Run under torchrun by test_gpu_ranks.py."""

import sys

import check_gpus
import torch

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.launch import read_launch
from roll_lite.engine.request import Request
from roll_lite.types import SamplingParams


def main(model, device):
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    requests = [
        Request(prompt_ids=sequence.token_ids[:12], params=greedy)
        for sequence in check_gpus.make_sequences()
    ]
    size = read_launch().world_size
    with Cluster(f"alone=0 all=all,tp={size}", device) as cluster:
        options = {"model": model, "dtype": torch.float32}
        (expected, _), (found, _) = (
            cluster.role(name, check_gpus.Speaker, **options).answer(requests)
            for name in ("alone", "all")
        )
        assert check_gpus.reply_error(found, expected) < 1e-3
        same = check_gpus.num_equal(found, expected)
        print(f"{size} ranks: {same} of {len(expected)} replies equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
