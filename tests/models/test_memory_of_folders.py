"""Folders of mixtures are read and written a tensor at a time: peaks of processes of their own."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support import memory_program
from support.paths import PYTHONPATH
from transformers import AutoModelForCausalLM

from roll_lite.models import hf_write
from roll_lite.models.config import parse_config
from roll_lite.models.transformer import random_model

pytestmark = pytest.mark.slow
MIB = 2**20
FILE = 40 * MIB
EXPERTS = 32 * MIB  # the largest parameter: gate and up of a layer's experts
HF = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
    "norm_topk_prob": True, "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """300 MiB in eight files."""
    like, folder = tmp_path_factory.mktemp("like"), tmp_path_factory.mktemp("models") / "many"
    (like / "config.json").write_text(json.dumps(HF))
    model = random_model(parse_config(HF), device="cpu", dtype=torch.bfloat16)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 295 * MIB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_write, "SHARD_BYTES", FILE)
        hf_write.save_model(folder, model, like=like)
    assert len(list(folder.glob("*.safetensors"))) == 8
    return folder


# A file that is open counts too, as far as it was read.
@pytest.mark.parametrize(
    ("what", "most"),
    [
        ("load", 299 * MIB + FILE + EXPERTS),
        ("load_half", 150 * MIB + FILE + EXPERTS),
        ("save", EXPERTS),
        ("export", EXPERTS),
    ],
)
def test_no_second_copy_of_a_model_is_in_memory(folder, tmp_path, what, most):
    command = [sys.executable, memory_program.__file__, what, folder, tmp_path / "out"]
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert int(done.stdout.split()[-1]) < most, (what, int(done.stdout.split()[-1]) / MIB)
    if what in ("save", "export"):
        first = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        assert all(tensor.equal(copy[name]) for name, tensor in first.items())
