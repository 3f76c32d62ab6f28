"""Make a tiny model that learns on a laptop: one million parameters, a token per character.

    roll-lite tiny models/tiny

It is an ordinary Hugging Face folder (Qwen3 shape), used like any other model. With --experts 8 it
is a mixture of experts (Qwen3-MoE shape) of 2.6 million parameters, of which a token uses 0.8.
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

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "moe_intermediate_size": 192,  # two experts are as wide as the dense model's MLP
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("roll-lite tiny", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="models/tiny", help="default: models/tiny")
    parser.add_argument("--seed", type=int, default=0, help="of the fresh weights (0)")
    help = "experts of each layer, of which a token has 2; 0 is a dense model (0)"
    parser.add_argument("--experts", type=int, default=0, help=help)
    options = parser.parse_args(arguments)
    if Path(options.folder, "config.json").exists():
        print(
            f"{options.folder} holds a model already; remove it, or name another folder",
            file=sys.stderr,
        )
        return 1
    if options.experts < 0 or options.experts == 1:
        print(f"--experts {options.experts}: use 0, or at least 2", file=sys.stderr)
        return 2
    folder = build_tiny(options.folder, options.seed, options.experts)
    print(f"wrote {folder} (torch {torch.__version__})")
    return 0


def build_tiny(folder: str | Path, seed: int = 0, num_experts: int = 0) -> Path:
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
    if num_experts:
        hf_config |= MIXTURE | {"num_experts": num_experts}
    model = Transformer(parse_config(hf_config))
    model.init_weights(seed)
    tensors = hf_tensors(dict(model.named_parameters()), model.config)

    def add_tokenizer(target: Path) -> None:
        tokenizer.save_pretrained(target)
        generation = {"eos_token_id": tokenizer.eos_token_id}
        (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    return write_folder(folder, hf_config, tensors, tensors.items(), add_tokenizer)
