"""How a model is spread over ranks."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from roll_lite.models.transformer import Transformer


def shard(model: Transformer, mesh: DeviceMesh, compute_dtype: torch.dtype) -> Transformer:
    """FSDP2 over the mesh: fp32 masters in shards, gathered block by block in `compute_dtype`."""
    # What a block gets stays as it is: its rotation is in fp32, as in the engine.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
