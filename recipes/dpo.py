"""Direct preference optimization: make the chosen reply of each pair likelier than the rejected.

python recipes/sft.py --model models/tiny --careless 0.7 --steps 140 --run-dir runs/sft
python recipes/dpo.py --model runs/sft/model
torchrun --nproc-per-node 4 recipes/dpo.py --model MODEL --data pairs.jsonl --lr 1e-6 --tp 2

Reference logprobs are computed once, before the first update, and kept in the run folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import ClassVar

import roll_lite as rl
from roll_lite import command, data
from roll_lite.checks import above, at_least, unread_with


@dataclass(frozen=True, kw_only=True)
class Config(rl.RecipeConfig):
    model: str = "models/tiny"
    """Hugging Face folder or name on the Hugging Face Hub: a model fine-tuned on such dialogues."""
    data: str = "reverse:5"
    """A file of {"prompt": text or messages, "chosen": text, "rejected": text}, or a task, right
    answers against careless ones: addition:N (digits), reverse:N or counting:N (letters)."""
    task_pairs: int = 2048
    """Number of pairs to generate for the task."""
    steps: int = 40
    """Optimizer updates."""
    epochs: float | None = None
    """Passes over the pairs in place of steps: as many steps as they take, printed."""
    rows_per_step: int = 32
    """Pairs per update; a pair must fit in one micro-batch."""
    reference: str | None = None
    """Folder of the reference model; None is the starting policy."""
    run_dir: str = field(default_factory=partial(rl.default_folder, "dpo"))
    """Folder for config.json, metrics.jsonl, reference.safetensors, checkpoints/ and model/."""
    seed: int = 0
    """Seed for the pairs and their order."""
    device: str = "auto"
    """What to compute on: auto, cpu or cuda."""
    tp: int = 1
    """Tensor-parallel ranks per model."""
    chat: rl.ChatOptions = rl.ChatOptions()
    rows: rl.RowOptions = rl.RowOptions()
    loss: rl.DPOLoss = rl.DPOLoss()
    training: rl.TrainingOptions = rl.TrainingOptions(warmup_steps=5)
    evaluation: rl.HeldOutOptions = rl.HeldOutOptions(eval_every=10)
    checkpoints: rl.CheckpointOptions = rl.CheckpointOptions()
    tracking: rl.TrackerOptions = rl.TrackerOptions()
    profile: rl.ProfileOptions = rl.ProfileOptions()

    SHOWN: ClassVar = {
        "loss/loss": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin",
        "reward/chosen": "chosen", "reward/rejected": "rejected", "eval/accuracy": "eval accuracy",
        "loss/grad_norm": "grad", "loss/skipped_steps": "skipped", "time/step": "step s",
    }  # fmt: skip
    FIXED: ClassVar = (
        "model", "seed", "kind", "beta", "lora_rank", "lora_alpha", "lora_targets", "reference",
        "template_args", "system", "columns",
    )  # fmt: skip

    @property
    def default_kinds(self) -> dict[str, str]:
        return {"lr": "preference"}

    def __post_init__(self):
        rl.read_config(self.model)
        at_least(1, self, "steps", "rows_per_step", "task_pairs", "tp")
        if not data.is_task(self.data):
            unread_with("a file in data", self, "task_pairs")
        self.rows.check_columns(self.data, self.evaluation.eval_data)
        above(0, self, "epochs")
        if self.epochs is not None and "steps" not in self.chosen:
            unread_with("epochs", self, "steps")

    def check_files(self) -> None:
        """Refuse data that is missing, a reference of another family and a folder with another
        run; the first rank does."""
        data.check_source(self.data)
        self.evaluation.check_files()
        if self.reference is not None:
            rl.check_vocabulary(self.model, self.reference, "reference")
        if not self.checkpoints.resume:
            rl.refuse_old_run(self.run_dir)


TRACKERS = ()  # yours, beside those of --tracker: docs/howto/monitor.md has one for trackio


def main(cfg: Config) -> None:
    config = rl.read_config(cfg.model)
    others = {} if cfg.reference is None else {"reference": rl.read_config(cfg.reference)}
    device_map = " ".join(f"{role}=all,tp={cfg.tp}" for role in ("train", *others))
    with rl.Cluster(
        device_map, cfg.device, roles=["train", *others], config=config, role_configs=others,
        options=cfg,
    ) as cluster:  # fmt: skip
        cfg.check_files()
        pairs = read_pairs(cfg)
        if cfg.epochs is not None:
            cfg = rl.with_epochs(cfg, len(pairs))
        roles = rl.Roles(cluster)
        roles.policy = trainer = roles.add(
            "train", rl.Trainer, folder=cfg.model, loss=cfg.loss,
            schedule=cfg.training.schedule_over(cfg.steps), **cfg.training.policy_options,
        )  # fmt: skip
        # Before a checkpoint is loaded, while the trainer is still the starting policy.
        training, held_out = with_reference(cfg, roles, pairs)
        rows = data.Shuffled(training, seed=cfg.seed)
        budget, shards = cfg.training.tokens_per_microbatch, trainer.role.num_replicas
        pack = partial(rl.pack_pairs, tokens_per_microbatch=budget, num_shards=shards)

        def validate() -> dict[str, float]:
            measured = trainer.evaluate(rl.split(pack(held_out)))[0]
            return {f"eval/{name}": measured[f"reward/{name}"] for name in ("accuracy", "margin")}

        every = cfg.evaluation.eval_every
        evaluation = rl.Validation(validate, every, best="eval/accuracy") if held_out else None
        parts = {"rows": rows}
        with rl.Loop(cfg, roles, evaluation=evaluation, parts=parts, trackers=TRACKERS) as loop:
            for step in loop:
                batch = pack(rows.take(cfg.rows_per_step))
                loop.end(step, trainer.step(rl.split(batch))[0])


def read_pairs(cfg: Config) -> list[data.Preference]:
    """Pairs to train on."""
    if not data.is_task(cfg.data):
        return data.read_preferences(cfg.data, cfg.rows.by_name)
    drawn = data.task_preferences(cfg.data, seed=f"dpo-{cfg.seed}")
    return list(islice(drawn, cfg.task_pairs))


def with_reference(
    cfg: Config, roles: rl.Roles, pairs: list[data.Preference]
) -> tuple[list[rl.Pair], list[rl.Pair]]:
    """Pairs to train and to evaluate on, encoded, with the reference's logprobs."""
    held_out = data.PREFERENCES.held_out(cfg.data, cfg.evaluation, cfg.rows.by_name)
    chat, budget = rl.Chat(cfg.model, **cfg.chat.arguments), cfg.training.tokens_per_microbatch

    def score(sequences: list[rl.TrainingSequence]) -> list[list[float]]:
        policy = roles.policy
        method = policy.reference_logprobs if cfg.training.lora_rank else policy.logprobs
        if cfg.reference is not None:
            method = roles.add("reference", rl.Scorer, folder=cfg.reference).logprobs
        return rl.score_over_ranks(method, sequences, budget)

    folders = {cfg.model, cfg.reference or cfg.model}
    encoded = rl.encode_preferences(
        chat, [*pairs, *held_out], tokens_per_microbatch=budget,
        max_positions=min(rl.read_config(folder).max_positions for folder in folders),
    )  # fmt: skip
    encoded = rl.with_reference(
        encoded, score, folder=cfg.reference or cfg.model,
        path=f"{cfg.run_dir}/reference.safetensors",
    )  # fmt: skip
    return encoded[: len(pairs)], encoded[len(pairs) :]


if __name__ == "__main__":
    command.run(main, Config, __doc__)
