"""Reinforcement learning with verifiable rewards: questions whose answers can be checked.

python recipes/rlvr.py --model models/tiny --data reverse:5
python recipes/rlvr.py --model models/SmolLM2-135M-Instruct --data addition:2 --max-tokens 48 \
        --prompts-per-step 128 --drop-equal --max-refills 0 --updates-per-step 4 --lr 8e-5 \
        --schedule linear --steps 60 --kv-cache-gib 8
torchrun --nproc-per-node 8 recipes/rlvr.py --data math.jsonl@0.7 code.jsonl@0.3 \
        --device-map "train=0-3 generate=4-7" --max-staleness 1         # asynchronous
python recipes/rlvr.py --advantage gae --loss ppo ...       # PPO with a critic; see --help
python -m pdb recipes/rlvr.py ...      # one process: break anywhere, also in a reward
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import tyro

from roll_lite import data
from roll_lite.chat import Chat
from roll_lite.checks import above, at_least, filled_from, unread_with
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.planner import BatchPlan, plan, render
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.cluster.world import device_bytes
from roll_lite.engine.service import EngineService
from roll_lite.models.config import read_config
from roll_lite.models.cost import SequenceCost
from roll_lite.progress import Laps
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.rewarding import RewardOptions, Rewards
from roll_lite.rewards import registry
from roll_lite.rewards.math import last_number
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.evaluation import Evaluation, EvaluationOptions
from roll_lite.rollout.garbage import rare_collections
from roll_lite.rollout.in_flight import NothingLeft
from roll_lite.rollout.metrics import describe_groups
from roll_lite.rollout.options import RolloutOptions
from roll_lite.sync import WeightSync
from roll_lite.train.advantage_options import AdvantageState
from roll_lite.train.advantages import Evidence, with_advantages
from roll_lite.train.algorithm import Algorithm
from roll_lite.train.checkpoint import Checkpoints
from roll_lite.train.losses import critic_metrics
from roll_lite.train.options import Training
from roll_lite.train.packing import TrainingSequence, equal_parts, pack
from roll_lite.train.resume import RunState
from roll_lite.train.scorer import Scorer
from roll_lite.train.scoring import plain_sequences, score_over_ranks, with_field
from roll_lite.train.shaping import Shaping
from roll_lite.train.trainer import Trainer, combine
from roll_lite.types import Group, Prompt, SamplingParams


@dataclass(kw_only=True)
class Config(Algorithm, RolloutOptions, EvaluationOptions, RewardOptions, Shaping, Training):
    model: str = "models/tiny"
    """Hugging Face folder to start from."""
    data: tuple[str, ...] = ("reverse:5",)
    """What to learn: files of prompts, or tasks: addition:N (digits), reverse:N or counting:N
    (letters). Several are mixed by weight, as in math.jsonl@0.7 code.jsonl@0.3."""
    steps: int = 40
    """Rounds of generate, score, train."""
    temperature: float = 1.0
    """Sampling temperature; logprobs in the loss use the same."""
    on_new_weights: Literal["go_on", "finish", "abort"] = "go_on"
    """Samples that run when weights come: go on under them, finish first, or begin again."""
    updates_per_step: int = 1
    """Optimizer steps per pass over a round's samples, each on an equal part of them; fewer where
    many samples are missing, so that the parts stay about as large."""
    epochs: int = 1
    """Passes over a round's samples."""
    lr: float = 3e-4
    """Learning rate after warm-up."""
    device_map: str = "auto"
    """Which ranks do what, as in "train=0-3 generate=4-7,tp=2"; auto is all on all ranks."""
    kv_cache_gib: float = 1.0
    """Memory of each generation engine's cache."""
    engines_sleep: bool = False
    """Engines give the memory of cache and weights to the trainer while it works."""
    rollouts_every: int = 1
    """Write the samples of every so many steps, and of the last; 0 is of the last only. A sampled
    token takes some 20 bytes."""
    checkpoint_every: int = 0
    """Write a checkpoint after every so many steps; one is written at the end in any case."""
    keep_last: int = 2
    """Checkpoints to keep, beside the one that evaluates best."""
    resume: bool = False
    """Go on from the newest whole checkpoint of run_dir, if there is one."""
    seed: int = 0
    """Of the prompts and of all sampling."""
    device: str = "auto"
    """auto, cpu or cuda."""
    plan: bool = False
    """Only print what the run would hold in memory and do in a step."""
    run_dir: str = field(default_factory=partial(default_folder, "rlvr"))
    """Gets config.json, metrics.jsonl, events.jsonl, rollouts/, checkpoints/ and the model."""

    def __post_init__(self):
        for options in Config.__bases__:
            options.__post_init__(self)
        max_positions = read_config(self.model).max_positions
        if self.max_tokens >= min(max_positions, self.tokens_per_microbatch):
            raise ValueError(
                f"max_tokens={self.max_tokens} must be below the model's {max_positions} and "
                f"tokens_per_microbatch={self.tokens_per_microbatch}: a sample is not cut"
            )
        for entries in filter(None, (self.data, self.eval_data)):
            data.parse_mixture(entries)
        if self.advantage in LACKING:
            raise ValueError(
                f"advantage={self.advantage!r} needs {LACKING[self.advantage]}, which this recipe "
                "does not have; use one of the others"
            )
        at_least(self.min_samples, self, "samples_per_prompt")
        at_least(1, self, "updates_per_step", "epochs", "keep_last")
        at_least(0, self, "steps", "checkpoint_every", "rollouts_every")
        above(0, self, "temperature", "kv_cache_gib")
        if self.prompts_per_step < self.updates_per_step:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} must be at least "
                f"updates_per_step={self.updates_per_step}: every update has a part of the prompts"
            )
        if self.critic_warmup_steps > self.steps > 0:
            raise ValueError(
                f"critic_warmup_steps={self.critic_warmup_steps} must not exceed "
                f"steps={self.steps}: the policy is trained after them"
            )
        if self.runs_ahead:
            unread_with("max_staleness above 0", self, "extra_prompts", "engines_sleep")
        elif self.surplus == "abort":
            unread_with("max_staleness=0", self, "on_new_weights")
        if not self.resume:
            refuse_old_run(self.run_dir)

    @property
    def min_samples(self) -> int:
        """Of a group: one alone has nothing to compare with, but may not need to."""
        return 2 if self.advantage_options.compares_samples else 1

    @property
    def loads_reference(self) -> bool:
        """A model with adapters is its own reference, unless another is named."""
        return self.needs_reference and (self.lora_rank == 0 or self.reference is not None)

    @property
    def runs_ahead(self) -> bool:
        """Generation goes on beside training; if not, prompts that were too many may be kept."""
        return self.max_staleness > 0 and self.surplus == "abort"

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Sources to evaluate on; questions of files that are trained on are not held out."""
        return self.eval_data or tuple(e.source for e in data.parse_mixture(self.data) if e.is_task)

    @property
    def cluster_options(self) -> dict[str, Any]:
        """Roles and their models; those that are not named have the policy's."""
        wanted = {"critic": self.needs_critic, "reference": self.loads_reference}
        chosen = [name for name, is_wanted in wanted.items() if is_wanted]
        return {
            "roles": ["train", "generate", *chosen, *self.reward_roles],
            "config": read_config(self.model),
            "role_configs": self.reward_configs | self.reference_configs,
        }


LACKING = {"gigpo": "rewards turn by turn", "opd": "a teacher"}


class Models(NamedTuple):
    """Roles, as the controller holds them."""

    policy: RoleHandle
    engines: RoleHandle
    sync: RoleHandle
    critic: RoleHandle | None
    """With advantage gae."""
    reference: RoleHandle | None
    """With kl_coef, unless the policy has adapters that can be left out."""

    @property
    def trained(self) -> list[RoleHandle]:
        return [self.policy, self.critic] if self.critic else [self.policy]


def reversed_word(prompt: Prompt, reply: str) -> float:
    """Your own reward looks like this: text in, number out. `breakpoint()` works here."""
    return float(reply.strip() == prompt.ground_truth)


REWARDS = registry.REWARDS  # in worker processes, by domain: {..., "mine": my_reward}
INLINE = {"addition": last_number, "counting": last_number, "reverse": reversed_word}
SHOWN = {
    "reward/mean": "reward", "eval/pass@1": "eval", "eval/failed": "eval failed",
    "rollout/failed": "failed",
    "rollout/missing_groups": "missing groups", "rollout/reply_tokens": "tokens",
    "rollout/staleness": "versions old",
    "loss/entropy": "entropy", "loss/grad_norm": "grad", "mismatch/logprob_mean": "mismatch",
    "loss/kl": "kl", "critic/explained_variance": "critic explains",
    "time/rollout": "rollout s", "time/train": "train s", "time/step": "step s",
}  # fmt: skip
FIXED = "model", "seed", "lora_rank", "lora_alpha", "lora_targets", "advantage"


def main(cfg: Config) -> list[float]:
    """Returns the held-out pass rates, the first from before training or after it was resumed."""
    with Cluster(cfg.device_map, cfg.device, **cfg.cluster_options) as cluster:
        prompts = data.Mixture(cfg.data, seed=f"rlvr-{cfg.seed}")
        held_out = data.held_out(cfg.evaluated, cfg.eval_prompts) if cfg.evaluated else []
        registry.check_prompts([*prompts.rows, *held_out], REWARDS | INLINE)
        domains = {*prompts.domains, *(prompt.domain for prompt in held_out)}
        with Rewards(REWARDS, INLINE, domains, cfg, cluster, cfg.tokens_per_microbatch) as rewards:
            chat, models = Chat(cfg.model), make_roles(cfg, cluster)
            params = SamplingParams(
                max_tokens=cfg.max_tokens, temperature=cfg.temperature, stop_ids=chat.stop_ids
            )
            evaluation = Evaluation(held_out, cfg, params)
            rollout = Coordinator(
                engines=models.engines, chat=chat, make_env=rewards, prompts=prompts,
                params=params, options=cfg, seed=cfg.seed, asked=rewards.asked,
            )  # fmt: skip
            with rollout, rare_collections():
                train(cfg, models, rollout, rewards, evaluation)
        print(f"model: {models.policy.export(f'{cfg.run_dir}/model')}")
    return evaluation.rates


def train(
    cfg: Config, models: Models, rollout: Coordinator, rewards: Rewards, evaluation: Evaluation
) -> None:
    state = AdvantageState(cfg.advantage_options)
    checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", keep_last=cfg.keep_last)
    fixed = {name: getattr(cfg, name) for name in FIXED}
    saved = RunState(checkpoints, models.trained, {"rollout": rollout, "advantages": state}, fixed)
    done = saved.resume() if cfg.resume else None
    run = Run(cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN, resumed_at=done)
    if done:
        models.sync.sync(done)
        rollout.set_version(done)
    else:
        run.log(0, evaluation.run(rollout))
        run.note_samples(0, rollout.dropped())  # by the evaluation
    if cfg.runs_ahead:
        rollout.start()

    for step in range((done or 0) + 1, cfg.steps + 1):
        laps = Laps()
        try:
            groups = rollout.collect()
        except NothingLeft:  # what was learnt is kept, and what was dropped can be looked at
            run.note_samples(step, rollout.dropped())
            if step - 1 > (done or 0) and not run.is_due(step - 1, cfg.checkpoint_every):
                print(f"what was learnt is in {saved.save(step - 1)}; --resume goes on from it")
                run.note("checkpoint", step=step - 1)
            raise
        laps.end("rollout")
        if cfg.engines_sleep:
            models.engines.sleep()
        sequences = prepare(groups, cfg, models, state)
        laps.end("prepare")
        metrics = update(sequences, cfg, models, step)
        laps.end("train")
        if cfg.engines_sleep:
            models.engines.wake()
        models.sync.sync(step, cfg.on_new_weights)
        rollout.set_version(step)
        laps.end("sync")
        metrics |= describe_groups(groups) | rollout.metrics() | rewards.metrics() | state.metrics
        if run.is_due(step, cfg.rollouts_every):
            run.write_rollouts(step, groups)
        run.note_samples(step, rollout.dropped())
        laps.end("records")
        metrics |= {"rollout/trained_samples": len(sequences)} | laps.metrics()
        if run.is_due(step, cfg.eval_every):
            metrics |= evaluation.run(rollout)  # not a part of the step
            run.note_samples(step, rollout.dropped())
        run.log(step, metrics)
        if run.is_due(step, cfg.checkpoint_every):
            start = time.perf_counter()
            saved.save(step, higher=metrics.get("eval/pass@1"))
            run.note("checkpoint", step=step, seconds=time.perf_counter() - start)
    run.close()
    if rates := evaluation.rates:
        since = f", the first since step {done}" if done else ""
        print(f"held-out pass rate {rates[0]:.3f} -> {rates[-1]:.3f}{since}")


def make_roles(cfg: Config, cluster: Cluster) -> Models:
    """The policy, and beside it only what the algorithm reads."""
    critic = reference = None
    num_policy_steps = cfg.steps - cfg.critic_warmup_steps
    policy = cluster.role(
        "train", Trainer, folder=cfg.model, loss=cfg.policy_loss,
        schedule=cfg.schedule_over(num_policy_steps), temperature=cfg.temperature,
        **cfg.policy_options,
    )  # fmt: skip
    if cfg.needs_critic:
        critic = cluster.role(
            "critic", Trainer, folder=cfg.model, loss=cfg.value_loss, head="value",
            schedule=cfg.schedule_over(cfg.steps, cfg.critic_lr), **cfg.trainer_options,
        )  # fmt: skip
    if cfg.loads_reference:
        folder = cfg.reference or cfg.model
        reference = cluster.role("reference", Scorer, folder=folder, temperature=cfg.temperature)
    engines = cluster.role(
        "generate", EngineService, folder=cfg.model, kv_cache_gib=cfg.kv_cache_gib
    )
    print(engines.describe())
    return Models(policy, engines, cluster.role("sync", WeightSync), critic, reference)


def prepare(
    groups: list[Group], cfg: Config, models: Models, state: AdvantageState
) -> list[TrainingSequence]:
    """Advantages, and what the models say of the samples before the first update."""
    groups = cfg.shape_rewards(groups)
    plain = plain_sequences(groups)

    def score(role: RoleHandle, method: str) -> list[list[float]]:
        return score_over_ranks(getattr(role, method), plain, cfg.tokens_per_microbatch)

    reference = None
    if models.reference:
        reference = score(models.reference, "logprobs")
    elif cfg.needs_reference:
        reference = score(models.policy, "reference_logprobs")  # itself, without its adapters
    evidence = Evidence(
        values=score(models.critic, "values") if models.critic else None,
        reference_logprobs=reference if cfg.kl_in == "reward" else None,
    )
    sequences = with_advantages(groups, cfg.advantage_options, evidence, state)
    if reference and cfg.kl_in == "loss":
        sequences = with_field(sequences, "reference_logprobs", reference)
    if cfg.denominator == "old":
        sequences = with_field(sequences, "old_logprobs", score(models.policy, "logprobs"))
    return cfg.shape_weights(sequences, groups)


def update(
    sequences: list[TrainingSequence], cfg: Config, models: Models, step: int
) -> dict[str, float]:
    """The round's optimizer steps: `epochs` passes of `updates_per_step` each."""
    cost, policy_updates, critic_updates = SequenceCost.of(read_config(cfg.model)), [], []

    def update_once(
        trainer: RoleHandle, done: int, part: list[TrainingSequence], **options
    ) -> dict[str, float]:
        num_shards = trainer.role.num_replicas
        options |= {"num_shards": num_shards, "cost": cost}
        batch = pack(part, cfg.tokens_per_microbatch, **options)
        return trainer.step(split(batch), scheduled_at=done)[0]

    share = len(sequences) / (cfg.prompts_per_step * cfg.samples_per_prompt)
    parts = equal_parts(sequences, max(1, round(share * cfg.updates_per_step)))
    for part in cfg.epochs * parts:
        if models.critic:
            critic_updates.append(update_once(models.critic, step - 1, part))
        if (done := step - 1 - cfg.critic_warmup_steps) >= 0:
            options = {"aggregation": cfg.chosen_aggregation, "constant": cfg.constant}
            policy_updates.append(update_once(models.policy, done, part, **options))
    of_critic = critic_metrics(combine(critic_updates)) if critic_updates else {}
    return combine(policy_updates) | of_critic


def describe_plan(cfg: Config) -> str:
    """Without starting anything: bytes, batch arithmetic, warnings."""
    chat, config = Chat(cfg.model), read_config(cfg.model)
    prompts = data.Mixture(cfg.data, seed=0)
    longest = max(len(chat.encode(next(prompts).messages)) for _ in range(64))
    batch = filled_from(BatchPlan, cfg, prompt_tokens=longest, reply_tokens=cfg.max_tokens)
    cluster = Cluster(cfg.device_map, cfg.device, **cfg.cluster_options)  # not entered
    return render(plan(config, cluster.device_map, batch, device_bytes(cluster.device)))


if __name__ == "__main__":
    cfg = tyro.cli(Config, description=__doc__.split("\n\n")[0])
    print(describe_plan(cfg)) if cfg.plan else main(cfg)
