"""Reinforcement learning with verifiable rewards: questions whose answers can be checked.

python recipes/rlvr.py --model models/tiny --task reverse:5
python recipes/rlvr.py --model models/SmolLM2-135M-Instruct --task addition:2 --max-tokens 48 \
        --samples-per-prompt 16 --lr 1e-5 --kv-cache-gib 8
python recipes/rlvr.py --advantage gae --loss ppo ...       # PPO with a critic; see --help
python -m pdb recipes/rlvr.py ...      # one process: break anywhere, also in a reward
"""

import time
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import tyro

from roll_lite.chat import Chat
from roll_lite.checks import above, at_least, one_of, read_only_if
from roll_lite.cluster.device_map import auto_device_map
from roll_lite.cluster.groups import Place, start_alone
from roll_lite.cluster.planner import BatchPlan, plan, render
from roll_lite.cluster.world import choose_device, device_bytes, read_launch
from roll_lite.engine.engine import Engine
from roll_lite.envs.question import question_maker
from roll_lite.models.config import read_config
from roll_lite.models.hf import load_model
from roll_lite.report.run import Run, default_folder
from roll_lite.rewards.math import last_number
from roll_lite.rollout.filters import drop_failed
from roll_lite.rollout.metrics import describe_groups
from roll_lite.rollout.one_process import Rollout
from roll_lite.sync import sync_weights
from roll_lite.tasks import parse_task, prompts
from roll_lite.train import shaping
from roll_lite.train.advantage_options import AdvantageState
from roll_lite.train.advantages import Evidence, with_advantages
from roll_lite.train.algorithm import Algorithm
from roll_lite.train.losses import critic_metrics
from roll_lite.train.optimizer import Schedule
from roll_lite.train.packing import TrainingSequence, pack, split
from roll_lite.train.scorer import Scorer
from roll_lite.train.scoring import plain_sequences, score_tokens, with_field
from roll_lite.train.trainer import Trainer, combine
from roll_lite.types import Group, Prompt, SamplingParams


@dataclass(kw_only=True)
class Config(Algorithm):
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
    min_group_reward: float | None = None
    """Leave out groups whose mean reward is below: too hard."""
    max_group_reward: float | None = None
    """Leave out groups whose mean reward is above: too easy."""
    overlong: str = "train"
    """Replies cut at max_tokens: train on them, mask them, or lower rewards softly by a penalty."""
    overlong_buffer: int = 0
    """overlong=penalty: over the last so many tokens the reward falls, by 1 in the end (DAPO)."""
    updates_per_step: int = 1
    """Optimizer steps per pass over a round's samples, each on an equal part of them."""
    epochs: int = 1
    """Passes over a round's samples."""
    lr: float = 3e-4
    """Learning rate after warm-up."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises to lr."""
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
        super().__post_init__()
        max_positions = read_config(self.model).max_positions
        if self.max_tokens >= max_positions:
            raise ValueError(
                f"max_tokens={self.max_tokens} must be below the model's {max_positions}"
            )
        parse_task(self.task)
        if self.advantage in LACKING:
            raise ValueError(
                f"advantage={self.advantage!r} needs {LACKING[self.advantage]}, which this recipe "
                "does not have; use one of the others"
            )
        at_least(self.min_samples, self, "samples_per_prompt")
        at_least(1, self, "prompts_per_step", "updates_per_step", "epochs", "max_tokens")
        at_least(1, self, "tokens_per_microbatch", "eval_prompts", "eval_every")
        at_least(0, self, "steps", "warmup_steps", "lr")
        above(0, self, "temperature", "max_grad_norm", "kv_cache_gib")
        one_of(("train", "mask", "penalty"), self, "overlong")
        read_only_if(self.overlong == "penalty", "overlong='penalty'", self, "overlong_buffer")
        if self.overlong == "penalty":
            shaping.overlong_penalty(0, self.max_tokens, self.overlong_buffer)
        if self.min_group_reward is not None and self.max_group_reward is not None:
            at_least(self.min_group_reward, self, "max_group_reward")
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} must not exceed "
                f"prompts_per_step={self.prompts_per_step}"
            )

    @property
    def min_samples(self) -> int:
        """Of a group: one alone has nothing to compare with, but may not need to."""
        return 2 if self.advantage_options.compares_samples else 1


LACKING = {"gigpo": "rewards turn by turn", "opd": "a teacher"}


class Models(NamedTuple):
    policy: Trainer
    critic: Trainer | None
    """With advantage gae."""
    reference: Scorer | None
    """With kl_coef."""


def reversed_word(prompt: Prompt, reply: str) -> float:
    """Your own reward looks like this: text in, number out. `breakpoint()` works here."""
    return float(reply.strip() == prompt.ground_truth)


REWARDS = {"addition": last_number, "counting": last_number, "reverse": reversed_word}
SHOWN = {
    "reward/mean": "reward", "eval/accuracy": "eval", "rollout/failed": "failed",
    "rollout/reply_tokens": "tokens",
    "loss/entropy": "entropy", "loss/grad_norm": "grad", "mismatch/logprob_mean": "mismatch",
    "loss/kl": "kl", "critic/explained_variance": "critic explains",
    "time/rollout": "rollout s", "time/train": "train s", "time/step": "step s",
}  # fmt: skip


def main(cfg: Config) -> list[float]:
    """Train; returns the held-out accuracies, the first from before training."""
    with start_alone(cfg.device) as place:
        run = Run(cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN)
        chat = Chat(cfg.model)
        models = load_models(cfg, place)
        policy = load_model(cfg.model, device=place.device, dtype=place.dtype)
        engine = Engine(policy, kv_cache_gib=cfg.kv_cache_gib, decode=chat.decode)
        print(engine)
        rollout = Rollout(engine=engine, chat=chat, make_env=question_maker(REWARDS), seed=cfg.seed)
        params = SamplingParams(
            max_tokens=cfg.max_tokens, temperature=cfg.temperature, stop_ids=chat.stop_ids
        )
        state = AdvantageState(cfg.advantage_options)
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
            metrics = describe_groups(groups) | {"time/rollout": time.perf_counter() - start}
            sequences = prepare(choose(groups, cfg), cfg, models, state)
            metrics |= {"rollout/trained_samples": len(sequences)} | state.metrics
            metrics |= update(sequences, cfg, models, only_critic=step <= cfg.critic_warmup_steps)
            metrics |= sync_weights(models.policy, engine)
            metrics["time/step"] = time.perf_counter() - start
            if step % cfg.eval_every == 0 or step == cfg.steps:
                accuracies.append(evaluate(rollout, cfg))
                metrics["eval/accuracy"] = accuracies[-1]
            run.log(step, metrics, groups)

        run.close()
        print(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
        print(f"model: {models.policy.export(f'{cfg.run_dir}/model')}")
    return accuracies


def load_models(cfg: Config, place: Place) -> Models:
    """The policy, and beside it only what the algorithm reads."""
    trainer = partial(Trainer, cfg.model, place=place, max_grad_norm=cfg.max_grad_norm)
    schedule, critic, reference = Schedule(lr=cfg.lr, warmup_steps=cfg.warmup_steps), None, None
    policy = trainer(loss=cfg.policy_loss, schedule=schedule, temperature=cfg.temperature)
    if cfg.needs_critic:
        schedule = Schedule(lr=cfg.critic_lr, warmup_steps=cfg.warmup_steps)
        critic = trainer(loss=cfg.value_loss, schedule=schedule, head="value")
    if cfg.needs_reference:
        folder = cfg.reference or cfg.model
        reference = Scorer(folder, place=place, temperature=cfg.temperature)
    return Models(policy, critic, reference)


def choose(groups: list[Group], cfg: Config) -> list[Group]:
    """The groups that are worth training on, with the rewards that count."""
    groups = drop_failed(groups, min_samples=cfg.min_samples)
    groups = shaping.keep_difficulty(groups, cfg.min_group_reward, cfg.max_group_reward)
    if cfg.overlong == "penalty":
        groups = shaping.penalise_overlong(groups, cfg.max_tokens, cfg.overlong_buffer)
    return groups


def prepare(
    groups: list[Group], cfg: Config, models: Models, state: AdvantageState
) -> list[TrainingSequence]:
    """Advantages, and what the models say of the samples before the first update."""
    if not groups:
        return []
    plain = plain_sequences(groups)
    score = partial(score_tokens, sequences=plain, tokens_per_microbatch=cfg.tokens_per_microbatch)
    reference = score(models.reference.logprobs) if models.reference else None
    evidence = Evidence(
        values=score(models.critic.values) if models.critic else None,
        reference_logprobs=reference if cfg.kl_in == "reward" else None,
    )
    sequences = with_advantages(groups, cfg.advantage_options, evidence, state)
    if reference and cfg.kl_in == "loss":
        sequences = with_field(sequences, "reference_logprobs", reference)
    if cfg.denominator == "old":
        sequences = with_field(sequences, "old_logprobs", score(models.policy.logprobs))
    if cfg.overlong == "mask":
        sequences = shaping.mask_overlong(sequences, groups)
    return [sequence for sequence in sequences if sequence.weight > 0]


def update(
    sequences: list[TrainingSequence], cfg: Config, models: Models, *, only_critic: bool
) -> dict[str, float]:
    """The round's optimizer steps: `epochs` passes of `updates_per_step` each."""
    budget, policy_updates, critic_updates = cfg.tokens_per_microbatch, [], []
    for part in cfg.epochs * split(sequences, cfg.updates_per_step):
        if models.critic:
            critic_updates.append(models.critic.step(pack(part, budget)))
        if not only_critic:
            batch = pack(part, budget, aggregation=cfg.chosen_aggregation, constant=cfg.constant)
            policy_updates.append(models.policy.step(batch))
    of_critic = critic_metrics(combine(critic_updates)) if critic_updates else {}
    return combine(policy_updates) | of_critic


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
    wanted = {"critic": cfg.needs_critic, "reference": cfg.needs_reference}
    roles = ["train", "generate", *(name for name, is_wanted in wanted.items() if is_wanted)]
    device_map, _ = auto_device_map(1, config, memory, roles)
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


if __name__ == "__main__":
    cfg = tyro.cli(Config, description=__doc__.split("\n\n")[0])
    print(describe_plan(cfg)) if cfg.plan else main(cfg)
