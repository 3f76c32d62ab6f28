"""Hugging Face model folders, written for transformers to load.

A folder appears by rename, so it is never seen half-written. Tensors are written as they come, so
that a model which is gathered from several ranks is never whole in memory. No pickle is written.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from roll_lite.models.config import LoraOptions, ModelConfig, read_hf_config
from roll_lite.models.hf import INDEX, hf_stream, tensor_slices
from roll_lite.models.tensor_files import content, header
from roll_lite.models.tensor_parallel import is_of_experts
from roll_lite.models.transformer import Head, Transformer

SHARD_BYTES = 5 * 2**30
COMPANION_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip


def save_model(folder: str | Path, model: Transformer, *, like: str | Path) -> Path:
    """Write the model, with config and tokenizer of the folder that it was loaded from (`like`)."""
    head = "language" if model.value_head is None else "value"
    options = {"like": like, "dtype": model.embedding.dtype, "head": head}
    return save_parameters(folder, model.named_parameters(), model.config, **options)


def save_parameters(
    folder: str | Path,
    parameters: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    *,
    like: str | Path,
    dtype: torch.dtype,
    head: Head = "language",
) -> Path:
    """Write whole parameters, by our names and in the model's order, as a Hugging Face folder."""
    hf_config = read_hf_config(like)
    if head == "value":  # the class in transformers that has a scalar `score`
        names = [
            n.replace("ForCausalLM", "ForSequenceClassification")
            for n in hf_config.get("architectures") or ()
        ]
        hf_config |= {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}

    def add_companions(target: Path) -> None:
        for name in COMPANION_FILES:
            if (Path(like) / name).exists():
                shutil.copy(Path(like) / name, target / name)

    slices = tensor_slices(config, head, _layout(hf_config))
    with torch.device("meta"):
        expected = Transformer(config, head).to(dtype).named_parameters()
    expected = dict(hf_stream(expected, slices))
    return write_folder(folder, hf_config, expected, hf_stream(parameters, slices), add_companions)


def _layout(hf_config: dict) -> str:
    return "mixtral" if hf_config["model_type"] == "mixtral" else "qwen"


def save_adapter(
    folder: str | Path, state: dict[str, Tensor], lora: LoraOptions, config: ModelConfig,
    *, base: str | Path,
) -> Path:  # fmt: skip
    """Write adapters, by our names, as a folder that PEFT loads on the model in `base`.

    Projections that share a `down` here get a copy of it each. Experts are modules of their own, as
    in the folder.
    """
    tensors, modules = {}, []
    for part in tensor_slices(config, layout=_layout(read_hf_config(base))):
        down, up = (state.get(f"{part.parameter}_adapter.{half}") for half in ("down", "up"))
        if down is None:
            continue
        if is_of_experts(part.parameter):
            down = down[part.index[0]]
        module = part.hf_name.removesuffix(".weight")
        modules.append(module.rpartition(".")[2])
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = down.clone()
        tensors[f"{name}.lora_B.weight"] = up[part.index].reshape(-1, lora.rank)
    peft_config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(set(modules)), "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(peft_config, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text)
    return folder


def write_folder(
    folder: str | Path,
    hf_config: dict,
    expected: dict[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    add_files: Callable[[Path], object],
) -> Path:
    """Write a Hugging Face folder under a temporary name, then rename it.

    `tensors` come in the order of `expected`, which has their shapes and the dtype of the files.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*-*"):  # by a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        dtype = str(next(iter(expected.values())).dtype).removeprefix("torch.")
        hf_config = {k: v for k, v in hf_config.items() if k != "torch_dtype"} | {"dtype": dtype}
        (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        _write_tensors(partial, expected, tensors)
        add_files(partial)
        for file in partial.iterdir():
            file.chmod(0o644)  # copies may have another mode
            with file.open("rb") as handle:  # on disk before the rename
                os.fsync(handle.fileno())
        _replace_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _replace_folder(new: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)
    else:
        new.rename(folder)


def _write_tensors(
    folder: Path, expected: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """One file, or shards of at most SHARD_BYTES with an index; a tensor at a time."""
    files = _files_of(expected)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in expected.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    tensors = iter(tensors)
    for file, names in files.items():
        with (folder / file).open("wb") as out:
            out.write(header({name: expected[name] for name in names}))
            for name in names:
                found, tensor = next(tensors)
                assert (found, tensor.shape) == (name, expected[name].shape), (found, name)
                out.write(content(tensor.to(expected[name].dtype)))


def _files_of(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """File -> the tensors that it holds."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > SHARD_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": p for i, p in enumerate(parts, 1)}
