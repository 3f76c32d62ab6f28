"""Weights from the trainer to the engine: the only file that knows both."""

import time

import torch
from torch import Tensor

from roll_lite.cluster.role import RoleHandle
from roll_lite.engine.engine import Engine
from roll_lite.train.trainer import Trainer


def sync_weights(
    trainer: Trainer | RoleHandle, engine: Engine, version: int | None = None
) -> dict[str, float]:
    """Give the engine the trainer's weights as a policy version, and check them.

    The version is the number of updates where none is given; a handle cannot tell that number.

    Raises when the engine does not hold, bit for bit, what the trainer sent: a sync that corrupts
    the policy would otherwise show as nothing but slow learning.
    """
    start = time.perf_counter()
    dtype = engine.model.embedding.dtype
    sent = {name: tensor.to(dtype) for name, tensor in trainer.state().items()}
    version = trainer.num_steps if version is None else version
    engine.load_weights(sent.items(), version)
    held = dict(engine.model.named_parameters())
    if broken := [name for name in sent if not same_bits(sent[name], held[name])]:
        raise RuntimeError(
            f"weight sync of version {version} failed: the engine does not hold what was "
            f"sent for {', '.join(broken)}"
        )
    return {"time/sync": time.perf_counter() - start}


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.detach().view(bits), b.detach().view(bits))
