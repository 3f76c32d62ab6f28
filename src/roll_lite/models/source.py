"""Models by name: a Hugging Face folder, or random weights of a known shape to measure with."""

from pathlib import Path
from typing import Any

from roll_lite.models.hf import load_model
from roll_lite.models.shapes import shape_config
from roll_lite.models.transformer import Transformer, random_model

SHAPE = "shape:"


def open_model(source: str | Path, **options: Any) -> Transformer:
    """`source` is a folder, or a shape as in shape:qwen3-0.6b."""
    if str(source).startswith(SHAPE):
        return random_model(shape_config(str(source).removeprefix(SHAPE)), **options)
    return load_model(source, **options)
