"""Direct preference optimization: make the chosen reply of each pair likelier than the rejected.

python recipes/sft.py --model models/tiny --careless 0.7 --steps 140 --run-dir runs/sft
python recipes/dpo.py --model runs/sft/model
torchrun --nproc-per-node 4 recipes/dpo.py --model MODEL --data pairs.jsonl --lr 1e-6 --tp 2

Reference logprobs are computed once, before the first update, and kept in the run's folder.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from roll_lite import command, data, tasks
from roll_lite.chat import Chat
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import at_least, unread_with
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.data import HeldOutOptions
from roll_lite.models.config import read_config
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.train.batch import MicroBatch, TrainingSequence
from roll_lite.train.checkpoint import CheckpointOptions, RunState
from roll_lite.train.defaults import choose_defaults
from roll_lite.train.encoding import check_vocabulary, encode_preferences
from roll_lite.train.optimizer import TrainingOptions
from roll_lite.train.preference import DPOLoss, pack_pairs, with_reference
from roll_lite.train.profiling import ProfileOptions, Profiler
from roll_lite.train.scorer import Scorer, score_over_ranks
from roll_lite.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "models/tiny"
    """Hugging Face folder to start from: a model fine-tuned on such dialogues."""
    data: str = "reverse:5"
    """A file of {"prompt": text or messages, "chosen": text, "rejected": text}, or a task, right
    answers against careless ones: addition:N (digits), reverse:N or counting:N (letters)."""
    task_pairs: int = 2048
    """Number of pairs to generate for the task."""
    steps: int = 40
    """Optimizer updates."""
    rows_per_step: int = 32
    """Pairs per update; a pair must fit in one micro-batch."""
    reference: str | None = None
    """Folder of the reference model; None is the starting policy."""
    run_dir: str = field(default_factory=partial(default_folder, "dpo"))
    """Folder for config.json, metrics.jsonl, reference.safetensors, checkpoints/ and model/."""
    seed: int = 0
    """Seed for the pairs and their order."""
    device: str = "auto"
    """auto, cpu or cuda."""
    tp: int = 1
    """Tensor-parallel ranks per model."""
    chat: ChatOptions = ChatOptions()
    loss: DPOLoss = DPOLoss()
    training: TrainingOptions = TrainingOptions(warmup_steps=5)
    evaluation: HeldOutOptions = HeldOutOptions(eval_every=10)
    checkpoints: CheckpointOptions = CheckpointOptions()
    profile: ProfileOptions = ProfileOptions()

    def __post_init__(self):
        read_config(self.model)
        data.check_source(self.data)
        at_least(1, self, "steps", "rows_per_step", "task_pairs", "tp")
        if not tasks.is_task(self.data):
            unread_with("a file in data", self, "task_pairs")
        if self.reference is not None:
            check_vocabulary(self.model, self.reference, "reference")
        if not self.checkpoints.resume:
            refuse_old_run(self.run_dir)


SHOWN = {
    "loss/loss": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin",
    "reward/chosen": "chosen", "reward/rejected": "rejected", "eval/accuracy": "validation",
    "loss/grad_norm": "grad", "loss/skipped_steps": "skipped", "time/step": "step s",
}  # fmt: skip
TRACKERS = ()  # yours, beside TensorBoard: docs/tutorial.md has wandb and trackio
FIXED = (
    "model", "seed", "kind", "beta", "lora_rank", "lora_alpha", "lora_targets", "reference",
    "template_args",
)  # fmt: skip


def main(cfg: Config) -> None:
    others = {} if cfg.reference is None else {"reference": read_config(cfg.reference)}
    roles, configs = ["train", *others], {"config": read_config(cfg.model), "role_configs": others}
    device_map = " ".join(f"{role}=all,tp={cfg.tp}" for role in roles)
    with Cluster(device_map, cfg.device, roles=roles, options=cfg, **configs) as cluster:
        cfg = choose_defaults(cfg, lr="preference")
        pairs = training_pairs(cfg)
        held_out = data.PREFERENCES.held_out(cfg.data, cfg.evaluation)
        chat, budget = Chat(cfg.model, **cfg.chat.arguments), cfg.training.tokens_per_microbatch
        trainer = cluster.role(
            "train",
            Trainer,
            folder=cfg.model,
            loss=cfg.loss,
            schedule=cfg.training.schedule_over(cfg.steps),
            **cfg.training.policy_options,
        )
        # Before a checkpoint is loaded, while the trainer is still the starting policy.
        encoded = with_reference(
            encode_preferences(chat, [*pairs, *held_out], budget),
            partial(reference_logprobs, cfg, cluster, trainer),
            folder=cfg.reference or cfg.model, path=f"{cfg.run_dir}/reference.safetensors",
        )  # fmt: skip
        rows = data.Shuffled(encoded[: len(pairs)], seed=cfg.seed)
        num_shards = trainer.role.num_replicas
        packed = partial(pack_pairs, tokens_per_microbatch=budget, num_shards=num_shards)
        validation = packed(encoded[len(pairs) :]) if held_out else []
        fixed = data.fixed_options(cfg, *FIXED)
        saved = RunState(cfg.run_dir, cfg.checkpoints, [trainer], {"rows": rows}, fixed)
        resumed_at = saved.resumed_at
        run = Run(
            cfg.run_dir, cfg, num_steps=cfg.steps, shown=SHOWN, resumed_at=resumed_at,
            trackers=TRACKERS, ranks=cluster.device_map.replicas,
        )  # fmt: skip
        if validation and not resumed_at:
            run.log(0, validate(trainer, validation))
        profiler = Profiler(cfg.profile, cfg.run_dir, [trainer])
        with saved.kept(run, cluster.stop_request()):
            for step in range(saved.step + 1, cfg.steps + 1):
                profiler.at(step)
                run.phase.enter("train", step)
                start = time.perf_counter()
                batch = packed(rows.take(cfg.rows_per_step))
                metrics = trainer.step(split(batch))[0]
                metrics["time/step"] = time.perf_counter() - start
                if validation and run.is_due(step, cfg.evaluation.eval_every):
                    run.phase.enter("evaluate")
                    metrics |= validate(trainer, validation)
                run.log(step, metrics)
                saved.end_step(run, step, higher=metrics.get("eval/accuracy"))

        profiler.close()
        run.close()
        print(f"model: {trainer.export(f'{cfg.run_dir}/model')}")


def training_pairs(cfg: Config) -> list[data.Preference]:
    if not tasks.is_task(cfg.data):
        return data.read_preferences(cfg.data)
    pairs = data.task_preferences(cfg.data, seed=f"dpo-{cfg.seed}")
    return list(islice(pairs, cfg.task_pairs))


def reference_logprobs(
    cfg: Config, cluster: Cluster, trainer: RoleHandle, sequences: list[TrainingSequence]
) -> list[list[float]]:
    method = trainer.reference_logprobs if cfg.training.lora_rank else trainer.logprobs
    if cfg.reference is not None:
        method = cluster.role("reference", Scorer, folder=cfg.reference).logprobs
    return score_over_ranks(method, sequences, cfg.training.tokens_per_microbatch)


def validate(trainer: RoleHandle, batch: list[MicroBatch]) -> dict[str, float]:
    measured = trainer.evaluate(split(batch))[0]
    return {f"eval/{name}": measured[f"reward/{name}"] for name in ("accuracy", "margin")}


if __name__ == "__main__":
    command.run(main, Config, __doc__, fixed=FIXED)
