"""Generation speed of the engine on three workloads. The last line is JSON.

    python scripts/bench/engine.py --shape qwen3-0.6b --workload R
    python scripts/bench/engine.py --model models/SmolLM2-135M-Instruct --workload N --repeats 3
    python scripts/bench/engine.py --workload C --device cpu --against transformers
    TRITON_CACHE_DIR=$(mktemp -d) python scripts/bench/engine.py        # cold start

Workload N: 256 requests, prompt and output lengths uniform in [100, 1024]. Workload R (one step of
RL): 64 prompts of 200 tokens x 16 samples, output lengths uniform in [64, 512]. Workload C (for a
CPU): 64 requests, prompts of 50 to 149 and outputs of 32 to 95 tokens. Temperature 1, no stop
tokens, logprobs always on. The roofline adds up, step by step, the larger of two times at the rates
of one H200: reading all weights and each sample's keys and values once, and the matrix products.
Start-up is the time from the start of the process to the first token.
"""

import json
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STARTED = time.time()  # before the slow imports

import torch  # noqa: E402
import tyro  # noqa: E402

from roll_lite.engine.engine import Engine  # noqa: E402
from roll_lite.engine.request import Request  # noqa: E402
from roll_lite.models.config import read_hf_config, shape_config  # noqa: E402
from roll_lite.models.hf import hf_tensors, load_model  # noqa: E402
from roll_lite.models.shapes import SHAPES  # noqa: E402
from roll_lite.models.transformer import Transformer, random_model  # noqa: E402
from roll_lite.types import SamplingParams  # noqa: E402

BYTES_PER_SECOND = 4.27e12  # copy, measured on an H200
FLOPS_PER_SECOND = 777e12  # bf16 matrix product, measured on an H200
Work = list[tuple[list[int], int]]
"""Prompt and number of tokens to sample, by request."""


@dataclass(kw_only=True)
class Config:
    shape: str = "smollm2-135m"
    """Random weights of this shape: smollm2-135m, qwen3-0.6b, qwen3-8b, ..."""
    model: str | None = None
    """A Hugging Face folder instead of a shape."""
    workload: Literal["N", "R", "C"] = "R"
    """Set of requests."""
    repeats: int = 3
    """Timed runs after a warm-up run; the median counts."""
    kv_cache_gib: float | None = None
    """Size of the KV cache; by default 80% of the free device memory."""
    requests: int | None = None
    """Run only this number of requests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on CUDA and float32 on a CPU."""
    against: Literal["none", "transformers"] = "none"
    """Also run transformers' generate on the same requests, all in one padded batch."""

    def __post_init__(self):
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r} is not known; use one of {', '.join(SHAPES)}")


def workload_n() -> Work:
    r = random.Random(0)
    prompts = [[r.randrange(10000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    return [(prompt, r.randint(100, 1024)) for prompt in prompts]


def workload_r() -> Work:
    r = random.Random(1)
    prompts = [[r.randrange(10000) for _ in range(200)] for _ in range(64)]
    r = random.Random(2)
    return [(prompt, r.randint(64, 512)) for prompt in prompts for _ in range(16)]


def workload_c() -> Work:
    r = random.Random(0)
    prompts = [[r.randrange(10000) for _ in range(r.randint(50, 149))] for _ in range(64)]
    return [(prompt, r.randint(32, 95)) for prompt in prompts]


WORKLOADS = {"N": workload_n, "R": workload_r, "C": workload_c}


def roofline_seconds(model: Transformer, work: Work) -> float:
    """Least time of the workload if all requests run at once and each prompt is read once.

    Of a mixture's experts a step reads those that its rows use, if every choice is equally likely.
    """
    config = model.config
    width = model.embedding.element_size()
    experts = sum(p.numel() for name, p in model.blocks.named_parameters() if ".experts." in name)
    # An untied embedding is only looked up.
    weights = sum(p.numel() for p in model.blocks.parameters()) - experts
    head = model.head_weight.numel()
    share = config.experts.experts_per_token / config.experts.num_experts if experts else 0
    active = weights + share * experts
    key_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * width
    prefill_tokens = sum(len(prompt) for prompt in {tuple(prompt) for prompt, _ in work})
    seconds = 2 * active * prefill_tokens / FLOPS_PER_SECOND
    for step in range(1, max(length for _, length in work)):  # prefill gives the first token
        keys = [len(prompt) + step for prompt, length in work if length > step]
        read = weights + head + experts * (1 - (1 - share) ** len(keys))
        num_bytes = read * width + sum(keys) * key_bytes
        flops = 2 * (active + head) * len(keys)
        seconds += max(num_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
    return seconds


def is_compile_cache_cold() -> bool:
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return not folder.exists() or not any(folder.iterdir())


def transformers_seconds(cfg: Config, model: Transformer, work: Work) -> float:
    """One padded batch until the longest reply is done, as `generate` works."""
    import transformers

    hf_config = read_hf_config(cfg.model) if cfg.model else dict(SHAPES[cfg.shape])
    config = transformers.AutoConfig.for_model(**hf_config)
    device, dtype = model.embedding.device, model.embedding.dtype
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    tensors = hf_tensors(dict(model.named_parameters()), model.config)
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    reference.tie_weights()
    longest = max(len(prompt) for prompt, _ in work)
    ids = [[0] * (longest - len(prompt)) + prompt for prompt, _ in work]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in work]
    ids, mask = (torch.tensor(x, device=device) for x in (ids, mask))

    def generate(num_tokens: int) -> None:
        reference.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()

    generate(2)  # warm-up
    begin = time.perf_counter()
    generate(max(length for _, length in work))
    return time.perf_counter() - begin


def make_engine(cfg: Config) -> Engine:
    device = cfg.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    default = torch.bfloat16 if device == "cuda" else torch.float32
    dtype = default if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    if cfg.model:
        model = load_model(cfg.model, device=device, dtype=dtype)
    else:
        model = random_model(shape_config(cfg.shape), device=device, dtype=dtype)
    gib = cfg.kv_cache_gib
    if gib is None:
        gib = 0.8 * torch.cuda.mem_get_info()[0] / 2**30 if device == "cuda" else 2.0
    return Engine(model, kv_cache_gib=gib)


def measure(engine: Engine, work: Work, repeats: int) -> list[float]:
    """Seconds of a warm-up run, then of each repeat."""
    requests = [
        Request(prompt_ids=prompt, params=SamplingParams(max_tokens=length), seed=i)
        for i, (prompt, length) in enumerate(work)
    ]
    num_out = sum(length for _, length in work)
    seconds = []
    for repeat in range(repeats + 1):
        engine.pool.forget_all()  # no prefix-cache hits from the last run
        begin = time.perf_counter()
        turns = engine.generate(requests, progress=True)
        seconds.append(time.perf_counter() - begin)
        assert sum(len(turn.token_ids) for group in turns for turn in group) == num_out
        name = f"run {repeat}" if repeat else "warm-up"
        print(f"{name}: {num_out / seconds[-1]:,.0f} tok/s")
    return seconds


def main(cfg: Config) -> None:
    is_cold = is_compile_cache_cold()
    engine = make_engine(cfg)
    print(engine)
    engine.generate([Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=2))])
    startup = time.time() - STARTED
    work = WORKLOADS[cfg.workload]()[: cfg.requests]
    num_out = sum(length for _, length in work)
    warm_up, *seconds = measure(engine, work, cfg.repeats)
    median, weight = statistics.median(seconds), engine.model.embedding
    on_cuda = weight.is_cuda
    result = {
        "shape": cfg.model or cfg.shape,
        "workload": cfg.workload,
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": None if on_cuda else torch.get_num_threads(),
        "backend": engine.runner.backend,
        "output_tokens": num_out,
        "tokens_per_second": round(num_out / median, None if on_cuda else 1),
        "warm_up_seconds": round(warm_up, 2),
        "startup_seconds": round(startup, 2),
        "compile_cache": "cold" if is_cold else "warm",
        "preemptions": engine.scheduler.num_preempted,
    }
    if on_cuda:
        result |= cuda_results(engine, work, num_out, median)
    if cfg.against == "transformers":
        theirs = transformers_seconds(cfg, engine.model, work)
        result |= {
            "transformers_tokens_per_second": round(num_out / theirs, 1),
            "times_transformers": round(theirs / median, 2),
        }
    print(json.dumps(result))


def cuda_results(engine: Engine, work: Work, num_out: int, median: float) -> dict[str, float]:
    """Share of the roofline, memory, and the time to release and restore the memory."""
    roof = roofline_seconds(engine.model, work)
    weights = {name: p.to("cpu") for name, p in engine.model.named_parameters()}
    free, total = torch.cuda.mem_get_info()
    begin = time.perf_counter()
    engine.sleep()
    asleep = time.perf_counter()
    free_asleep = torch.cuda.mem_get_info()[0]
    engine.wake()
    torch.cuda.synchronize()
    awake = time.perf_counter()
    engine.load_weights(weights.items(), 1)
    return {
        "roofline_tokens_per_second": round(num_out / roof),
        "share_of_roofline": round(roof / median, 3),
        "held_gib": round((total - free) / 2**30, 1),
        "held_asleep_gib": round((total - free_asleep) / 2**30, 1),
        "sleep_seconds": round(asleep - begin, 3),
        "wake_seconds": round(awake - asleep, 3),
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
