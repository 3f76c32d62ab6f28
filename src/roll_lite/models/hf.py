"""Hugging Face model folders: read into the fused layout, write what transformers loads.

A folder appears by rename, so nobody ever sees half of one. Pickle is neither read nor written.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll_lite.models.config import ModelConfig, read_config, read_hf_config
from roll_lite.models.tensor_parallel import TensorShard, cut_dimension
from roll_lite.models.transformer import Head, Transformer

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # old Llama folders store what the config implies
COMPANION_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip


class CheckpointError(ValueError):
    """A model folder whose tensors are not those its config.json promises."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One Hugging Face tensor and the part of our parameter it is."""

    hf_name: str
    hf_shape: tuple[int, ...]
    parameter: str
    index: tuple = ()
    """Into the parameter; the part has the same numbers in the same order as the HF tensor."""


def pieces(config: ModelConfig, head: Head = "language") -> list[Piece]:
    """Every tensor of a folder of this shape, in file order."""
    H, F, V, D = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    K, G = config.num_kv_heads, config.group_size
    result = [Piece("model.embed_tokens.weight", (V, H), "embedding")]
    everything = slice(None)
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        result += [
            Piece(theirs + "input_layernorm.weight", (H,), ours + "attention_norm.weight"),
            Piece(theirs + "post_attention_layernorm.weight", (H,), ours + "mlp_norm.weight"),
            Piece(theirs + "self_attn.o_proj.weight", (H, K * G * D), ours + "attention.out"),
            Piece(theirs + "mlp.gate_proj.weight", (F, H), ours + "mlp.gate_up", (0,)),
            Piece(theirs + "mlp.up_proj.weight", (F, H), ours + "mlp.gate_up", (1,)),
            Piece(theirs + "mlp.down_proj.weight", (H, F), ours + "mlp.down"),
        ]
        for name, heads, part in (("q", K * G, slice(0, G)), ("k", K, G), ("v", K, G + 1)):
            index, projection = (everything, part), f"{theirs}self_attn.{name}_proj."
            result.append(
                Piece(projection + "weight", (heads * D, H), ours + "attention.qkv", index)
            )
            if config.qkv_bias:
                result.append(
                    Piece(projection + "bias", (heads * D,), ours + "attention.qkv_bias", index)
                )
            if config.qk_norm and name != "v":
                norm = f"{name}_norm.weight"
                result.append(Piece(f"{theirs}self_attn.{norm}", (D,), f"{ours}attention.{norm}"))
    result.append(Piece("model.norm.weight", (H,), "norm.weight"))
    if head == "value":
        result.append(Piece("score.weight", (1, H), "value_head"))
    elif not config.tied_head:
        result.append(Piece("lm_head.weight", (V, H), "lm_head"))
    return result


def load_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    head: Head = "language",
    shard: TensorShard | None = None,
) -> Transformer:
    """A model with the folder's weights. A folder without a value head gets one of zeros."""
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config, head, shard)
        whole = dict(Transformer(config, head).named_parameters())
    wanted = pieces(config, head)
    files = _tensor_files(folder)
    if head == "value" and "score.weight" not in files:
        wanted.pop()
    _check_names(folder, wanted, files)
    state = {
        name: torch.zeros(parameter.shape, dtype=dtype, device=device)
        for name, parameter in model.named_parameters()
    }
    for piece, tensor in _read(folder, wanted, files):
        tensor = tensor.reshape(whole[piece.parameter][piece.index].shape)
        if shard:
            tensor = _cut_piece(piece, tensor, shard)
        state[piece.parameter][piece.index].copy_(tensor)
    model.load_state_dict(state, assign=True)
    return model


def _cut_piece(piece: Piece, tensor: Tensor, shard: TensorShard) -> Tensor:
    """A rank's part of a piece, whose index may have taken dimensions of the parameter away."""
    dimension = cut_dimension(piece.parameter)
    if dimension is None:
        return tensor
    dimension -= sum(isinstance(index, int) for index in piece.index[:dimension])
    return tensor.chunk(shard.size, dimension)[shard.rank]


def has_value_head(folder: str | Path) -> bool:
    """Whether the folder has a scalar head of its own."""
    return "score.weight" in _tensor_files(Path(folder))


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The dtype that a folder's config.json names for its weights."""
    hf_config = read_hf_config(folder)
    return getattr(torch, hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")


def save_model(folder: str | Path, model: Transformer, *, like: str | Path) -> Path:
    """Write the model with the config and tokenizer of the folder it came from (`like`)."""
    return save_state(folder, dict(model.named_parameters()), model.config, like=like)


def hf_tensors(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Parameters by our names -> tensors by Hugging Face's."""
    head = "value" if "value_head" in state else "language"
    return {
        piece.hf_name: state[piece.parameter].detach()[piece.index].reshape(piece.hf_shape)
        for piece in pieces(config, head)
    }


def save_state(
    folder: str | Path, state: dict[str, Tensor], config: ModelConfig, *, like: str | Path
) -> Path:
    """Write parameters, by our names, as a Hugging Face folder."""
    hf_config = read_hf_config(like)
    if "value_head" in state:  # what transformers calls a model with a scalar `score`
        names = [
            n.replace("ForCausalLM", "ForSequenceClassification")
            for n in hf_config.get("architectures") or ()
        ]
        hf_config |= {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}

    def add_companions(target: Path) -> None:
        for name in COMPANION_FILES:
            if (Path(like) / name).exists():
                shutil.copy(Path(like) / name, target / name)

    return write_folder(folder, hf_config, hf_tensors(state, config), add_companions)


def write_folder(
    folder: str | Path,
    hf_config: dict,
    tensors: dict[str, Tensor],
    add_files: Callable[[Path], object],
) -> Path:
    """Write a Hugging Face folder beside its place, then rename it there."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _fill_folder(partial, hf_config, tensors, add_files)
        _replace_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _fill_folder(
    partial: Path,
    hf_config: dict,
    tensors: dict[str, Tensor],
    add_files: Callable[[Path], object],
) -> None:
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    hf_config = {k: v for k, v in hf_config.items() if k != "torch_dtype"} | {"dtype": dtype}
    (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    _write_tensors(partial, tensors)
    add_files(partial)
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors would keep it from other users
        with file.open("rb") as handle:  # on disk before the name says so
            os.fsync(handle.fileno())


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
    """Which file of the folder holds each tensor."""
    if (folder / INDEX).exists():
        try:
            return json.loads((folder / INDEX).read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{folder / INDEX} is not a whole index: {error!r}") from None
    if (folder / "model.safetensors").exists():
        with _open(folder / "model.safetensors") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder} holds only pickled weights, which can run any code when they are read. "
            "Convert it once where you trust it: transformers' "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)` writes safetensors."
        )
    raise CheckpointError(f"{folder} has no model.safetensors and no {INDEX}")


def _check_names(folder: Path, wanted: list[Piece], files: dict[str, str]) -> None:
    names = {piece.hf_name for piece in wanted}
    missing = sorted(names - files.keys())
    extra = sorted(name for name in files.keys() - names if not name.endswith(IGNORED_SUFFIXES))
    # A tied head stored twice and the unused language head of a value model are harmless.
    extra = [name for name in extra if name != "lm_head.weight"]
    if missing or extra:
        raise CheckpointError(
            f"{folder} does not hold the tensors of its config.json: "
            f"missing {_some(missing)}; not expected {_some(extra)}"
        )


def _some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + rest


def _read(
    folder: Path, wanted: list[Piece], files: dict[str, str]
) -> Iterator[tuple[Piece, Tensor]]:
    """The wanted tensors, one file after the other, with their shapes checked."""
    wrong = []
    for name in sorted({files[piece.hf_name] for piece in wanted}):
        with _open(folder / name) as file:
            for piece in wanted:
                if files[piece.hf_name] != name:
                    continue
                tensor = _tensor(file, folder / name, piece.hf_name)
                if tuple(tensor.shape) == piece.hf_shape:
                    yield piece, tensor
                else:
                    wrong.append(
                        f"{piece.hf_name} is {tuple(tensor.shape)}, expected {piece.hf_shape}"
                    )
    if wrong:
        raise CheckpointError(f"{folder} has tensors of other shapes: {_some(wrong)}")


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is named by the index but does not exist") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); copy or download it again"
        ) from None


def _tensor(file, path: Path, name: str) -> Tensor:
    try:
        return file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path} does not hold {name} as the index says: {error}") from None
