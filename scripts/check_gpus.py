"""Whether ranks and their connections work, before a long run: a table with a verdict per line.

    torchrun --nproc-per-node 8 scripts/check_gpus.py
    torchrun --nproc-per-node 4 scripts/check_gpus.py --device cpu
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint ... scripts/check_gpus.py

Rates between ranks; then a small model's update, replies and weight sync in every layout that the
ranks allow, compared with one rank. Exits with 1 if a line has failed.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import tyro

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.launch import read_launch
from roll_lite.cluster.places import Place
from roll_lite.cluster.role import Method, split
from roll_lite.device_map import divisors, format_table
from roll_lite.engine.engine import Engine
from roll_lite.engine.parallel_engine import TensorParallelEngine
from roll_lite.engine.request import Request
from roll_lite.models.config import read_config, tp_sizes
from roll_lite.models.fsdp import whole
from roll_lite.models.hf import open_model
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.tiny import build_tiny
from roll_lite.sync import WeightSync
from roll_lite.train.batch import pack
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.trainer import Trainer
from roll_lite.types import SamplingParams

SLOW = 5e9
"""Bytes per second between GPUs below which something is wrong: PCIe 4 has 25e9."""
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}
"""Tolerance of gradients and logprobs: in fp32, and in bf16."""


@dataclass(frozen=True, kw_only=True)
class Config:
    device: str = "auto"
    """auto, cpu or cuda."""
    mib: int = 64
    """Size of the messages whose rate is measured."""
    model: str | None = None
    """Hugging Face folder that all ranks can read; None makes a tiny model on every rank."""


class Line(NamedTuple):
    what: str
    ranks: str
    seconds: float
    found: str
    verdict: str = "ok"


class Wires:
    """Messages between ranks. Every method returns seconds: the median of five rounds."""

    def __init__(self, place: Place, mib: int):
        self._place = place
        self._sent = torch.ones(mib << 18, device=place.device)

    def all_reduce(self) -> float:
        return self._median(lambda: dist.all_reduce(self._sent, group=self._place.group))

    def all_gather(self) -> float:
        num_ranks = self._place.group.size()
        part = self._sent[: len(self._sent) // num_ranks]
        parts = list(self._sent[: len(part) * num_ranks].clone().chunk(num_ranks))
        return self._median(lambda: dist.all_gather(parts, part, group=self._place.group))

    def send(self, source: int, target: int) -> float:
        """From one rank to another, while the others wait."""
        group, here = self._place.group, self._place.group.rank()

        def exchange() -> None:
            if here == source:
                dist.send(self._sent, group_dst=target, group=group)
            elif here == target:
                dist.recv(self._sent, group_src=source, group=group)

        return self._median(exchange)

    def _median(self, action: Callable[[], object]) -> float:
        times = []
        for _ in range(6):
            dist.barrier(self._place.group)
            start = time.perf_counter()
            action()
            if self._place.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[2]


class Learner(Trainer):
    def __init__(self, model: str | None, *, place: Place):
        folder = model or tiny_here()
        super().__init__(folder, place=place, loss=sft_loss, schedule=Schedule(lr=1e-3))

    def gradient(self, batch: list) -> tuple[dict[str, torch.Tensor], float]:
        start = time.perf_counter()
        self._accumulate(batch)
        self._clip()
        grads = {
            name: whole(name, parameter.grad, self.tensor_shard).cpu()
            for name, parameter in self.optimizer.parameters.items()
        }
        self.optimizer.zero_grad()
        return grads, time.perf_counter() - start


class Speaker:
    """An engine that answers a call, as all ranks of its replica."""

    def __init__(self, model: str | None, dtype: torch.dtype | None = None, *, place: Place):
        shard = TensorShard.of(place.mesh["tp"].get_group()) if place.tp > 1 else None
        options = {"device": place.device, "dtype": dtype or place.dtype, "shard": shard}
        model = open_model(model or tiny_here(), **options)
        options = {"kv_cache_gib": 0.1} | ({"control": place.control} if shard else {})
        self.engine = (TensorParallelEngine if shard else Engine)(model, **options)
        self._is_first = place.tp_rank == 0

    def answer(self, requests: list[Request]) -> tuple[list, float]:
        """Greedy token ids and their logprobs."""
        start = time.perf_counter()
        if not self._is_first:
            self.engine.follow()
            return [], 0.0
        turns = [turn for turns in self.engine.generate(requests) for turn in turns]
        if isinstance(self.engine, TensorParallelEngine):
            self.engine.pause()
        replies = [(turn.token_ids, turn.logprobs) for turn in turns]
        return replies, time.perf_counter() - start


def tiny_here() -> Path:
    """The same weights on every rank; none reads another's files."""
    folder = Path(tempfile.gettempdir()) / f"roll_lite-check-{read_launch().rank}"
    return folder if folder.exists() else build_tiny(folder)


def main(cfg: Config) -> None:
    num_ranks = read_launch().world_size
    config = read_config(cfg.model or tiny_here())
    sizes = [tp for tp in tp_sizes(config) if num_ranks % tp == 0]
    learners = dict(layouts(num_ranks, sizes))
    speakers = {f"speak_tp{tp}": f"all,tp={tp}" for tp in sizes[:-1]}
    roles = {"wires": "all", "alone": "0", "train": "all", "single": "0"}
    roles |= learners | speakers | {"generate": f"all,tp={max(sizes)}"}
    device_map = " ".join(f"{name}={ranks}" for name, ranks in roles.items())
    with Cluster(device_map, cfg.device) as cluster:
        tolerance = TOLERANCE[cluster.device.type]
        lines = [*rates(cluster, cfg.mib)]
        lines += compare_updates(cluster, ["train", *learners], cfg.model, tolerance)
        lines += compare_replies(cluster, [*speakers, "generate"], cfg.model, tolerance)
        lines.append(sync_weights(cluster))
        rows = [("what", "ranks", "seconds", "found", "verdict")]
        rows += [(line.what, line.ranks, f"{line.seconds:.4f}", *line[3:]) for line in lines]
        print(format_table(rows))
        num_failed = sum(line.verdict == "FAILED" for line in lines)
        print(f"{num_failed} of {len(lines)} lines have failed" if num_failed else "all is well")
        if num_failed:
            raise SystemExit(1)


def layouts(num_ranks: int, sizes: list[int]) -> Iterator[tuple[str, str]]:
    """Ways to train on all ranks beside FSDP over all, by name."""
    for tp in sizes:
        replicas = num_ranks // tp
        if tp > 1:
            yield f"fsdp{replicas}_tp{tp}", f"all,tp={tp}"
        for fsdp in divisors(replicas)[1:-1]:
            yield f"copies{replicas // fsdp}_fsdp{fsdp}_tp{tp}", f"all,tp={tp},fsdp={fsdp}"
    if num_ranks > 1:
        yield f"cp{num_ranks}", f"all,cp={num_ranks}"


def rates(cluster: Cluster, mib: int) -> Iterator[Line]:
    """Bytes that each rank sends, over seconds."""
    wires = cluster.role("wires", Wires, mib=mib)
    size, num_bytes = cluster.world_size, mib << 20
    if size == 1:
        return
    is_judged = cluster.device.type == "cuda" and torch.cuda.device_count() > 1

    def line(what: str, ranks: str, measure: Method, sent: float, *between: int) -> Line:
        seconds = max(measure.options(collect="all")(*between))
        rate = sent / seconds
        is_slow = is_judged and rate < SLOW
        return Line(what, ranks, seconds, f"{rate / 1e9:.2f} GB/s", "SLOW" if is_slow else "ok")

    share, everyone = (size - 1) / size, f"0-{size - 1}"
    yield line("all-reduce", everyone, wires.all_reduce, 2 * share * num_bytes)
    yield line("all-gather", everyone, wires.all_gather, share * num_bytes)
    for target in range(1, size):
        ranks = f"{target - 1} to {target}"
        yield line("send", ranks, wires.send, num_bytes, target - 1, target)


def compare_updates(
    cluster: Cluster, names: list[str], model: str | None, tolerance: float
) -> Iterator[Line]:
    """The gradient of one batch in every layout, against one rank's."""
    sequences = make_sequences()

    def gradient(name: str) -> tuple[dict[str, torch.Tensor], float]:
        learner = cluster.role(name, Learner, model=model)
        batch = pack(sequences, 1024, num_shards=learner.role.num_replicas)
        learner.gradient(split(batch))  # the first is slow
        return learner.gradient(split(batch))[0]

    expected, alone = gradient("alone")
    yield Line("update", "0", alone, "what the others are compared with")
    for name in names:
        grads, seconds = gradient(name)
        error = max(starmap(_error, zip(grads.values(), expected.values(), strict=True)))
        what = "update, FSDP over all" if name == "train" else f"update, {name.replace('_', ' ')}"
        yield Line(what, "all", seconds, f"gradient within {error:.1e}", _verdict(error, tolerance))


def compare_replies(
    cluster: Cluster, names: list[str], model: str | None, tolerance: float
) -> Iterator[Line]:
    """Greedy replies of every engine, against one rank's; in bf16 a near tie may go either way."""
    requests = [
        Request(prompt_ids=s.token_ids[:12], params=SamplingParams(max_tokens=16, temperature=0.0))
        for s in make_sequences()
    ]

    def answers(name: str) -> list[tuple[list, float]]:
        speaker = cluster.role(name, Speaker, model=model).answer.options(collect="replicas")
        speaker(requests)
        return speaker(requests)

    ((expected, alone),) = answers("single")
    yield Line("reply", "0", alone, "what the others are compared with")
    for name in names:
        found = answers(name)
        error = max(reply_error(replies, expected) for replies, _ in found)
        tp = cluster.device_map[name].tp
        same = min(num_equal(replies, expected) for replies, _ in found)
        text = f"{same} of {len(expected)} replies equal, logprobs within {error:.1e}"
        seconds = max(seconds for _, seconds in found)
        is_other = cluster.device.type == "cpu" and same < len(expected)  # fp32 has no near ties
        verdict = "FAILED" if is_other else _verdict(error, tolerance)
        yield Line(f"reply, tp={tp}", "all", seconds, text, verdict)


class CheckedSync(WeightSync):
    """Compares also what did not travel, of which the sync itself makes no checksums."""

    @torch.no_grad()
    def is_wrong(self) -> bool:
        if not (self.is_direct and self.engine):
            return False
        held = dict(self.engine.model.named_parameters())
        own = self.trainer.whole_parameters(self.place.dtype, only_part=True)
        return not all(torch.equal(held[name], tensor) for name, tensor in own)


def sync_weights(cluster: Cluster) -> Line:
    """From FSDP over all ranks to the engines."""
    sync = cluster.role("sync", CheckedSync)
    try:
        sync.sync(1)
        seconds = sync.sync(2)["time/sync"]
    except RuntimeError as error:
        return Line("weight sync", "all", 0.0, str(error).splitlines()[0], "FAILED")
    if any(sync.is_wrong.options(collect="all")()):
        return Line("weight sync", "all", seconds, "an engine holds other weights", "FAILED")
    return Line("weight sync", "all", seconds, "every engine holds the trainer's weights")


def make_sequences() -> list[TrainingSequence]:
    generator = torch.Generator().manual_seed(0)

    def draw(number: int) -> TrainingSequence:
        ids = torch.randint(3, 90, (24 + 4 * number,), generator=generator).tolist()
        return TrainingSequence(
            id=str(number), token_ids=ids, loss_mask=[i > 8 for i in range(len(ids))]
        )

    return [draw(number) for number in range(16)]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def num_equal(found: list, expected: list) -> int:
    return sum(ids == wanted for (ids, _), (wanted, _) in zip(found, expected, strict=True))


def reply_error(found: list, expected: list) -> float:
    """The largest difference of logprobs up to the first token that differs."""
    errors = [0.0]
    for (ids, logprobs), (wanted_ids, wanted) in zip(found, expected, strict=True):
        for token, logprob, wanted_token, wanted_logprob in zip(
            ids, logprobs, wanted_ids, wanted, strict=False
        ):
            errors.append(abs(logprob - wanted_logprob))
            if token != wanted_token:
                break
    return max(errors)


def _verdict(error: float, tolerance: float) -> str:
    return "ok" if error < tolerance else "FAILED"  # also if it is not a number


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
