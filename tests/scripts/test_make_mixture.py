"""Mixtures made of dense models compute what these do, as transformers reads them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_mixture.py"
SMALL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CLASSES = {"llama": "MixtralForCausalLM", "qwen2": "Qwen2MoeForCausalLM"}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_mixture_without_noise_says_what_the_dense_model_said(kind, tmp_path):
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    dense = transformers.AutoModelForCausalLM.from_config(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    command = [sys.executable, SCRIPT, tmp_path / "dense", tmp_path / "mixture", "--noise", "0"]
    subprocess.run([*command, "--experts", "4"], check=True, capture_output=True)
    mixture = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixture").eval()
    assert type(mixture).__name__ == CLASSES[kind]
    ids = torch.arange(60)[None]
    with torch.no_grad():
        torch.testing.assert_close(mixture(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)
