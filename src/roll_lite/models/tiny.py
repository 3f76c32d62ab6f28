"""Make a tiny model that learns on a laptop: one million parameters, a token per character.

    roll-lite tiny models/tiny

It is an ordinary Hugging Face folder (Qwen3 shape), used like any other model.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from roll_lite.characters import character_tokenizer
from roll_lite.models.config import parse_config
from roll_lite.models.hf import hf_tensors
from roll_lite.models.hf_write import write_folder
from roll_lite.models.transformer import Transformer


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("roll-lite tiny", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="models/tiny", help="default: models/tiny")
    parser.add_argument("--seed", type=int, default=0, help="of the fresh weights (0)")
    options = parser.parse_args(arguments)
    if Path(options.folder, "config.json").exists():
        print(
            f"{options.folder} holds a model already; remove it, or name another folder",
            file=sys.stderr,
        )
        return 1
    print(f"wrote {build_tiny(options.folder, options.seed)} (torch {torch.__version__})")
    return 0


def build_tiny(folder: str | Path, seed: int = 0) -> Path:
    """Write the tiny model with fresh weights and its tokenizer."""
    tokenizer = character_tokenizer()
    hf_config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = Transformer(parse_config(hf_config))
    model.init_weights(seed)
    tensors = hf_tensors(dict(model.named_parameters()), model.config)

    def add_tokenizer(target: Path) -> None:
        tokenizer.save_pretrained(target)
        generation = {"eos_token_id": tokenizer.eos_token_id}
        (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    return write_folder(folder, hf_config, tensors, tensors.items(), add_tokenizer)
