"""vLLM on the workloads of scripts/bench/engine.py. Prints a line of JSON for each.

    pip install vllm==0.22.1                 # in an environment of its own: it pins torch
    VLLM_ENABLE_V1_MULTIPROCESSING=0 PYTHONPATH=src \
            python scripts/bench/compare_vllm.py --shape qwen3-0.6b --workloads R N

Random weights of the same shape, the same requests, temperature 1, no stop tokens, logprobs of
sampled tokens. As in scripts/bench/engine.py a workload runs once as a warm-up, then --repeats
times, of which the median counts; prompts of an earlier run are forgotten, equal prompts within a
run are computed once; start-up is the time from the start of the process to the first token. CUDA
graphs go to 1,024 rows, which is all of workload R; by itself vLLM stops at 512. Logprobs come as
vLLM's default, an object for each token, or flat, in lists, which costs less Python, or not at all.
With VLLM_ENABLE_V1_MULTIPROCESSING=1, vLLM's default, the engine has a process of its own; with 0
it has none, as inside a trainer on the same GPU.
"""

import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

STARTED = time.time()  # before the slow imports

import torch  # noqa: E402
import tyro  # noqa: E402
from engine import WORKLOADS, Work  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402

from roll_lite.models.shapes import SHAPES, hf_shape  # noqa: E402

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PACKAGES = ("vllm", "torch", "triton", "transformers")


@dataclass(frozen=True, kw_only=True)
class Config:
    shape: str = "qwen3-0.6b"
    """Random weights of this shape: smollm2-135m, qwen3-0.6b, qwen3-8b, ..."""
    workloads: tuple[Literal["N", "R", "C"], ...] = ("R",)
    """Sets of requests."""
    logprobs: tuple[Literal["objects", "flat", "none"], ...] = ("objects",)
    """How logprobs of sampled tokens come; each workload runs with each."""
    repeats: int = 1
    """Timed runs after a warm-up run; the median counts."""
    graph_rows: int = 1024
    """Most rows of a CUDA graph."""
    memory: float = 0.85
    """Share of the GPU's memory that vLLM may use."""

    def __post_init__(self):
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r} is not known; use one of {', '.join(SHAPES)}")


def engine_options(cfg: Config, folder: str) -> dict[str, Any]:
    """Arguments of vLLM's LLM; `folder` gets the shape's config.json, and no weights are read."""
    shape = hf_shape(cfg.shape)
    config = shape | {"architectures": [ARCHITECTURES[shape["model_type"]]], "dtype": "bfloat16"}
    Path(folder, "config.json").write_text(json.dumps(config))
    return {
        "model": folder, "load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True,
        "generation_config": "vllm", "max_model_len": 4096, "max_num_seqs": 1024,
        "gpu_memory_utilization": cfg.memory,
        "compilation_config": {"max_cudagraph_capture_size": cfg.graph_rows},
    }  # fmt: skip


def measure(llm: LLM, work: Work, logprobs: str, repeats: int) -> dict[str, Any]:
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in work]
    lengths = [length for _, length in work]
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False,
            logprobs=None if logprobs == "none" else 0, flat_logprobs=logprobs == "flat",
        )
        for length in lengths
    ]  # fmt: skip
    seconds, was_empty = [], True
    for _ in range(1 + repeats):
        was_empty &= llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        replies = [output.outputs[0] for output in outputs]
        assert [len(reply.token_ids) for reply in replies] == lengths
        if logprobs != "none":
            assert [len(reply.logprobs) for reply in replies] == lengths
    warm_up, *seconds = seconds
    return {
        "output_tokens": sum(lengths),
        "tokens_per_second": round(sum(lengths) / statistics.median(seconds)),
        "seconds": [round(value, 3) for value in seconds],
        "warm_up_seconds": round(warm_up, 2),
        "prompts_were_forgotten": was_empty,
    }


def settings(llm: LLM) -> dict[str, Any]:
    """What vLLM made of the options."""
    config = llm.llm_engine.vllm_config
    graphs, scheduler, cache = (
        config.compilation_config, config.scheduler_config, config.cache_config
    )  # fmt: skip
    return {
        "cuda_graphs": graphs.cudagraph_mode.name,
        "graph_rows": graphs.max_cudagraph_capture_size,
        "num_graph_sizes": len(graphs.cudagraph_capture_sizes),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": scheduler.async_scheduling,
        "prefix_cache": cache.enable_prefix_caching,
        "memory": cache.gpu_memory_utilization,
        "cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "logprobs_mode": config.model_config.logprobs_mode,
        "model_runner": 2 if config.use_v2_model_runner else 1,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_")},
    }


def main(cfg: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**engine_options(cfg, folder))
        params = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, detokenize=False)
        llm.generate([TokensPrompt(prompt_token_ids=[1, 2, 3])], params, use_tqdm=False)
        engine = {
            "startup_seconds": round(time.time() - STARTED, 2),
            "device": torch.cuda.get_device_name(),
            "settings": settings(llm),
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in PACKAGES},
        }
        for workload, logprobs in itertools.product(cfg.workloads, cfg.logprobs):
            asked = {"shape": cfg.shape, "workload": workload, "logprobs": logprobs}
            result = measure(llm, WORKLOADS[workload](), logprobs, cfg.repeats)
            print(json.dumps(asked | result | engine), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
