"""A checkpoint's model as a Hugging Face folder, without the ranks that wrote it."""

from pathlib import Path

import torch

from roll_lite.models.config import read_config
from roll_lite.models.hf import save_state, stored_dtype
from roll_lite.models.transformer import Transformer
from roll_lite.train.checkpoint import read_pieces, verify
from roll_lite.train.manifest import check_architecture, read_manifest
from roll_lite.train.shards import DamagedError, Piece

MASTERS = "policy.model."


def export_checkpoint(checkpoint: str | Path, base: str | Path, folder: str | Path) -> Path:
    """Write the folder in the dtype of `base`, the one that training started from."""
    if problems := verify(checkpoint):
        raise DamagedError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    manifest, config = read_manifest(checkpoint), read_config(base)
    check_architecture(manifest, config)
    if manifest.kind == "adapter":
        raise ValueError(
            f"{checkpoint} holds adapters alone; use the model that the run exported at its end, "
            "or resume the run with steps at the checkpoint's, which exports it"
        )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(config).named_parameters()}
    wanted = {MASTERS + name: Piece.whole(torch.empty(shape)) for name, shape in shapes.items()}
    read_pieces(checkpoint, wanted)
    dtype = stored_dtype(base)
    state = {name: wanted[MASTERS + name].tensor.to(dtype) for name in shapes}
    return save_state(folder, state, config, like=base)
