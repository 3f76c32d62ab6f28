"""Damaged model folders: each is refused by an error that names the file and the remedy."""

import json
import os
import shutil
import signal
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.models.config import read_config
from roll_lite.models.hf import INDEX, load_model, stored_dtype

WEIGHTS = "model.safetensors"
DEEP = "[" * 100_000
LONG_HEADER = struct.pack("<Q", 1 << 60)


def options(**changes):
    """A config.json with other values."""

    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def index(content):
    def change(path):
        (path.parent / WEIGHTS).rename(path.with_name("model-00001-of-00001.safetensors"))
        path.write_text(content)

    return change


def weights(change):
    """Other tensors."""
    return lambda path: save_file(change(load_file(path)), path)


def text(content):
    return lambda path: path.write_text(content)


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


DAMAGES = {  # name: (file, what is done to it, what the error says beside the file's name)
    "config: no JSON": ("config.json", text("{'a': 1}"), "not valid JSON"),
    "config: no text": ("config.json", lambda p: p.write_bytes(b"\xff\xfe{"), "not valid JSON"),
    "config: a list": ("config.json", text("[]"), "no JSON object"),
    "config: deep": ("config.json", text(DEEP), "nested too deeply"),
    "config: a pipe": ("config.json", pipe, "not a file"),
    "config: a folder": ("config.json", folder, "not a file"),
    "config: too long": ("config.json", lambda p: os.truncate(p, 1 << 40), "bytes, too many"),
    "config: a billion layers": ("config.json", options(num_hidden_layers=10**9), "up to 1,000"),
    "config: a text": ("config.json", options(hidden_size="64"), "must be a positive number"),
    "config: a broken number": ("config.json", options(hidden_size=64.5), "must be a whole number"),
    "config: not a number": ("config.json", options(rms_norm_eps=float("nan")), "positive number"),
    "config: heads as text": ("config.json", options(num_key_value_heads="2"), "positive number"),
    "config: a negative head": ("config.json", options(head_dim=-8), "positive number"),
    "config: a list of rotations": ("config.json", options(rope_scaling=[1]), "must be dict"),
    "config: a text of a rotation": (
        "config.json", options(rope_parameters={"rope_theta": "1e4"}), "must be a positive number"
    ),
    "config: a text as window": ("config.json", options(sliding_window="all"), "positive number"),
    "config: layer types": ("config.json", options(layer_types=[{}]), "must be a list of texts"),
    "config: architectures": ("config.json", options(architectures=[5]), "must be a list of texts"),
    "config: a type of torch": ("config.json", options(dtype="nn"), "dtype='nn' is not one of"),
    "config: another size": ("config.json", options(hidden_size=10**8), "unexpected shapes"),
    "index: a list": (INDEX, index("[]"), "no JSON object"),
    "index: no map": (INDEX, index('{"weight_map": []}'), "not a valid index"),
    "index: numbers": (INDEX, index('{"weight_map": {"a": 5}}'), "not a valid index"),
    "index: deep": (INDEX, index(DEEP), "nested too deeply"),
    "index: a pipe": (INDEX, pipe, "not a file"),
    "weights: empty": (WEIGHTS, cut(0), "not a complete"),
    "weights: cut": (WEIGHTS, cut(0.5), "not a complete"),
    "weights: a long header": (WEIGHTS, lambda p: p.write_bytes(LONG_HEADER), "not a complete"),
    "weights: a deep header": (
        WEIGHTS,
        lambda p: p.write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode()),
        "not a complete",
    ),
    "weights: a pipe": (WEIGHTS, pipe, "not a file"),
    "weights: a folder": (WEIGHTS, folder, "not a file"),
    "weights: whole numbers": (
        WEIGHTS, weights(lambda found: {n: t.to(torch.int32) for n, t in found.items()}), "is I32"
    ),
    "tokenizer: no JSON": ("tokenizer.json", text("{"), "cannot be read"),
    "tokenizer: another object": ("tokenizer.json", text("{}"), "cannot be read"),
    "tokenizer: cut": ("tokenizer.json", cut(0.5), "cannot be read"),
    "tokenizer: a pipe": ("tokenizer.json", pipe, "has no tokenizer; copy"),
    "tokenizer config: a list": ("tokenizer_config.json", text("[]"), "cannot be read"),
    "tokenizer config: deep": ("tokenizer_config.json", text(DEEP), "cannot be read"),
    "tokenizer config: a pipe": ("tokenizer_config.json", pipe, "not a file"),
    "template: no Jinja": ("chat_template.jinja", text("{% for m in %}"), "is not Jinja"),
    "template: it fails": ("chat_template.jinja", text("{{ 1 // 0 }}"), "ZeroDivisionError"),
    "template: a pipe": ("chat_template.jinja", pipe, "not a file"),
    "generation config: a list": ("generation_config.json", text("[]"), "no JSON object"),
    "generation config: a text": (
        "generation_config.json", text('{"eos_token_id": ["</s>"]}'), "give one id or a list"
    ),
    "generation config: a pipe": ("generation_config.json", pipe, "not a file"),
}  # fmt: skip


@pytest.fixture
def no_hang():
    """A hang is a failure."""

    def fail(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(toy_folder, tmp_path, no_hang, name):
    file, change, problem = DAMAGES[name]
    damaged = tmp_path / "model"
    shutil.copytree(toy_folder, damaged)
    change(damaged / file)
    errors = []
    for read in (Chat, read_config, stored_dtype, load_model):
        try:
            read(damaged)
        except UserError as error:
            errors.append(str(error))
    assert any(str(damaged) in error and problem in error for error in errors), errors
