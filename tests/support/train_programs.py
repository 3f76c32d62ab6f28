"""Programs that tests run under torchrun: train_programs.py NAME MODEL RESULT_FILE [DEVICE]."""

import sys
from pathlib import Path

import torch

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.places import Place
from roll_lite.cluster.role import split
from roll_lite.models.config import TARGETS, LoraOptions, read_config
from roll_lite.models.fsdp import whole
from roll_lite.models.logprobs import ALL
from roll_lite.train.batch import pack
from roll_lite.train.checkpoint import load_checkpoint, start_checkpoint
from roll_lite.train.checkpoint_folders import Checkpoints
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.trainer import Trainer
from roll_lite.types import Truncation

LAYOUTS = {
    "fsdp2": "fsdp2=0-1",
    "fsdp2cp2": "fsdp2cp2=0-3,cp=2",
    "tp2": "tp2=0-1,tp=2",
    "tp4": "tp4=0-3,tp=4",
    "cp2tp2": "cp2tp2=0-3,tp=2,cp=2",
    "fsdp2tp2": "fsdp2tp2=0-3,tp=2",
    "hsdp2": "hsdp2=0-3,fsdp=2",
    "copies2tp2": "copies2tp2=0-3,tp=2,fsdp=1",
}
MIXTURE_LAYOUTS = {
    "fsdp2tp2": "fsdp2tp2=0-3,tp=2",
    "tp2": "tp2=0-1,tp=2",
    "ep2": "ep2=0-1,ep=2",
    "ep2fsdp2": "ep2fsdp2=0-3,ep=2",
    "ep2tp2": "ep2tp2=0-3,tp=2,ep=2",
    "ep4cp2": "ep4cp2=0-3,cp=2,ep=4",
    "hsdp2": "hsdp2=0-3,ep=2,fsdp=2",
    "fsdp2": "fsdp2=0-1",
}
LORA = LoraOptions(rank=4, alpha=8.0)
LORA_LAYOUTS = ("fsdp2tp2",)
MIXTURE_LORA = LoraOptions(rank=8, alpha=8.0, targets=tuple(TARGETS))
CASES = [(layout, False) for layout in LAYOUTS]
CASES += [(layout, True) for layout in LORA_LAYOUTS]
MIXTURE_CASES = [(layout, False) for layout in MIXTURE_LAYOUTS]
MIXTURE_CASES += [("ep2tp2", True)]
CHECKPOINTING = {
    "cp2tp2": "selective", "fsdp2cp2": "full", "ep2fsdp2": "full", "ep2tp2": "selective",
}  # fmt: skip
"""Where the backward pass recomputes the collectives of the forward pass too."""
BUDGETS = {10_000: 1, 200: 2, 60: 5}
"""Tokens of a micro-batch, and how many of them that gives to a single rank."""


class Probe(Trainer):
    """Shows the gradient that an update would use."""

    def gradient(self, batch):
        self._accumulate(batch)
        norm = self._clip()
        grads = {
            name: whole(name, parameter.grad, self.tensor_shard).cpu()  # calls carry host tensors
            for name, parameter in self.optimizer.parameters.items()
        }
        self.optimizer.zero_grad()
        return grads, norm

    def holds_its_part(self):
        """Whether this rank has what it would cut from the whole: equal copies, zero padding."""
        shard = self.tensor_shard
        return shard is None or all(
            torch.equal(shard.cut(name, whole(name, p, shard), p.shape), p.full_tensor())
            for name, p in self.model.named_parameters()
        )

    def truncated_logprobs(self, batch):
        """Among what a truncation leaves; -inf for the many targets that it removes."""
        self.truncation = Truncation(top_k=60, top_p=0.9, min_p=1e-3)
        try:
            return self.logprobs(batch)
        finally:
            self.truncation = ALL

    def shake_adapters(self):
        """Adapters start with no effect, and half of their gradients at 0."""
        for name, parameter in self.optimizer.parameters.items():
            if name.endswith("adapter.up"):
                torch.nn.init.constant_(parameter.to_local(), 0.01)


def make_sequences(num=11, vocab=99):
    generator = torch.Generator().manual_seed(5)
    sequences = []
    for i in range(num):
        length = int(torch.randint(3, 60, (), generator=generator))
        sequences.append(
            TrainingSequence(
                id=str(i),
                token_ids=torch.randint(0, vocab, (length,), generator=generator).tolist(),
                loss_mask=[j > length // 3 for j in range(length)],
            )
        )
    return sequences


def options(lora=None):
    schedule = Schedule(lr=1e-3, warmup_steps=2)
    return {"loss": sft_loss, "schedule": schedule, "max_grad_norm": 1.0, "lora": lora}


def measure(trainer, num_shards):
    """Gradients of three cuts of one batch, then the losses of five updates, then the weights."""
    sequences = make_sequences()
    grads = {
        budget: trainer.gradient(split(pack(sequences, budget, num_shards=num_shards)))[0][0]
        for budget in BUDGETS
    }
    batch = pack(sequences, 200, num_shards=num_shards)
    logprobs = trainer.logprobs(split(batch))
    truncated = trainer.truncated_logprobs(split(batch))
    top = trainer.top_logprobs(split(batch), 5)
    losses = [trainer.step(split(batch))[0]["loss/loss"] for _ in range(5)]
    return {
        "grads": grads, "losses": losses, "state": trainer.state(),
        "holds": trainer.holds_its_part.options(collect="all")(),
        "logprobs": by_sequence(batch, [x for part in logprobs for x in part]),
        "truncated": by_sequence(batch, [x for part in truncated for x in part]),
        "top": by_sequence(batch, [x[0] for part in top for x in part]),
    }  # fmt: skip


def by_sequence(batch, rows):
    """Rows of micro-batches -> a tensor for each sequence."""
    found = {}
    for micro, values in zip(batch, rows, strict=True):
        for s, index in enumerate(micro.indices_S.tolist()):
            found[index] = values[micro.sequence_R == s]
    return [found[i] for i in sorted(found)]


def balanced(trainer):
    """A gradient with the balancing loss, which depends on what a micro-batch has."""
    return trainer.gradient(pack(make_sequences(), 10_000))[0]


def replayed(cluster, model, layout):
    """A gradient with recorded experts, which are random."""
    trainer = cluster.role(layout, Probe, folder=model, **options(), replays_experts=True)
    batch = pack(with_experts(model), 200, num_shards=trainer.role.num_replicas)
    return trainer.gradient(split(batch))[0][0]


def with_experts(model):
    config = read_config(model)
    experts, num_layers = config.experts, len(config.sparse_layers)
    torch.manual_seed(0)
    sequences = make_sequences()
    for sequence in sequences:
        rows = range((len(sequence.token_ids) - 1) * num_layers)
        ids = [torch.randperm(experts.num_experts)[: experts.experts_per_token] for _ in rows]
        sequence.experts = bytes(torch.cat(ids).tolist())
    return sequences


def is_mixture(model):
    return read_config(model).experts is not None


def cases(model):
    return MIXTURE_CASES if is_mixture(model) else CASES


def adapters(model):
    return MIXTURE_LORA if is_mixture(model) else LORA


def exported(result_file, layout, has_adapters):
    return Path(result_file).with_name(f"export-{layout}-{has_adapters}")


def layouts(model, result_file, device="cpu", dtype=None):
    if dtype:  # what is computed in, instead of a device's own
        Place.dtype = getattr(torch, dtype)
    known = MIXTURE_LAYOUTS if is_mixture(model) else LAYOUTS
    with Cluster(" ".join(known.values()), device) as cluster:
        results = {}
        for name, has_adapters in cases(model):
            chosen = options(adapters(model) if has_adapters else None)
            recomputed = {"checkpointing": CHECKPOINTING.get(name, "none")}
            trainer = cluster.role(name, Probe, folder=model, **chosen, **recomputed)
            if has_adapters:
                trainer.shake_adapters()
            replicas = cluster.device_map[name].num_replicas
            results[name, has_adapters] = measure(trainer, replicas)
            trainer.export(exported(result_file, name, has_adapters))
        if is_mixture(model):
            results["replayed"] = {name: replayed(cluster, model, name) for name in known}
            trainer = cluster.role("tp2", Probe, folder=model, **options(), balance_coef=0.5)
            results["balanced"] = balanced(trainer)
        folder = Path(result_file).parent
        results["resumed"] = resume_elsewhere(cluster, model, folder)
        results["of copies"] = written_by_copies(cluster, model, folder)
        torch.save(results, result_file)


def recorded(model, result_file, device):
    with Cluster(" ".join(MIXTURE_LAYOUTS.values()), device) as cluster:
        torch.save({n: replayed(cluster, model, n) for n in MIXTURE_LAYOUTS}, result_file)


def resume_elsewhere(cluster, model, folder):
    """Written in a layout, read by others: weights, and losses of three updates."""
    known = cluster.device_map.names
    layout = "ep2tp2" if is_mixture(model) else "fsdp2tp2"
    batches = {
        name: pack(make_sequences(), 200, num_shards=cluster.device_map[name].num_replicas)
        for name in known
    }
    writer = cluster.role(layout, Trainer, folder=model, **options())
    for _ in range(3):
        writer.step(split(batches[layout]))
    checkpoints = Checkpoints(folder / "checkpoints")
    start_checkpoint(checkpoints, [writer], 3, {"position": 3, "fixed": {}})()
    results = {}
    for name in known:
        reader = cluster.role(name, Trainer, folder=model, **options())
        assert load_checkpoint(checkpoints, [reader], {})["position"] == 3
        state = {name: tensor.clone() for name, tensor in reader.state().items()}
        losses = [reader.step(split(batches[name]))[0]["loss/loss"] for _ in range(3)]
        results[name] = state, losses
    return results


def written_by_copies(cluster, model, folder):
    """Of two copies of the weights: bytes of the checkpoint, and state before and after reading."""
    writer = cluster.role("hsdp2", Trainer, folder=model, **options())
    writer.step(split(pack(make_sequences(), 200, num_shards=4)))
    checkpoints = Checkpoints(folder / "of-copies")
    start_checkpoint(checkpoints, [writer], 1, {"position": 1, "fixed": {}})()
    num_bytes = sum(
        path.stat().st_size for path in checkpoints.newest_first()[0].glob("*.safetensors")
    )
    written = {name: tensor.clone() for name, tensor in writer.state().items()}
    reader = cluster.role("fsdp2", Trainer, folder=model, **options())
    load_checkpoint(checkpoints, [reader], {})
    return num_bytes, written, {name: tensor.clone() for name, tensor in reader.state().items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
