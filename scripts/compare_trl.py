"""TRL's GRPOTrainer on the addition task of recipes/rlvr.py, like for like. Prints JSON lines.

    pip install trl datasets                 # only for this comparison
    python scripts/compare_trl.py --model models/SmolLM2-135M-Instruct --steps 60 > trl.jsonl

Model, questions, reward, samples per step, updates per step, learning rate, schedule, lengths,
temperature and clipping are those of the command in docs/benchmarks.md ("Learning"); generation is
TRL's own with transformers, not vLLM. Two things differ: TRL trains on groups with equal rewards,
whose advantage is zero, and its token average counts them. A line has the step, the seconds of
training so far, and the share of right samples in the step.
"""

import itertools
import json
import time
from dataclasses import dataclass

import tyro
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from roll_lite import tasks
from roll_lite.rewards.maths import last_number


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "models/SmolLM2-135M-Instruct"
    """Hugging Face folder."""
    task: str = "addition:2"
    """Questions."""
    steps: int = 60
    """Rollouts, each followed by `updates_per_step` updates."""
    prompts_per_step: int = 128
    """Prompts of a rollout."""
    samples_per_prompt: int = 8
    """Samples of a prompt."""
    updates_per_step: int = 4
    """Updates on equal parts of a rollout."""
    lr: float = 8e-5
    """Learning rate, which falls linearly to 0."""
    max_tokens: int = 48
    """Longest reply."""
    seed: int = 0
    """Seed of questions and sampling."""
    minutes: float | None = None
    """Stop after this time."""


class Clock(TrainerCallback):
    """Prints a line after each rollout's updates."""

    def __init__(self, cfg: Config):
        self.cfg, self.start, self.rewards = cfg, 0.0, []

    def on_train_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in (logs or {}):
            self.rewards.append(logs["reward"])
        if state.global_step % self.cfg.updates_per_step == 0 and self.rewards:
            seconds = time.perf_counter() - self.start
            step = state.global_step // self.cfg.updates_per_step
            right = sum(self.rewards) / len(self.rewards)
            print(json.dumps({"step": step, "seconds": seconds, "right": right}), flush=True)
            self.rewards = []
            control.should_training_stop |= bool(
                self.cfg.minutes and seconds > 60 * self.cfg.minutes
            )


def main(cfg: Config) -> None:
    prompts = list(
        itertools.islice(
            tasks.prompts(cfg.task, seed=f"rlvr-{cfg.seed}"), cfg.prompts_per_step * cfg.steps
        )
    )
    by_id = {prompt.id: prompt for prompt in prompts}
    rows = [{"prompt": list(prompt.messages), "key": prompt.id} for prompt in prompts]

    def reward(completions, key, **_):
        replies = [completion[0]["content"] for completion in completions]
        return [
            float(getattr(score, "value", score))
            for score in map(last_number, [by_id[k] for k in key], replies)
        ]

    samples = cfg.prompts_per_step * cfg.samples_per_prompt
    options = GRPOConfig(
        output_dir="runs/trl", seed=cfg.seed, bf16=True, report_to=[], save_strategy="no",
        learning_rate=cfg.lr, lr_scheduler_type="linear", weight_decay=0.0, max_grad_norm=1.0,
        per_device_train_batch_size=samples // cfg.updates_per_step,
        steps_per_generation=cfg.updates_per_step, num_generations=cfg.samples_per_prompt,
        max_steps=cfg.steps * cfg.updates_per_step, num_iterations=1, beta=0.0, epsilon=0.2,
        loss_type="dapo", temperature=1.0, max_completion_length=cfg.max_tokens,
        logging_steps=1, disable_tqdm=True, shuffle_dataset=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=cfg.model, args=options, reward_funcs=reward, train_dataset=Dataset.from_list(rows),
        callbacks=[Clock(cfg)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
