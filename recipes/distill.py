"""Distillation: a student learns a teacher's distribution over tokens, not only its replies.

python recipes/sft.py --model models/tiny --steps 200 --run-dir runs/teacher     # a teacher first
python recipes/distill.py --model models/tiny --teacher runs/teacher/model
torchrun --nproc-per-node 4 recipes/distill.py --teacher BIG --device-map "train=0-1 teacher=2-3"

The replies are those of the data. On the student's own samples (on-policy):

python recipes/rlvr.py --model runs/sft/model --teacher runs/teacher/model --advantage opd --lr 3e-4
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import roll_lite as rl
from roll_lite import command, data
from roll_lite.checks import above, at_least


@dataclass(frozen=True, kw_only=True)
class Config(rl.RecipeConfig):
    teacher: str
    """Hugging Face folder or name on the Hugging Face Hub: a teacher with the student's
    vocabulary."""
    model: str = "models/tiny"
    """Hugging Face folder or name on the Hugging Face Hub: the student to start from."""
    data: str = "reverse:5"
    """A file of dialogues as for sft.py; or a task: addition:N (digits), reverse:N or counting:N
    (letters)."""
    steps: int = 60
    """Optimizer updates."""
    rows_per_step: int = 64
    """Dialogues per update."""
    run_dir: str = field(default_factory=partial(rl.default_folder, "distill"))
    """Folder for config.json, metrics.jsonl, checkpoints/ and model/."""
    seed: int = 0
    """Seed for the rows and their order."""
    temperature: float = 1.0
    """Temperature of both models' distributions."""
    top_k: int = 32
    """Number of the teacher's likeliest tokens to compare; all other tokens count as one."""
    device: str = "auto"
    """What to compute on: auto, cpu or cuda."""
    device_map: str | None = None
    """Ranks of train and teacher; None puts both on all ranks."""
    chat: rl.ChatOptions = rl.ChatOptions()
    rows: rl.RowOptions = rl.RowOptions()
    divergence: rl.DistillLoss = rl.DistillLoss()
    training: rl.TrainingOptions = rl.TrainingOptions(warmup_steps=10)
    evaluation: rl.HeldOutOptions = rl.HeldOutOptions(eval_every=20)
    checkpoints: rl.CheckpointOptions = rl.CheckpointOptions()
    tracking: rl.TrackerOptions = rl.TrackerOptions()
    profile: rl.ProfileOptions = rl.ProfileOptions()

    SHOWN: ClassVar = {
        "loss/loss": "loss", "loss/kl": "KL", "eval/kl": "eval KL",
        "loss/grad_norm": "grad", "loss/skipped_steps": "skipped",
        "train/tokens_per_second": "tokens/s", "time/step": "step s",
    }  # fmt: skip
    FIXED: ClassVar = (
        "model", "teacher", "seed", "kind", "template_args", "system", "lora_rank", "lora_alpha",
        "lora_targets", "columns",
    )  # fmt: skip

    @property
    def default_kinds(self) -> dict[str, str]:
        return {"lr": "sft"}

    def __post_init__(self):
        at_least(1, self, "steps", "rows_per_step", "top_k")
        above(0, self, "temperature")
        self.rows.check_columns(self.data, self.evaluation.eval_data)

    @property
    def open_defaults(self) -> dict[str, str]:
        return {"device_map": "train=all teacher=all"}

    def check_files(self) -> None:
        """Refuse data that is missing, a teacher of another family and a folder with another run;
        the first rank does."""
        data.check_source(self.data)
        self.evaluation.check_files()
        rl.check_vocabulary(self.model, self.teacher, "teacher")
        if not self.checkpoints.resume:
            rl.refuse_old_run(self.run_dir)


TRACKERS = ()  # yours, beside those of --tracker: docs/howto/monitor.md has one for trackio


def main(cfg: Config) -> None:
    config = rl.read_config(cfg.model)
    with rl.Cluster(
        cfg.device_map, cfg.device, roles=["train", "teacher"],
        config=config, role_configs={"teacher": rl.read_config(cfg.teacher)}, options=cfg,
    ) as cluster:  # fmt: skip
        cfg.check_files()
        rows = data.DIALOGUES.training(cfg.data, f"distill-{cfg.seed}", cfg.rows.by_name)
        held_out = data.DIALOGUES.held_out(cfg.data, cfg.evaluation, cfg.rows.by_name)
        chat, budget = rl.Chat(cfg.model, **cfg.chat.arguments), cfg.training.tokens_per_microbatch
        encode = partial(rl.encode_fitting, chat, budget, (cfg.model, cfg.teacher))
        if not data.is_task(cfg.data):
            encode(rows.rows)  # refuse a row that does not fit now, not in mid-run

        roles = rl.Roles(cluster)
        teacher = roles.add("teacher", rl.Scorer, folder=cfg.teacher, temperature=cfg.temperature)
        roles.policy = student = roles.add(
            "train", rl.Trainer, folder=cfg.model, temperature=cfg.temperature,
            loss=cfg.divergence, schedule=cfg.training.schedule_over(cfg.steps),
            **cfg.training.policy_options,
        )  # fmt: skip

        def taught(dialogues: list[data.Dialogue]) -> rl.split:
            """A batch with the teacher's likeliest tokens."""
            limits = cfg.top_k, config.vocab_size
            return rl.split(rl.pack_taught(encode(dialogues), budget, student, teacher, *limits))

        def validate() -> dict[str, float]:
            return {"eval/kl": student.evaluate(taught(held_out))[0]["loss/kl"]}

        evaluation = None
        if held_out:
            every = cfg.evaluation.eval_every
            evaluation = rl.Validation(validate, every, best="eval/kl", is_lower_better=True)
        parts = {"rows": rows}
        with rl.Loop(cfg, roles, evaluation=evaluation, parts=parts, trackers=TRACKERS) as loop:
            for step in loop:
                loop.phase("teacher")
                batch = taught(rows.take(cfg.rows_per_step))
                loop.phase("train")
                loop.end(step, student.step(batch)[0])


if __name__ == "__main__":
    command.run(main, Config, __doc__)
