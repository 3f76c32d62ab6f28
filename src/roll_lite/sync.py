"""Weights from the trainer to the engine: the only file that knows both."""

import time

import torch
from torch import Tensor

from roll_lite.engine.engine import Engine
from roll_lite.train.trainer import Trainer


def sync_weights(trainer: Trainer, engine: Engine) -> dict[str, float]:
    """Give the engine the trainer's weights, as policy version = number of updates, and check them.

    Raises when the engine does not hold, bit for bit, what the trainer sent: a sync that corrupts
    the policy would otherwise show as nothing but slow learning.
    """
    start = time.perf_counter()
    dtype = engine.model.embedding.dtype
    sent = {name: tensor.to(dtype) for name, tensor in trainer.state().items()}
    engine.load_weights(sent.items(), trainer.num_steps)
    if checksum(sent) != checksum(dict(engine.model.named_parameters())):
        raise RuntimeError(
            f"weight sync of version {trainer.num_steps} failed: checksums of trainer and engine "
            "differ"
        )
    return {"time/sync": time.perf_counter() - start}


@torch.no_grad()
def checksum(state: dict[str, Tensor]) -> int:
    """Sum over all bits of the parameters, each weighed by its tensor's place."""
    total = torch.zeros((), dtype=torch.int64, device=next(iter(state.values())).device)
    for place, name in enumerate(sorted(state), start=1):
        tensor = state[name]
        bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        total += bits.sum(dtype=torch.int64) * place
    return total.item()
