"""TRL's GRPOTrainer on the prompts of recipes/rlvr.py, like for like. Prints JSON lines.

    pip install trl==1.16.0 datasets         # and vllm==0.22.1 for --vllm-memory
    python scripts/bench/compare_trl.py --model models/SmolLM2-135M-Instruct --steps 60 > trl.jsonl
    VLLM_ENABLE_V1_MULTIPROCESSING=0 python scripts/bench/compare_trl.py --vllm-memory 0.3 \
            --model models/Qwen2.5-Coder-0.5B-Instruct --data gsm8k-train.jsonl --steps 6 \
            --schedule constant --lr 3e-6 --max-tokens 512 --samples-per-microbatch 32 \
            --out runs/trl
    python recipes/rlvr.py --model models/Qwen2.5-Coder-0.5B-Instruct --data gsm8k-train.jsonl \
            --schedule constant --lr 3e-6 --max-tokens 512 --prompts-per-step 128 \
            --samples-per-prompt 8 --updates-per-step 4 --tokens-per-microbatch 32768 \
            --kv-cache-gib 16 --eval-every 0 --rollouts-every 0 --steps 6 --run-dir runs/ours
    python recipes/evaluate.py --model runs/trl --data gsm8k-test.jsonl --max-tokens 512

Model, prompts and their order, reward, samples per step, updates per step, learning rate, schedule,
lengths, temperature and clipping are those of rlvr.py with the same options; the defaults are those
of the addition run in docs/notebook/2026-11-18-benchmarks.md. Everything else is TRL's default: its
own generation with transformers, or with --vllm-memory vLLM in the same process, on the same GPU.
TRL trains on groups with equal rewards, whose advantage is zero, and its token average counts them:
to compare, leave out rlvr.py's --drop-equal, with which it makes fewer updates. The first line has
versions and options. Each other line has the step, the seconds of training so far, those of
the step and of its rollout (weight sync, generation, rewards and TRL's logprobs before the first
update), the tokens generated a second, the share of right samples in the step, and the most GPU
memory so far: that of torch in this process, vLLM's included.
"""

import importlib.metadata
import itertools
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import tyro
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from roll_lite.data import Mixture
from roll_lite.rewards import registry
from roll_lite.rewards.maths import last_number

REWARDS = registry.REWARDS | {"addition": last_number, "counting": last_number}


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "models/SmolLM2-135M-Instruct"
    """Hugging Face folder."""
    data: str = "addition:2"
    """A task or a file of prompts."""
    eval_share: float = 0.0
    """Share of the file that rlvr.py holds out."""
    steps: int = 60
    """Rollouts, each followed by `updates_per_step` updates."""
    prompts_per_step: int = 128
    """Prompts of a rollout."""
    samples_per_prompt: int = 8
    """Samples of a prompt."""
    updates_per_step: int = 4
    """Updates on equal parts of a rollout."""
    samples_per_microbatch: int = 256
    """Samples of one forward and backward pass: as many as the memory allows."""
    vllm_memory: float | None = None
    """Share of the GPU's memory for vLLM, which then generates."""
    lr: float = 8e-5
    """Learning rate."""
    schedule: Literal["constant", "linear"] = "linear"
    """linear: it falls to 0."""
    max_tokens: int = 48
    """Longest reply."""
    seed: int = 0
    """Seed of prompts and sampling."""
    minutes: float | None = None
    """Stop after this time."""
    out: str = "runs/trl"
    """Folder for the model that was trained."""


class TimedTrainer(GRPOTrainer):
    rollout_seconds = 0.0
    """Of all rollouts so far."""

    def _generate_and_score_completions(self, inputs):
        begin = time.perf_counter()
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self.rollout_seconds += time.perf_counter() - begin


class Clock(TrainerCallback):
    """Prints a line after each rollout's updates."""

    def __init__(self, cfg: Config):
        self.cfg, self.rewards, self.tokens = cfg, [], 0
        self.start = self.last = self.last_rollouts = 0.0
        self.trainer: TimedTrainer | None = None

    def on_train_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        logs = logs or {}
        if "reward" in logs:  # once for each rollout
            self.rewards.append(logs["reward"])
            samples = self.cfg.prompts_per_step * self.cfg.samples_per_prompt
            self.tokens += samples * float(logs["completions/mean_length"])
        if state.global_step % self.cfg.updates_per_step == 0 and self.rewards:
            seconds, rollouts = time.perf_counter() - self.start, self.trainer.rollout_seconds
            line = {
                "step": state.global_step // self.cfg.updates_per_step,
                "seconds": seconds,
                "step_seconds": seconds - self.last,
                "rollout_seconds": rollouts - self.last_rollouts,
                "tokens_per_second": self.tokens / seconds,
                "right": sum(self.rewards) / len(self.rewards),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
            print(json.dumps(line), flush=True)
            self.rewards, self.last, self.last_rollouts = [], seconds, rollouts
            control.should_training_stop |= bool(
                self.cfg.minutes and seconds > 60 * self.cfg.minutes
            )


def run_facts(cfg: Config) -> dict[str, Any]:
    packages = ["trl", "transformers", "accelerate", "torch"] + ["vllm"] * bool(cfg.vllm_memory)
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "options": asdict(cfg),
        "versions": {"python": platform.python_version()} | versions,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_")},
    }


def main(cfg: Config) -> None:
    print(json.dumps(run_facts(cfg)), flush=True)
    mixture = Mixture((cfg.data,), seed=f"rlvr-{cfg.seed}", held_out_share=cfg.eval_share)
    prompts = list(itertools.islice(mixture, cfg.prompts_per_step * cfg.steps))
    by_id = {prompt.id: prompt for prompt in prompts}
    rows = [{"prompt": list(prompt.messages), "key": prompt.id} for prompt in prompts]

    def reward(completions, key, **_):
        replies = [completion[0]["content"] for completion in completions]
        return [
            float(getattr(score, "value", score))
            for prompt, reply in zip(map(by_id.get, key), replies, strict=True)
            for score in [REWARDS[prompt.domain](prompt, reply)]
        ]

    samples = cfg.prompts_per_step * cfg.samples_per_prompt
    per_update = samples // cfg.updates_per_step
    microbatch = min(cfg.samples_per_microbatch, per_update)
    vllm = {"use_vllm": True, "vllm_mode": "colocate"}
    vllm = vllm | {"vllm_gpu_memory_utilization": cfg.vllm_memory} if cfg.vllm_memory else {}
    options = GRPOConfig(
        output_dir=cfg.out, seed=cfg.seed, report_to=[], save_strategy="no",
        bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
        learning_rate=cfg.lr, lr_scheduler_type=cfg.schedule, weight_decay=0.0, max_grad_norm=1.0,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=per_update // microbatch,
        steps_per_generation=samples // microbatch, num_generations=cfg.samples_per_prompt,
        max_steps=cfg.steps * cfg.updates_per_step, num_iterations=1, beta=0.0, epsilon=0.2,
        loss_type="dapo", temperature=1.0, max_completion_length=cfg.max_tokens,
        logging_steps=1, disable_tqdm=True, shuffle_dataset=False, gradient_checkpointing=False,
        **vllm,
    )  # fmt: skip
    clock = Clock(cfg)
    clock.trainer = trainer = TimedTrainer(
        model=cfg.model, args=options, reward_funcs=reward, train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(cfg.out)
    trainer.processing_class.save_pretrained(cfg.out)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
