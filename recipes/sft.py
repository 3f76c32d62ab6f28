"""Supervised fine-tuning: cross-entropy on the assistant's turns of packed dialogues.

python recipes/sft.py --model models/tiny --data reverse:5
torchrun --nproc-per-node 4 recipes/sft.py --data dialogues.jsonl --run-dir runs/mine
torchrun --nproc-per-node 2 recipes/sft.py --data dialogues.jsonl --run-dir runs/mine --resume
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from roll_lite import command, data, tasks
from roll_lite.chat import Chat
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import at_least, unread_with
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import split
from roll_lite.data import HeldOutOptions
from roll_lite.models.config import read_config
from roll_lite.models.cost import SequenceCost
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.train.batch import TrainingSequence, pack
from roll_lite.train.checkpoint import CheckpointOptions, RunState
from roll_lite.train.defaults import choose_defaults
from roll_lite.train.encoding import encode_dialogues, fit
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import TrainingOptions
from roll_lite.train.profiling import ProfileOptions, Profiler
from roll_lite.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "models/tiny"
    """Hugging Face folder to start from."""
    data: str = "reverse:5"
    """A file of {"messages": [...]} or {"prompt": text or messages, "reply": text}, or a task:
    addition:N (digits), reverse:N or counting:N (letters)."""
    careless: float = 0.0
    """Share of the task's dialogues whose reply is a careless mistake instead of the answer."""
    steps: int = 100
    """Optimizer updates."""
    rows_per_step: int = 64
    """Dialogues per update."""
    run_dir: str = field(default_factory=partial(default_folder, "sft"))
    """Folder for config.json, metrics.jsonl, checkpoints/ and model/."""
    seed: int = 0
    """Seed for the dialogues and their order."""
    too_long: Literal["error", "truncate"] = "error"
    """What to do with a dialogue that does not fit in a micro-batch or in the model."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    device: str = "auto"
    """auto, cpu or cuda."""
    device_map: str | None = None
    """Ranks that train, as in train=0-3,tp=2; all ranks unless given."""
    tp: int = 1
    """Tensor-parallel ranks per model."""
    chat: ChatOptions = ChatOptions()
    training: TrainingOptions = TrainingOptions(warmup_steps=20)
    evaluation: HeldOutOptions = HeldOutOptions(eval_every=50)
    checkpoints: CheckpointOptions = CheckpointOptions()
    profile: ProfileOptions = ProfileOptions()

    def __post_init__(self):
        read_config(self.model)
        data.check_source(self.data)
        at_least(1, self, "steps", "rows_per_step", "tp")
        at_least(0, self, "weight_decay", "careless")
        if not tasks.is_task(self.data):
            unread_with("data", self, "careless")
        if self.device_map is not None:
            unread_with("device_map", self, "tp")
        if not self.checkpoints.resume:
            refuse_old_run(self.run_dir)


SHOWN = {
    "loss/loss": "loss", "eval/loss": "validation", "loss/grad_norm": "grad",
    "loss/skipped_steps": "skipped", "data/truncated": "cut",
    "train/tokens_per_second": "tokens/s", "time/step": "step s",
}  # fmt: skip
TRACKERS = ()  # yours, beside TensorBoard: docs/tutorial.md has wandb and trackio
FIXED = (
    "model", "seed", "careless", "template_args", "lora_rank", "lora_alpha", "lora_targets",
)  # fmt: skip


def main(cfg: Config) -> None:
    device_map = cfg.device_map or f"train=all,tp={cfg.tp}"
    model_config = read_config(cfg.model)
    configs = {"config": model_config, "roles": ["train"]}
    with Cluster(device_map, cfg.device, options=cfg, **configs) as cluster:
        cfg = choose_defaults(cfg, lr="sft")
        rows = data.DIALOGUES.training(cfg.data, f"sft-{cfg.seed}", careless=cfg.careless)
        held_out = data.DIALOGUES.held_out(cfg.data, cfg.evaluation)
        chat = Chat(cfg.model, **cfg.chat.arguments)
        trainer = cluster.role(
            "train",
            Trainer,
            folder=cfg.model,
            loss=sft_loss,
            schedule=cfg.training.schedule_over(cfg.steps),
            weight_decay=cfg.weight_decay,
            **cfg.training.policy_options,
        )
        fixed = data.fixed_options(cfg, *FIXED)
        saved = RunState(cfg.run_dir, cfg.checkpoints, [trainer], {"rows": rows}, fixed)
        run = Run(
            cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN, resumed_at=saved.resumed_at,
            trackers=TRACKERS, ranks=cluster.device_map.replicas,
        )  # fmt: skip
        encode = partial(encode_rows, chat, model_config.max_positions, cfg)
        num_shards, cost = trainer.role.num_replicas, SequenceCost.of(model_config)
        validation, _ = encode(held_out)
        if not tasks.is_task(cfg.data) and cfg.too_long == "error":
            encode(rows.rows)  # refuse a dialogue that does not fit now, not in mid-run

        budget = cfg.training.tokens_per_microbatch
        profiler = Profiler(cfg.profile, cfg.run_dir, [trainer])
        with saved.kept(run, cluster.stop_request()):
            for step in range(saved.step + 1, cfg.steps + 1):
                profiler.at(step)
                run.phase.enter("train", step)
                start = time.perf_counter()
                sequences, num_cut = encode(rows.take(cfg.rows_per_step))
                batch = pack(sequences, budget, num_shards=num_shards, cost=cost)
                metrics = trainer.step(split(batch))[0] | {"data/truncated": num_cut}
                metrics["time/step"] = time.perf_counter() - start
                if validation and run.is_due(step, cfg.evaluation.eval_every):
                    run.phase.enter("evaluate")
                    batch = pack(validation, budget, num_shards=num_shards)
                    metrics["eval/loss"] = trainer.evaluate(split(batch))[0]["loss/loss"]
                run.log(step, metrics)
                saved.end_step(run, step, lower=metrics.get("eval/loss"))

        profiler.close()
        run.close()
        print(f"model: {trainer.export(f'{cfg.run_dir}/model')}")


def encode_rows(
    chat: Chat, max_positions: int, cfg: Config, dialogues: list[data.Dialogue]
) -> tuple[list[TrainingSequence], int]:
    return fit(
        encode_dialogues(chat, dialogues),
        tokens_per_microbatch=cfg.training.tokens_per_microbatch,
        max_positions=max_positions,
        too_long=cfg.too_long,
    )


if __name__ == "__main__":
    command.run(main, Config, __doc__, fixed=FIXED)
