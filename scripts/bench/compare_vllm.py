"""vLLM on the workloads of scripts/bench/engine.py. The last line is JSON.

    pip install vllm                         # in an environment of its own: it pins torch
    PYTHONPATH=src python scripts/bench/compare_vllm.py --model FOLDER --workload R

FOLDER has the config.json of the shape; weights are random, as in scripts/bench/engine.py.
Temperature 1, no stop tokens, lengths fixed by request, logprobs of sampled tokens unless
--no-logprobs. The median of --repeats counts, after a warm-up of the whole workload.
"""

import json
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import tyro
from engine import WORKLOADS
from vllm import LLM, SamplingParams, TokensPrompt


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str
    """Folder with a config.json; no weights are read."""
    workload: Literal["N", "R", "C"] = "R"
    """Set of requests."""
    repeats: int = 3
    """Timed runs."""
    logprobs: bool = True
    """Ask for the logprobs of sampled tokens, which RL needs."""
    memory: float = 0.85
    """Share of the GPU's memory that vLLM may use."""


def main(cfg: Config) -> dict:
    work = WORKLOADS[cfg.workload]()
    llm = LLM(
        cfg.model, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
        gpu_memory_utilization=cfg.memory, max_model_len=4096, max_num_seqs=1024,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in work]
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False,
            logprobs=0 if cfg.logprobs else None,
        )
        for _, length in work
    ]  # fmt: skip
    seconds = []
    for _ in range(1 + cfg.repeats):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == sum(length for _, length in work)
    return {
        "workload": cfg.workload, "logprobs": cfg.logprobs, "tokens": num_tokens,
        "tokens_per_second": num_tokens / statistics.median(seconds[1:]),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))))
