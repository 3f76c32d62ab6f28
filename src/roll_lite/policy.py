"""Options of a run that trains a policy on its own samples, as recipes/rlvr.py does.

The recipe's Config adds what it learns from, and is what the planner, the loop and replay read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from roll_lite import data
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import UserError, above, at_least, read_only_if, unread_with
from roll_lite.code_files import CodeOptions
from roll_lite.engine.request import check_recordable
from roll_lite.envs.env import Player
from roll_lite.envs.play import EpisodeOptions
from roll_lite.envs.specs import ENVS, EnvMaker, EnvOptions, env_players
from roll_lite.models.config import ModelConfig, read_config
from roll_lite.options import RecipeConfig, flag_names
from roll_lite.profiling import ProfileOptions
from roll_lite.report.run import is_due, refuse_old_run
from roll_lite.report.trackers import TrackerOptions
from roll_lite.rewarding import RewardOptions
from roll_lite.rewards.registry import REWARDS
from roll_lite.rollout.evaluation import EvaluationOptions
from roll_lite.rollout.rollout_options import RolloutOptions, SamplingOptions
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.checkpoint import CheckpointOptions
from roll_lite.train.encoding import check_vocabulary
from roll_lite.train.kl import KLOptions
from roll_lite.train.losses import CriticOptions, LossOptions
from roll_lite.train.optimizer import TrainingOptions, default_tokens
from roll_lite.train.shaping import LengthOptions
from roll_lite.types import Prompt, Reward


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Teachers, whose logprobs pull the policy towards them (on-policy distillation)."""

    teacher: tuple[str, ...] = ()
    """Hugging Face folders with the policy's tokenizer: FOLDER, or DOMAIN=FOLDER for the prompts of
    that domain. They need roles in a device map: teacher, or teacher_DOMAIN."""
    teacher_weight: float = 1.0
    """Weight of log p_teacher - log p of each token in its advantage. With advantage=opd it is the
    only signal."""

    def __post_init__(self):
        read_only_if(bool(self.teacher), "a teacher", self, "teacher_weight")
        above(0, self, "teacher_weight")
        if len(self.folders) < len(self.teacher) or len(self.roles) < len(self.folders):
            raise UserError(f"teacher={self.teacher!r} names a domain twice; give each one teacher")

    def weight_beside(self, advantages: AdvantageOptions) -> float:
        """What the teacher counts beside an estimator; one that reads the teacher is all of it."""
        return self.teacher_weight if self.teacher and not advantages.needs_teacher else 0.0

    def check_domains(self, domains: Iterable[str], advantages: AdvantageOptions) -> None:
        """Refuse a teacher without prompts and, where it is the only signal, the reverse."""
        if unknown := self.folders.keys() - {"", *domains}:
            raise UserError(
                f"teacher={min(unknown)}=... is for a domain that no prompt has; the prompts have "
                f"{', '.join(sorted(domains))}"
            )
        if advantages.needs_teacher and "" not in self.folders:
            for domain in sorted({*domains} - self.folders.keys()):
                raise UserError(
                    f"there is no teacher for domain {domain!r}, and with advantage="
                    f"{advantages.advantage!r} no other signal; name one with --teacher FOLDER"
                )

    @property
    def folders(self) -> dict[str, str]:
        """By domain; the teacher of all other domains is under the empty name."""
        # The domain of an environment may hold "=", as in frozen_lake:size=8=FOLDER.
        pairs = [re.fullmatch(r"(?:([^/]+)=)?(.+)", text).groups("") for text in self.teacher]
        return dict(pairs)

    @property
    def roles(self) -> dict[str, str]:
        """Domains by the names of their roles in the device map."""
        names = {domain: re.sub(r"\W", "_", domain.lower()) for domain in self.folders}
        return {f"teacher_{names[d]}" if d else "teacher": d for d in self.folders}


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(RecipeConfig):
    """Options that do not depend on what is learnt from."""

    model: str = "models/tiny"
    """Hugging Face folder to start from, or a name on the Hugging Face Hub, as Qwen/Qwen3-0.6B."""
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
    """What to compute on: auto, cpu or cuda."""
    device_map: str = "auto"
    """Which ranks do what, as in "train=0-3 generate=4-7,tp=2"; auto is all roles on all ranks."""
    kv_cache_gib: float | None = None
    """KV cache of each generation engine, in GiB; None chooses by the model, the samples of a step
    and the GPU's memory, and prints it. On a CPU it is 1."""
    engines_sleep: bool = False
    """Engines free their memory (weights and KV cache) for the trainer while it works. With
    device_map=auto this and offload are on where memory asks for them."""
    offload: bool = False
    """Offload trainer weights, optimizer state and the reference to host memory while engines
    generate."""
    on_new_weights: Literal["go_on", "finish", "abort"] = "go_on"
    """What in-flight samples do when weights update: continue (go_on), finish first, or restart
    (abort)."""
    router: Literal["replay", "own"] = "replay"
    """Mixtures: train with the experts that the engine used for each token (replay), or with those
    that the trainer's routers choose (own)."""
    rollouts_every: int = 1
    """Write the samples of every N-th step, and of the last; 0 writes the last step only. A sampled
    token takes about 20 bytes. Samples that were filtered, stale or surplus are written for the
    same steps. Samples of evaluations are written as text, unless it is 0."""
    plan: bool = False
    """Print what the run would hold in memory and do in a step, and exit: with 1 if it would not
    fit."""
    own: CodeOptions = CodeOptions()
    sampling: SamplingOptions = SamplingOptions()
    rollout: RolloutOptions = RolloutOptions()
    lengths: LengthOptions = LengthOptions()
    training: TrainingOptions = TrainingOptions()
    advantages: AdvantageOptions = AdvantageOptions()
    policy_loss: LossOptions = LossOptions()
    kl: KLOptions = KLOptions()
    critic: CriticOptions = CriticOptions()
    teaching: TeacherOptions = TeacherOptions()
    scoring: RewardOptions = RewardOptions()
    environments: EnvOptions = EnvOptions()
    episodes: EpisodeOptions = EpisodeOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoints: CheckpointOptions = CheckpointOptions()
    tracking: TrackerOptions = TrackerOptions()
    profile: ProfileOptions = ProfileOptions()
    chat: ChatOptions = ChatOptions()
    rows: data.RowOptions = data.RowOptions()

    REWARDS: ClassVar[Mapping[str, Reward]] = REWARDS
    """Rewards by the domain of prompts, called in worker processes."""
    INLINE: ClassVar[Mapping[str, Reward]] = {}
    """Rewards that take microseconds, called on rank 0."""
    ENVS: ClassVar[Mapping[str, EnvMaker]] = ENVS
    """Environments by name, in worker processes."""
    SHOWN: ClassVar[Mapping[str, str]]
    """Metrics of the console and their titles, the most important first."""
    COMMON: ClassVar[tuple[str, ...]] = (
        "model", "data", "code", "steps", "run_dir", "prompts_per_step", "samples_per_prompt",
        "max_tokens", "temperature", "advantage", "loss", "kl_coef", "drop_equal", "lr", "schedule",
        "updates_per_step", "epochs", "lora_rank", "max_staleness", "eval_every", "eval_share",
        "device_map", "tokens_per_microbatch", "kv_cache_gib", "seed", "plan",
    )  # fmt: skip
    FIXED: ClassVar[tuple[str, ...]] = (
        "model", "seed", "template_args", "system", "lora_rank", "lora_alpha", "lora_targets",
        "advantage", "columns",
    )  # fmt: skip
    """Options that a resumed run must not change."""

    def __post_init__(self):
        at_least(1, self, "updates_per_step", "epochs")
        at_least(0, self, "steps", "rollouts_every")
        above(0, self, "temperature", "kv_cache_gib")
        at_least(self.min_samples, self.rollout, "samples_per_prompt")
        self._check_sources()
        self._check_algorithm()
        self._check_sizes()
        if self.runs_ahead:
            unread_with("max_staleness above 0", self.rollout, "extra_groups", "recorded")
            unread_with("max_staleness above 0", self, "engines_sleep", "offload")
        else:
            unread_with("max_staleness=0", self, "on_new_weights")

    def check_files(self) -> None:
        """Refuse data that is missing, teachers of another family, and a folder with another run;
        the first rank does, for all."""
        for entries in filter(None, (self.data, self.evaluation.eval_data)):
            data.check_mixture(entries, self.env_names)
        for folder in self.teaching.folders.values():
            check_vocabulary(self.model, folder, "teacher")
        if not self.checkpoints.resume:
            refuse_old_run(self.run_dir)

    def _check_sources(self) -> None:
        """Refuse options of questions and of environments where data has none."""
        kinds = self._kinds(self.data)
        _ = self.players  # refuses wrong options of environments
        has_envs = bool(self.players)
        for part in (self.environments, self.episodes):
            names = flag_names(type(part))
            read_only_if(has_envs, "an environment in data", part, *names)
        read_only_if("file" in kinds, "a file in data", self.evaluation, "eval_share")
        read_only_if("file" in kinds, "a file in data", self.lengths, "long_prompts")
        has_files = "file" in kinds | self._kinds(self.evaluation.eval_data)
        read_only_if(has_files, "a file in data or eval_data", self.rows, "columns")
        if has_envs and self.lengths.overlong == "penalty":
            raise UserError("overlong='penalty' applies to single replies; use train or mask")
        is_split = self.episodes.history is not None or self.episodes.old_thoughts == "drop"
        if is_split and self.policy_loss.pack_options["by_sample"]:
            raise UserError(
                f"loss={self.policy_loss.loss!r} or its correction has one number per episode, "
                "whose sequences need not fit a micro-batch with history or old_thoughts=drop; "
                "use loss=ppo, segment or cispo, with corrections by token"
            )
        if not has_envs and self.advantages.reads_turns:
            raise UserError(
                f"advantage={self.advantages.advantage!r} needs rewards turn by turn, which "
                "questions do not have; use another advantage, or an environment in data"
            )

    def _kinds(self, entries: tuple[str, ...]) -> set[str]:
        """Which of file, task and env there are."""
        return {e.kind for e in (data.parse_mixture(entries, self.env_names) if entries else ())}

    def _check_algorithm(self) -> None:
        differs = self.advantages.differs_by_token(self.kl.is_in("reward"))
        if self.policy_loss.facts.by_sequence and differs:
            raise UserError(
                f"loss={self.policy_loss.loss!r} has one advantage per sequence; advantage="
                f"{self.advantages.advantage!r} gives each token its own with these options; use "
                "loss=ppo or cispo, or advantage=grpo"
            )
        has_critic = self.advantages.needs_critic
        condition = "an advantage that reads values_R, as gae"
        read_only_if(has_critic, condition, self.critic, "critic_lr")
        if self.rollout.drop_equal and not self.advantages.nothing_to_learn:
            raise UserError(
                f"drop_equal=True with advantage={self.advantages.advantage!r}, which may learn "
                "from groups of equal rewards too; leave it out, or say above an estimator of your "
                "own which groups teach nothing: rl.AdvantageFacts(nothing_to_learn=...)"
            )
        if self.critic.critic_warmup_steps > self.steps > 0:
            raise UserError(
                f"critic_warmup_steps={self.critic.critic_warmup_steps} must not exceed "
                f"steps={self.steps}: the policy is trained after them"
            )
        if self.advantages.needs_teacher:
            if not self.teaching.teacher:
                raise UserError(
                    f"advantage={self.advantages.advantage!r} needs a teacher; name one, as "
                    "--teacher FOLDER"
                )
            reason = f"advantage={self.advantages.advantage!r}"
            unread_with(reason, self.teaching, "teacher_weight")

    def _check_sizes(self) -> None:
        config = read_config(self.model)
        if config.experts is None:
            unread_with("a model without experts", self, "router")
        if self.replays_experts:
            check_recordable(config)
        max_tokens = self.lengths.max_tokens
        if max_tokens is None:
            max_tokens = default_tokens(self.default_kinds["max_tokens"], config)
        if max_tokens >= self.longest_sample:
            raise UserError(
                f"max_tokens={max_tokens} must be below the model's {config.max_positions} "
                f"positions and tokens_per_microbatch={self.training.tokens_per_microbatch}: "
                "samples are never split"
            )
        if self.rollout.prompts_per_step < self.updates_per_step:
            raise UserError(
                f"prompts_per_step={self.rollout.prompts_per_step} must be at least "
                f"updates_per_step={self.updates_per_step}: every update trains on a part of them"
            )

    @property
    def env_names(self) -> Mapping[str, EnvMaker]:
        """Environments by name, those of --code included."""
        return {**self.ENVS, **self.own.envs}

    @property
    def players(self) -> dict[str, Player]:
        """For each environment to train or evaluate on, what plays its episodes."""
        entries = data.parse_mixture(self.data, self.env_names)
        if self.evaluation.eval_data:
            entries += data.parse_mixture(self.evaluation.eval_data, self.env_names)
        specs = [entry.source for entry in entries if entry.kind == "env"]
        return env_players(specs, self.env_names, self.episodes)

    def read_rows(self, source: str) -> list[Prompt]:
        """Prompts of a file; rows without a domain get that of the only reward."""
        domain = self.own.only_domain(self.scoring.reward_roles)
        return data.read_prompts(source, self.rows.by_name, domain)

    @property
    def longest_sample(self) -> int:
        """Tokens that fit the model and a micro-batch; the cache must hold them too."""
        positions = read_config(self.model).max_positions
        return min(positions, self.training.tokens_per_microbatch)

    @property
    def replays_experts(self) -> bool:
        """Whether the policy is trained with the experts that engines record."""
        return self.router == "replay" and read_config(self.model).experts is not None

    @property
    def min_samples(self) -> int:
        """Smallest group to train on: estimators that compare samples need two."""
        return 2 if self.advantages.compares_samples else 1

    @property
    def loads_reference(self) -> bool:
        """A policy with adapters is its own reference, unless another is named."""
        has_own = self.training.lora_rank > 0 and self.kl.reference in (None, self.model)
        return self.kl.has_reference and not has_own

    @property
    def default_kinds(self) -> dict[str, str]:
        """Options that depend on the model's size, where they are not given."""
        entries = data.parse_mixture(self.data, self.env_names)
        is_played = all(entry.kind == "env" for entry in entries)
        critic = {"critic_lr": "critic"} if self.advantages.needs_critic else {}
        return {"lr": "rl", "max_tokens": "turn" if is_played else "reply"} | critic

    @property
    def runs_ahead(self) -> bool:
        """Whether generation goes on beside training."""
        return self.rollout.max_staleness > 0

    @property
    def generated_at_once(self) -> dict[str, int]:
        return {"prompts_per_step": self.rollout.max_in_flight}

    def is_recorded(self, step: int) -> bool:
        """Whether the samples of a step are written to the run folder."""
        return is_due(step, self.rollouts_every, self.steps)

    @property
    def cluster_options(self) -> dict[str, Any]:
        """Roles and their models; a role without a config of its own has the policy's."""
        wanted = {"critic": self.advantages.needs_critic, "reference": self.loads_reference}
        chosen = [name for name, is_wanted in wanted.items() if is_wanted]
        configs: dict[str, ModelConfig] = {}
        if self.kl.reference and self.loads_reference:
            configs["reference"] = read_config(self.kl.reference)
        for role, domain in self.teaching.roles.items():
            configs[role] = read_config(self.teaching.folders[domain])
        return {
            "roles": [
                "train", "generate", *chosen, *self.teaching.roles, *self.scoring.reward_roles,
            ],
            "config": read_config(self.model),
            "role_configs": configs | self.scoring.reward_configs,
        }  # fmt: skip

    @property
    def map_options(self) -> dict[str, Any]:
        """What a device map that is chosen depends on, beside roles and models."""
        turns = dict.fromkeys(("engines_sleep", "offload"), not self.runs_ahead)  # if need be
        return self.training.memory_options | turns
