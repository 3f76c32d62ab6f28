"""Gradients of recorded samples over ranks: replay_program.py MODEL SAMPLES RESULT_FILE."""

import sys

import torch

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import split
from roll_lite.train.batch import pack
from roll_lite.train.losses import PolicyLoss
from support.train_programs import Probe, options

LAYOUTS = {
    "fsdp2": "fsdp2=0-1",
    "tp2": "tp2=0-1,tp=2",
    "fsdp2cp2": "fsdp2cp2=0-3,cp=2",
    "cp4": "cp4=0-3,cp=4",
}


def measure(trainer, sequences, num_shards):
    """Gradient and metrics of a batch."""
    batch = split(pack(sequences, 60, num_shards=num_shards))
    return trainer.gradient(batch)[0][0], trainer.evaluate(batch)[0]


def roles(cluster, names, model):
    for name in names:
        given = options() | {"loss": PolicyLoss(), "replays_experts": True}
        trainer = cluster.role(name, Probe, folder=model, **given)
        yield name, trainer, cluster.device_map[name].num_replicas


if __name__ == "__main__":
    model, samples, result_file = sys.argv[1:]
    sequences = torch.load(samples, weights_only=False)
    with Cluster(" ".join(LAYOUTS.values()), "cpu") as cluster:
        found = {n: measure(t, sequences, s) for n, t, s in roles(cluster, LAYOUTS, model)}
        torch.save(found, result_file)
