"""Supervised fine-tuning: cross-entropy on the assistant's turns of packed dialogues.

python recipes/sft.py --model models/tiny --data reverse:5
torchrun --nproc-per-node 4 recipes/sft.py --data dialogues.jsonl --run-dir runs/mine
torchrun --nproc-per-node 2 recipes/sft.py --data dialogues.jsonl --run-dir runs/mine --resume
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import roll_lite as rl
from roll_lite import command, data
from roll_lite.checks import above, at_least, unread_with


@dataclass(frozen=True, kw_only=True)
class Config(rl.RecipeConfig):
    model: str = "models/tiny"
    """Hugging Face folder to start from, or a name on the Hugging Face Hub, as Qwen/Qwen3-0.6B."""
    data: str = "reverse:5"
    """A file of {"messages": [...]} or {"prompt": text or messages, "reply": text}, or a task:
    addition:N (digits), reverse:N or counting:N (letters)."""
    careless: float = 0.0
    """Share of the task's dialogues whose reply is a careless mistake instead of the answer."""
    steps: int = 100
    """Optimizer updates."""
    epochs: float | None = None
    """Passes over the file in place of steps: as many steps as they take, printed."""
    rows_per_step: int = 64
    """Dialogues per update."""
    run_dir: str = field(default_factory=partial(rl.default_folder, "sft"))
    """Folder for config.json, metrics.jsonl, checkpoints/ and model/."""
    seed: int = 0
    """Seed for the dialogues and their order."""
    too_long: Literal["error", "truncate"] = "error"
    """What to do with a dialogue that does not fit in a micro-batch or in the model."""
    device: str = "auto"
    """What to compute on: auto, cpu or cuda."""
    device_map: str | None = None
    """Ranks that train, as in train=0-3,tp=2; all ranks unless given."""
    tp: int = 1
    """Tensor-parallel ranks per model."""
    chat: rl.ChatOptions = rl.ChatOptions()
    rows: rl.RowOptions = rl.RowOptions()
    training: rl.TrainingOptions = rl.TrainingOptions(warmup_steps=20)
    evaluation: rl.HeldOutOptions = rl.HeldOutOptions(eval_every=50)
    checkpoints: rl.CheckpointOptions = rl.CheckpointOptions()
    tracking: rl.TrackerOptions = rl.TrackerOptions()
    profile: rl.ProfileOptions = rl.ProfileOptions()

    SHOWN: ClassVar = {
        "loss/loss": "loss", "eval/loss": "eval loss", "loss/grad_norm": "grad",
        "loss/skipped_steps": "skipped", "data/truncated": "cut",
        "train/tokens_per_second": "tokens/s", "time/step": "step s",
    }  # fmt: skip
    FIXED: ClassVar = (
        "model", "seed", "careless", "template_args", "system", "lora_rank", "lora_alpha",
        "lora_targets", "columns",
    )  # fmt: skip

    @property
    def default_kinds(self) -> dict[str, str]:
        return {"lr": "sft"}

    def __post_init__(self):
        rl.read_config(self.model)
        at_least(1, self, "steps", "rows_per_step", "tp")
        at_least(0, self, "careless")
        if not data.is_task(self.data):
            unread_with("data", self, "careless")
        self.rows.check_columns(self.data, self.evaluation.eval_data)
        above(0, self, "epochs")
        if data.is_task(self.data):
            unread_with("a task in data, which has no end", self, "epochs")
        if self.epochs is not None and "steps" not in self.chosen:
            unread_with("epochs", self, "steps")
        if self.device_map is not None and "device_map" not in self.chosen:
            unread_with("device_map", self, "tp")

    @property
    def open_defaults(self) -> dict[str, str]:
        return {"device_map": f"train=all,tp={self.tp}"}

    def check_files(self) -> None:
        """Refuse data that is missing and a folder with another run; the first rank does."""
        data.check_source(self.data)
        self.evaluation.check_files()
        if not self.checkpoints.resume:
            rl.refuse_old_run(self.run_dir)


TRACKERS = ()  # yours, beside those of --tracker: docs/howto/monitor.md has one for trackio


def main(cfg: Config) -> None:
    config = rl.read_config(cfg.model)
    with rl.Cluster(
        cfg.device_map, cfg.device, roles=["train"], config=config, options=cfg
    ) as cluster:
        cfg.check_files()
        rows = data.DIALOGUES.training(
            cfg.data, f"sft-{cfg.seed}", cfg.rows.by_name, careless=cfg.careless
        )
        if cfg.epochs is not None:  # then the rows are those of a file
            cfg = rl.with_epochs(cfg, len(rows.rows))
        encode = partial(encode_rows, cfg, rl.Chat(cfg.model, **cfg.chat.arguments))
        validation, _ = encode(data.DIALOGUES.held_out(cfg.data, cfg.evaluation, cfg.rows.by_name))
        if not data.is_task(cfg.data) and cfg.too_long == "error":
            encode(rows.rows)  # refuse a dialogue that does not fit now, not in mid-run

        roles = rl.Roles(cluster)
        roles.policy = trainer = roles.add(
            "train", rl.Trainer, folder=cfg.model, loss=rl.sft_loss,
            schedule=cfg.training.schedule_over(cfg.steps), **cfg.training.policy_options,
        )  # fmt: skip
        shards = trainer.role.num_replicas
        budget = cfg.training.tokens_per_microbatch
        pack = partial(rl.pack, tokens_per_microbatch=budget, num_shards=shards)

        def validate() -> dict[str, float]:
            return {"eval/loss": trainer.evaluate(rl.split(pack(validation)))[0]["loss/loss"]}

        evaluation = None
        if validation:
            every = cfg.evaluation.eval_every
            evaluation = rl.Validation(validate, every, best="eval/loss", is_lower_better=True)
        with rl.Loop(
            cfg, roles, evaluation=evaluation, parts={"rows": rows}, trackers=TRACKERS,
            is_measured_first=False,
        ) as loop:  # fmt: skip
            for step in loop:
                sequences, num_cut = encode(rows.take(cfg.rows_per_step))
                batch = pack(sequences, cost=rl.SequenceCost.of(config))
                metrics = trainer.step(rl.split(batch))[0]
                loop.end(step, metrics | {"data/truncated": num_cut})


def encode_rows(
    cfg: Config, chat: rl.Chat, dialogues: list[data.Dialogue]
) -> tuple[list[rl.TrainingSequence], int]:
    """Sequences of the dialogues, and how many of them were cut."""
    return rl.fit(
        rl.encode_dialogues(chat, dialogues),
        tokens_per_microbatch=cfg.training.tokens_per_microbatch,
        max_positions=rl.read_config(cfg.model).max_positions,
        too_long=cfg.too_long,
    )


if __name__ == "__main__":
    command.run(main, Config, __doc__)
