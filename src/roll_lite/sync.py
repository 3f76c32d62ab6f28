"""Weights from the trainers to the engines: the only module that knows both."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from roll_lite.cluster.places import Place
from roll_lite.device_map import FEED
from roll_lite.engine.arena import ROW_BYTES, held_by
from roll_lite.engine.engine import Engine, OnNewWeights
from roll_lite.engine.service import EngineService
from roll_lite.models.config import ModelConfig
from roll_lite.models.fsdp import in_buckets, num_shards
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Transformer
from roll_lite.train.trainer import Trainer


class SharingService(EngineService):
    """An engine that computes with the frozen weights of the trainer on its rank."""

    def __init__(
        self, folder: str | Path, *, place: Place, siblings: Mapping[str, Any], **options: Any
    ):
        self._trainer: Trainer = siblings["train"]
        super().__init__(folder, place=place, **options)

    def _open(self, shard: TensorShard | None) -> Transformer:
        return self._trainer.engine_model(shard)


class WeightSync:
    """The sync role, on all ranks of train and generate, for any pair of layouts.

    Parameters travel in buckets. Train's ranks gather one while the one before is used. Engines
    there take their shards; to ranks without a trainer train's first rank broadcasts theirs. If
    every engine is on the rank of the trainer with the same shard (aligned), FSDP's gathering is
    the only communication. If there is nothing to gather either, the weights are cast into the
    engine's memory, and nothing else is touched; an engine that shares the trainer's frozen weights
    gets its adapters so. Whatever travelled is compared by checksums.
    """

    def __init__(self, *, place: Place, places: Mapping[str, Place], siblings: Mapping[str, Any]):
        self.place = place
        self.trainer: Trainer | None = siblings.get("train")
        self.engine: Engine | None = siblings["generate"].engine if "generate" in siblings else None
        self._is_aligned = self._all_aligned()
        self.is_direct = self._is_aligned and num_shards(self.trainer.place.shards) == 1
        """Whether the weights do not travel, so that there is nothing to compare."""
        feeds = {int(n.removeprefix(FEED)): p for n, p in places.items() if n.startswith(FEED)}
        self.feeds = {part: Feed(part, feeds[part], self.trainer, self.engine) for part in feeds}
        """By tensor-parallel part: all on train's first rank, one on ranks without a trainer."""
        arenas = held_by(self.engine.weight_arenas, self.engine.model) if self.engine else []
        shapes = {name: p.shape for held in arenas for name, p in held.items()}
        self._own = Cut(self.engine.model.shard, shapes) if self.engine else None
        self._num_rows = [{n: -(-p.nbytes // ROW_BYTES) for n, p in h.items()} for h in arenas]
        self._held: dict[str, Tensor] = {}
        """Checksums of the engine's parameters since the last sync, if they are known."""

    def _all_aligned(self) -> bool:
        mine = _held_by(self.trainer.tensor_shard) if self.trainer else None
        theirs = _held_by(self.engine.model.shard) if self.engine else None
        flag = torch.tensor(float(theirs is None or mine == theirs), device=self.place.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.place.group)
        return bool(flag)

    @torch.no_grad()
    def sync(self, version: int, running: OnNewWeights = "go_on") -> dict[str, float]:
        """Load the trainer's weights into all engines."""
        start = time.perf_counter()
        self._leave_out_lost()
        if self.is_direct:
            if self.engine:
                if self.engine.takes_adapters:
                    own = self.trainer.adapters()
                else:
                    own = self.trainer.whole_parameters(only_part=True)
                self.engine.load_weights(own, version, running)
                self._held = {}
                if self.place.device.type == "cuda":
                    torch.cuda.synchronize(self.place.device)  # the engine may use another stream
        else:
            self._send(version, running)
        return {"time/sync": time.perf_counter() - start}

    def _leave_out_lost(self) -> None:
        """Form the groups of feeds again without engines that have ended."""
        for part, feed in [*self.feeds.items()]:
            if not self.place.lost.isdisjoint(feed.ranks):
                feed.leave_out(self.place.lost)
                if len(feed.ranks) == 1:  # no rank is left to be fed
                    del self.feeds[part]

    def _send(self, version: int, running: OnNewWeights) -> None:
        taken = {}
        buckets = self._own_parts() if self._is_aligned else self._arriving()
        if self.engine is None:
            deque(buckets, maxlen=0)  # only takes part in the collectives
        else:
            self.engine.load_weights(_recording(buckets, taken), version, running)
        pairs = [feed.sums() for feed in self.feeds.values()]
        # No collective follows, so a rank may raise here.
        for sent, arrived in pairs:
            _compare(version, "what arrived is not what was sent", sent, arrived)
        if self.engine:
            self._held = self._held_checksums()
            _compare(version, "the engine does not hold what it got", taken, self._held)

    def digest(self) -> str:
        """A digest of the weights of this rank's engine; empty where there is no engine."""
        if self.engine is None:
            return ""
        self._held = self._held or self._held_checksums()
        return digest_of(torch.cat([*self._held.values()]))

    def _held_checksums(self) -> dict[str, Tensor]:
        """Checksums of the engine's weights, arena by arena."""
        sums = {}
        for arena, num_rows in zip(self.engine.weight_arenas, self._num_rows, strict=True):
            rows = row_checksums(arena.bytes)
            sums |= zip(num_rows, rows.split([*num_rows.values()]), strict=True)
        return sums

    def _own_parts(self) -> Iterator["Bucket"]:
        """The parts that the trainer on this rank gathers, which are those of its engine."""
        return self._packed(self.trainer.whole_parameters(self.place.dtype, only_part=True))

    def _arriving(self) -> Iterator["Bucket"]:
        """The engine's weights; on ranks with a trainer alone nothing, but it feeds others."""
        if self.trainer is None:
            (feed,) = self.feeds.values()
            yield from map(feed.receive, in_buckets(self._whole_shapes(), self.place.device))
            return
        for bucket in self._packed(self.trainer.whole_parameters(self.place.dtype)):
            for feed in self.feeds.values():
                feed.send(bucket)
            if self.engine:
                yield bucket.cut(self._own)

    def _whole_shapes(self) -> Iterator[tuple[str, Tensor]]:
        with torch.device("meta"):
            model = Transformer(self.engine.model.config)
        return model.named_parameters()

    def _packed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator["Bucket"]:
        """In buckets that have the same names on all ranks."""
        for tensors in in_buckets(weights, self.place.device):
            yield Bucket(tensors, self.place.dtype, self.place.device)


class Cut(NamedTuple):
    """What an engine has of the whole parameters."""

    shard: TensorShard | None
    shapes: dict[str, torch.Size]

    @staticmethod
    def of(config: ModelConfig, part: int, size: int, ep: int) -> "Cut":
        """What an engine on another rank has, by its part of `size`."""
        with torch.device("meta"):
            shard = TensorShard(part, size, None, ep=ep) if size > 1 else None
            model = Transformer(config, shard=shard)
        return Cut(model.shard, {name: p.shape for name, p in model.named_parameters()})


class Feed:
    """One tensor-parallel part of the weights on its way from train's first rank to the ranks
    without a trainer that hold it."""

    def __init__(self, part: int, place: Place, trainer: Trainer | None, engine: Engine | None):
        self.place = place
        self._group = place.group
        self.ranks = dist.get_process_group_ranks(place.group)
        mine = _sizes(engine.model.shard) if engine and trainer is None else (0, 0)
        sizes = torch.tensor(mine, device=place.device)
        everyone = [torch.empty_like(sizes) for _ in self.ranks]
        dist.all_gather(everyone, sizes, group=place.group)
        known = [tuple(sizes.tolist()) for sizes in everyone]
        self.source = self.ranks[known.index((0, 0))]
        config = trainer.config if trainer else engine.model.config
        self.cut = Cut.of(config, part, *max(known))
        self._sums: dict[str, Tensor] = {}

    def leave_out(self, lost: Set[int]) -> None:
        """Go on without some ranks; all others call it together."""
        self.ranks = [rank for rank in self.ranks if rank not in lost]
        if len(self.ranks) > 1:
            self._group = self.place.regroup(self.place.role, self.ranks)

    def send(self, bucket: "Bucket") -> None:
        self._broadcast(bucket.cut(self.cut))

    def receive(self, shapes: dict[str, Tensor]) -> "Bucket":
        """As many parameters as the source sends at a time; these only have a shape."""
        own = {name: torch.empty(self.cut.shapes[name], device="meta") for name in shapes}
        return self._broadcast(Bucket(own, self.place.dtype, self.place.device))

    def _broadcast(self, bucket: "Bucket") -> "Bucket":
        self._broadcast_flat(bucket.flat)
        self._sums |= bucket.checksums
        return bucket

    def _broadcast_flat(self, tensor: Tensor) -> None:
        # Not dist.broadcast, which does not know groups that were formed again.
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(self.source)
        options.asyncOp = False
        if work := self._group.broadcast([tensor], options):
            work.wait()

    def sums(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Checksums of what was sent, and of what this rank has of it, since the last call."""
        arrived = self._sums
        self._sums = {}
        sums = torch.cat([*arrived.values()])
        self._broadcast_flat(sums)
        parts = sums.split([len(rows) for rows in arrived.values()])
        return dict(zip(arrived, parts, strict=True)), arrived


class Bucket:
    """Copies of tensors in one, as an arena has them: they begin at multiples of ROW_BYTES."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device):
        """Tensors on the meta device only have a shape: their bucket is left to be filled."""
        self._rows = [-(-t.numel() // _row_size(dtype)) for t in tensors.values()]
        self.flat = torch.empty(sum(self._rows) * _row_size(dtype), dtype=dtype, device=device)
        parts = self.flat.split([rows * _row_size(dtype) for rows in self._rows])
        self.tensors = {}
        tails = []
        for part, (name, tensor) in zip(parts, tensors.items(), strict=True):
            size = tensor.numel()
            if size < len(part):
                tails.append(part[size:])
                part = part[:size]
            self.tensors[name] = part.view(tensor.shape)
        if not any(tensor.is_meta for tensor in tensors.values()):
            torch._foreach_copy_([*self.tensors.values()], [*tensors.values()])
            if tails:  # zero, as in an arena
                torch._foreach_zero_(tails)

    def cut(self, cut: Cut) -> "Bucket":
        if cut.shard is None:
            return self
        parts = {n: cut.shard.cut(n, t, cut.shapes[n]) for n, t in self.tensors.items()}
        return Bucket(parts, self.flat.dtype, self.flat.device)

    @property
    def checksums(self) -> dict[str, Tensor]:
        rows = row_checksums(self.flat)
        return dict(zip(self.tensors, rows.split(self._rows), strict=True))


def _row_size(dtype: torch.dtype) -> int:
    return ROW_BYTES // dtype.itemsize


def row_checksums(flat: Tensor) -> Tensor:
    """The sum of the 64-bit words of each ROW_BYTES.

    They show a changed bit and rows that changed places, though not every pair of changes in a row.
    Sums of narrower words take longer than the copy of the weights.
    """
    return flat.view(torch.int64).view(-1, ROW_BYTES // 8).sum(1)


def digest_of(sums: Tensor) -> str:
    """128 bits that depend on every sum and its place.

    They are made on the device: an 8B model has 128 MB of sums. Each sum goes through the
    finaliser of MurmurHash3 (public domain), so changes of several do not cancel.
    """
    places = torch.arange(len(sums), device=sums.device)
    words = []
    for odd in (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D):
        word = places * odd
        word ^= sums
        for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):  # wrap around, as in C
            word ^= (word >> 33) & 0x7FFFFFFF  # without the copies of the sign
            word *= factor
        word ^= (word >> 33) & 0x7FFFFFFF
        words.append(word.sum())
    return "".join(f"{word % 2**64:016x}" for word in torch.stack(words).tolist())


def _recording(buckets: Iterator[Bucket], sums: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of buckets one by one; fills `sums` with their checksums."""
    for bucket in buckets:
        sums |= bucket.checksums
        yield from bucket.tensors.items()


def _compare(
    version: int, problem: str, expected: dict[str, Tensor], found: dict[str, Tensor]
) -> None:
    if not expected:
        return
    # All at once: a kernel launch per parameter would take longer than the comparison.
    is_same = torch.cat(list(expected.values())) == torch.cat([found[name] for name in expected])
    if is_same.all():
        return
    parts = is_same.split([len(rows) for rows in expected.values()])
    broken = [name for name, part in zip(expected, parts, strict=True) if not part.all()]
    raise RuntimeError(
        f"weight sync of version {version} failed: {problem} for {', '.join(broken)}"
    )


def _held_by(shard: TensorShard | None) -> tuple[int, ...]:
    """What a rank holds of a model, in a form that can be compared."""
    return (shard.rank, shard.size, *shard.expert_place) if shard else (0, 1, 0, 1, 0, 1)


def _sizes(shard: TensorShard | None) -> tuple[int, int]:
    return (shard.size, shard.ep) if shard else (1, 1)
