"""Generation speed of the engine on two workloads; the last line is JSON.

    python scripts/bench_engine.py --shape qwen3-0.6b --workload R
    python scripts/bench_engine.py --model models/SmolLM2-135M-Instruct --workload N --repeats 3

Workload N: 256 requests, prompt and output lengths uniform in [100, 1024]. Workload R (one step of
RL): 64 prompts of 200 tokens x 16 samples, output lengths uniform in [64, 512]. Temperature 1, no
stop, logprobs always on. The roofline counts, step by step, the larger of two times: reading all
weights and each sample's keys and values once, and the matrix products; at the rates of one H200.
Start-up is from the start of the process to the first token.
"""

import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Literal

STARTED = time.time()  # before the slow imports

import torch  # noqa: E402
import tyro  # noqa: E402

from roll_lite.engine.engine import Engine  # noqa: E402
from roll_lite.engine.sequence import Request  # noqa: E402
from roll_lite.models.config import ModelConfig, parse_config  # noqa: E402
from roll_lite.models.hf import load_model  # noqa: E402
from roll_lite.models.transformer import Transformer  # noqa: E402
from roll_lite.types import SamplingParams  # noqa: E402

BYTES_PER_SECOND = 4.27e12  # copy, measured on an H200
FLOPS_PER_SECOND = 777e12  # bf16 matrix product, measured on an H200
SHAPES = {  # vocabulary, hidden, intermediate, layers, heads, kv heads, head dim, model type, tied
    "smollm2-135m": (49152, 576, 1536, 30, 9, 3, 64, "llama", True),
    "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128, "qwen3", True),
    "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128, "qwen3", False),
}


@dataclass(kw_only=True)
class Config:
    shape: str = "smollm2-135m"
    """Random weights of this shape: smollm2-135m, qwen3-0.6b or qwen3-8b."""
    model: str | None = None
    """A Hugging Face folder instead of a shape."""
    workload: Literal["N", "R"] = "R"
    """Which requests."""
    repeats: int = 3
    """Timed runs after one that warms up; the median counts."""
    kv_cache_gib: float | None = None
    """Size of the cache; 80% of what is free on the device unless given."""
    requests: int | None = None
    """Only the first so many requests."""

    def __post_init__(self):
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r} is not known; use one of {', '.join(SHAPES)}")


def workload_n() -> list[tuple[list[int], int]]:
    r = random.Random(0)
    prompts = [[r.randrange(10000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    return [(prompt, r.randint(100, 1024)) for prompt in prompts]


def workload_r() -> list[tuple[list[int], int]]:
    r = random.Random(1)
    prompts = [[r.randrange(10000) for _ in range(200)] for _ in range(64)]
    r = random.Random(2)
    return [(prompt, r.randint(64, 512)) for prompt in prompts for _ in range(16)]


def shape_config(name: str) -> ModelConfig:
    vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, kind, tied = SHAPES[name]
    return parse_config(
        {
            "model_type": kind, "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
            "rope_theta": 1e6,
        }
    )  # fmt: skip


def random_model(config: ModelConfig, device: str, dtype: torch.dtype) -> Transformer:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Transformer(config)
    torch.set_default_dtype(default)
    model.init_weights(0)
    return model


def roofline_seconds(model: Transformer, work: list[tuple[list[int], int]]) -> float:
    """The least time for the workload with all requests running at once, each prompt read once."""
    config = model.config
    width = model.embedding.element_size()
    head = model.head_weight.numel()
    blocks = sum(p.numel() for p in model.blocks.parameters())
    weights = blocks + head  # an embedding that is not the head is only looked up
    key_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * width
    prefill_tokens = sum(len(prompt) for prompt in {tuple(prompt) for prompt, _ in work})
    seconds = 2 * blocks * prefill_tokens / FLOPS_PER_SECOND
    for step in range(1, max(length for _, length in work)):  # prefill gives the first token
        keys = [len(prompt) + step for prompt, length in work if length > step]
        num_bytes = weights * width + sum(keys) * key_bytes
        flops = 2 * weights * len(keys)
        seconds += max(num_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
    return seconds


def main(cfg: Config) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if cfg.model:
        model = load_model(cfg.model, device=device, dtype=dtype)
    else:
        model = random_model(shape_config(cfg.shape), device, dtype)
    gib = cfg.kv_cache_gib
    if gib is None:
        gib = 0.8 * torch.cuda.mem_get_info()[0] / 2**30 if device == "cuda" else 2.0
    engine = Engine(model, kv_cache_gib=gib)
    engine.generate([Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=2))])
    startup = time.time() - STARTED

    work = (workload_n() if cfg.workload == "N" else workload_r())[: cfg.requests]
    requests = [
        Request(prompt_ids=prompt, params=SamplingParams(max_tokens=length), seed=i)
        for i, (prompt, length) in enumerate(work)
    ]
    num_out = sum(length for _, length in work)
    seconds = []
    for repeat in range(cfg.repeats + 1):
        engine.pool.forget_all()  # prompts of the last run must not be found in the cache
        begin = time.perf_counter()
        turns = engine.generate(requests, progress=True)
        seconds.append(time.perf_counter() - begin)
        assert sum(len(turn.token_ids) for group in turns for turn in group) == num_out
        print(
            f"{'warm-up' if repeat == 0 else f'run {repeat}'}: {num_out / seconds[-1]:,.0f} tok/s"
        )

    median = statistics.median(seconds[1:])
    roof = roofline_seconds(model, work)
    result = {
        "shape": cfg.model or cfg.shape,
        "workload": cfg.workload,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "backend": engine.runner.backend,
        "output_tokens": num_out,
        "tokens_per_second": round(num_out / median),
        "roofline_tokens_per_second": round(num_out / roof) if device == "cuda" else None,
        "share_of_roofline": round(roof / median, 3) if device == "cuda" else None,
        "warm_up_seconds": round(seconds[0], 2),
        "startup_seconds": round(startup, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if device == "cuda"
        else None,
        "preemptions": engine.scheduler.num_preempted,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
