"""How a model in training is sharded: tensor parallel within a replica, FSDP2 over replicas.

Tensor-parallel modules already have local sizes (`models/tensor_parallel.py`); FSDP2 shards these
again over the data-parallel ranks, or over those of one machine, with a copy on every other (HSDP).
So each rank holds a rectangle of every parameter.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from roll_lite.models.mlp import ExpertWeights
from roll_lite.models.tensor_parallel import Part, TensorShard, all_gather_single, cut_dimension
from roll_lite.models.transformer import Checkpointing, Transformer

UNIT_PARAMETERS = 2**25
"""The most that FSDP gathers at once, unless one block has more."""
BUCKET_PARAMETERS = {"cuda": 2**26, "cpu": 2**20}  # a CPU's caches are small
"""The most that travel in one message, unless one tensor has more."""


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    checkpointing: Checkpointing = "none",
    expert_mesh: DeviceMesh | None = None,
) -> Transformer:
    """FSDP2 over the last dimension of the mesh, with copies along the first of two.

    Experts that ranks of `mesh` hold different ones of are cut over `expert_mesh` instead.
    Parameters are gathered in `compute_dtype` unit by unit, except frozen ones that are whole on
    every rank: these stay where they are.
    Gradients are summed over ranks, not averaged: loss weights are normalised over the whole batch.
    """
    # Inputs are not cast: rotation is in fp32, as in the engine.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )

    def cut(unit: nn.Module | list[nn.Module], mesh: DeviceMesh) -> None:
        options = {"shard_placement_fn": _placement(num_shards(mesh)), "ignored_params": staying}
        fully_shard(unit, mesh=mesh, mp_policy=policy, **options)
        modules = unit if isinstance(unit, list) else [unit]
        for module in modules if mesh.size() > 1 else ():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way

    staying = {p for p in model.parameters() if num_shards(mesh) == 1 and not p.requires_grad}
    for block in model.blocks:
        block.checkpointing = checkpointing
    if expert_mesh is not None:
        for module in [m for m in model.modules() if isinstance(m, ExpertWeights)]:
            cut(module, expert_mesh)
    for unit in (*_units(model, staying), model):
        cut(unit, mesh)
    return model


def _placement(num_shards: int) -> Callable[[nn.Parameter], Shard]:
    def placement(parameter: nn.Parameter) -> Shard:
        """The first dimension that divides evenly, else dimension 0 (unevenly)."""
        sizes = enumerate(parameter.shape)
        return Shard(next((d for d, size in sizes if size % num_shards == 0), 0))

    return placement


def _units(model: Transformer, staying: set[nn.Parameter]) -> list[list[nn.Module]]:
    """Blocks that are gathered together: with many small ones, the host would be the bottleneck."""
    blocks = list(model.blocks)
    size = max(sum(p.numel() for p in block.parameters() if p not in staying) for block in blocks)
    count = max(1, UNIT_PARAMETERS // max(1, size))
    return [blocks[start : start + count] for start in range(0, len(blocks), count)]


def num_shards(mesh: DeviceMesh) -> int:
    """Shards that weights are cut into; the mesh's first dimension of two holds copies."""
    return mesh.size(mesh.ndim - 1)


def rectangles(name: str, parameter: DTensor, tensor_shard: TensorShard | None) -> list[Part]:
    """The parts of a parameter that a rank holds after `shard`; copies come last."""
    shape = parameter.shape
    held = _held(parameter)
    parts = tensor_shard.parts(name, shape) if tensor_shard else [Part.whole(shape)]
    return [part.within(*held) for part in parts]


def _held(parameter: DTensor) -> tuple[int, int, int]:
    """The dimension that FSDP has cut, and this rank's first and last index there."""
    placement = parameter.placements[-1]
    mesh = parameter.device_mesh
    size = parameter.shape[placement.dim]
    chunk = -(-size // num_shards(mesh))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * chunk, size)
    return placement.dim, start, min(start + chunk, size)


def local(parameter: Tensor) -> Tensor:
    """This rank's shard."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole_shape(name: str, parameter: DTensor, tensor_shard: TensorShard | None) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    return tensor_shard.whole_shape(name, shape) if tensor_shard else shape


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, as many at a time as travel together."""
    bucket, size = {}, 0
    for name, tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET_PARAMETERS[device.type]:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.numel()
    yield bucket


@torch.no_grad()
def start_gathering(
    parameters: dict[str, DTensor | Tensor], dtype: torch.dtype | None = None
) -> Callable[[], dict[str, Tensor]]:
    """Whole parameters over FSDP's ranks, cast before communication, all in one message.

    A collective call. The result waits for the message; start the next one before that. Where one
    rank holds all, these are the parameters themselves.
    """
    first = next(iter(parameters.values()))
    dtype = dtype or first.dtype
    num_ranks = num_shards(first.device_mesh) if isinstance(first, DTensor) else 1
    if num_ranks == 1:  # DTensor overhead exceeds the copy
        held = {name: local(parameter) for name, parameter in parameters.items()}
        return lambda: {name: tensor.to(dtype) for name, tensor in held.items()}
    padded = [_padded_shape(parameter, num_ranks) for parameter in parameters.values()]
    sizes = [shape.numel() for shape in padded]
    mesh = first.device_mesh
    shards = [parameter.to_local() for parameter in parameters.values()]
    device = shards[0].device
    mine = torch.empty(sum(sizes), dtype=dtype, device=device)
    views = [x.view(shape) for x, shape in zip(mine.split(sizes), padded, strict=True)]
    filled = [(v[_corner(x)], x) for v, x in zip(views, shards, strict=True) if x.numel()]
    if filled:
        torch._foreach_copy_(*map(list, zip(*filled, strict=True)))
    gathered = torch.empty(num_ranks * len(mine), dtype=dtype, device=device)
    work = all_gather_single(gathered, mine, group=mesh.get_group(mesh.ndim - 1), async_op=True)

    def finish() -> dict[str, Tensor]:
        work.wait()
        wholes = {}
        targets, sources = [], []
        ranks = [row.split(sizes) for row in gathered.view(num_ranks, -1)]
        for i, (name, parameter) in enumerate(parameters.items()):
            dimension = parameter.placements[-1].dim
            wholes[name] = torch.empty(parameter.shape, dtype=dtype, device=device)
            parts = wholes[name].split(padded[i][dimension], dimension)
            targets += parts  # fewer than ranks, if the last ones have nothing
            sources += [ranks[r][i].view(padded[i])[_corner(part)] for r, part in enumerate(parts)]
        torch._foreach_copy_(targets, sources)
        return wholes

    return finish


def whole(name: str, parameter: DTensor, tensor_shard: TensorShard | None) -> Tensor:
    """One whole parameter, on every rank. A collective call."""
    tensor = start_gathering({name: parameter})()[name]
    return tensor_shard.join(name, tensor) if tensor_shard else tensor


def _padded_shape(parameter: DTensor, num_ranks: int) -> torch.Size:
    """Shape of the largest shard."""
    shape = list(parameter.shape)
    dimension = parameter.placements[-1].dim
    shape[dimension] = -(-shape[dimension] // num_ranks)
    return torch.Size(shape)


def _corner(shard: Tensor) -> tuple[slice, ...]:
    """Where a shard lies in a padded one."""
    return tuple(slice(size) for size in shard.shape)


@torch.no_grad()
def sum_copied_gradients(
    parameters: dict[str, nn.Parameter], tensor_shard: TensorShard | None
) -> None:
    """Give each copy of a key/value head the gradient of all: copies stay equal."""
    for name, parameter in parameters.items() if tensor_shard else ():
        if keys := tensor_shard.shared_keys(name, parameter.shape):
            grad = keys.within(*_held(parameter)).of_local(parameter.grad.to_local())
            if grad.numel():
                grad.copy_(tensor_shard.sum_over_copies(grad))


def gradient_norm(
    parameters: dict[str, nn.Parameter],
    tensor_shard: TensorShard | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """The norm of the whole gradient: every part of it counts once."""
    grads, counts = [], []
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh
        num_copies = mesh.size() // num_shards(mesh)
        grad = parameter.grad.to_local()
        if tensor_shard:
            grad = rectangles(name, parameter, tensor_shard)[0].of_local(grad)  # without copies
            if cut_dimension(name) is None:
                num_copies *= tensor_shard.size
        grads.append(grad)
        counts.append(1 / num_copies)
    norms = torch.stack(torch._foreach_norm(grads))
    total = (norms.square() * norms.new_tensor(counts)).sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()
