"""Turn a GGUF file into an ordinary bf16 Hugging Face folder, tokenizer and chat template included.

    python scripts/from_gguf.py FILE.gguf models/NAME         # needs: pip install 'roll_lite[gguf]'

Reads the families that roll_lite trains: Llama, Mistral (whose files say llama), Qwen2 and Qwen3.
Quantised weights are dequantised: the folder is close to the published model, not equal to it.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from torch import Tensor

from roll_lite.models.config import RopeConfig
from roll_lite.models.hf_write import write_folder
from roll_lite.models.ops import inverse_frequencies

try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ImportError:
    sys.exit("error: reading GGUF files needs the package gguf: pip install 'roll_lite[gguf]'")

ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDINGS, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
SAME_MATRIX = 0.3
"""Embeddings and head that differ by less than this, relative to their norm, are one matrix that
was quantised twice; matrices that were trained apart differ by more than 1."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
WORDS += r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
TEKKEN += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen2": WORDS % r"\p{N}",
    "deepseek-r1-qwen": WORDS % r"\p{N}",
    "llama-bpe": WORDS % r"\p{N}{1,3}",
    "tekken": TEKKEN,
}
"""tokenizer.ggml.pre -> the expression that splits text into words, within which tokens merge."""


class Gguf:
    """The values and the tensors of a GGUF file."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file")
        try:
            reader = GGUFReader(path)
        except Exception as error:  # the reader has no error type of its own for a broken file
            raise ValueError(f"{path}: cannot be read, it may be truncated: {error!r}") from error
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{path}: architecture {self.architecture!r} is not one of {known}")
        if self.get("split.count", 1) > 1:
            raise ValueError(
                f"{path}: one of several parts; join them: llama-gguf-split --merge FIRST OUT"
            )

    def get(self, key: str, *default):
        if key in self._fields:
            return self._fields[key].contents()
        if default:
            return default[0]
        raise ValueError(f"{self.path}: has no value {key}")

    def of_model(self, key: str, *default):
        return self.get(f"{self.architecture}.{key}", *default)

    def of_tokenizer(self, key: str, *default):
        return self.get(f"tokenizer.ggml.{key}", *default)

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised to fp32."""
        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {name} has type {tensor.tensor_type.name}") from error
        return torch.tensor(values).reshape(*reversed(tensor.shape.tolist())).float()

    def bits(self, name: str) -> float:
        return self.tensors[name].n_bytes * 8 / self.tensors[name].n_elements


def convert(path: Path, target: Path) -> None:
    gguf = Gguf(path)
    num_layers = gguf.of_model("block_count")
    print(f"{path.name}: {gguf.architecture}, {num_layers} layers", flush=True)
    tied = _is_tied(gguf)
    tensors = dict(_tensors(gguf, tied))
    config = _config(gguf, tied, tensors)
    write_folder(
        target, config, tensors, tensors.items(), lambda folder: _write_tokenizer(gguf, folder)
    )
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"wrote {len(tensors)} tensors, {num_parameters:,} parameters: {target}")


def _is_tied(gguf: Gguf) -> bool:
    """Whether embeddings and head are one matrix: a file may hold it twice, in two precisions."""
    if HEAD not in gguf.tensors:
        return True
    rows = slice(0, 4096)
    embeddings, head = gguf.read(EMBEDDINGS)[rows], gguf.read(HEAD)[rows]
    return bool((embeddings - head).norm() / head.norm() < SAME_MATRIX)


def _tensors(gguf: Gguf, tied: bool) -> Iterator[tuple[str, Tensor]]:
    heads = {
        "attn_q": gguf.of_model("attention.head_count"),
        "attn_k": gguf.of_model("attention.head_count_kv"),
    }
    skipped = {ROPE_FACTORS}
    if tied and HEAD in gguf.tensors:
        coarse, fine = sorted((EMBEDDINGS, HEAD), key=gguf.bits)
        skipped.add(coarse)
        print(f"the head is the embeddings, in two precisions: {fine} is kept")
    for number, name in enumerate(gguf.tensors, 1):
        if number % 100 == 0:
            print(f"tensor {number} of {len(gguf.tensors)}", flush=True)
        if name in skipped:
            continue
        weight = gguf.read(name)
        part = name.split(".")[-2]
        if gguf.architecture == "llama" and part in heads:
            weight = _unpermute(weight, heads[part])
        yield _hf_name(gguf, name, tied), weight.to(torch.bfloat16)


def _hf_name(gguf: Gguf, name: str, tied: bool) -> str:
    *block, part, kind = name.split(".")
    if name == HEAD:
        return "model.embed_tokens.weight" if tied else "lm_head.weight"
    if part not in NAMES or (block and block[0] != "blk"):
        raise ValueError(f"{gguf.path}: unknown tensor {name}")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{NAMES[part]}.{kind}"


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of rows: its rope rotates neighbours, transformers' rotates halves."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _config(gguf: Gguf, tied: bool, tensors: dict[str, Tensor]) -> dict:
    window = gguf.of_model("attention.sliding_window", None)
    family = "Mistral" if window else ARCHITECTURES[gguf.architecture]
    heads, hidden = gguf.of_model("attention.head_count"), gguf.of_model("embedding_length")
    head_dim = gguf.of_model("attention.key_length", hidden // heads)
    rope = _rope(gguf, head_dim)
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        # Without it transformers 5 takes any tokenizer for an old one of Mistral's, and warns.
        "transformers_version": version("transformers"),
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": hidden,
        "intermediate_size": gguf.of_model("feed_forward_length"),
        "num_hidden_layers": gguf.of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.of_model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        # a float32 in the file: seven digits give back the 1e-05 that was meant
        "rms_norm_eps": float(f"{gguf.of_model('attention.layer_norm_rms_epsilon'):.7g}"),
        "max_position_embeddings": gguf.of_model("context_length"),
        "rope_theta": rope["rope_theta"],  # for transformers 4; the next line is for transformers 5
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        **({"sliding_window": window} if window else {}),
        **{f"{name}_id": index for name, index in _special_ids(gguf).items()},
    }


def _rope(gguf: Gguf, head_dim: int) -> dict:
    theta = gguf.of_model("rope.freq_base", 10000.0)
    if ROPE_FACTORS in gguf.tensors:
        return {"rope_theta": theta} | _llama3(gguf, theta, head_dim)
    kind = gguf.of_model("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        factor = gguf.of_model("rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    raise ValueError(f"{gguf.path}: rope scaling {kind!r} is not one of none, linear, llama3")


def _llama3(gguf: Gguf, theta: float, head_dim: int) -> dict:
    """Llama 3's scaling, of which the file has only the factors of all frequencies."""
    factors = gguf.read(ROPE_FACTORS)
    known = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factor, positions = factors.max().item(), 8192
    rope = RopeConfig(
        theta=theta, kind="llama3", factor=factor, original_positions=positions, **known
    )
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    if not torch.allclose(plain / inverse_frequencies(rope, head_dim), factors, rtol=1e-3):
        raise ValueError(f"{gguf.path}: {ROPE_FACTORS} is not Llama 3's scaling by {factor}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": positions,
        **known,
    }


def _special_ids(gguf: Gguf) -> dict[str, int]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: gguf.of_tokenizer(f"{key}_token_id", None) for name, key in names.items()}
    return {name: index for name, index in ids.items() if index is not None}


def _stop_ids(gguf: Gguf) -> list[int]:
    """Tokens that end a reply: of a turn, of a message, of a text; Qwen pads with the last."""
    keys = ["eos", "eot", "eom"] + ["padding"] * gguf.architecture.startswith("qwen")
    ids = [gguf.of_tokenizer(f"{key}_token_id", None) for key in keys]
    return list(dict.fromkeys(index for index in ids if index is not None))


def _write_tokenizer(gguf: Gguf, folder: Path) -> None:
    """Write tokenizer files and generation_config.json, without the slow import of transformers."""
    ids, tokens = _special_ids(gguf), gguf.of_tokenizer("tokens")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it stands
        "model_max_length": gguf.of_model("context_length"),
        "clean_up_tokenization_spaces": False,
        **{name: tokens[index] for name, index in ids.items()},
    }
    stop = _stop_ids(gguf)
    generation_config = {f"{name}_id": index for name, index in ids.items() if name != "unk_token"}
    generation_config["eos_token_id"] = stop[0] if len(stop) == 1 else stop
    _tokenizer(gguf).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")
    if template := gguf.get("tokenizer.chat_template", None):
        (folder / "chat_template.jinja").write_text(template)


def _tokenizer(gguf: Gguf) -> Tokenizer:
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind = gguf.of_tokenizer("model")
    if kind not in makers:
        raise ValueError(f"{gguf.path}: tokenizer {kind!r} is not one of {', '.join(makers)}")
    tokenizer = makers[kind](gguf)
    tokens, types = gguf.of_tokenizer("tokens"), gguf.of_tokenizer("token_type")
    pairs = list(zip(tokens, types, strict=True))
    add = [AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind == CONTROL]
    tokenizer.add_special_tokens(add)
    add = [AddedToken(t, normalized=False) for t, kind in pairs if kind == USER_DEFINED]
    tokenizer.add_tokens(add)
    if gguf.of_tokenizer("add_bos_token", kind == "llama"):
        index = gguf.of_tokenizer("bos_token_id")
        bos = tokens[index]
        tokenizer.post_processor = processors.Sequence(
            [
                tokenizer.post_processor or processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, index)]),
            ]
        )
    return tokenizer


def _byte_level(gguf: Gguf) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(gguf.of_tokenizer("tokens"))}
    merges = [tuple(merge.split(" ")) for merge in gguf.of_tokenizer("merges")]
    pre = gguf.of_tokenizer("pre", "default")
    # Llama 3 looks a word up as it stands before it merges the word's bytes
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.normalizer = normalizers.NFC() if gguf.architecture.startswith("qwen") else None
    tokenizer.pre_tokenizer = _split_words(gguf, pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_words(gguf: Gguf, pre: str) -> PreTokenizer:
    if pre in SPLITS:
        split = Split(Regex(SPLITS[pre]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if pre in ("default", "gpt-2"):
        return ByteLevel(add_prefix_space=False)
    known = ", ".join([*SPLITS, "smollm", "gpt-2", "default"])
    raise ValueError(f"{gguf.path}: tokenizer.ggml.pre={pre!r} is not one of {known}")


def _sentence_piece(gguf: Gguf) -> Tokenizer:
    """Llama 2's and the first Mistral's: pieces with scores, the best of which merge first."""
    tokens, scores = gguf.of_tokenizer("tokens"), gguf.of_tokenizer("scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [
        (scores[index], piece[:i], piece[i:])
        for piece, index in vocabulary.items()
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    merges.sort(key=lambda merge: (-merge[0], vocabulary[merge[1]], vocabulary[merge[2]]))
    unknown = tokens[gguf.of_tokenizer("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = [normalizers.Prepend("▁")] if gguf.of_tokenizer("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("out", type=Path, help="the folder to write; must not exist")
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"error: {options.out} exists already")
    try:
        convert(options.file, options.out)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
