"""Hugging Face model folders: read into the fused layout, and written for transformers to load.

A folder appears by rename, so it is never seen half-written. Pickle is neither read nor written.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.files import check_is_file, read_json_object
from roll_lite.models.config import (
    SHAPE,
    LoraOptions,
    ModelConfig,
    read_config,
    read_hf_config,
)
from roll_lite.models.tensor_parallel import TensorShard, is_of_experts
from roll_lite.models.transformer import Head, Transformer, random_model
from roll_lite.progress import ProgressBar

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30
FLOATS = ("F64", "F32", "F16", "BF16")
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # old Llama folders store what the config implies
COMPANION_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip


class CheckpointError(UserError):
    """The tensors of a model folder do not match its config.json."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One Hugging Face tensor, and which slice of our parameter it is."""

    hf_name: str
    hf_shape: tuple[int, ...]
    parameter: str
    index: tuple = ()
    """Into the parameter; the slice has the same numbers in the same order as the HF tensor."""


def tensor_slices(
    config: ModelConfig, head: Head = "language", layout: str = "qwen"
) -> list[TensorSlice]:
    """Every tensor of a folder of this shape, in file order; `layout` is of its experts."""
    H, V = config.hidden_size, config.vocab_size
    slices = [TensorSlice("model.embed_tokens.weight", (V, H), "embedding")]
    slices += [
        TensorSlice(f"model.layers.{layer}.{hf_name}", shape, f"blocks.{layer}.{parameter}", index)
        for layer in range(config.num_layers)
        for hf_name, shape, parameter, index in _block_slices(config, layer, layout)
    ]
    slices.append(TensorSlice("model.norm.weight", (H,), "norm.weight"))
    if head == "value":
        slices.append(TensorSlice("score.weight", (1, H), "value_head"))
    elif not config.tied_head:
        slices.append(TensorSlice("lm_head.weight", (V, H), "lm_head"))
    return slices


Slice = tuple[str, tuple[int, ...], str, tuple]
"""The fields of TensorSlice, with names relative to a block."""


def _block_slices(config: ModelConfig, layer: int, layout: str) -> Iterator[Slice]:
    H, D = config.hidden_size, config.head_dim
    K, G = config.num_kv_heads, config.group_size
    yield "input_layernorm.weight", (H,), "attention_norm.weight", ()
    yield "post_attention_layernorm.weight", (H,), "mlp_norm.weight", ()
    yield "self_attn.o_proj.weight", (H, K * G * D), "attention.out", ()
    if layer in config.sparse_layers:
        yield from _expert_slices(config, layout)
    else:
        yield from _mlp_slices("mlp", H, config.intermediate_size)
    for name, heads, rows in (("q", K * G, slice(0, G)), ("k", K, G), ("v", K, G + 1)):
        index = (slice(None), rows)
        projection = f"self_attn.{name}_proj"
        yield f"{projection}.weight", (heads * D, H), "attention.qkv", index
        if config.qkv_bias:
            yield f"{projection}.bias", (heads * D,), "attention.qkv_bias", index
        if config.qk_norm and name != "v":
            yield f"self_attn.{name}_norm.weight", (D,), f"attention.{name}_norm.weight", ()


def _mlp_slices(name: str, H: int, F: int, ours: str = "mlp") -> Iterator[Slice]:
    yield f"{name}.gate_proj.weight", (F, H), f"{ours}.gate_up", (0,)
    yield f"{name}.up_proj.weight", (F, H), f"{ours}.gate_up", (1,)
    yield f"{name}.down_proj.weight", (H, F), f"{ours}.down", ()


EXPERT_NAMES = {
    "qwen": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
"""Of folders that hold experts one by one, by layout: the module, and gate, up and down in it."""


def _expert_slices(config: ModelConfig, layout: str) -> Iterator[Slice]:
    H, E, F = config.hidden_size, config.experts.num_experts, config.experts.size
    module, *projections = EXPERT_NAMES.get(layout, ("mlp",))
    yield f"{module}.gate.weight", (E, H), "mlp.router", ()
    if layout == "fused":
        yield "mlp.experts.gate_up_proj", (E, 2 * F, H), "mlp.experts.gate_up", ()
        yield "mlp.experts.down_proj", (E, H, F), "mlp.experts.down", ()
    else:
        for expert in range(E):
            gate, up, down = (f"{module}.experts.{expert}.{name}.weight" for name in projections)
            yield gate, (F, H), "mlp.experts.gate_up", (expert, 0)
            yield up, (F, H), "mlp.experts.gate_up", (expert, 1)
            yield down, (H, F), "mlp.experts.down", (expert,)
    if size := config.experts.shared_size:
        yield from _mlp_slices("mlp.shared_expert", H, size, "mlp.shared")
        yield "mlp.shared_expert_gate.weight", (1, H), "mlp.shared_gate", ()


def _expert_layout(names: Collection[str]) -> str:
    """How a folder holds experts; `names` are of its tensors."""
    if any(name.endswith("mlp.experts.gate_up_proj") for name in names):
        return "fused"
    return "mixtral" if any(".block_sparse_moe." in name for name in names) else "qwen"


def open_model(source: str | Path, **options: Any) -> Transformer:
    """`source` is a folder, or a shape with random weights for benchmarks: shape:qwen3-0.6b."""
    if str(source).startswith(SHAPE):
        return random_model(read_config(source), **options)
    return load_model(source, **options)


def load_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    head: Head = "language",
    shard: TensorShard | None = None,
) -> Transformer:
    """A model with the folder's weights. A missing value head is initialised with zeros."""
    folder = Path(folder)
    config = read_config(folder)
    files = _tensor_files(folder)
    wanted = tensor_slices(config, head, _expert_layout(files))
    if head == "value" and "score.weight" not in files:
        wanted.pop()
    _check_names(folder, wanted, files)
    _check_shapes(folder, wanted, files)
    with torch.device("meta"):
        model = Transformer(config, head, shard)
        whole = dict(Transformer(config, head).named_parameters())
    state = {
        name: torch.zeros(parameter.shape, dtype=dtype, device=device)
        for name, parameter in model.named_parameters()
    }
    for part, tensor in _with_progress(folder, files, _read(folder, wanted, files)):
        target = state[part.parameter]
        tensor = tensor.reshape(whole[part.parameter][part.index].shape)
        if model.layout is None:
            target[part.index].copy_(tensor)
        else:
            _copy_part(part, tensor, target, model.layout)
    model.load_state_dict(state, assign=True)
    return model


def _copy_part(part: TensorSlice, tensor: Tensor, target: Tensor, shard: TensorShard) -> None:
    """Copy what the rank holds of a slice; `target` is its tensor of the parameter."""
    for dimension, rows in enumerate(part.index):
        if isinstance(rows, int):  # the index has removed the dimension
            tensor = tensor.unsqueeze(dimension)
    for seen in shard.parts(part.parameter, target.shape):
        for dimension, rows in enumerate(part.index):
            if isinstance(rows, int):
                rows = slice(rows, rows + 1)
            if rows != slice(None):
                seen = seen.within_whole(dimension, rows.start, rows.stop)
        seen.of_local(target).copy_(seen.of_whole(tensor))


def has_value_head(folder: str | Path) -> bool:
    """Whether the folder has a scalar head."""
    return "score.weight" in _tensor_files(Path(folder))


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The dtype of the weights according to config.json."""
    hf_config = read_hf_config(folder)
    return getattr(torch, hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")


def save_model(folder: str | Path, model: Transformer, *, like: str | Path) -> Path:
    """Write the model, with config and tokenizer of the folder that it was loaded from (`like`)."""
    return save_state(folder, dict(model.named_parameters()), model.config, like=like)


def hf_tensors(
    state: dict[str, Tensor], config: ModelConfig, layout: str = "qwen"
) -> dict[str, Tensor]:
    """Parameters by our names -> tensors by Hugging Face's names."""
    head = "value" if "value_head" in state else "language"
    return {
        part.hf_name: state[part.parameter].detach()[part.index].reshape(part.hf_shape)
        for part in tensor_slices(config, head, layout)
    }


def save_state(
    folder: str | Path, state: dict[str, Tensor], config: ModelConfig, *, like: str | Path
) -> Path:
    """Write parameters, by our names, as a Hugging Face folder."""
    hf_config = read_hf_config(like)
    if "value_head" in state:  # the class in transformers that has a scalar `score`
        names = [
            n.replace("ForCausalLM", "ForSequenceClassification")
            for n in hf_config.get("architectures") or ()
        ]
        hf_config |= {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}

    def add_companions(target: Path) -> None:
        for name in COMPANION_FILES:
            if (Path(like) / name).exists():
                shutil.copy(Path(like) / name, target / name)

    tensors = hf_tensors(state, config, _written_layout(hf_config))
    return write_folder(folder, hf_config, tensors, add_companions)


def _written_layout(hf_config: dict) -> str:
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
    for part in tensor_slices(config, layout=_written_layout(read_hf_config(base))):
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
    tensors: dict[str, Tensor],
    add_files: Callable[[Path], object],
) -> Path:
    """Write a Hugging Face folder under a temporary name, then rename it."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*-*"):  # by a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        hf_config = {k: v for k, v in hf_config.items() if k != "torch_dtype"} | {"dtype": dtype}
        (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        _write_tensors(partial, tensors)
        add_files(partial)
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors writes 0600
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


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One file, or shards of at most SHARD_BYTES with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {
                key: name for name, shard in zip(names, shards, strict=True) for key in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        on_cpu = {key: tensor.cpu().contiguous() for key, tensor in shard.items()}
        save_file(on_cpu, folder / name, metadata={"format": "pt"})


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file of the folder that holds it."""
    if (folder / INDEX).exists():
        files = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise CheckpointError(
                f"{folder / INDEX} is not a valid index: its weight_map must name a file for each "
                "tensor; copy or download it again"
            )
        for name in set(files.values()):
            if Path(name).name != name:
                raise CheckpointError(f"{folder / INDEX} names {name!r}, outside of its folder")
        return files
    if (folder / "model.safetensors").exists():
        with _open(folder / "model.safetensors") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder} holds only pickled weights, and reading those can run arbitrary code. "
            "If you trust them, convert them once: transformers' "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)` writes safetensors."
        )
    raise CheckpointError(f"{folder} has no model.safetensors and no {INDEX}")


def _check_names(folder: Path, wanted: list[TensorSlice], files: dict[str, str]) -> None:
    names = {part.hf_name for part in wanted}
    missing = sorted(names - files.keys())
    extra = sorted(name for name in files.keys() - names if not name.endswith(IGNORED_SUFFIXES))
    # A tied head stored twice and the unused language head of a value model are harmless.
    extra = [name for name in extra if name != "lm_head.weight"]
    if missing or extra:
        raise CheckpointError(
            f"{folder} does not hold the tensors of its config.json: "
            f"missing {_some(missing)}; not expected {_some(extra)}"
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "none") + rest


def _check_shapes(folder: Path, wanted: list[TensorSlice], files: dict[str, str]) -> None:
    """From the files' headers, before any memory is taken."""
    wrong = []
    for part, found in _read(folder, wanted, files, lambda file, name: file.get_slice(name)):
        if (shape := tuple(found.get_shape())) != part.hf_shape:
            wrong.append(f"{part.hf_name} is {shape}, expected {part.hf_shape}")
        if (dtype := found.get_dtype()) not in FLOATS:
            wrong.append(f"{part.hf_name} is {dtype}, not one of {', '.join(FLOATS)}")
    if wrong:
        raise CheckpointError(f"{folder} has tensors of unexpected shapes or types: {_some(wrong)}")


def _read(
    folder: Path,
    wanted: list[TensorSlice],
    files: dict[str, str],
    read: Callable[[Any, str], Any] = lambda file, name: file.get_tensor(name),
) -> Iterator[tuple[TensorSlice, Any]]:
    """The wanted tensors, or what `read` reads of them, file by file."""
    for name in sorted({files[part.hf_name] for part in wanted}):
        with _open(folder / name) as file:
            for part in wanted:
                if files[part.hf_name] == name:
                    yield part, _tensor(read, file, folder / name, part.hf_name)


def _with_progress(
    folder: Path, files: dict[str, str], parts: Iterator[tuple[TensorSlice, Tensor]]
) -> Iterator[tuple[TensorSlice, Tensor]]:
    paths = {folder / name for name in files.values()}
    num_bytes = sum(path.stat().st_size for path in paths if path.exists())
    with ProgressBar(num_bytes, f"loading {folder.name}", "bytes") as bar:
        for part, tensor in parts:
            yield part, tensor
            bar.advance(tensor.nbytes)


def _open(path: Path):
    check_is_file(path)
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is named by the index but does not exist") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({error}); copy or download it again"
        ) from None


def _tensor(read: Callable[[Any, str], Any], file: Any, path: Path, name: str) -> Any:
    try:
        return read(file, name)
    except SafetensorError as error:
        raise CheckpointError(f"{path} does not hold {name} as the index says: {error}") from None
