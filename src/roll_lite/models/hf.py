"""Hugging Face model folders: which of their tensors is which of ours, and reading them.

Files are mapped into memory and read a tensor at a time. Pickle is not read.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.files import check_is_file, read_json_object
from roll_lite.models.config import ModelConfig, read_config, read_hf_config
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Head, Transformer, random_model
from roll_lite.progress import ProgressBar
from roll_lite.types import SHAPE

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # old Llama folders store what the config implies


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


def hf_tensors(
    state: dict[str, Tensor], config: ModelConfig, layout: str = "qwen"
) -> dict[str, Tensor]:
    """Parameters by our names -> tensors by Hugging Face's; views where they can be."""
    head = "value" if "value_head" in state else "language"
    return dict(hf_stream(state.items(), tensor_slices(config, head, layout)))


def hf_stream(
    parameters: Iterable[tuple[str, Tensor]], slices: Iterable[TensorSlice]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder, by Hugging Face's names, of one parameter after the other."""
    parts = defaultdict(list)
    for part in slices:
        parts[part.parameter].append(part)
    for name, tensor in parameters:
        for part in parts[name]:
            yield part.hf_name, tensor.detach()[part.index].reshape(part.hf_shape)


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
    names = dict.fromkeys(part.hf_name for part in wanted)  # in order: expert 2 before expert 10
    missing = [name for name in names if name not in files]
    extra = sorted(name for name in files.keys() - names if not name.endswith(IGNORED_SUFFIXES))
    # A tied head stored twice and the unused language head of a value model are harmless.
    extra = [name for name in extra if name != "lm_head.weight"]
    if missing or extra:
        raise CheckpointError(
            f"{folder} does not hold the tensors of its config.json: "
            f"missing {_some(missing)}; not expected {_some(extra)}; copy or download it again"
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 4:,} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "none") + rest


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
    of_file = defaultdict(list)
    for part in wanted:
        of_file[files[part.hf_name]].append(part)
    for name in sorted(of_file):
        with _open(folder / name) as file:
            for part in of_file[name]:
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
