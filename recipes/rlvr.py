"""Reinforcement learning with verifiable rewards: questions whose answers can be checked.

python recipes/rlvr.py --model models/tiny --data reverse:5
python recipes/rlvr.py --model models/SmolLM2-135M-Instruct --data addition:2 --max-tokens 48 \
        --prompts-per-step 128 --drop-equal --max-refills 0 --updates-per-step 4 --lr 8e-5 \
        --schedule linear --steps 60 --kv-cache-gib 8
torchrun --nproc-per-node 8 recipes/rlvr.py --data math.jsonl@0.7 code.jsonl@0.3 \
        --device-map "train=0-3 generate=4-7" --max-staleness 1         # asynchronous
python recipes/rlvr.py --advantage gae --loss ppo ...       # PPO with a critic; see --help
python recipes/rlvr.py --data mine.jsonl --rewards my_rewards.py    # a reward of your own
python -m pdb recipes/rlvr.py ...      # one process: break anywhere, also in a reward
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from roll_lite import command, data
from roll_lite.chat import Chat
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import above, at_least, read_only_if, unread_with
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.colocated import Colocated
from roll_lite.engine.service import EngineService
from roll_lite.models.config import read_config
from roll_lite.models.cost import SequenceCost
from roll_lite.options import flatten, unique_options
from roll_lite.planning import cache_tokens, choose_memory, print_plan
from roll_lite.progress import StepTimer
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.rewarding import RewardOptions, Rewards
from roll_lite.rewards import registry
from roll_lite.rewards.maths import last_number
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.evaluation import Evaluation, EvaluationOptions
from roll_lite.rollout.event_loop import rare_collections
from roll_lite.rollout.journal import fingerprint
from roll_lite.rollout.metrics import describe_groups
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.sync import WeightSync
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.batch import TrainingSequence, equal_parts, pack, sample_runs
from roll_lite.train.checkpoint import CheckpointOptions, RunState
from roll_lite.train.defaults import (
    check_algorithm,
    choose_defaults,
    default_tokens,
    paper_advantages,
)
from roll_lite.train.kl import KLOptions
from roll_lite.train.losses import (
    CriticOptions,
    LossOptions,
    PolicyLoss,
    ValueLoss,
    critic_metrics,
)
from roll_lite.train.optimizer import TrainingOptions
from roll_lite.train.profiling import ProfileOptions, Profiler
from roll_lite.train.scorer import Scorer, score_over_ranks
from roll_lite.train.sequences import (
    AdvantageState,
    ModelScores,
    plain_sequences,
    sampled_numbers,
    with_advantages,
    with_field,
)
from roll_lite.train.shaping import LengthOptions
from roll_lite.train.totals import combine
from roll_lite.train.trainer import Trainer, note_entropies
from roll_lite.types import Group, Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Options of all recipes that train a policy on its own samples; agentic.py is another one."""

    model: str = "models/tiny"
    """Hugging Face folder to start from."""
    data: tuple[str, ...]
    """What to learn."""
    steps: int = 40
    """Training steps: generate, score, train."""
    run_dir: str
    """Folder for config.json, metrics.jsonl, events.jsonl, rollouts/, checkpoints/ and model/."""
    seed: int = 0
    """Seed for prompt order and sampling."""
    temperature: float = 1.0
    """Sampling temperature; logprobs in the loss use the same."""
    updates_per_step: int = 1
    """Optimizer updates per pass over a step's samples, each on an equal part of them; fewer where
    many samples are missing, so that the parts stay about as large."""
    epochs: int = 1
    """Passes over a step's samples."""
    device: str = "auto"
    """auto, cpu or cuda."""
    device_map: str = "auto"
    """Which ranks do what, as in "train=0-3 generate=4-7,tp=2"; auto is all roles on all ranks."""
    kv_cache_gib: float = 1.0
    """KV cache of each generation engine, in GiB."""
    engines_sleep: bool = False
    """Engines give their memory (weights and KV cache) to the trainer while it works. With
    device_map=auto this and offload are on where memory asks for them."""
    offload: bool = False
    """Trainers give theirs (weights, moments, the reference) to the engines while these generate:
    it waits in host memory."""
    on_new_weights: Literal["go_on", "finish", "abort"] = "go_on"
    """What in-flight samples do when weights update: continue (go_on), finish first, or restart
    (abort)."""
    rollouts_every: int = 1
    """Write the samples of every N-th step, and of the last; 0 writes the last step only. A sampled
    token takes about 20 bytes. Samples that were filtered, stale or surplus are written for the
    same steps. Answers of evaluations are written as text, unless it is 0."""
    rollout: RolloutOptions = RolloutOptions()
    lengths: LengthOptions = LengthOptions()
    training: TrainingOptions = TrainingOptions()
    advantages: AdvantageOptions = AdvantageOptions()
    policy_loss: LossOptions = LossOptions()
    kl: KLOptions = KLOptions()
    critic: CriticOptions = CriticOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoints: CheckpointOptions = CheckpointOptions()
    profile: ProfileOptions = ProfileOptions()
    chat: ChatOptions = ChatOptions()
    lacking: ClassVar[dict[str, str]]
    """Advantages that the recipe cannot compute, and what it lacks for them."""

    def __post_init__(self):
        at_least(1, self, "updates_per_step", "epochs")
        at_least(0, self, "steps", "rollouts_every")
        above(0, self, "temperature", "kv_cache_gib")
        at_least(self.min_samples, self.rollout, "samples_per_prompt")
        self._check_algorithm()
        self._check_sizes()
        if self.runs_ahead:
            unread_with("max_staleness above 0", self.rollout, "extra_groups")
            unread_with("max_staleness above 0", self, "engines_sleep", "offload")
        else:
            unread_with("max_staleness=0", self, "on_new_weights")
        if not self.checkpoints.resume:
            refuse_old_run(self.run_dir)

    def _check_algorithm(self) -> None:
        if (chosen := self.advantages.advantage) in self.lacking:
            raise ValueError(
                f"advantage={chosen!r} needs {self.lacking[chosen]}, which this recipe does not "
                "have; use another advantage"
            )
        check_algorithm(self.advantages, self.policy_loss, self.kl)
        critic = ("critic_lr", "value_clip", "critic_warmup_steps")
        read_only_if(self.advantages.needs_critic, "advantage='gae'", self.critic, *critic)
        if self.critic.critic_warmup_steps > self.steps > 0:
            raise ValueError(
                f"critic_warmup_steps={self.critic.critic_warmup_steps} must not exceed "
                f"steps={self.steps}: the policy is trained after them"
            )

    def _check_sizes(self) -> None:
        config = read_config(self.model)
        kind = self.default_kinds["max_tokens"]
        max_tokens = self.lengths.max_tokens or default_tokens(kind, config)
        if max_tokens >= self.longest_sample:
            raise ValueError(
                f"max_tokens={max_tokens} must be below the model's {config.max_positions} "
                f"positions and tokens_per_microbatch={self.training.tokens_per_microbatch}: "
                "samples are never split"
            )
        if self.rollout.prompts_per_step < self.updates_per_step:
            raise ValueError(
                f"prompts_per_step={self.rollout.prompts_per_step} must be at least "
                f"updates_per_step={self.updates_per_step}: every update trains on a part of them"
            )

    @property
    def longest_sample(self) -> int:
        """Tokens that fit the model and a micro-batch; the cache must hold them too."""
        positions = read_config(self.model).max_positions
        return min(positions, self.training.tokens_per_microbatch)

    @property
    def min_samples(self) -> int:
        """Smallest group to train on: estimators that compare samples need two."""
        return 2 if self.advantages.compares_samples else 1

    @property
    def loads_reference(self) -> bool:
        """A policy with adapters is its own reference, unless another is named."""
        has_own = self.training.lora_rank > 0 and self.kl.reference is None
        return self.kl.kl_coef > 0 and not has_own

    @property
    def default_kinds(self) -> dict[str, str]:
        """Options that depend on the model's size, where they are not given."""
        critic = {"critic_lr": "critic"} if self.advantages.needs_critic else {}
        return {"lr": "rl", "max_tokens": "reply"} | critic

    @property
    def runs_ahead(self) -> bool:
        """Whether generation goes on beside training."""
        return self.rollout.max_staleness > 0

    @property
    def cluster_options(self) -> dict[str, Any]:
        """Roles and their models; a role without a config of its own has the policy's."""
        wanted = {"critic": self.advantages.needs_critic, "reference": self.loads_reference}
        chosen = [name for name, is_wanted in wanted.items() if is_wanted]
        reference = {"reference": read_config(self.kl.reference)} if self.kl.reference else {}
        turns = dict.fromkeys(("engines_sleep", "offload"), not self.runs_ahead)  # if need be
        return {
            "roles": ["train", "generate", *chosen],
            "config": read_config(self.model),
            "role_configs": reference,
            "auto_options": self.training.memory_options | turns,
        }


@unique_options
@dataclass(frozen=True, kw_only=True)
class Config(PolicyConfig):
    data: tuple[str, ...] = ("reverse:5",)
    """What to learn: files of prompts, or tasks: addition:N (digits), reverse:N or counting:N
    (letters), instructions:N (how many at once). Several are mixed by weight, as in
    math.jsonl@0.7 code.jsonl@0.3."""
    run_dir: str = field(default_factory=partial(default_folder, "rlvr"))
    """Folder for config.json, metrics.jsonl, events.jsonl, rollouts/, checkpoints/ and model/."""
    plan: bool = False
    """Print what the run would hold in memory and do in a step, and exit: with 1 if it would not
    fit."""
    scoring: RewardOptions = RewardOptions()
    lacking: ClassVar = dict.fromkeys(("gigpo", "agentic_reinforce"), "rewards turn by turn")
    lacking["opd"] = "a teacher"

    def __post_init__(self):
        super().__post_init__()
        for entries in filter(None, (self.data, self.evaluation.eval_data)):
            data.check_mixture(entries)
        has_files = not all(entry.kind == "task" for entry in data.parse_mixture(self.data))
        read_only_if(has_files, "a file in data", self.evaluation, "eval_share")

    @property
    def cluster_options(self) -> dict[str, Any]:
        options, scoring = super().cluster_options, self.scoring
        options["roles"] += scoring.reward_roles
        options["role_configs"] |= scoring.reward_configs
        return options


class Models(NamedTuple):
    """The roles that hold models."""

    policy: RoleHandle
    engines: RoleHandle
    devices: Colocated
    """Hands them from the engines to the trainers and back, with new weights."""
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


REWARDS = registry.REWARDS  # in worker processes, by domain; yours: --rewards FILE
INLINE = {"addition": last_number, "counting": last_number, "reverse": reversed_word}
SHOWN = {
    "reward/mean": "reward", "eval/pass@1": "eval", "eval/failed": "eval failed",
    "rollout/failed": "failed",
    "rollout/missing_groups": "missing groups", "rollout/reply_tokens": "tokens",
    "rollout/staleness": "staleness",
    "loss/entropy": "entropy", "loss/grad_norm": "grad", "loss/skipped_steps": "skipped",
    "time/step": "step s", "loss/kl": "kl", "mismatch/logprob_mean": "mismatch",
    "critic/explained_variance": "explained variance",
    "time/rollout": "rollout s", "time/train": "train s",
}  # fmt: skip
TRACKERS = ()  # yours, beside TensorBoard: docs/tutorial.md has wandb and trackio
FIXED = "model", "seed", "template_args", "lora_rank", "lora_alpha", "lora_targets", "advantage"


def main(cfg: Config) -> list[float]:
    """Returns the held-out pass rates of this start, in order."""
    if cfg.plan:
        cfg = choose_defaults(cfg, **cfg.default_kinds)
        prompts, chat = data.Mixture(cfg.data, seed=0), Chat(cfg.model, **cfg.chat.arguments)
        sys.exit(print_plan(cfg, [len(chat.encode(next(prompts).messages)) for _ in range(64)]))
    with Cluster(cfg.device_map, cfg.device, options=cfg, **cfg.cluster_options) as cluster:
        cfg = choose_memory(choose_defaults(cfg, **cfg.default_kinds), cluster)
        chat = Chat(cfg.model, **cfg.chat.arguments)
        fitting = data.PromptLimit(
            count=lambda prompt: len(chat.encode(prompt.messages)),
            longest_sample=min(cfg.longest_sample, cache_tokens(cfg, cluster)),
            reply_tokens=cfg.lengths.max_tokens,
            policy=cfg.lengths.long_prompts,
        )
        share, seed = cfg.evaluation.eval_share, f"rlvr-{cfg.seed}"
        prompts = data.Mixture(cfg.data, seed=seed, held_out_share=share, fitting=fitting)
        held_out = fitting(cfg.evaluation.prompts(cfg.data))
        if prompts.rows:
            print(f"{len(prompts.rows):,} rows to train on, {len(held_out):,} to evaluate on")
        if not held_out and cfg.evaluation.eval_every:
            print("no evaluation: files hold nothing out; name --eval-share or --eval-data")
        chat.check_prompts([*prompts.rows, *held_out])
        domains = {*prompts.domains, *(prompt.domain for prompt in held_out)}
        functions, inline = cfg.scoring.with_file(REWARDS, INLINE, domains)
        registry.check_prompts([*prompts.rows, *held_out], functions | inline)
        budget = cfg.training.tokens_per_microbatch
        with Rewards(functions, inline, domains, cfg.scoring, cluster, budget) as rewards:
            models = make_roles(cfg, cluster)
            params = SamplingParams(
                max_tokens=cfg.lengths.max_tokens,
                temperature=cfg.temperature,
                stop_ids=chat.stop_ids,
            )
            evaluation = Evaluation(held_out, cfg.evaluation, params)
            rollout = Coordinator(
                engines=models.engines, chat=chat, play=rewards.play, prompts=prompts,
                params=params, options=cfg.rollout, min_samples=cfg.min_samples, seed=cfg.seed,
                reward_engines=rewards.engine_clients,
                max_length=cfg.longest_sample,
            )  # fmt: skip
            with rollout, rare_collections(cfg.rollout.max_samples_in_flight):
                train(cfg, cluster, models, rollout, evaluation, rewards.metrics)
        print(f"model: {models.policy.export(f'{cfg.run_dir}/model')}")
    return evaluation.rates


def train(
    cfg: PolicyConfig, cluster: Cluster, models: Models,
    rollout: Coordinator, evaluation: Evaluation, scoring: Callable[[], dict[str, float]],
    shown: dict[str, str] = SHOWN,
) -> None:  # fmt: skip
    """`scoring` gives the metrics of whatever scores the samples."""
    state, stop = AdvantageState(cfg.kl), cluster.stop_request()
    fixed = {name: value for name, value in flatten(cfg).items() if name in FIXED}
    parts = {"rollout": rollout, "advantages": state}
    saved = RunState(cfg.run_dir, cfg.checkpoints, models.trained, parts, fixed, rollout.forget)
    resumed_at = saved.resumed_at
    run = Run(
        cfg.run_dir, cfg, num_steps=cfg.steps, shown=shown, resumed_at=resumed_at,
        trackers=TRACKERS, ranks=cluster.device_map.replicas,
    )  # fmt: skip
    rollout.on_states(run.phase.show_states)
    if resumed_at:
        models.devices.to_training()
        models.devices.to_engines(resumed_at)
        rollout.set_version(resumed_at)
    if cfg.rollout.journal:
        made_with, weights = fingerprint(flatten(cfg)), models.devices.digest
        rollout.open_journal(f"{cfg.run_dir}/journal", made_with, saved.step, weights)
    if run.lacks("eval/pass@1", saved.step, cfg.evaluation.eval_every):  # or was abandoned
        run.log(saved.step, evaluate(cfg, saved.step, run, rollout, evaluation))
    if cfg.runs_ahead:
        rollout.start()
    stop.listen(rollout.stop)
    profiler = Profiler(cfg.profile, cfg.run_dir, [*models.trained, models.engines])
    with saved.kept(run, stop, lambda: run.note_samples(saved.step + 1, rollout.dropped())):
        for step in range(saved.step + 1, cfg.steps + 1):
            profiler.at(step)
            timer = StepTimer(run.phase, step)
            timer.begin("rollout")
            groups = rollout.collect()
            timer.begin("prepare")
            models.devices.to_training()
            sequences = prepare(groups, cfg, models, state)
            timer.begin("train")
            is_recorded = run.is_due(step, cfg.rollouts_every)
            metrics = update(sequences, cfg, models, step, is_recorded)
            timer.begin("sync")
            models.devices.to_engines(step, cfg.on_new_weights)
            rollout.set_version(step)
            saved.step = step
            timer.begin("records")
            metrics |= describe_groups(groups) | rollout.metrics() | scoring()
            if is_recorded:
                learnt = (sampled_numbers(sequences, name) for name in ("advantages", "entropies"))
                run.write_rollouts(step, groups, *learnt)
            run.note_samples(step, rollout.dropped(), with_filtered=is_recorded)
            metrics |= state.metrics | models.devices.metrics | timer.metrics()
            metrics["rollout/trained_samples"] = len(sample_runs(sequences))
            if run.is_due(step, cfg.evaluation.eval_every):
                # Not part of the step's time.
                metrics |= evaluate(cfg, step, run, rollout, evaluation)
            run.log(step, metrics)
            saved.end_step(run, step, higher=metrics.get("eval/pass@1"))
    rollout.end_journal()
    profiler.close()
    run.close()
    if len(rates := evaluation.rates) > 1:
        since = f" since step {resumed_at}" if resumed_at else ""
        print(f"held-out pass rate {rates[0]:.3f} -> {rates[-1]:.3f}{since}")


def evaluate(
    cfg: PolicyConfig, step: int, run: Run, rollout: Coordinator, evaluation: Evaluation
) -> dict[str, float]:
    """Held-out pass rates; the answers are written to the run folder."""
    run.phase.enter("evaluate", step)
    try:
        return evaluation.run(rollout)
    finally:
        if run.is_due(step, min(1, cfg.rollouts_every)):
            run.write_answers(step, evaluation.groups)
        with_filtered = run.is_due(step, cfg.rollouts_every)
        run.note_samples(step, rollout.dropped(), with_filtered=with_filtered)
        run.flush()


def make_roles(cfg: PolicyConfig, cluster: Cluster) -> Models:
    """The policy, and beside it only the models that the algorithm reads."""
    critic = reference = None
    sharing = {"engines_sleep": cfg.engines_sleep, "offload": cfg.offload}
    devices = Colocated(cluster.device_map, **sharing)
    policy = devices.add(cluster.role(
        "train", Trainer, folder=cfg.model, loss=PolicyLoss(cfg.policy_loss, cfg.kl),
        schedule=cfg.training.schedule_over(cfg.steps - cfg.critic.critic_warmup_steps),
        temperature=cfg.temperature, **cfg.training.policy_options,
    ), stays_for_sync=not cfg.training.lora_rank)  # fmt: skip
    if cfg.advantages.needs_critic:
        critic = devices.add(cluster.role(
            "critic", Trainer, folder=cfg.model, loss=ValueLoss(clip=cfg.critic.value_clip),
            head="value", schedule=cfg.training.schedule_over(cfg.steps, cfg.critic.critic_lr),
            **cfg.training.trainer_options,
        ))  # fmt: skip
    if cfg.loads_reference:
        options = {"folder": cfg.kl.reference or cfg.model, "temperature": cfg.temperature}
        reference = devices.add(cluster.role("reference", Scorer, **options))
    engines = cluster.role(
        "generate", EngineService, folder=cfg.model, kv_cache_gib=cfg.kv_cache_gib
    )
    print(engines.describe())
    devices.connect(engines, cluster.role("sync", WeightSync))
    return Models(policy, engines, devices, critic, reference)


def prepare(
    groups: list[Group], cfg: PolicyConfig, models: Models, state: AdvantageState
) -> list[TrainingSequence]:
    """Advantages, from rewards and what models say of the samples before the first update."""
    groups = cfg.lengths.shape_rewards(groups)

    def score(role: RoleHandle, method: str) -> list[list[float]]:
        plain, budget = plain_sequences(groups), cfg.training.tokens_per_microbatch
        return score_over_ranks(getattr(role, method), plain, budget)

    reference = None
    if models.reference:
        reference = score(models.reference, "logprobs")
    elif cfg.kl.kl_coef:
        reference = score(models.policy, "reference_logprobs")  # itself, without its adapters
    scores = ModelScores(
        values=score(models.critic, "values") if models.critic else None,
        reference_logprobs=reference if cfg.kl.is_in("reward") else None,
    )
    options = paper_advantages(cfg.advantages, cfg.policy_loss)
    sequences = with_advantages(groups, options, scores, state)
    if cfg.kl.is_in("loss"):
        sequences = with_field(sequences, "reference_logprobs", reference)
    if cfg.policy_loss.denominator == "old":
        sequences = with_field(sequences, "old_logprobs", score(models.policy, "logprobs"))
    return cfg.lengths.shape_sequences(sequences, groups)


def update(
    sequences: list[TrainingSequence], cfg: PolicyConfig, models: Models, step: int,
    is_recorded: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The step's optimizer updates: `epochs` passes of `updates_per_step` each.

    If the step `is_recorded`, the sequences get the entropies of their tokens.
    """
    cost, policy_updates, critic_updates = SequenceCost.of(read_config(cfg.model)), [], []

    def update_once(
        trainer: RoleHandle, done: int, part: list[TrainingSequence], **options
    ) -> dict[str, float]:
        options |= {"num_shards": trainer.role.num_replicas, "cost": cost}
        batch = pack(part, cfg.training.tokens_per_microbatch, **options)
        metrics = trainer.step(split(batch), scheduled_at=done)[0]
        if is_recorded and trainer is models.policy:
            note_entropies(trainer, batch, part)
        return metrics

    share = len(sample_runs(sequences)) / (
        cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    )
    parts = equal_parts(sequences, max(1, round(share * cfg.updates_per_step)))
    loss = cfg.policy_loss
    for part in cfg.epochs * parts:
        if models.critic:
            critic_updates.append(update_once(models.critic, step - 1, part))
        if (done := step - 1 - cfg.critic.critic_warmup_steps) >= 0:
            policy_updates.append(update_once(models.policy, done, part, **loss.pack_options))
    of_critic = critic_metrics(combine(critic_updates)) if critic_updates else {}
    return combine(policy_updates) | of_critic


if __name__ == "__main__":
    command.run(main, Config, __doc__, fixed=FIXED)
