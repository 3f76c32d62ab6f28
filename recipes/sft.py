"""Supervised fine-tuning: cross-entropy on the assistant's turns of packed dialogues.

python recipes/sft.py --model models/tiny --task reverse:5
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import tyro

from roll_lite.chat import Chat
from roll_lite.checks import above, at_least
from roll_lite.cluster.groups import start_alone
from roll_lite.models.config import read_config
from roll_lite.report.run import Run, default_folder
from roll_lite.tasks import demonstrations, parse_task
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.packing import TrainingSequence, pack
from roll_lite.train.trainer import Trainer
from roll_lite.types import Prompt


@dataclass(kw_only=True)
class Config:
    model: str = "models/tiny"
    """Hugging Face folder to start from."""
    task: str = "reverse:5"
    """Where the dialogues come from: addition:N (digits), reverse:N or counting:N (letters)."""
    steps: int = 100
    """Updates."""
    careless: float = 0.0
    """Share of dialogues whose reply is a careless mistake instead of the answer."""
    dialogues_per_step: int = 64
    """Batch size."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 20
    """Updates over which the learning rate rises to lr."""
    weight_decay: float = 0.0
    """AdamW's decay."""
    max_grad_norm: float = 1.0
    """Gradients longer than this are scaled down to it."""
    tokens_per_microbatch: int = 16384
    """Memory budget of one forward and backward pass."""
    validation_dialogues: int = 256
    """Held-out dialogues for the validation loss."""
    validate_every: int = 50
    """Compute the validation loss after every so many updates."""
    seed: int = 0
    """Of the dialogues."""
    device: str = "auto"
    """auto, cpu or cuda."""
    run_dir: str = field(default_factory=partial(default_folder, "sft"))
    """Gets config.json, metrics.jsonl and the trained model."""

    def __post_init__(self):
        read_config(self.model)
        parse_task(self.task)
        at_least(1, self, "steps", "dialogues_per_step", "tokens_per_microbatch")
        at_least(1, self, "validation_dialogues", "validate_every")
        at_least(0, self, "warmup_steps", "weight_decay", "lr", "careless")
        above(0, self, "max_grad_norm")


SHOWN = {
    "loss/loss": "loss", "eval/loss": "validation", "loss/grad_norm": "grad", "time/step": "step s",
}  # fmt: skip


def main(cfg: Config) -> None:
    with start_alone(cfg.device) as place:
        run = Run(cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN)
        chat = Chat(cfg.model)
        trainer = Trainer(
            cfg.model,
            place=place,
            loss=sft_loss,
            schedule=Schedule(lr=cfg.lr, warmup_steps=cfg.warmup_steps),
            weight_decay=cfg.weight_decay,
            max_grad_norm=cfg.max_grad_norm,
        )
        dialogues = encode(
            chat, demonstrations(cfg.task, seed=f"sft-{cfg.seed}", careless=cfg.careless)
        )
        held_out = encode(chat, demonstrations(cfg.task, seed=0, split="held_out"))
        validation = list(islice(held_out, cfg.validation_dialogues))
        for step in range(1, cfg.steps + 1):
            start = time.perf_counter()
            batch = pack(list(islice(dialogues, cfg.dialogues_per_step)), cfg.tokens_per_microbatch)
            metrics = trainer.step(batch)
            metrics["time/step"] = time.perf_counter() - start
            if step % cfg.validate_every == 0 or step == cfg.steps:
                metrics["eval/loss"] = mean_loss(trainer, validation, cfg.tokens_per_microbatch)
            run.log(step, metrics)
        run.close()
        print(f"model: {trainer.export(f'{cfg.run_dir}/model')}")


def encode(chat: Chat, dialogues: Iterable[tuple[Prompt, str]]) -> Iterator[TrainingSequence]:
    for prompt, reply in dialogues:
        token_ids, loss_mask = chat.encode_dialogue(
            [*prompt.messages, {"role": "assistant", "content": reply}]
        )
        yield TrainingSequence(token_ids=token_ids, loss_mask=loss_mask)


def mean_loss(trainer: Trainer, sequences: list[TrainingSequence], token_budget: int) -> float:
    batch = pack(sequences, token_budget)
    logprobs = trainer.logprobs(batch)
    return sum(
        -(logprobs_R.cpu() * micro.weights_R).sum().item()
        for logprobs_R, micro in zip(logprobs, batch, strict=True)
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
