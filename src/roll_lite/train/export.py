"""Export a checkpoint of a run as a Hugging Face folder; adapters are merged.

roll-lite export runs/RUN/checkpoints/step-00000100 OUT
roll-lite export runs/RUN/checkpoints/step-00000100 OUT --adapter      # LoRA's alone, for PEFT
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.hub import local_folder, snapshot_name
from roll_lite.models.config import LoraOptions, ModelConfig, lora_options, read_config
from roll_lite.models.hf import load_model, stored_dtype
from roll_lite.models.hf_write import save_adapter, save_parameters
from roll_lite.models.lora import add_adapters, is_of_adapter, merge
from roll_lite.models.transformer import Transformer
from roll_lite.train.checkpoint_folders import (
    MANIFEST,
    Manifest,
    check_architecture,
    read_manifest,
    read_pieces,
    verify,
)
from roll_lite.train.shards import DamagedError, Piece

MASTERS = "policy.model."


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("roll-lite export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="like RUN_DIR/checkpoints/step-00000100")
    parser.add_argument("out", help="folder to write, which must not exist")
    help = "folder or name on the Hugging Face Hub of the model that training started from, if "
    parser.add_argument("--model", help=f"{help}its folder has moved")
    help = "write the adapters alone, as a folder of PEFT, instead of merging them"
    parser.add_argument("--adapter", action="store_true", help=help)
    options = parser.parse_args(arguments)
    try:
        if Path(options.out).exists():
            raise UserError(f"{options.out} exists; remove it, or name another folder")
        base = base_model(options.checkpoint, options.model, is_merged=not options.adapter)
        export = export_adapter if options.adapter else export_checkpoint
        print(f"wrote {export(options.checkpoint, base, options.out)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def base_model(checkpoint: str | Path, model: str | None = None, *, is_merged: bool = True) -> str:
    """The model that training started from: `model`, or what the checkpoint names."""
    manifest = _manifest(checkpoint)
    needs_weights = is_merged and manifest.kind == "adapter"
    if model:
        return local_folder(model, with_weights=needs_weights)
    folder = manifest.state["controller"]["fixed"]["model"]
    if snapshot_name(folder):
        return local_folder(folder, with_weights=needs_weights)
    if not Path(folder).is_dir():
        raise UserError(
            f"{checkpoint} was trained from the model {folder}, which is not here; name it with "
            "--model, or start in the folder where training was started"
        )
    return folder


def _manifest(checkpoint: str | Path) -> Manifest:
    if not (Path(checkpoint) / MANIFEST).is_file():
        raise UserError(
            f"{checkpoint} is not the folder of a checkpoint: it has no {MANIFEST}; name one like "
            "RUN_DIR/checkpoints/step-00000100"
        )
    return read_manifest(checkpoint)


def check_checkpoint(checkpoint: str | Path, base: str | Path) -> Manifest:
    """Refuse a folder that is no checkpoint, or a checkpoint of another model than `base`."""
    manifest = _manifest(checkpoint)
    check_architecture(manifest, read_config(base))
    if manifest.kind == "adapter":
        _check_base(checkpoint, manifest, Path(base))
    return manifest


def _check_base(checkpoint: str | Path, manifest: Manifest, base: Path) -> None:
    """Adapters fit only the weights they were trained on. A moved folder is compared by name."""
    stored = Path(manifest.state["controller"]["fixed"]["model"])
    is_same = stored.samefile(base) if stored.exists() else stored.name == base.name
    if not is_same:
        raise UserError(
            f"{checkpoint} holds adapters of the model {stored}, not of {base}; name that model"
        )


def export_checkpoint(checkpoint: str | Path, base: str | Path, folder: str | Path) -> Path:
    """Write the folder in the dtype of `base`, the model that training started from."""
    weights = checkpoint_weights(checkpoint, base)
    options = {"like": base, "dtype": stored_dtype(base)}
    return save_parameters(folder, weights, read_config(base), **options)


def export_adapter(checkpoint: str | Path, base: str | Path, folder: str | Path) -> Path:
    """Write the adapters alone, in fp32, as PEFT reads them on top of `base`."""
    adapters, lora = checkpoint_adapters(checkpoint, base)
    return save_adapter(folder, adapters, lora, read_config(base), base=base)


def checkpoint_adapters(
    checkpoint: str | Path, base: str | Path
) -> tuple[dict[str, Tensor], LoraOptions]:
    """The policy's adapters in fp32, on the weights of `base`."""
    manifest, config = check_checkpoint(checkpoint, base), read_config(base)
    if manifest.kind != "adapter":
        raise UserError(f"{checkpoint} has no adapters: the run trained all weights, without LoRA")
    if problems := verify(checkpoint):
        raise DamagedError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    return _adapters(checkpoint, manifest, config)


def checkpoint_weights(checkpoint: str | Path, base: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The policy's masters in fp32, adapters merged, one after the other; `base` is what training
    started from."""
    manifest, config = check_checkpoint(checkpoint, base), read_config(base)
    if problems := verify(checkpoint):
        raise DamagedError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    if manifest.kind == "adapter":
        return _merged(checkpoint, manifest, config, base)
    with torch.device("meta"):
        model = Transformer(config)
    names = model.named_parameters()
    return ((name, _read(checkpoint, {name: p}, manifest)[name]) for name, p in names)


def _merged(
    checkpoint: str | Path, manifest: Manifest, config: ModelConfig, base: str | Path
) -> Iterator[tuple[str, Tensor]]:
    """The base's weights with the checkpoint's adapters merged in."""
    adapters, options = _adapters(checkpoint, manifest, config)
    model = load_model(base, dtype=stored_dtype(base))
    for name, parameter in model.named_parameters():
        weight = parameter.detach().float()
        if (down := adapters.get(f"{name}_adapter.down")) is not None:
            weight = merge(weight, down, adapters[f"{name}_adapter.up"], options)
        yield name, weight


def _adapters(
    checkpoint: str | Path, manifest: Manifest, config: ModelConfig
) -> tuple[dict[str, Tensor], LoraOptions]:
    fixed = manifest.state["controller"]["fixed"]
    options = lora_options(fixed["lora_rank"], fixed["lora_alpha"], tuple(fixed["lora_targets"]))
    with torch.device("meta"):
        model = Transformer(config)
        add_adapters(model, options)
    adapters = {n: p for n, p in model.named_parameters() if is_of_adapter(n)}
    return _read(checkpoint, adapters, manifest), options


def _read(checkpoint: str | Path, like: dict[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    wanted = {MASTERS + name: Piece.whole(torch.empty(p.shape)) for name, p in like.items()}
    read_pieces(checkpoint, wanted, kind=manifest.kind)
    return {name: wanted[MASTERS + name].tensor for name in like}
