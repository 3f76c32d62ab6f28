"""A model over the ranks of a role that reads packed batches: logprobs, values, top-k logprobs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.cluster.places import Place
from roll_lite.cluster.role import Method, RoleHandle, split
from roll_lite.engine.arena import move_to_arena
from roll_lite.models.config import LoraOptions
from roll_lite.models.context_parallel import ContextShard
from roll_lite.models.fsdp import local, shard
from roll_lite.models.hf import open_model
from roll_lite.models.logprobs import ALL
from roll_lite.models.lora import add_adapters
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Checkpointing, Head
from roll_lite.profiling import Profiled
from roll_lite.progress import ProgressBar
from roll_lite.train.batch import MicroBatch, pack, unpack
from roll_lite.train.offload import Offload
from roll_lite.train.recorded_experts import RecordedExperts
from roll_lite.train.sequences import TrainingSequence

SEQUENCES_PER_CALL = 512  # bounds what a call over ranks carries


class Scorer(Profiled):
    """A frozen model in the compute dtype, sharded: a reference, teacher or reward model."""

    replays_experts = False
    """Whether tokens have the experts that are recorded: the policy's alone, for its own tokens."""
    _differing_R: Tensor | None = None
    """Of the rows of the last forward pass, the layers with other experts than recorded."""

    def __init__(
        self,
        folder: str | Path,
        *,
        place: Place,
        temperature: float = 1.0,
        head: Head = "language",
    ):
        """`temperature` is that of sampling, so that logprobs are comparable.

        A folder like shape:qwen3-0.6b means random weights of that shape, for benchmarks.
        """
        self._build(folder, place, temperature, head, place.dtype)
        self.model.requires_grad_(False)

    def _build(
        self,
        folder: str | Path,
        place: Place,
        temperature: float,
        head: Head,
        dtype: torch.dtype,
        checkpointing: Checkpointing = "none",
        lora: LoraOptions | None = None,
        in_arena: bool = False,
    ) -> None:
        self.folder = folder
        self.place = place
        self.device = place.device
        self.temperature = temperature
        self.truncation = ALL
        self.replicas = place.mesh["dp"].get_group()
        shard_of_rank = TensorShard.of(place.mesh["tp"].get_group(), place.ep, place.ep_group)
        self.context_shard = ContextShard.of(place.mesh["cp"].get_group()) if place.cp > 1 else None
        options = {"device": place.device, "dtype": dtype, "head": head, "shard": shard_of_rank}
        model = open_model(folder, **options)
        if lora:
            add_adapters(model, lora)
        self._arenas = move_to_arena(model) if in_arena else []
        self.config = model.config
        self.tensor_shard = model.layout
        meshes = {"mesh": place.shards, "expert_mesh": place.expert_shards}
        self.model = shard(model, compute_dtype=place.dtype, checkpointing=checkpointing, **meshes)
        self._offload: Offload | None = None

    def max_positions(self) -> int:
        """The most tokens that the model reads at once."""
        return self.config.max_positions

    @torch.no_grad()
    def logprobs(self, batch: list[MicroBatch]) -> list[Tensor]:
        """Logprobs of each micro-batch's targets."""
        return self._read(batch, lambda micro: self._forward(micro, micro.targets_R)[0].cpu())

    @torch.no_grad()
    def values(self, batch: list[MicroBatch]) -> list[Tensor]:
        """The value head's output at each row of each micro-batch."""
        if self.model.value_head is None:
            raise UserError("values need a model with a value head: make the role head='value'")
        return self._read(batch, lambda micro: self._forward(micro, None)[0].cpu())

    @torch.no_grad()
    def top_logprobs(
        self, batch: list[MicroBatch], k: int, num_entries: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Ids and logprobs, each (R, k), of the k likeliest tokens at each row.

        `num_entries` restricts the vocabulary to that of a smaller student.
        """

        def read(micro: MicroBatch) -> tuple[Tensor, Tensor]:
            ids_RK, logprobs_RK = self._forward(micro, None, k, num_entries)
            return ids_RK.cpu(), logprobs_RK.cpu()

        return self._read(batch, read)

    def _read(self, batch: list[MicroBatch], function) -> list:
        try:
            return [function(micro.to(self.device)) for micro in batch]
        finally:
            self.model.reshard()  # there is no backward pass to free the gathered root parameters

    def offload(self) -> None:
        """Move weights and optimizer to host memory until `reload`, to free the device."""
        if self._offload is None:
            self._offload = Offload(*self._state_tensors())
        self._offload.out()

    def reload(self) -> None:
        if self._offload is not None:
            self._offload.back()

    @property
    def is_offloaded(self) -> bool:
        return self._offload is not None and self._offload.is_out

    def _state_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's tensors that updates change, and those that nothing changes."""
        return [], [local(p.detach()) for p in self.model.parameters()]

    def _check_here(self) -> None:
        if self.is_offloaded:
            raise RuntimeError(f"the weights of {self.place.role} are offloaded; call reload()")

    def _forward(self, micro: MicroBatch, targets: Tensor | None, *top: int | None) -> tuple:
        self._check_here()
        if micro.max_seqlen > self.config.max_positions:
            raise UserError(
                f"a sequence of {micro.max_seqlen} tokens exceeds the model's "
                f"{self.config.max_positions} positions"
            )
        if self.context_shard:
            return self._forward_over_ranks(micro, targets, *top)
        choose = self._recorded_experts(micro)
        out = self.model(
            micro.token_ids_T,
            micro.positions_T,
            micro.attention,
            micro.rows_R,
            targets,
            self.temperature,
            *top,
            truncation=self.truncation,
            is_whole_R=micro.observed_R,
            choose=choose,
        )
        self._differing_R = choose and choose.differing_T[micro.rows_R]
        return out if isinstance(out, tuple) else (out,)

    def _recorded_experts(
        self, micro: MicroBatch, places: Tensor | slice = slice(None)
    ) -> RecordedExperts | None:
        is_used = self.replays_experts and micro.experts_TK is not None
        return RecordedExperts(micro, self.config, places) if is_used else None

    def _forward_over_ranks(
        self, micro: MicroBatch, targets: Tensor | None, *top: int | None
    ) -> tuple:
        """Every rank reads its part of the tokens, and gets the results of all rows."""
        tokens = micro.token_ids_T, micro.positions_T, micro.cu_seqlens
        part = self.context_shard.cut(*tokens, micro.rows_R)
        choose = self._recorded_experts(micro, part.places_L)
        out = self.model(
            part.token_ids_L,
            part.positions_L,
            part.attention,
            part.rows,
            None if targets is None else targets[part.chosen],
            self.temperature,
            *top,
            truncation=self.truncation,
            is_whole_R=None if micro.observed_R is None else micro.observed_R[part.chosen],
            choose=choose,
        )
        results = out if isinstance(out, tuple) else (out,)
        results += (choose.differing_T[part.rows],) if choose else ()
        rows = [self.context_shard.join_rows(x, part, len(micro.rows_R)) for x in results]
        self._differing_R = rows.pop() if choose else None
        return tuple(rows)


def score_over_ranks(
    method: Method, sequences: Sequence[TrainingSequence], tokens_per_microbatch: int
) -> list[list[float]]:
    """A number for each token of each sequence, 0 where there is no loss.

    `method` is `logprobs` or `values` of a role.
    """
    scores = []
    num_shards = method.role.num_replicas
    with ProgressBar(len(sequences), method.role.name, "sequences") as bar:
        for start in range(0, len(sequences), SEQUENCES_PER_CALL):
            part = sequences[start : start + SEQUENCES_PER_CALL]
            batch = pack(part, tokens_per_microbatch, num_shards=num_shards)
            rows = [rows_R for replica in method(split(batch)) for rows_R in replica]
            scores += unpack(batch, rows, part)
            bar.advance(len(part))
    return scores


def pack_taught(
    sequences: Sequence[TrainingSequence],
    tokens_per_microbatch: int,
    student: RoleHandle,
    teacher: RoleHandle,
    k: int,
    vocab_size: int,
) -> list[MicroBatch]:
    """Micro-batches with the teacher's k likeliest tokens of the student's vocabulary."""
    # A multiple of both: every replica of the student and of the teacher gets equally many.
    num_shards = math.lcm(student.role.num_replicas, teacher.role.num_replicas)
    batch = pack(sequences, tokens_per_microbatch, num_shards=num_shards)
    top = chain.from_iterable(teacher.top_logprobs(split(batch), k, vocab_size))
    return [
        replace(micro, teacher_ids_RK=ids_RK, teacher_logprobs_RK=logprobs_RK)
        for micro, (ids_RK, logprobs_RK) in zip(batch, top, strict=True)
    ]
