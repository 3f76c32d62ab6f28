"""Kernels of the engine and of the trainer, against what the GPU's memory and arithmetic allow.

python scripts/bench/kernels.py --shape qwen2.5-0.5b --rows 1024

Of each: milliseconds on the GPU (median, L2 cache cleared, launches not counted), the least that
its bytes or flops take at the published rates, and the share of these rates that it reaches. The
last line is JSON.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from timing import print_results
from triton.testing import do_bench

from roll_lite.checks import at_least
from roll_lite.kernels.paged_attention import paged_decode
from roll_lite.kernels.sample import sample
from roll_lite.models.config import ModelConfig, shape_config
from roll_lite.models.cost import device_flops
from roll_lite.models.logprobs import token_logprobs
from roll_lite.planning.speed import MEMORY_RATES, known_machine

PAGE = 16
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


@dataclass(kw_only=True)
class Config:
    shape: str = "qwen2.5-0.5b"
    """smollm2-135m, qwen2.5-0.5b, qwen3-0.6b, ..."""
    rows: int = 1024
    """Sequences that decode together."""
    shortest: int = 140
    """Tokens of the shortest of them; the lengths are evenly spread."""
    longest: int = 500
    """Tokens of the longest."""
    trained: int = 32768
    """Tokens of a micro-batch that go through the head, forward and backward."""

    def __post_init__(self):
        shape_config(self.shape)
        at_least(1, self, "rows", "shortest", "trained")
        at_least(self.shortest, self, "longest")


Work = tuple[Callable[[], object], int]
"""What to run, and its bytes or flops."""


def sampling(cfg: Config, model: ModelConfig) -> Work:
    """One token per row; the bytes of the logits."""
    logits_RV = torch.randn(cfg.rows, model.vocab_size, **BF16) * 3
    logits_RV[:, 0] += 20  # as sure of a token as a trained model
    temperatures_R = torch.ones(cfg.rows, device="cuda")
    greedy_R = torch.zeros(cfg.rows, dtype=torch.bool, device="cuda")
    keys_R2 = torch.randint(0, 2**31, (cfg.rows, 2), device="cuda")
    positions_R = torch.arange(cfg.rows, device="cuda")
    return lambda: sample(
        logits_RV, temperatures_R, greedy_R, keys_R2, positions_R
    ), logits_RV.nbytes


def attention(cfg: Config, model: ModelConfig) -> Work:
    """Decode attention of one layer; the bytes of keys and values."""
    K, D = model.num_kv_heads, model.head_dim
    num_pages = -(-cfg.longest // PAGE)
    cache = torch.randn(2, cfg.rows * num_pages, PAGE, K, D, **BF16)
    table = torch.randperm(cfg.rows * num_pages, device="cuda").view(cfg.rows, num_pages).int()
    q_BHD = torch.randn(cfg.rows, model.num_heads, D, **BF16)
    lengths_B = torch.linspace(cfg.shortest, cfg.longest, cfg.rows, device="cuda").long()
    finished = torch.zeros(cfg.rows, K, dtype=torch.int32, device="cuda")
    num_bytes = 4 * K * D * int(lengths_B.sum())
    return lambda: paged_decode(q_BHD, *cache, table, lengths_B, cfg.longest, finished), num_bytes


def head(cfg: Config, model: ModelConfig) -> Work:
    """Logprobs and their gradient; the flops of the logits, twice, and of two gradients."""
    H, V = model.hidden_size, model.vocab_size
    inputs = [torch.randn(cfg.trained, H, **BF16), torch.randn(V, H, **BF16) * H**-0.5]
    for tensor in inputs:
        tensor.requires_grad_()
    ids_R = torch.randint(0, V, (cfg.trained,), device="cuda")

    def step() -> None:
        logprobs_R, _ = token_logprobs(*inputs, ids_R)
        torch.autograd.grad(logprobs_R.sum(), inputs)

    return step, 4 * 2 * cfg.trained * H * V


def main(cfg: Config) -> dict[str, object]:
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device was found; run this where there is one")
    torch.manual_seed(0)
    name, model = torch.cuda.get_device_name(), shape_config(cfg.shape)
    if (machine := known_machine(name)) is None:
        sys.exit(f"error: the rates of {name} are not known; add them to planning/speed.py")
    memory, flops = MEMORY_RATES[machine.gpu], device_flops(machine.gpu)
    results: dict[str, object] = {"gpu": name, **vars(cfg)}
    for make, rate in ((sampling, memory), (attention, memory), (head, flops)):
        action, amount = make(cfg, model)
        taken = do_bench(action, warmup=200, rep=1000, return_mode="median")
        least = 1e3 * amount / rate
        results |= {
            f"{make.__name__} ms": round(taken, 4),
            f"{make.__name__} least ms": round(least, 4),
            f"{make.__name__} share of the rate": round(least / taken, 3),
        }
        del action
        torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    print_results(main(tyro.cli(Config, description=__doc__.split("\n\n")[0])))
