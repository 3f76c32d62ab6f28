"""Run under torchrun by test_sync.py: sync_program.py DEVICE_MAP MODEL RESULT_FILE DEVICE."""

import sys

import torch
import torch.distributed as dist

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.launch import read_launch
from roll_lite.cluster.role import split
from roll_lite.device_map import parse_device_map
from roll_lite.engine.engine import Engine
from roll_lite.engine.parallel_engine import TensorParallelEngine
from roll_lite.models.config import LoraOptions
from roll_lite.models.hf import load_model
from roll_lite.models.tensor_parallel import TensorShard, cut_dimension
from roll_lite.sync import Feed, WeightSync
from roll_lite.train.batch import pack
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.trainer import Trainer
from support.training_data import random_sequences

BROADCAST = Feed._broadcast_flat
WITHOUT_TRAVEL = "train=0-1,tp=2 generate=0-1,tp=2"


class Holder:
    """An engine and nothing else."""

    def __init__(self, folder, *, place):
        shard = TensorShard.of(place.mesh["tp"].get_group(), place.ep)
        model = load_model(folder, device=place.device, dtype=place.dtype, shard=shard)
        control = {"control": place.control} if shard else {}
        self.engine = (TensorParallelEngine if shard else Engine)(
            model, kv_cache_gib=0.01, **control
        )
        self.place = place

    def held(self):
        weights = {
            name: p.detach().cpu().clone() for name, p in self.engine.model.named_parameters()
        }
        return self.place.tp_rank, self.place.tp, self.engine.policy_version, weights

    def sleep_and_wake(self):
        self.engine.sleep()
        self.engine.wake()

    def flip_what_arrives(self, is_on, but_of):
        """A bit of all weights that come over the wire, save to these ranks."""

        def flipped(feed, tensor):
            BROADCAST(feed, tensor)
            if tensor.is_floating_point():
                tensor.view(-1).view(torch.int32)[5] += 1

        is_here = is_on and dist.get_rank() not in but_of
        Feed._broadcast_flat = flipped if is_here else BROADCAST

    def break_a_bit(self):
        write = self.engine.load_weights

        def broken(*args):
            write(*args)
            self.engine.model.norm.weight.detach().view(torch.int32)[3] += 1

        self.engine.load_weights = broken


def error_of(sync, version):
    try:
        sync.sync(version)
    except Exception as error:
        return str(error)


def main(text, model, result_file, device="cpu", targets="qkv,out,gate_up,down"):
    device_map = parse_device_map(text, read_launch().world_size)
    with Cluster(text, device) as cluster:
        options = {"loss": sft_loss, "folder": model, "lora": None}
        results = {}
        adapters = LoraOptions(rank=2, targets=tuple(targets.split(",")))
        for name, lora, lr in [("full", None, 1e-2), ("lora", adapters, 1e-1)]:
            options |= {"lora": lora, "schedule": Schedule(lr=lr)}
            trainer = cluster.role("train", Trainer, **options)
            engines = cluster.role("generate", Holder, folder=model)
            sync = cluster.role("sync", WeightSync)
            batch = pack(random_sequences(), 200, num_shards=trainer.role.num_replicas)
            for _ in range(2):
                trainer.step(split(batch))
            sync.sync(2)
            state = {key: tensor.clone() for key, tensor in trainer.state().items()}
            results[name] = state, engines.held.options(collect="all")()
        for round in range(20):  # nothing is trained, so nothing may change
            engines.sleep_and_wake()
            sync.sync(3 + round)
        results["rounds"] = state, engines.held.options(collect="all")()
        trained = device_map["train"].ranks
        if set(device_map["generate"].ranks) - set(trained):
            engines.flip_what_arrives(True, trained)
            results["flipped"] = error_of(sync, 98)
            engines.flip_what_arrives(False, trained)
        engines.break_a_bit()
        results["broken"] = error_of(sync, 99)
        *_, replica = device_map["generate"].replicas
        if device_map.is_spare(replica[0]):
            results["spared"] = without(cluster, replica, trainer, model)
        torch.save(results, result_file)


def without(cluster, replica, trainer, model):
    """An engine gets no more calls, as if it had ended."""
    engines, sync = cluster.role("generate", Holder, folder=model), cluster.role("sync", WeightSync)
    cluster._controller.lost = frozenset(replica)
    for version in (1, 2):
        sync.sync(version)
    state = {key: tensor.clone() for key, tensor in trainer.state().items()}
    held = engines.held.options(collect="all")()
    cluster._controller.lost = frozenset()
    return state, held


def part_of(name, tensor, rank, size, ep):
    """A rank's part: rows of the vocabulary are padded, and all ranks have the only kv head."""
    if ".experts." in name and ep > 1:  # whole experts, or halves of them if there are more ranks
        tensor = tensor.chunk(ep)[rank * ep // size]
        return tensor.chunk(size // ep, cut_dimension(name))[rank % (size // ep)]
    if name in ("embedding", "lm_head"):
        padding = tensor.new_zeros(-len(tensor) % size, tensor.shape[1])
        return torch.cat([tensor, padding]).chunk(size)[rank]
    if "attention.qkv" in name:
        return torch.cat([tensor[:, :-2].chunk(size, 1)[rank], tensor[:, -2:]], 1)
    if cut_dimension(name) is None:
        return tensor
    return tensor.chunk(size, cut_dimension(name))[rank]


def check_synced(result_file, device_map, ranks):
    results = torch.load(result_file, weights_only=False, map_location="cpu")
    parsed = parse_device_map(device_map, ranks)
    ep = parsed["generate"].ep
    *_, last = parsed["generate"].replicas
    versions = {"full": 2, "lora": 2, "rounds": 22}
    if parsed.is_spare(last[0]):
        versions["spared"] = 2
    for kind, version in versions.items():
        state, engines = results[kind]
        assert len(engines) == len(parsed["generate"].ranks) - len(last) * (kind == "spared")
        for rank, size, found, weights in engines:
            assert found == version and weights.keys() == state.keys()
            for name, tensor in state.items():
                expected = part_of(name, tensor, rank, size, ep).to(weights[name].dtype)
                assert torch.equal(weights[name], expected), (kind, name)
    if device_map == WITHOUT_TRAVEL:
        assert results["broken"] is None  # nothing to compare
    else:
        assert "does not hold what it got for norm.weight" in results["broken"]
    if set(parsed["generate"].ranks) - set(parsed["train"].ranks):
        assert "what arrived is not what was sent for embedding" in results["flipped"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
