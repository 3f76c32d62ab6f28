"""The engine's weights: in memory that can be given back, and written in place."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from roll_lite.engine.memory import Memory
from roll_lite.models.transformer import Transformer

_HOMES: WeakKeyDictionary[Transformer, list[Memory]] = WeakKeyDictionary()


@torch.no_grad()
def take_over(model: Transformer) -> list[Memory]:
    """Move the parameters, block by block, to memory that can be given back.

    Engines of one model share that memory.
    """
    if not _is_at_home(model):
        rest = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
        parts = [*(list(block.parameters()) for block in model.blocks), rest]
        _HOMES[model] = [_move(part, model.embedding.device) for part in parts]
    return _HOMES[model]


def check_fit(model: Transformer, shapes: dict[str, torch.Size]) -> None:
    """Refuse weights that are not exactly the model's, by name."""
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    if wanted != shapes:
        differing = sorted(name for name, _ in wanted.items() ^ shapes.items())
        raise ValueError(f"new weights do not fit the model: {', '.join(dict.fromkeys(differing))}")


def write(model: Transformer, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights in place, each as it comes."""
    parameters, shapes = dict(model.named_parameters()), {}
    for name, tensor in weights:
        shapes[name] = tensor.shape
        if name in parameters and parameters[name].shape == tensor.shape:
            parameters[name].copy_(tensor)
    check_fit(model, shapes)


def _move(parameters: list[nn.Parameter], device: torch.device) -> Memory:
    starts = np.cumsum([0] + [-(-p.nbytes // 256) * 256 for p in parameters]).tolist()
    memory = Memory(starts[-1], device)
    for parameter, start in zip(parameters, starts[:-1], strict=True):
        place = memory.tensor(tuple(parameter.shape), parameter.dtype, start)
        place.copy_(parameter)
        parameter.data = place
    return memory


def _is_at_home(model: Transformer) -> bool:
    addresses = {memory.address for memory in _HOMES.get(model, ())}
    return all(p.untyped_storage().data_ptr() in addresses for p in model.parameters())
