"""Weights from the trainers to the engines, and which of them has the device: the only module that
knows both."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_lite.cluster.device_map import DeviceMap
from roll_lite.cluster.groups import Place
from roll_lite.cluster.role import RoleHandle
from roll_lite.engine.arena import ROW_BYTES, held_by
from roll_lite.engine.engine import Engine, OnNewWeights
from roll_lite.models.fsdp import in_buckets
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Transformer
from roll_lite.train.trainer import Trainer


class WeightSync:
    """The sync role, on all ranks of train and generate, for any pair of layouts.

    Parameters travel in buckets. Train's ranks gather one while the one before is used, train's
    first rank broadcasts it to ranks without a trainer, and each engine takes its shard. If every
    engine is on the rank of the trainer with the same shard (aligned), FSDP's gathering is the only
    communication. If there is nothing to gather either, the weights are cast into the engine's
    memory, and nothing else is touched. Whatever travelled is compared by checksums.
    """

    def __init__(self, *, place: Place, places: Mapping[str, Place], siblings: Mapping[str, Any]):
        self.place, self.feed = place, places.get("feed")
        self.trainer: Trainer | None = siblings.get("train")
        self.engine: Engine | None = siblings["generate"].engine if "generate" in siblings else None
        self.is_aligned = self._all_aligned()
        self._source = self._find_source() if self.feed else 0
        arenas = held_by(self.engine.weight_arenas, self.engine.model) if self.engine else []
        self._shapes = {name: p.shape for held in arenas for name, p in held.items()}
        self._num_rows = [{n: -(-p.nbytes // ROW_BYTES) for n, p in h.items()} for h in arenas]
        self._held: dict[str, Tensor] = {}
        """Checksums of the engine's parameters since the last sync, if they are known."""

    def _all_aligned(self) -> bool:
        mine = _tensor_place(self.trainer.tensor_shard) if self.trainer else None
        theirs = _tensor_place(self.engine.model.shard) if self.engine else None
        flag = torch.tensor(float(theirs is None or mine == theirs), device=self.place.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.place.group)
        return bool(flag)

    @torch.no_grad()
    def sync(self, version: int, running: OnNewWeights = "go_on") -> dict[str, float]:
        """Load the trainer's weights into all engines, and verify checksums."""
        start = time.perf_counter()
        if self.is_aligned and self.trainer.place.shards.size() == 1:
            if self.engine:
                own = self.trainer.whole_parameters(only_part=True)
                self.engine.load_weights(own, version, running)
                self._held = {}
                if self.place.device.type == "cuda":
                    torch.cuda.synchronize(self.place.device)  # the engine may use another stream
        else:
            self._send(version, running)
        return {"time/sync": time.perf_counter() - start}

    def _send(self, version: int, running: OnNewWeights) -> None:
        arrived, taken = {}, {}
        buckets = self._aligned() if self.is_aligned else self._cut(self._arriving(arrived))
        if self.engine is None:
            deque(buckets, maxlen=0)  # only takes part in the collectives
        else:
            self.engine.load_weights(_recording(buckets, taken), version, running)
        sent = self._source_checksums(arrived) if self.feed else arrived
        # No collective follows, so a rank may raise here.
        _compare(version, "what arrived is not what was sent", sent, arrived)
        if self.engine:
            self._held = self._held_checksums()
            _compare(version, "the engine does not hold what it got", taken, self._held)

    def digest(self) -> str:
        """Of the weights of this rank's engine: another text for other weights. Empty without."""
        if self.engine is None:
            return ""
        self._held = self._held or self._held_checksums()
        sums = torch.cat([*self._held.values()])
        return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def _find_source(self) -> int:
        """The rank within the feed group that has a trainer."""
        flags = torch.tensor([self.trainer is not None], device=self.place.device)
        everyone = [torch.empty_like(flags) for _ in range(self.feed.group.size())]
        dist.all_gather(everyone, flags, group=self.feed.group)
        return [bool(flag) for flag in everyone].index(True)

    def _source_checksums(self, arrived: dict[str, Tensor]) -> dict[str, Tensor]:
        sums = torch.cat(list(arrived.values()))
        dist.broadcast(sums, group_src=self._source, group=self.feed.group)
        parts = sums.split([len(rows) for rows in arrived.values()])
        return dict(zip(arrived, parts, strict=True))

    def _held_checksums(self) -> dict[str, Tensor]:
        """Of the engine's weights, arena by arena."""
        sums = {}
        for arena, num_rows in zip(self.engine.weight_arenas, self._num_rows, strict=True):
            rows = row_checksums(arena.bytes)
            sums |= zip(num_rows, rows.split([*num_rows.values()]), strict=True)
        return sums

    def _aligned(self) -> Iterator["Bucket"]:
        yield from self._packed(self.trainer.whole_parameters(self.place.dtype, only_part=True))

    def _arriving(self, arrived: dict[str, Tensor]) -> Iterator["Bucket"]:
        """Whole parameters, on all ranks; fills `arrived` with checksums of what was sent."""
        for bucket in self._packed(self._whole_parameters()):
            if self.feed:
                dist.broadcast(bucket.flat, group_src=self._source, group=self.feed.group)
                arrived |= bucket.checksums
            yield bucket

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The trainer's parameters; without one, shapes alone."""
        if self.trainer:
            yield from self.trainer.whole_parameters(self.place.dtype)
            return
        with torch.device("meta"):
            yield from Transformer(self.engine.model.config).named_parameters()

    def _cut(self, buckets: Iterator["Bucket"]) -> Iterator["Bucket"]:
        """The engine's part of each."""
        model = self.engine.model if self.engine else None
        if model is None or model.shard is None:
            yield from buckets
            return
        for bucket in buckets:
            yield from self._packed(
                (name, model.shard.cut(name, tensor, self._shapes[name]))
                for name, tensor in bucket.tensors.items()
            )

    def _packed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator["Bucket"]:
        """In buckets that have the same names on all ranks."""
        for tensors in in_buckets(weights, self.place.device):
            yield Bucket(tensors, self.place.dtype, self.place.device)


class Bucket:
    """Copies of tensors in one, as an arena has them: they begin at multiples of ROW_BYTES."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device):
        """Tensors on the meta device only have a shape: their bucket is left to be filled."""
        self._rows = [-(-t.numel() // _row_size(dtype)) for t in tensors.values()]
        self.flat = torch.empty(sum(self._rows) * _row_size(dtype), dtype=dtype, device=device)
        parts = self.flat.split([rows * _row_size(dtype) for rows in self._rows])
        self.tensors, tails = {}, []
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

    @property
    def checksums(self) -> dict[str, Tensor]:
        rows = row_checksums(self.flat)
        return dict(zip(self.tensors, rows.split(self._rows), strict=True))


def _row_size(dtype: torch.dtype) -> int:
    return ROW_BYTES // dtype.itemsize


class Colocated:
    """Hands devices that trainers and engines share from one to the other; the controller's part.

    |          | engines (engines_sleep) | trainers (offload)                             |
    |----------|-------------------------|------------------------------------------------|
    | generate | weights and KV cache    | in host memory                                 |
    | train    | nothing                 | on the device                                  |
    | sync     | weights, which are new  | a policy without adapters; others leave before |

    Without the option in brackets that side stays on the device. A policy with adapters is as large
    as the engine, and its frozen weights are on the host anyway: the engine reads them from there.
    """

    def __init__(
        self, device_map: DeviceMap, *, engines_sleep: bool = False, offload: bool = False
    ):
        self._sleeps, self._offloads = engines_sleep, offload
        self._trainers: list[RoleHandle] = []
        self._source: RoleHandle | None = None
        """Stays until the engines have its weights."""
        self.seconds: dict[str, float] = {}
        """Of the parts of the last step."""
        options = {"engines_sleep": engines_sleep, "offload": offload}
        is_shared = not set(device_map["train"].ranks).isdisjoint(device_map["generate"].ranks)
        for name in (name for name, is_on in options.items() if is_on and not is_shared):
            raise ValueError(
                f"{name}=True is for ranks that train and generate in turn, and device_map="
                f"{device_map.text!r} has none; leave it out"
            )

    def add(self, trainer: RoleHandle, *, stays_for_sync: bool = False) -> RoleHandle:
        """A role that only works between generations; it leaves the device for the next role."""
        self._trainers.append(trainer)
        if stays_for_sync:
            self._source = trainer
        if self._offloads:
            trainer.offload()
        return trainer

    def connect(self, engines: RoleHandle, sync: RoleHandle) -> None:
        """The engines, which have the devices until `to_training`."""
        self._engines, self._sync = engines, sync

    def to_training(self) -> None:
        """Generation has ended, for the next update."""
        self.seconds = {}
        if self._sleeps:
            self._timed("sleep", self._engines.sleep)
        if self._offloads:
            self._timed("reload", *(trainer.reload for trainer in self._trainers))

    def to_engines(self, version: int, running: OnNewWeights = "go_on") -> None:
        """New weights to the engines, for the next samples."""
        if self._offloads:
            first = (trainer for trainer in self._trainers if trainer is not self._source)
            self._timed("offload", *(trainer.offload for trainer in first))
        if self._sleeps:
            self._timed("wake", lambda: self._engines.wake("weights"))
        self._timed("sync", lambda: self._sync.sync(version, running))
        if self._offloads and self._source:
            self._timed("offload", self._source.offload)
        if self._sleeps:
            self._timed("wake", self._engines.wake)

    def digest(self) -> str:
        """Of the engines' weights; another text for other weights."""
        return max(self._sync.digest.options(collect="all")())

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds of handing over, where memory changes hands; time/sync and time/prepare include
        them."""
        is_shared = self._sleeps or self._offloads
        return {f"colocated/{k}": v for k, v in self.seconds.items()} if is_shared else {}

    def _timed(self, name: str, *calls: Callable[[], Any]) -> None:
        start = time.perf_counter()
        for call in calls:
            call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def row_checksums(flat: Tensor) -> Tensor:
    """Of each ROW_BYTES: the sum of its 64-bit words, so that a changed bit and rows that changed
    places are found. Narrower words would take longer than the copy of the weights."""
    return flat.view(torch.int64).view(-1, ROW_BYTES // 8).sum(1)


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


def _tensor_place(shard: TensorShard | None) -> tuple[int, int]:
    return (shard.rank, shard.size) if shard else (0, 1)
