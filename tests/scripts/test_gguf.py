"""scripts/from_gguf.py against transformers' own reading of the same file, and the first model."""

import json
import re
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from from_gguf import Gguf, convert
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from support.models import FAMILIES, make_reference
from support.paths import DOCS, SCRIPTS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from roll_lite.models.hf import load_model

SCRIPT = SCRIPTS / "from_gguf.py"

TEXTS = [
    "Don't WE'LL go, 12345 times?\n\n  x = f(3.14)\tend ",
    "naïve café, Ελλάδα, 東京, 🙂 👩\u200d🚀",
    "for i in range(10):\r\n    print(i)   ",
]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def write(path, model, add_tokenizer=None, kind=Type.F32, more=lambda writer: None):
    """A GGUF file of a transformers model, as llama.cpp writes it."""
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config, head_dim))
    (add_tokenizer or add_bytes)(writer, config.vocab_size)
    more(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if ".q_" in name else config.num_key_value_heads
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        data = np.ascontiguousarray(data)
        chosen = kind if data.ndim == 2 else Type.F32
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(found, gguf.quants.quantize(data, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_factors(config, head_dim):
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy().astype(np.float32)


def add_bytes(writer, vocab_size):
    """A tokenizer of single bytes."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 1]
    tokens = [*tokens[:-1], "".join(tokens[:2]), "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (vocab_size - 1) + [3])
    writer.add_token_merges([" ".join(tokens[:2])])
    writer.add_eos_token_id(vocab_size - 1)


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def random_tensor(path, kind):
    """A file with a tensor "x" of any bytes, except those of an infinite scale."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (3, 512 // elements * size), dtype=np.uint8)
    add = partial(gguf.GGUFWriter.add_tensor, name="x", tensor=blocks, raw_dtype=kind)
    return write(path, make_reference("llama2"), more=add), blocks


@pytest.mark.parametrize("kind", [*KINDS, "IQ4_NL", "IQ4_XS", "IQ3_S"])
def test_numbers_equal_transformers(kind, tmp_path):
    """transformers has a reader and a dequantisation of its own."""
    reader = pytest.importorskip("transformers.integrations.gguf.reader")
    path, _ = random_tensor(tmp_path / "m.gguf", Type[kind])
    theirs = dequantised(reader, path)
    ours = Gguf(path).read("x")
    assert ours.shape == (3, 512) and ours.isfinite().all() and ours.std() > 0
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_numbers_of_five_bits_equal_the_formula(kind, tmp_path):
    """A scale, in Q5_1 a minimum, 32 high bits, 32 times four low bits; not in transformers."""
    path, blocks = random_tensor(tmp_path / "m.gguf", Type[kind])
    expected = []
    for block in blocks.reshape(-1, 22 if kind == "Q5_0" else 24):
        scale, *rest = block[:-20].view(np.float16).astype(np.float64)
        high, low = int(block[-20:-16].view(np.uint32)[0]), block[-16:].astype(int)
        lowest = rest[0] if rest else -16 * scale
        numbers = [low[i % 16] >> 4 * (i // 16) & 15 | (high >> i & 1) << 4 for i in range(32)]
        expected += [lowest + scale * number for number in numbers]
    ours = Gguf(path).read("x").flatten().double()
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def dequantised(reader, path):
    from transformers.integrations.gguf.dequant import dequantize

    header = reader.GgufHeader.from_file(str(path))
    raw = reader.load_gguf_state_dict(header)["x"][...]
    kind = header.ggml_types["x"]
    return dequantize(raw, kind).reshape(3, 512) if raw.dtype == torch.uint8 else raw.float()


@torch.no_grad()
@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name != "llama3"), "llama3.2"])
def test_a_converted_model_computes_what_the_first_one_does(family, tmp_path):
    more = {"rope_parameters": LLAMA3} if family == "llama3.2" else {}
    reference = make_reference("llama2" if more else family, **more)
    for parameter in reference.parameters():
        parameter.copy_(parameter.bfloat16())
    convert(write(tmp_path / "m.gguf", reference), tmp_path / "out")
    load_model(tmp_path / "out")  # ours reads the folder; that it computes the same is tested there
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(1, 181)[None]
    torch.testing.assert_close(theirs(tokens).logits, reference(tokens).logits)


def test_of_embeddings_in_two_precisions_the_finer_ones_are_kept(tmp_path, capsys):
    reference = make_reference("qwen2")
    head = reference.model.embed_tokens.weight.detach().numpy()
    quantised = gguf.quants.quantize(head, Type.Q8_0)

    def add_head(writer):
        writer.add_tensor("output.weight", quantised, raw_dtype=Type.Q8_0)

    path = write(tmp_path / "m.gguf", reference, kind=Type.Q4_0, more=add_head)
    convert(path, tmp_path / "out")
    assert "output.weight is kept" in capsys.readouterr().out
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in ours
    kept = torch.tensor(gguf.quants.dequantize(quantised, Type.Q8_0)).bfloat16()
    assert torch.equal(ours["model.embed_tokens.weight"], kept)


def trained_tokenizer(split):
    """A byte-level tokenizer whose words are those of `split`, trained on this repository."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = [*sorted(DOCS.rglob("*.md")), Path(__file__)]
    tokenizer.train([*map(str, files)], trainer)
    return json.loads(tokenizer.to_str())["model"]


def add_byte_level(pre, trained, types=None):
    def add(writer, vocab_size):
        tokens = sorted(trained["vocab"], key=trained["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
        writer.add_token_merges([" ".join(merge) for merge in trained["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(pre == "llama-bpe")
        writer.add_chat_template("{{ messages }}")

    return add


@pytest.mark.parametrize(
    ("family", "pre"),
    [("qwen2", "qwen2"), ("qwen3", "qwen2"), ("llama2", "llama-bpe"), ("mistral", "tekken")],
)
def test_tokens_equal_transformers(family, pre, tmp_path):
    trained = trained_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    path = write(
        tmp_path / "m.gguf", make_reference(family, vocab_size=1500), add_byte_level(pre, trained)
    )
    convert(path, tmp_path / "out")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*TEXTS, "<s>user\nhi</s> you"]:
        assert ids(ours, text) == ids(theirs, text)
        assert ours.decode(ids(ours, text)) == theirs.decode(ids(ours, text))
    # Qwen's own tokenizer.json composes marks, which transformers' reading of the file forgets
    assert (ids(ours, "e\u0301") == ids(ours, "é")) == (pre == "qwen2")
    assert (ours("a").input_ids[0] == ours.bos_token_id) == (pre == "llama-bpe")
    assert ours.chat_template == "{{ messages }}" and ours.eos_token == "</s>"


def ids(tokenizer, text):
    """Without the token that begins a text: transformers' reading forgets it."""
    return tokenizer(text, add_special_tokens=False).input_ids


def add_pieces(writer, vocab_size):
    """Pieces with scores, as sentencepiece has them."""
    words = " ".join(TEXTS).replace(" ", "▁").replace("\n", "▁")
    pieces = sorted({words[i : i + n] for n in (2, 3, 4) for i in range(len(words) - n)})
    letters = sorted(set("".join(pieces)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *pieces]
    tokens = tokens[:vocab_size]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_pieces_equal_transformers(tmp_path):
    path = write(tmp_path / "m.gguf", make_reference("mistral", vocab_size=900), add_pieces)
    convert(path, tmp_path / "out")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert ids(ours, text) == ids(theirs, text)
        assert ours.decode(ids(ours, text)) == theirs.decode(ids(ours, text))
    assert ours("a").input_ids[0] == ours.bos_token_id == 1


def test_a_bad_file_is_named(command, tmp_path):
    path = write(tmp_path / "m.gguf", make_reference("llama2"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"m\.gguf.*may be truncated"):
        convert(path, tmp_path / "out")
    path.write_bytes(b"GGML" + data[4:])
    said, _ = command(SCRIPT, path, tmp_path / "out")  # a text as its exit code: it is printed
    assert said == f"error: {path}: not a GGUF file"
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rope_scaling_type", gguf.RopeScalingType.YARN, "rope scaling 'yarn' is not one of"),
        ("tokenizer_pre", "falcon", "tokenizer.ggml.pre='falcon' is not one of"),
        ("tokenizer_model", "t5", "tokenizer 't5' is not one of gpt2, llama"),
    ],
)
def test_what_cannot_be_converted_is_named(option, value, message, tmp_path):
    def add(writer):
        writer.kv_data[0].pop(f"tokenizer.ggml.{option.removeprefix('tokenizer_')}", None)
        getattr(writer, f"add_{option}")(value)

    path = write(tmp_path / "m.gguf", make_reference("llama2"), more=add)
    with pytest.raises(ValueError, match=re.escape(message)):
        convert(path, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
