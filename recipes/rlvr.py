"""Reinforcement learning with verifiable rewards: GRPO on questions whose answers can be checked.

python recipes/rlvr.py --model models/tiny --task reverse:5
python recipes/rlvr.py --model models/SmolLM2-135M-Instruct --task addition:2 --max-tokens 48 \
        --samples-per-prompt 16 --lr 1e-5 --kv-cache-gib 8
python -m pdb recipes/rlvr.py ...      # one process: break anywhere, also in a reward
"""

import time
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean

import tyro

from roll_lite.chat import Chat
from roll_lite.checks import above, at_least
from roll_lite.cluster.device_map import auto_device_map
from roll_lite.cluster.groups import start_alone
from roll_lite.cluster.planner import BatchPlan, plan, render
from roll_lite.cluster.world import choose_device, device_bytes, read_launch
from roll_lite.engine.engine import Engine
from roll_lite.envs.question import question_maker
from roll_lite.models.config import read_config
from roll_lite.models.hf import load_model
from roll_lite.report.run import Run, default_folder
from roll_lite.rewards.math import last_number
from roll_lite.rollout.coordinator import Rollout
from roll_lite.rollout.filters import drop_failed
from roll_lite.sync import sync_weights
from roll_lite.tasks import parse_task, prompts
from roll_lite.train.advantage_options import AdvantageOptions
from roll_lite.train.advantages import with_advantages
from roll_lite.train.optimizer import Schedule
from roll_lite.train.packing import TrainingSequence, pack
from roll_lite.train.policy_loss import PolicyLoss
from roll_lite.train.trainer import Trainer, combine
from roll_lite.types import Group, Prompt, SamplingParams


@dataclass(kw_only=True)
class Config:
    model: str = "models/tiny"
    """Hugging Face folder to start from."""
    task: str = "reverse:5"
    """What to learn: addition:N (digits), reverse:N or counting:N (letters)."""
    steps: int = 40
    """Rounds of generate, score, train."""
    prompts_per_step: int = 32
    """Prompts of one round."""
    samples_per_prompt: int = 8
    """Group size: replies that are compared with each other."""
    max_tokens: int = 16
    """Longest reply, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; logprobs in the loss use the same."""
    updates_per_step: int = 1
    """Optimizer steps per round, each on an equal part of its samples."""
    lr: float = 3e-4
    """Learning rate after warm-up."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises to lr."""
    clip_low: float = 0.2
    """A token's probability ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """A token's probability ratio is clipped above 1 + clip_high."""
    divide_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); off is Dr. GRPO."""
    max_grad_norm: float = 1.0
    """Gradients longer than this are scaled down to it."""
    tokens_per_microbatch: int = 16384
    """Memory budget of one forward and backward pass."""
    kv_cache_gib: float = 1.0
    """Memory of the generation engine's cache."""
    eval_prompts: int = 256
    """Held-out prompts, answered greedily before and after training."""
    eval_every: int = 10
    """Evaluate after every so many steps."""
    seed: int = 0
    """Of the prompts and of all sampling."""
    device: str = "auto"
    """auto, cpu or cuda."""
    plan: bool = False
    """Only print what the run would hold in memory and do in a step."""
    run_dir: str = field(default_factory=partial(default_folder, "rlvr"))
    """Gets config.json, metrics.jsonl, rollouts/ and the trained model."""

    def __post_init__(self):
        max_positions = read_config(self.model).max_positions
        if self.max_tokens >= max_positions:
            raise ValueError(
                f"max_tokens={self.max_tokens} must be below the model's {max_positions}"
            )
        parse_task(self.task)
        at_least(2, self, "samples_per_prompt")  # a group of one has nothing to compare with
        at_least(1, self, "prompts_per_step", "updates_per_step", "max_tokens")
        at_least(1, self, "tokens_per_microbatch", "eval_prompts", "eval_every")
        at_least(0, self, "steps", "warmup_steps", "lr", "clip_low", "clip_high")
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} must not exceed "
                f"prompts_per_step={self.prompts_per_step}"
            )
        above(0, self, "temperature", "max_grad_norm", "kv_cache_gib")


def reversed_word(prompt: Prompt, reply: str) -> float:
    """Your own reward looks like this: text in, number out. `breakpoint()` works here."""
    return float(reply.strip() == prompt.ground_truth)


REWARDS = {"addition": last_number, "counting": last_number, "reverse": reversed_word}
SHOWN = {
    "reward/mean": "reward", "eval/accuracy": "eval", "rollout/failed": "failed",
    "rollout/reply_tokens": "tokens",
    "loss/entropy": "entropy", "loss/grad_norm": "grad", "mismatch/logprob_mean": "mismatch",
    "time/rollout": "rollout s", "time/train": "train s", "time/step": "step s",
}  # fmt: skip


def main(cfg: Config) -> list[float]:
    """Train; returns the held-out accuracies, the first from before training."""
    with start_alone(cfg.device) as place:
        run = Run(cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN)
        chat = Chat(cfg.model)
        trainer = Trainer(
            cfg.model,
            place=place,
            loss=PolicyLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high),
            schedule=Schedule(lr=cfg.lr, warmup_steps=cfg.warmup_steps),
            max_grad_norm=cfg.max_grad_norm,
            temperature=cfg.temperature,
        )
        policy = load_model(cfg.model, device=place.device, dtype=place.dtype)
        engine = Engine(policy, kv_cache_gib=cfg.kv_cache_gib, decode=chat.decode)
        print(engine)
        rollout = Rollout(engine=engine, chat=chat, make_env=question_maker(REWARDS), seed=cfg.seed)
        params = SamplingParams(
            max_tokens=cfg.max_tokens, temperature=cfg.temperature, stop_ids=chat.stop_ids
        )
        options = AdvantageOptions(divide_by_std=cfg.divide_by_std)
        train_prompts = prompts(cfg.task, seed=f"rlvr-{cfg.seed}")
        accuracies = [evaluate(rollout, cfg)]
        run.log(0, {"eval/accuracy": accuracies[-1]})

        for step in range(1, cfg.steps + 1):
            start = time.perf_counter()
            groups = rollout.collect(
                islice(train_prompts, cfg.prompts_per_step),
                num_samples=cfg.samples_per_prompt,
                params=params,
            )
            metrics = describe(groups) | {"time/rollout": time.perf_counter() - start}
            sequences = with_advantages(drop_failed(groups), options)
            updates = []
            for part in split(sequences, cfg.updates_per_step):
                updates.append(trainer.step(pack(part, cfg.tokens_per_microbatch)))
            metrics |= combine(updates)
            metrics |= sync_weights(trainer, engine)
            metrics["time/step"] = time.perf_counter() - start
            if step % cfg.eval_every == 0 or step == cfg.steps:
                accuracies.append(evaluate(rollout, cfg))
                metrics["eval/accuracy"] = accuracies[-1]
            run.log(step, metrics, groups)

        run.close()
        print(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
        print(f"model: {trainer.export(f'{cfg.run_dir}/model')}")
    return accuracies


def describe_plan(cfg: Config) -> str:
    """Without starting anything: bytes, batch arithmetic, warnings."""
    config, chat = read_config(cfg.model), Chat(cfg.model)
    longest = max(len(chat.encode(p.messages)) for p in islice(prompts(cfg.task, seed=0), 64))
    batch = BatchPlan(
        prompts_per_step=cfg.prompts_per_step,
        samples_per_prompt=cfg.samples_per_prompt,
        prompt_tokens=longest,
        reply_tokens=cfg.max_tokens,
        tokens_per_microbatch=cfg.tokens_per_microbatch,
        updates_per_step=cfg.updates_per_step,
        kv_cache_gib=cfg.kv_cache_gib,
    )
    memory = device_bytes(choose_device(cfg.device, read_launch()))
    device_map, _ = auto_device_map(1, config, memory, ["train", "generate"])
    return render(plan(config, device_map, batch, memory))


def evaluate(rollout: Rollout, cfg: Config) -> float:
    """Mean reward of greedy replies to held-out prompts, the same ones for every seed."""
    held_out = islice(prompts(cfg.task, seed=0, split="held_out"), cfg.eval_prompts)
    greedy = SamplingParams(
        max_tokens=cfg.max_tokens, temperature=0.0, stop_ids=rollout.chat.stop_ids
    )
    groups = rollout.collect(held_out, num_samples=1, params=greedy)
    kept = drop_failed(groups, min_samples=1)
    return fmean(sample.score.value for group in kept for sample in group.samples)


def split(sequences: list[TrainingSequence], num_parts: int) -> list[list[TrainingSequence]]:
    """Equal parts, each with samples of every group."""
    return [part for i in range(num_parts) if (part := sequences[i::num_parts])]


def describe(groups: list[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    done = [sample for sample in samples if sample.state == "done"]
    rewards = [[s.score.value for s in g.samples if s.score] for g in groups]
    parts = sorted({name for sample in done for name in sample.score.parts})
    return {
        "reward/mean": fmean(s.score.value for s in done) if done else 0.0,
        "reward/solved_groups": fmean(any(r > 0 for r in group) for group in rewards),
        "reward/equal_groups": fmean(len(set(group)) < 2 for group in rewards),
        **{f"reward/{part}": fmean(s.score.parts.get(part, 0.0) for s in done) for part in parts},
        "rollout/failed": len(samples) - len(done),
        "rollout/reply_tokens": fmean(sum(s.loss_mask) for s in samples),
        "rollout/truncated": fmean(
            any(turn.finish_reason == "length" for turn in s.turns) for s in samples
        ),
    }


if __name__ == "__main__":
    cfg = tyro.cli(Config, description=__doc__.split("\n\n")[0])
    print(describe_plan(cfg)) if cfg.plan else main(cfg)
