"""Distillation: a student learns a teacher's distribution over tokens, not only its replies.

python recipes/sft.py --model models/tiny --steps 200 --run-dir runs/teacher     # a teacher first
python recipes/distill.py --model models/tiny --teacher runs/teacher/model
torchrun --nproc-per-node 4 recipes/distill.py --teacher BIG --device-map "train=0-1 teacher=2-3"
python recipes/distill.py --model runs/sft/model --teacher runs/teacher/model --on-policy --lr 3e-4

Replies are those of the data, or with --on-policy the student's own samples.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import tyro

from roll_lite import data
from roll_lite.chat import Chat
from roll_lite.checks import above, at_least, unread_with
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.engine.service import EngineService
from roll_lite.models.config import read_config
from roll_lite.on_policy import JudgedSamples
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.sync import WeightSync
from roll_lite.train.checkpoint import Checkpoints
from roll_lite.train.distillation import DistillLoss, pack_taught
from roll_lite.train.encoding import check_vocabulary, encode_fitting
from roll_lite.train.options import Training
from roll_lite.train.packing import MicroBatch
from roll_lite.train.policy_loss import PolicyLoss
from roll_lite.train.resume import RunState
from roll_lite.train.scorer import Scorer
from roll_lite.train.trainer import Trainer
from roll_lite.types import SamplingParams


@dataclass(kw_only=True)
class Config(Training):
    teacher: str
    """Hugging Face folder of the teacher, with the student's vocabulary."""
    model: str = "models/tiny"
    """Hugging Face folder of the student to start from."""
    task: str | None = None
    """addition:N (digits), reverse:N or counting:N (letters); reverse:5 if there is no data."""
    data: str | None = None
    """JSON lines: dialogues as for sft.py; with on_policy, {"prompt": text or messages}."""
    kind: Literal["forward", "reverse", "skewed", "js"] = "forward"
    """Divergence between teacher and student."""
    skew: float = 0.1
    """Share of the teacher in what skewed compares it with."""
    top_k: int = 32
    """How many of the teacher's likeliest tokens are compared; the others count as one."""
    on_policy: bool = False
    """Learn from the student's own samples, by policy gradient on the teacher's logprobs."""
    samples_per_prompt: int = 4
    """On policy: replies to each prompt."""
    max_tokens: int = 16
    """On policy: longest reply."""
    kv_cache_gib: float = 1.0
    """On policy: memory of the engine's cache."""
    temperature: float = 1.0
    """Of both models' distributions, and of sampling."""
    steps: int = 60
    """Updates."""
    rows_per_step: int = 64
    """Dialogues, or prompts, of one update."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises to lr."""
    device_map: str | None = None
    """Ranks of student and teacher; None is train=all teacher=all, on policy also generate=all."""
    validation_data: str | None = None
    """Rows for the KL to the teacher; without it, held-out ones of the task."""
    validation_rows: int = 256
    """At most so many of them."""
    validate_every: int = 20
    """Measure the KL before training, after every so many updates, and at the end."""
    checkpoint_every: int = 0
    """Write a checkpoint after every so many updates, and at the end; two are kept."""
    resume: bool = False
    """Go on from the newest whole checkpoint of run_dir, if there is one."""
    seed: int = 0
    """Of the rows, their order, and sampling."""
    device: str = "auto"
    """auto, cpu or cuda."""
    run_dir: str = field(default_factory=partial(default_folder, "distill"))
    """Gets config.json, metrics.jsonl, checkpoints/ and the trained model."""

    def __post_init__(self):
        super().__post_init__()
        data.check_source(self.data, self.task)
        check_vocabulary(self.model, self.teacher, "teacher")
        make_loss(self)
        at_least(1, self, "steps", "rows_per_step", "top_k", "samples_per_prompt", "max_tokens")
        at_least(1, self, "validation_rows", "validate_every")
        at_least(0, self, "checkpoint_every")
        above(0, self, "temperature", "kv_cache_gib")
        if self.on_policy:
            unread_with("on_policy", self, "kind", "skew", "top_k")
        else:
            unread_with("on_policy off", self, "samples_per_prompt", "max_tokens", "kv_cache_gib")
        if not self.resume:
            refuse_old_run(self.run_dir)


SHOWN = {
    "loss/loss": "loss", "loss/kl": "KL", "rollout/kl": "KL", "eval/kl": "validation KL",
    "loss/grad_norm": "grad", "loss/skipped_steps": "skipped", "rollout/reply_tokens": "tokens",
    "train/tokens_per_second": "tokens/s", "time/step": "step s",
}  # fmt: skip
FIXED = (
    "model", "teacher", "task", "seed", "on_policy", "kind",
    "lora_rank", "lora_alpha", "lora_targets",
)  # fmt: skip


def main(cfg: Config) -> None:
    roles = ["train", "teacher", *(["generate"] if cfg.on_policy else [])]
    device_map = cfg.device_map or " ".join(f"{role}=all" for role in roles)
    config, role_configs = read_config(cfg.model), {"teacher": read_config(cfg.teacher)}
    options = {"roles": roles, "config": config, "role_configs": role_configs}
    with Cluster(device_map, cfg.device, **options) as cluster:
        source = data.PROMPTS if cfg.on_policy else data.DIALOGUES
        rows = source.training(cfg.data, cfg.task, f"distill-{cfg.seed}")
        held_out = source.validation(cfg.validation_data, cfg.data, cfg.task, cfg.validation_rows)
        teacher = cluster.role("teacher", Scorer, folder=cfg.teacher, temperature=cfg.temperature)
        trainer = cluster.role(
            "train", Trainer, folder=cfg.model, loss=make_loss(cfg), temperature=cfg.temperature,
            schedule=cfg.schedule_over(cfg.steps), **cfg.policy_options,
        )  # fmt: skip
        checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints")
        fixed = data.fixed_options(cfg, *FIXED)
        saved = RunState(checkpoints, [trainer], {"rows": rows}, fixed)
        done = saved.resume() if cfg.resume else None
        run = Run(cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN, resumed_at=done)
        chat = Chat(cfg.model)
        if cfg.on_policy:
            make_batch = judged_samples(cfg, cluster, chat, trainer, teacher)
        else:
            models = cfg.model, cfg.teacher
            encode = partial(encode_fitting, chat, cfg.tokens_per_microbatch, models)
            if cfg.data is not None:
                encode(rows.rows)  # says now, not in the middle of the run, what does not fit
            make_batch = partial(taught_dialogues, cfg, encode, trainer, teacher)
        if held_out and not done:
            run.log(0, {"eval/kl": kl_to_teacher(trainer, *make_batch(held_out, 0))})
        for step in range((done or 0) + 1, cfg.steps + 1):
            start = time.perf_counter()
            batch, metrics = make_batch(rows.take(cfg.rows_per_step), step - 1)
            metrics |= trainer.step(split(batch))[0]
            metrics["time/step"] = time.perf_counter() - start
            if held_out and run.is_due(step, cfg.validate_every):
                metrics["eval/kl"] = kl_to_teacher(trainer, *make_batch(held_out, step))
            run.log(step, metrics)
            if run.is_due(step, cfg.checkpoint_every):
                saved.save(step, lower=metrics.get("eval/kl"))
        run.close()
        print(f"model: {trainer.export(f'{cfg.run_dir}/model')}")


def make_loss(cfg: Config) -> PolicyLoss | DistillLoss:
    return PolicyLoss() if cfg.on_policy else DistillLoss(kind=cfg.kind, skew=cfg.skew)


def taught_dialogues(
    cfg: Config, encode: Callable, trainer: RoleHandle, teacher: RoleHandle,
    dialogues: list[data.Dialogue], num_updates: int,
) -> tuple[list[MicroBatch], dict[str, float]]:  # fmt: skip
    """A batch with the teacher's likeliest tokens, the same after any number of updates."""
    start = time.perf_counter()
    limits = cfg.top_k, read_config(cfg.model).vocab_size
    batch = pack_taught(encode(dialogues), cfg.tokens_per_microbatch, trainer, teacher, *limits)
    return batch, {"time/teacher": time.perf_counter() - start}


def judged_samples(
    cfg: Config, cluster: Cluster, chat: Chat, trainer: RoleHandle, teacher: RoleHandle
) -> JudgedSamples:
    sampling = {"max_tokens": cfg.max_tokens, "temperature": cfg.temperature}
    options = {"folder": cfg.model, "kv_cache_gib": cfg.kv_cache_gib}
    return JudgedSamples(
        trainer=trainer, teacher=teacher, chat=chat, seed=cfg.seed,
        engines=cluster.role("generate", EngineService, **options),
        sync=cluster.role("sync", WeightSync),
        params=SamplingParams(**sampling, stop_ids=chat.stop_ids),
        num_samples=cfg.samples_per_prompt, tokens_per_microbatch=cfg.tokens_per_microbatch,
    )  # fmt: skip


def kl_to_teacher(trainer: RoleHandle, batch: list[MicroBatch], metrics: dict[str, float]) -> float:
    """Of the dialogues' tokens, KL(teacher, student); of samples, KL(student, teacher)."""
    if "rollout/kl" in metrics:
        return metrics["rollout/kl"]
    return trainer.evaluate(split(batch))[0]["loss/kl"]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
