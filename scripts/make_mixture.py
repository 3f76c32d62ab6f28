"""Make a mixture of experts of a dense model: every expert begins as the model's MLP, with noise.

    python scripts/make_mixture.py models/Qwen2.5-Coder-0.5B-Instruct models/mixture --experts 8

The experts of a token have weights that add up to 1, so without noise the mixture computes what the
model did. The router is fresh. A Llama or Mistral becomes a Mixtral, a Qwen3 a Qwen3-MoE; a Qwen2
becomes a Qwen2-MoE, whose shared expert begins without effect.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch

from roll_lite.models.config import parse_config, read_hf_config
from roll_lite.models.hf import load_model, stored_dtype
from roll_lite.models.hf_write import save_model
from roll_lite.models.transformer import Transformer

KINDS = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
ARCHITECTURES = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}
SHARED_SIZE = 128


def mixture_config(dense: dict, experts: int, per_token: int) -> dict:
    if dense["model_type"] not in KINDS:
        raise SystemExit(f"error: model_type={dense['model_type']!r} is not one of {[*KINDS]}")
    kind = KINDS[dense["model_type"]]
    more = {
        "num_local_experts" if kind == "mixtral" else "num_experts": experts,
        "num_experts_per_tok": per_token,
        "norm_topk_prob": True,
    }
    if kind != "mixtral":
        more |= {"moe_intermediate_size": dense["intermediate_size"], "decoder_sparse_step": 1}
    if kind == "qwen2_moe":
        more |= {"shared_expert_intermediate_size": SHARED_SIZE}
    names = [f"{ARCHITECTURES[kind]}ForCausalLM"]
    return dense | more | {"model_type": kind, "architectures": names}


@torch.no_grad()
def fill(model: Transformer, dense: Transformer, noise: float) -> None:
    """`noise` is relative to the standard deviation of a weight."""
    model.init_weights(0)
    held = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        if name in held:
            parameter.copy_(held[name])
        elif ".experts." in name:
            whole = held[name.replace(".experts", "")]
            for expert in parameter:
                expert.copy_(whole + noise * whole.std() * torch.randn_like(whole))
        elif name.endswith("shared.down"):
            parameter.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face folder of a dense model")
    parser.add_argument("folder", help="for the mixture")
    parser.add_argument("--experts", type=int, default=8, help="in each layer (8)")
    parser.add_argument("--per-token", type=int, default=2, help="experts of a token (2)")
    parser.add_argument("--noise", type=float, default=0.01, help="of an expert's weights (0.01)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (0)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    hf_config = mixture_config(read_hf_config(args.model), args.experts, args.per_token)
    dtype = stored_dtype(args.model)
    model = Transformer(parse_config(hf_config)).to(dtype)
    fill(model, load_model(args.model, dtype=dtype), args.noise)

    with tempfile.TemporaryDirectory() as like:  # what the folder has beside its weights
        for file in Path(args.model).iterdir():
            if file.is_file() and file.suffix != ".safetensors" and "index" not in file.name:
                shutil.copy(file, like)
        Path(like, "config.json").write_text(json.dumps(hf_config))
        print(f"wrote {save_model(args.folder, model, like=like)}")


if __name__ == "__main__":
    main()
