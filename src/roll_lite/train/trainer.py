"""The train role: fp32 master weights and optimizer; one call of `step` is one update."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from roll_lite.checks import UserError
from roll_lite.cluster.places import Place
from roll_lite.cluster.role import RoleHandle
from roll_lite.models.config import LoraOptions
from roll_lite.models.cost import device_flops, training_flops
from roll_lite.models.fsdp import (
    gradient_norm,
    in_buckets,
    local,
    rectangles,
    start_gathering,
    sum_copied_gradients,
    whole_shape,
)
from roll_lite.models.hf import stored_dtype
from roll_lite.models.hf_write import save_parameters
from roll_lite.models.logprobs import ALL
from roll_lite.models.lora import adapters, add_adapters, is_of_adapter, merge
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Checkpointing, Head, Transformer
from roll_lite.progress import ProgressBar
from roll_lite.stopping import Ended
from roll_lite.train.adamw import AdamW
from roll_lite.train.balance import Balance
from roll_lite.train.batch import MicroBatch, unpack
from roll_lite.train.checkpoint_folders import (
    check_architecture,
    read_manifest,
    read_pieces,
    verify,
)
from roll_lite.train.digests import RunningDigest, digest_tensors
from roll_lite.train.losses import Loss, sampled_only
from roll_lite.train.optimizer import Schedule
from roll_lite.train.scorer import Scorer
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.shards import Piece, ShardRecord, write_shard
from roll_lite.train.totals import ENTROPY, LOSS, MISMATCH, Totals
from roll_lite.types import Truncation

MAX_SKIPPED = 5
"""Updates in a row without a finite gradient that end a run."""
NOTED: dict[str, str] = {"entropies": ENTROPY, "mismatches": MISMATCH}
"""Fields of a sequence that a step may note, and the measurements that they are."""


class Diverged(Ended):
    """No gradient is finite any more. All ranks raise it together, with the weights unchanged."""


class Trainer(Scorer):
    def __init__(
        self,
        folder: str | Path,
        *,
        place: Place,
        loss: Loss,
        schedule: Schedule,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        max_grad_norm: float = 1.0,
        temperature: float = 1.0,
        truncation: Truncation = ALL,
        head: Head = "language",
        checkpointing: Checkpointing = "none",
        moments: Literal["float32", "bfloat16"] = "float32",
        lora: LoraOptions | None = None,
        balance_coef: float = 0.0,
        is_shared: bool = False,
        replays_experts: bool = False,
    ):
        """A critic is a trainer with head="value". With `lora` only adapters are trained. With
        `replays_experts` a mixture reads its samples with the experts that the engine used.

        `is_shared`: an engine on this rank computes with the frozen weights too (`engine_model`).
        They stay on the device, in arenas.

        `temperature` and `truncation` are those of sampling: losses and `logprobs` are of the
        distribution that the engine samples from at the same weights.
        """
        # Frozen weights need no fp32 master.
        dtype = place.dtype if lora else torch.float32
        self._build(folder, place, temperature, head, dtype, checkpointing, lora, is_shared)
        self._is_shared = is_shared
        self.truncation = truncation
        self.replays_experts = replays_experts
        self.loss = loss
        self._balance = Balance(self.model, balance_coef, place)
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.part: Literal["policy", "critic"] = "policy" if head == "language" else "critic"
        """The name of its files in a checkpoint."""
        self.num_steps = 0
        self._num_skipped = 0  # in a row
        self.lora = lora
        self._parameters = dict(self.model.named_parameters())
        weights = ((n, p) for n, p in self._parameters.items() if not is_of_adapter(n))
        self._buckets = [list(bucket) for bucket in in_buckets(weights, place.device)]
        trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        self.optimizer = AdamW(
            trained, weight_decay=weight_decay, betas=betas, moments_dtype=getattr(torch, moments)
        )
        self._trained = {n: local(p.detach()) for n, p in trained.items()}
        self._digests = RunningDigest()
        self._digest_seconds = 0.0
        self._noted: list[dict[str, Tensor]] = []
        """By field, numbers of the rows of each micro-batch of the last step, on the device."""
        self._checkpoint: Future[ShardRecord]

    def step(self, batch: list[MicroBatch], scheduled_at: int | None = None) -> dict[str, float]:
        """Accumulate the gradient over all micro-batches of all ranks, then update once.

        `scheduled_at` is the schedule's step of the learning rate; None counts updates.
        """
        start = time.perf_counter()
        self.optimizer.zero_grad()  # in case an earlier step failed midway
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        totals = self._accumulate(batch)
        update = self._update(scheduled_at)
        metrics = totals.over_ranks(self.replicas) | update | self._balance.metrics()
        return metrics | self._speed(batch, time.perf_counter() - start)

    def _update(self, scheduled_at: int | None) -> dict[str, float]:
        """Clip the gradient and follow it."""
        grad_norm = self._clip()
        lr = self.schedule.at(self.num_steps if scheduled_at is None else scheduled_at)
        is_finite = grad_norm < float("inf")
        if is_finite:  # inf or nan would destroy the policy: skip the update
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self._count_skipped(is_finite, lr)
        self.num_steps += 1
        return {
            "loss/grad_norm": grad_norm,
            "loss/lr": lr,
            "loss/skipped_steps": float(not is_finite),
        }

    def keep(self, batch: list[MicroBatch]) -> None:
        """Keep this state, and its gradient on a batch, for `step_without`."""
        self._counts = self.optimizer.num_updates, self.num_steps
        self._kept = [tensor.clone() for tensor in self._state_tensors()[0]]
        self._whole = [grad.clone() for grad in self._gradient(batch)]

    def step_without(self, left_out: list[MicroBatch], scheduled_at: int) -> None:
        """What `step` would do in the state that was kept, had `left_out` not been in the batch.

        Gradients add up, so that of `left_out` is taken off."""
        self.optimizer.num_updates, self.num_steps = self._counts
        torch._foreach_copy_(self._state_tensors()[0], self._kept)
        gradient = self._gradient(left_out)
        torch._foreach_neg_(gradient)
        torch._foreach_add_(gradient, self._whole)
        self._update(scheduled_at)

    def _gradient(self, batch: list[MicroBatch]) -> list[Tensor]:
        self.optimizer.zero_grad()
        self._accumulate(batch)
        return [local(parameter.grad) for parameter in self.optimizer.parameters.values()]

    def _count_skipped(self, is_finite: bool, lr: float) -> None:
        self._num_skipped = 0 if is_finite else self._num_skipped + 1
        if self._num_skipped == MAX_SKIPPED:
            raise Diverged(
                f"the gradient of the {self.part} was not finite in {MAX_SKIPPED} updates in a row "
                f"(learning rate {lr:g}): nothing is learnt any more; start again, or from an "
                "earlier checkpoint, with a lower learning rate, and look at the rewards and "
                "advantages for nan and inf"
            )

    def _accumulate(self, batch: list[MicroBatch]) -> Totals:
        """The gradient of all micro-batches; copies of the weights sum theirs after the last."""
        totals = Totals()
        last = len(batch) - 1
        self._noted = []
        self._balance.start(batch)
        with _token_bar(batch, "training") as bar:
            for number, sent in enumerate(batch):
                micro = sent.to(self.device)
                self.model.set_requires_all_reduce(number == last)
                with self._balance.of(sent):
                    loss_R, measurements = self._loss(micro)
                    (loss_R * micro.weights_R).sum().backward()
                with self._timed_digest():  # beside the device's work
                    for name, tensor in sent.tensors():
                        self._digests.add(f"batch/{name}", tensor)
                rows = {LOSS: loss_R.detach(), **measurements}
                totals.add(rows, micro.weights_R, micro.observed_R)
                found = {field: measurements.get(name) for field, name in NOTED.items()}
                self._noted.append({f: rows for f, rows in found.items() if rows is not None})
                bar.advance(len(micro.token_ids_T))
        return totals

    def digests(self, *, with_frozen: bool = False) -> dict[str, str | float]:
        """Of this rank's batches, gradients and their clipping since the last call, and of its
        weights; and the seconds that they took. `with_frozen` adds the weights that are not
        trained."""
        with self._timed_digest():
            # As the files of a checkpoint have them.
            held = sorted(self._written_pieces().items())
            weights = (
                (f"{name} at {list(piece.offsets)}", piece.tensor)
                for name, piece in held
                if name.startswith(f"{self.part}.model.") and piece.tensor.numel()
            )
            found = self._digests.take() | {"weights": digest_tensors(weights)}
            if with_frozen:
                frozen = [(n, p) for n, p in self._parameters.items() if not p.requires_grad]
                tensors = ((n, self._readable(local(p.detach()))) for n, p in frozen)
                found |= {"frozen": digest_tensors(tensors)} if frozen else {}
        seconds, self._digest_seconds = self._digest_seconds, 0.0
        return found | {"seconds": seconds}

    @contextmanager
    def _timed_digest(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._digest_seconds += time.perf_counter() - start

    def noted(self) -> list[dict[str, Tensor]]:
        """What NOTED names of each row of each micro-batch of the last step."""
        return [{field: rows_R.cpu() for field, rows_R in micro.items()} for micro in self._noted]

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = micro.targets_R if micro.teacher_ids_RK is None else micro.teacher_ids_RK
        found = self._forward(micro, targets)
        more = {}
        if self.truncation.is_on:
            *found, micro, outside_R = hold_outside(*found, micro)
            more["loss/outside_truncation"] = outside_R.float()
        if self.replays_experts:
            nothing_R = torch.zeros_like(micro.weights_R)
            differing_R = nothing_R if self._differing_R is None else self._differing_R
            more["mismatch/experts"] = sampled_only(differing_R, micro)
        loss_R, measurements = self.loss(*found, micro)
        return loss_R, measurements | more

    @torch.no_grad()
    def evaluate(self, batch: list[MicroBatch]) -> dict[str, float]:
        """Loss and measurements of a batch over all ranks, without an update."""
        totals = Totals()

        def add(micro: MicroBatch) -> None:
            loss_R, measurements = self._loss(micro)
            totals.add({LOSS: loss_R, **measurements}, micro.weights_R, micro.observed_R)
            bar.advance(len(micro.token_ids_T))

        with _token_bar(batch, "evaluation") as bar:
            self._read(batch, add)
        return totals.over_ranks(self.replicas)

    @torch.no_grad()
    def _clip(self) -> float:
        """Clip the gradient to `max_grad_norm`; returns its norm before."""
        trained = self.optimizer.parameters
        sum_copied_gradients(trained, self.tensor_shard)
        norm = gradient_norm(trained, self.tensor_shard, self.place.group)
        found = norm.item()  # waits for the gradient, which is not the digest's time
        scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = {name: local(parameter.grad) for name, parameter in trained.items()}
        with self._timed_digest():
            self._digests.add_text("gradient", digest_tensors(gradients.items()))
            self._digests.add_text("clipping", str(scale.item()))
        torch._foreach_mul_([*gradients.values()], scale)
        return found

    def _speed(self, batch: list[MicroBatch], seconds: float) -> dict[str, float]:
        lengths = torch.cat([micro.cu_seqlens.diff() for micro in batch]).double()
        rows = sum(len(micro.rows_R) for micro in batch)
        counts = [lengths.sum().item(), (lengths * (lengths + 1) / 2).sum().item(), rows]
        counts = torch.tensor(counts, dtype=torch.float64, device=self.device)
        dist.all_reduce(counts, group=self.replicas)
        tokens, pairs, rows = counts.tolist()
        speed = {
            "time/train": seconds,
            "train/tokens": tokens,
            "train/tokens_per_second": tokens / seconds,
        }
        if self.device.type == "cuda":
            speed["train/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            if flops := device_flops(torch.cuda.get_device_name()):
                counts = {"num_tokens": tokens, "num_pairs": pairs, "num_rows": rows}
                done = training_flops(self.config, is_frozen=self.lora is not None, **counts)
                speed["train/mfu"] = done / (flops * seconds * self.place.group.size())
        return speed

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The frozen base model, which serves as the reference. Its routers choose freely."""
        if not self.lora:
            raise UserError("only a model with LoRA is its own reference; give lora options")
        for adapter in adapters(self.model):
            adapter.is_on = False
        replays_experts, self.replays_experts = self.replays_experts, False
        try:
            yield
        finally:
            self.replays_experts = replays_experts
            for adapter in adapters(self.model):
                adapter.is_on = True

    def reference_logprobs(self, batch: list[MicroBatch]) -> list[Tensor]:
        """Logprobs under the frozen base, with LoRA off, among all tokens."""
        with self.without_adapters():
            return self.whole_logprobs(batch)

    def whole_logprobs(self, batch: list[MicroBatch]) -> list[Tensor]:
        """Logprobs among all tokens, whatever sampling leaves in."""
        truncation, self.truncation = self.truncation, ALL
        try:
            return self.logprobs(batch)
        finally:
            self.truncation = truncation

    @torch.no_grad()
    def engine_model(self, tensor_shard: TensorShard | None) -> Transformer:
        """A model for an engine on this rank: the same frozen tensors, and adapters of its own in
        the dtype of these. The shard is the same part as this trainer's."""
        with torch.device("meta"):
            model = Transformer(self.config, shard=tensor_shard)
            add_adapters(model, self.lora)
        frozen = {n: p.detach() for n, p in self._parameters.items() if not p.requires_grad}
        own = {n: p.to(self.device, self.place.dtype, copy=True) for n, p in self.adapters()}
        model.load_state_dict(frozen | own, assign=True)
        return model

    def adapters(self) -> Collection[tuple[str, Tensor]]:
        """This rank's part of the adapters; in host memory while they are offloaded."""
        return {n: self._readable(tensor) for n, tensor in self._trained.items()}.items()

    def _state_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        trained = [*self._trained.values()]
        moments = [t for moment in self.optimizer.moments.values() for t in moment.values()]
        frozen = [local(p.detach()) for p in self.model.parameters() if not p.requires_grad]
        return trained + moments, [] if self._is_shared else frozen

    def _readable(self, tensor: Tensor) -> Tensor:
        """One of this rank's tensors; while it is offloaded, its copy in host memory."""
        return self._offload.host_copy(tensor) if self.is_offloaded else tensor

    def _on_device(self, parameter: Tensor) -> Tensor:
        """A parameter, or while it is offloaded a copy for the moment."""
        if not self.is_offloaded:
            return parameter
        held = self._readable(local(parameter.detach())).to(self.device, non_blocking=True)
        if not isinstance(parameter, DTensor):
            return held
        layout = parameter.device_mesh, parameter.placements
        sizes = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(held, *layout, run_check=False, **sizes)

    def state(self) -> dict[str, Tensor]:
        """Whole parameters by name, adapters merged. All ranks of the role call this together.

        Where one rank holds all, these are the live parameters, not copies.
        """
        return dict(self.whole_parameters())

    def whole_parameters(
        self, dtype: torch.dtype | None = None, *, only_part: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, some at a time so that no rank holds the whole model; cast to `dtype`.

        `only_part` keeps the tensor-parallel split: this rank's part.
        """
        tensor_shard = None if only_part else self.tensor_shard
        started = deque()
        for names in self._buckets:  # one is on its way while the last is used
            started.append((names, self._start_gathering(names, dtype)))
            if len(started) > 1:
                yield from self._finish_gathering(*started.popleft(), tensor_shard)
        for bucket in started:
            yield from self._finish_gathering(*bucket, tensor_shard)

    def _start_gathering(
        self, names: list[str], dtype: torch.dtype | None
    ) -> list[Callable[[], dict[str, Tensor]]]:
        """Weights, and in messages of their own what other ranks share and adapters."""
        added = [f"{name}_adapter.{part}" for name in names for part in ("down", "up")]
        messages: dict[tuple, dict[str, DTensor]] = {}
        for name in [*names, *(name for name in added if name in self._parameters)]:
            parameter = self._parameters[name]
            own = dtype is None or is_of_adapter(name)  # adapters are merged as they are
            kind = parameter.dtype if own else dtype
            mesh = getattr(parameter, "device_mesh", None)  # None: it is whole on every rank
            of_mesh = messages.setdefault((mesh, kind), {})
            of_mesh[name] = self._on_device(parameter)
        return [start_gathering(held, kind) for (_, kind), held in messages.items()]

    def _finish_gathering(
        self,
        names: list[str],
        messages: list[Callable[[], dict[str, Tensor]]],
        tensor_shard: TensorShard | None,
    ) -> Iterator[tuple[str, Tensor]]:
        arrived = {name: tensor for finish in messages for name, tensor in finish().items()}

        def whole(name: str) -> Tensor:
            return tensor_shard.join(name, arrived[name]) if tensor_shard else arrived[name]

        for name in names:
            tensor, adapter = whole(name), f"{name}_adapter"
            if f"{adapter}.down" in arrived:
                tensor = merge(tensor, whole(f"{adapter}.down"), whole(f"{adapter}.up"), self.lora)
            yield name, tensor

    def export(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder, in the dtype of the model that training started from.

        The first rank writes each parameter as it is gathered.
        """
        parameters = self.whole_parameters()
        try:
            if self.place.group.rank() == 0:
                options = {"like": self.folder, "dtype": stored_dtype(self.folder)}
                head = "language" if self.model.value_head is None else "value"
                save_parameters(folder, parameters, self.config, head=head, **options)
        finally:  # the other ranks gather all of them, whether or not writing has failed
            deque(parameters, maxlen=0)
        return Path(folder)

    def write_checkpoint(self, folder: str | Path) -> ShardRecord:
        """Write this rank's file: masters (with LoRA, adapters alone) and moments.

        Of several copies of the weights the first is written.
        """
        return write_shard(folder, self.place.group.rank(), self._written_pieces(), of=self.part)

    def start_checkpoint(self, folder: str | Path) -> None:
        """Like `write_checkpoint`, but of a copy, written beside what this rank does next."""
        pieces = {name: piece.copy() for name, piece in self._written_pieces().items()}
        rank = self.place.group.rank()
        options = {"of": self.part, "shows_progress": False}  # the bar is that of the next work
        self._checkpoint = _run_beside(partial(write_shard, folder, rank, pieces, **options))

    def finish_checkpoint(self) -> ShardRecord:
        """Wait until the copy is written."""
        return self._checkpoint.result()

    def _written_pieces(self) -> dict[str, Piece]:
        held = self._pieces() if self.place.copy == 0 else ()
        return {name: piece for name, piece, is_copy in held if not is_copy}

    def describe_checkpoint(self) -> dict[str, Any]:
        return {
            "architecture": self.config,
            "layout": {"ranks": self.place.group.size(), "tp": self.place.tp, "ep": self.place.ep},
            "kind": "adapter" if self.lora else "full",
            "progress": {
                self.part: {
                    "num_steps": self.num_steps,
                    "num_updates": self.optimizer.num_updates,
                }
            },
        }

    def verify_checkpoint(self, folder: str | Path) -> list[str]:
        """Problems of this rank's share of the files."""
        return verify(folder, self.place.group.rank(), self.place.group.size())

    def read_checkpoint(self, folder: str | Path) -> None:
        """Continue exactly as the ranks that wrote it would have, whatever their layout."""
        manifest = read_manifest(folder)
        check_architecture(manifest, self.config)
        kind = "adapter" if self.lora else "full"
        for copies in (False, True):
            wanted = {name: piece for name, piece, is_copy in self._pieces() if is_copy == copies}
            # `kind` describes the policy; a critic has no adapters.
            read_pieces(folder, wanted, kind=kind if self.part == "policy" else None)
        progress = manifest.state["progress"][self.part]
        self.num_steps = progress["num_steps"]
        self.optimizer.num_updates = progress["num_updates"]

    def _pieces(self) -> Iterator[tuple[str, Piece, bool]]:
        """All state that an update changes: name, this rank's rectangle, whether it is a copy."""
        for name, parameter in self.optimizer.parameters.items():
            shape = whole_shape(name, parameter, self.tensor_shard)
            tensors = {"model": local(parameter.detach())}
            tensors |= {moment: of[name] for moment, of in self.optimizer.moments.items()}
            for part in rectangles(name, parameter, self.tensor_shard):
                for what, tensor in tensors.items():
                    piece = Piece(part.of_local(self._readable(tensor)), part.offsets, shape)
                    yield f"{self.part}.{what}.{name}", piece, part.is_copy


def hold_outside(
    logprobs_R: Tensor, entropy_R: Tensor, micro: MicroBatch
) -> tuple[Tensor, Tensor, MicroBatch, Tensor]:
    """Tokens that were sampled but that top-k, top-p or min-p remove at the trainer's weights, now
    or before the first update, and a loss that they do not move.

    Their logprobs are -inf. The loss sees those of the engine instead, as constants: the ratio is
    1, there is no gradient, and nothing changes for the other tokens of their sample.
    """
    if micro.logprobs_R is None:
        raise UserError("a truncation needs the logprobs with which the tokens were sampled")
    outside_R = logprobs_R.isneginf()
    if micro.old_logprobs_R is not None:
        outside_R = outside_R | micro.old_logprobs_R.isneginf()
        old_R = micro.old_logprobs_R.where(~outside_R, micro.logprobs_R)
        micro = replace(micro, old_logprobs_R=old_R)
    logprobs_R = logprobs_R.where(~outside_R, micro.logprobs_R)
    return logprobs_R, entropy_R.where(~outside_R, entropy_R.detach()), micro, outside_R


def _run_beside(function: Callable[[], ShardRecord]) -> Future:
    """Run it in a thread that does not keep a process alive which ends for another reason."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _token_bar(batch: list[MicroBatch], label: str) -> ProgressBar:
    return ProgressBar(sum(len(micro.token_ids_T) for micro in batch), label, "tokens")


def note_numbers(
    trainer: RoleHandle, batch: list[MicroBatch], sequences: Sequence[TrainingSequence]
) -> None:
    """Note in the sequences of a batch what NOTED names and the step on it computed, unless an
    earlier step has."""
    replicas = trainer.noted.options(collect="replicas")()
    micros = [micro for replica in replicas for micro in replica]
    for field in micros[0]:
        values = unpack(batch, [micro[field] for micro in micros], sequences)
        for sequence, numbers in zip(sequences, values, strict=True):
            setattr(sequence, field, getattr(sequence, field) or numbers)
