"""Supervised fine-tuning: cross-entropy on the assistant's turns of packed dialogues.

python recipes/sft.py --model models/tiny --task reverse:5
torchrun --nproc-per-node 4 recipes/sft.py --data dialogues.jsonl --run-dir runs/mine
torchrun --nproc-per-node 2 recipes/sft.py --data dialogues.jsonl --run-dir runs/mine --resume
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import tyro

from roll_lite import data
from roll_lite.chat import Chat
from roll_lite.checks import at_least, unread_with
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import split
from roll_lite.models.config import read_config
from roll_lite.models.cost import SequenceCost
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.train.checkpoint import Checkpoints
from roll_lite.train.encoding import encode_dialogues, fit
from roll_lite.train.losses import sft_loss
from roll_lite.train.options import Training
from roll_lite.train.packing import TrainingSequence, pack
from roll_lite.train.resume import RunState
from roll_lite.train.trainer import Trainer


@dataclass(kw_only=True)
class Config(Training):
    model: str = "models/tiny"
    """Hugging Face folder to start from."""
    task: str | None = None
    """addition:N (digits), reverse:N or counting:N (letters); reverse:5 if there is no data."""
    data: str | None = None
    """JSON lines: {"messages": [...]} or {"prompt": text or messages, "reply": text}."""
    careless: float = 0.0
    """Share of the task's dialogues whose reply is a careless mistake instead of the answer."""
    steps: int = 100
    """Updates."""
    dialogues_per_step: int = 64
    """Batch size."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises to lr."""
    weight_decay: float = 0.0
    """AdamW's decay."""
    too_long: Literal["error", "truncate"] = "error"
    """What happens to a dialogue that does not fit in a micro-batch or in the model."""
    tp: int = 1
    """Ranks that hold one model together."""
    device_map: str | None = None
    """Ranks that train, as in train=0-3,tp=2; all of them unless given."""
    validation_data: str | None = None
    """Dialogues for the validation loss; without it, held-out ones of the task."""
    validation_dialogues: int = 256
    """At most so many of them."""
    validate_every: int = 50
    """Compute the validation loss after every so many updates, and at the end."""
    checkpoint_every: int = 0
    """Write a checkpoint after every so many updates; one is written at the end in any case."""
    keep_last: int = 2
    """Checkpoints to keep."""
    resume: bool = False
    """Go on from the newest whole checkpoint of run_dir, if there is one."""
    seed: int = 0
    """Of the dialogues and their order."""
    device: str = "auto"
    """auto, cpu or cuda."""
    run_dir: str = field(default_factory=partial(default_folder, "sft"))
    """Gets config.json, metrics.jsonl, checkpoints/ and the trained model."""

    def __post_init__(self):
        super().__post_init__()
        read_config(self.model)
        data.check_source(self.data, self.task)
        at_least(1, self, "steps", "dialogues_per_step", "tp", "keep_last")
        at_least(1, self, "validation_dialogues", "validate_every")
        at_least(0, self, "weight_decay", "careless", "checkpoint_every")
        if self.data is not None:
            unread_with("data", self, "careless")
        if self.device_map is not None:
            unread_with("device_map", self, "tp")
        if not self.resume:
            refuse_old_run(self.run_dir)


SHOWN = {
    "loss/loss": "loss", "eval/loss": "validation", "loss/grad_norm": "grad",
    "loss/skipped_steps": "skipped", "data/truncated": "cut",
    "train/tokens_per_second": "tokens/s", "time/step": "step s",
}  # fmt: skip


def main(cfg: Config) -> None:
    device_map = cfg.device_map or f"train=all,tp={cfg.tp}"
    model_config = read_config(cfg.model)
    with Cluster(device_map, cfg.device, config=model_config, roles=["train"]) as cluster:
        rows = data.DIALOGUES.training(cfg.data, cfg.task, f"sft-{cfg.seed}", careless=cfg.careless)
        held_out = data.DIALOGUES.validation(
            cfg.validation_data, cfg.data, cfg.task, cfg.validation_dialogues
        )
        trainer = cluster.role(
            "train",
            Trainer,
            folder=cfg.model,
            loss=sft_loss,
            schedule=cfg.schedule_over(cfg.steps),
            weight_decay=cfg.weight_decay,
            **cfg.policy_options,
        )
        checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", keep_last=cfg.keep_last)
        fixed = data.fixed_options(
            cfg, "model", "task", "seed", "careless", "lora_rank", "lora_alpha", "lora_targets"
        )
        saved = RunState(checkpoints, [trainer], {"rows": rows}, fixed)
        done = saved.resume() if cfg.resume else None
        run = Run(cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN, resumed_at=done)
        encode = partial(encode_rows, Chat(cfg.model), model_config.max_positions, cfg)
        num_shards, cost = trainer.role.num_replicas, SequenceCost.of(model_config)
        validation, _ = encode(held_out)
        if cfg.data is not None and cfg.too_long == "error":
            encode(rows.rows)  # says now, not in the middle of the run, which one does not fit

        for step in range((done or 0) + 1, cfg.steps + 1):
            start = time.perf_counter()
            sequences, num_cut = encode(rows.take(cfg.dialogues_per_step))
            batch = pack(sequences, cfg.tokens_per_microbatch, num_shards=num_shards, cost=cost)
            metrics = trainer.step(split(batch))[0] | {"data/truncated": num_cut}
            metrics["time/step"] = time.perf_counter() - start
            if validation and run.is_due(step, cfg.validate_every):
                batch = pack(validation, cfg.tokens_per_microbatch, num_shards=num_shards)
                metrics["eval/loss"] = trainer.evaluate(split(batch))[0]["loss/loss"]
            run.log(step, metrics)
            if run.is_due(step, cfg.checkpoint_every):
                saved.save(step, lower=metrics.get("eval/loss"))

        run.close()
        print(f"model: {trainer.export(f'{cfg.run_dir}/model')}")


def encode_rows(
    chat: Chat, max_positions: int, cfg: Config, dialogues: list[data.Dialogue]
) -> tuple[list[TrainingSequence], int]:
    return fit(
        encode_dialogues(chat, dialogues),
        tokens_per_microbatch=cfg.tokens_per_microbatch,
        max_positions=max_positions,
        too_long=cfg.too_long,
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
