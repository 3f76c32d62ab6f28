"""Run by test_expert_parallel.py on ranks: expert_program.py STORE RESULT_FOLDER.

Each rank has its own tokens and two of the experts.
"""

import os
import sys

import torch
import torch.distributed as dist

from roll_lite.models.expert_parallel import mix_over_ranks
from roll_lite.models.mlp import mix

RANKS, EXPERTS, HIDDEN, SIZE = 3, 6, 16, 8
CASES = {
    "all to all": lambda rank: torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(5 + rank)]),
    "all to the last": lambda rank: torch.tensor([[5, 4]]).repeat(4, 1),
    "none of a rank": lambda rank: torch.tensor([[1, 4]]).repeat(3 * rank, 1),
    "none": lambda rank: torch.empty(0, 2, dtype=torch.int64),
}


def inputs(case):
    """Tokens, experts and weights of each rank, and the experts' weights."""
    torch.manual_seed(0)
    experts = torch.randn(EXPERTS, 2, SIZE, HIDDEN), torch.randn(EXPERTS, HIDDEN, SIZE)
    of_ranks = []
    for rank in range(RANKS):
        ids = CASES[case](rank)
        of_ranks.append((torch.randn(len(ids), HIDDEN), ids, torch.rand(ids.shape)))
    return of_ranks, experts


def with_gradients(function, *leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]


def main(store, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    results = {}
    for case in CASES:
        of_ranks, experts = inputs(case)
        x, ids, weights = of_ranks[rank]
        num_here = EXPERTS // RANKS
        mine = [part[rank * num_here : (rank + 1) * num_here] for part in experts]
        counts = []

        def own(x, weights, gate_up, down, ids=ids, num_here=num_here, counts=counts):
            def of_arrived(x, ids, weights, num_pairs):
                counts.append((num_pairs, int((ids // num_here == rank).sum())))
                return mix(
                    x, gate_up, down, ids, weights, first=rank * num_here, num_pairs=num_pairs
                )

            return mix_over_ranks(of_arrived, x, ids, weights, num_here, dist.group.WORLD)

        with torch.no_grad():
            narrow = own(x, weights, *mine, ids=ids.int(), counts=[])  # as kernels choose them
        results[case] = with_gradients(own, x, weights, *mine), counts, narrow
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
