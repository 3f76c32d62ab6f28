"""Distillation: a student learns a teacher's distribution over tokens, not only its replies.

python recipes/sft.py --model models/tiny --steps 200 --run-dir runs/teacher     # a teacher first
python recipes/distill.py --model models/tiny --teacher runs/teacher/model
torchrun --nproc-per-node 4 recipes/distill.py --teacher BIG --device-map "train=0-1 teacher=2-3"
python recipes/distill.py --model runs/sft/model --teacher runs/teacher/model --on-policy --lr 3e-4

Replies are those of the data, or with --on-policy the student's own samples.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import NamedTuple

from roll_lite import command, data, tasks
from roll_lite.chat import Chat
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import above, at_least, unread_with
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.data import HeldOutOptions
from roll_lite.engine.service import EngineService
from roll_lite.envs.question import ask
from roll_lite.models.config import read_config
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.groups import drop_failed
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.rollout.sample import derive_seed
from roll_lite.sync import WeightSync
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.batch import MicroBatch, TrainingSequence, pack
from roll_lite.train.checkpoint import CheckpointOptions, RunState
from roll_lite.train.defaults import choose_defaults
from roll_lite.train.distillation import DistillLoss, pack_taught
from roll_lite.train.encoding import check_vocabulary, encode_fitting
from roll_lite.train.losses import PolicyLoss
from roll_lite.train.optimizer import TrainingOptions
from roll_lite.train.profiling import ProfileOptions, Profiler
from roll_lite.train.scorer import Scorer, score_over_ranks
from roll_lite.train.sequences import ModelScores, plain_sequences, with_advantages
from roll_lite.train.trainer import Trainer
from roll_lite.types import Group, Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Config:
    teacher: str
    """Hugging Face folder of the teacher, with the student's vocabulary."""
    model: str = "models/tiny"
    """Hugging Face folder of the student to start from."""
    data: str = "reverse:5"
    """A file of dialogues as for sft.py or, with on_policy, of {"prompt": text or messages}; or a
    task: addition:N (digits), reverse:N or counting:N (letters)."""
    steps: int = 60
    """Optimizer updates."""
    rows_per_step: int = 64
    """Dialogues, or prompts, per update."""
    run_dir: str = field(default_factory=partial(default_folder, "distill"))
    """Folder for config.json, metrics.jsonl, checkpoints/ and model/."""
    seed: int = 0
    """Seed for the rows, their order, and sampling."""
    temperature: float = 1.0
    """Temperature of both models' distributions, and of sampling."""
    top_k: int = 32
    """Number of the teacher's likeliest tokens to compare; all other tokens count as one."""
    on_policy: bool = False
    """Learn from the student's own samples, by policy gradient on the teacher's logprobs."""
    samples_per_prompt: int = 4
    """on_policy: samples of each prompt."""
    max_tokens: int | None = None
    """on_policy: longest reply, in tokens; None chooses by the model's size."""
    kv_cache_gib: float = 1.0
    """on_policy: KV cache of each engine, in GiB."""
    device: str = "auto"
    """auto, cpu or cuda."""
    device_map: str | None = None
    """Ranks of train, teacher and (on_policy) generate; None puts every role on all ranks."""
    chat: ChatOptions = ChatOptions()
    divergence: DistillLoss = DistillLoss()
    training: TrainingOptions = TrainingOptions(warmup_steps=10)
    evaluation: HeldOutOptions = HeldOutOptions(eval_every=20)
    checkpoints: CheckpointOptions = CheckpointOptions()
    profile: ProfileOptions = ProfileOptions()

    def __post_init__(self):
        data.check_source(self.data)
        check_vocabulary(self.model, self.teacher, "teacher")
        at_least(1, self, "steps", "rows_per_step", "top_k", "samples_per_prompt", "max_tokens")
        above(0, self, "temperature", "kv_cache_gib")
        if self.on_policy:
            unread_with("on_policy", self, "top_k")
            unread_with("on_policy", self.divergence, "kind", "skew")
        else:
            unread_with("on_policy off", self, "samples_per_prompt", "max_tokens", "kv_cache_gib")
        if not self.checkpoints.resume:
            refuse_old_run(self.run_dir)


SHOWN = {
    "loss/loss": "loss", "loss/kl": "KL", "rollout/kl": "KL", "eval/kl": "validation KL",
    "loss/grad_norm": "grad", "loss/skipped_steps": "skipped", "rollout/reply_tokens": "tokens",
    "train/tokens_per_second": "tokens/s", "time/step": "step s",
}  # fmt: skip
TRACKERS = ()  # yours, beside TensorBoard: docs/tutorial.md has wandb and trackio
FIXED = (
    "model", "teacher", "seed", "on_policy", "kind", "template_args",
    "lora_rank", "lora_alpha", "lora_targets",
)  # fmt: skip


class Models(NamedTuple):
    """The roles that hold models; engines and their weight sync exist on policy alone."""

    student: RoleHandle
    teacher: RoleHandle
    engines: RoleHandle | None
    sync: RoleHandle | None


def main(cfg: Config) -> None:
    roles = ["train", "teacher", *(["generate"] if cfg.on_policy else [])]
    device_map = cfg.device_map or " ".join(f"{role}=all" for role in roles)
    config, role_configs = read_config(cfg.model), {"teacher": read_config(cfg.teacher)}
    configs = {"config": config, "role_configs": role_configs}
    with Cluster(device_map, cfg.device, roles=roles, options=cfg, **configs) as cluster:
        cfg = choose_defaults(cfg, lr="sft", **({"max_tokens": "reply"} if cfg.on_policy else {}))
        is_task = tasks.is_task(cfg.data)
        source = data.PROMPTS if cfg.on_policy else data.DIALOGUES
        rows = source.training(cfg.data, f"distill-{cfg.seed}")
        held_out = source.held_out(cfg.data, cfg.evaluation)
        chat = Chat(cfg.model, **cfg.chat.arguments)
        if cfg.on_policy:
            chat.check_prompts([*(() if is_task else rows.rows), *held_out])
        models = make_roles(cfg, cluster)
        fixed = data.fixed_options(cfg, *FIXED)
        saved = RunState(cfg.run_dir, cfg.checkpoints, [models.student], {"rows": rows}, fixed)
        resumed_at = saved.resumed_at
        run = Run(
            cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN, resumed_at=resumed_at,
            trackers=TRACKERS, ranks=cluster.device_map.replicas,
        )  # fmt: skip
        make_batches = OnPolicyBatches if cfg.on_policy else TeacherBatches
        make_batch = make_batches(cfg, models, chat)
        if not (is_task or cfg.on_policy):
            make_batch.encode(rows.rows)  # refuse a row that does not fit now, not in mid-run
        if held_out and not resumed_at:
            run.log(0, {"eval/kl": kl_to_teacher(models, *make_batch(held_out, 0))})
        profiler = Profiler(cfg.profile, cfg.run_dir, list(filter(None, models[:3])))
        with saved.kept(run, cluster.stop_request()):
            for step in range(saved.step + 1, cfg.steps + 1):
                profiler.at(step)
                run.phase.enter("train", step)
                start = time.perf_counter()
                batch, metrics = make_batch(rows.take(cfg.rows_per_step), step - 1)
                metrics |= models.student.step(split(batch))[0]
                metrics["time/step"] = time.perf_counter() - start
                if held_out and run.is_due(step, cfg.evaluation.eval_every):
                    run.phase.enter("evaluate")
                    metrics["eval/kl"] = kl_to_teacher(models, *make_batch(held_out, step))
                run.log(step, metrics)
                saved.end_step(run, step, lower=metrics.get("eval/kl"))
        profiler.close()
        run.close()
        print(f"model: {models.student.export(f'{cfg.run_dir}/model')}")


def make_roles(cfg: Config, cluster: Cluster) -> Models:
    engines = sync = None
    teacher = cluster.role("teacher", Scorer, folder=cfg.teacher, temperature=cfg.temperature)
    student = cluster.role(
        "train", Trainer, folder=cfg.model, temperature=cfg.temperature,
        loss=PolicyLoss() if cfg.on_policy else cfg.divergence,
        schedule=cfg.training.schedule_over(cfg.steps), **cfg.training.policy_options,
    )  # fmt: skip
    if cfg.on_policy:
        options = {"folder": cfg.model, "kv_cache_gib": cfg.kv_cache_gib}
        engines = cluster.role("generate", EngineService, **options)
        sync = cluster.role("sync", WeightSync)
    return Models(student, teacher, engines, sync)


class TeacherBatches:
    """Makes batches of dialogues with the teacher's likeliest tokens."""

    def __init__(self, cfg: Config, models: Models, chat: Chat):
        self._cfg, self._models = cfg, models
        self._budget = cfg.training.tokens_per_microbatch
        folders = cfg.model, cfg.teacher
        self.encode = partial(encode_fitting, chat, self._budget, folders)

    def __call__(
        self, dialogues: list[data.Dialogue], num_updates: int
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """The batch does not depend on the number of updates so far."""
        start = time.perf_counter()
        student, teacher, *_ = self._models
        limits = self._cfg.top_k, read_config(self._cfg.model).vocab_size
        batch = pack_taught(self.encode(dialogues), self._budget, student, teacher, *limits)
        return batch, {"time/teacher": time.perf_counter() - start}


class OnPolicyBatches:
    """Makes batches of the student's samples; a token's advantage is the teacher's logprob of it
    minus the student's."""

    def __init__(self, cfg: Config, models: Models, chat: Chat):
        self._cfg, self._models, self._chat = cfg, models, chat
        self._version = models.engines.version()

    def __call__(
        self, prompts: Sequence[Prompt], num_updates: int
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """A batch sampled after `num_updates` updates, and its reverse KL to the teacher."""
        if self._version != num_updates:
            self._models.sync.sync(num_updates)
            self._version = num_updates
        start = time.perf_counter()
        groups = self._sample(prompts, num_updates)
        sampled = time.perf_counter()
        sequences = self._score(groups)
        num_tokens = sum(sum(sequence.loss_mask) for sequence in sequences)
        num_shards = self._models.student.role.num_replicas
        budget = self._cfg.training.tokens_per_microbatch
        return pack(sequences, budget, num_shards=num_shards), {
            # An advantage is log p_teacher - log p_student.
            "rollout/kl": -sum(sum(sequence.advantages) for sequence in sequences) / num_tokens,
            "rollout/reply_tokens": fmean(sum(sequence.loss_mask) for sequence in sequences),
            "rollout/tokens_per_second": num_tokens / (sampled - start),
            "time/rollout": sampled - start,
            "time/teacher": time.perf_counter() - sampled,
        }

    def _sample(self, prompts: Sequence[Prompt], num_updates: int) -> list[Group]:
        cfg, chat = self._cfg, self._chat
        params = SamplingParams(
            max_tokens=cfg.max_tokens, temperature=cfg.temperature, stop_ids=chat.stop_ids
        )
        with Coordinator(
            engines=self._models.engines, chat=chat, prompts=iter(()), params=params,
            play=partial(ask, reward=unscored),
            options=RolloutOptions(samples_per_prompt=cfg.samples_per_prompt),
            # A seed of its own for every update: a resumed run samples as it would have.
            seed=derive_seed(cfg.seed, num_updates),
        ) as rollout:  # fmt: skip
            groups = rollout.answer(prompts, num_samples=cfg.samples_per_prompt, params=params)
        return drop_failed(groups, min_samples=1)

    def _score(self, groups: list[Group]) -> list[TrainingSequence]:
        sequences, teacher = plain_sequences(groups), self._models.teacher
        budget = self._cfg.training.tokens_per_microbatch
        scores = ModelScores(teacher_logprobs=score_over_ranks(teacher.logprobs, sequences, budget))
        return with_advantages(groups, AdvantageOptions(advantage="opd"), scores)


def unscored(prompt: Prompt, reply: str) -> float:
    """The teacher judges instead of a reward."""
    return 0.0


def kl_to_teacher(models: Models, batch: list[MicroBatch], metrics: dict[str, float]) -> float:
    """KL(teacher, student) of dialogues; KL(student, teacher) of the student's samples."""
    if "rollout/kl" in metrics:
        return metrics["rollout/kl"]
    return models.student.evaluate(split(batch))[0]["loss/kl"]


if __name__ == "__main__":
    command.run(main, Config, __doc__, fixed=FIXED)
