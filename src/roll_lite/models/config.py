"""The shape of a decoder, read from a Hugging Face config.json."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from roll_lite.checks import UserError
from roll_lite.files import read_json_object
from roll_lite.models.shapes import SHAPES, hf_shape
from roll_lite.types import SHAPE

DENSE_MODELS = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
SUPPORTED_MODELS = DENSE_MODELS + MIXTURES
BIASED_ROUTERS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "kimi_k2", "dots1")
"""Mixtures whose routers add a bias to choose experts, which nothing here trains."""
SUPPORTED_ROPE = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_SIZE, MAX_LAYERS = 10**8, 1000
"""Far above those of any model."""
_TYPES = {
    "architectures": list, "layer_types": list, "rope_parameters": dict, "rope_scaling": dict,
    "tie_word_embeddings": bool, "use_sliding_window": bool, "auto_map": dict,
}  # fmt: skip


class UnsupportedModelError(UserError):
    """A config.json needs something that this transformer does not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    kind: str = "default"
    """One of SUPPORTED_ROPE."""
    factor: float = 1.0
    """Scaled over original context length (linear, llama3)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    """Context length of pre-training (llama3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in the place of an MLP."""

    num_experts: int
    experts_per_token: int
    size: int
    """Inner width of an expert."""
    renormalizes: bool
    """Whether the weights of a token's experts add up to 1."""
    shared_size: int = 0
    """Inner width of the expert that every token has beside the others; 0: there is none."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP."""

    def __post_init__(self):
        if self.experts_per_token > self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok={self.experts_per_token} is more than the "
                f"{self.num_experts} experts; lower it in config.json"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner width of an MLP that is not a mixture."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    """The longest sequence for which our attention is exact."""
    tied_head: bool
    qkv_bias: bool
    qk_norm: bool
    experts: ExpertsConfig | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts."""
        if self.experts is None:
            return ()
        return tuple(n for n in range(self.num_layers) if n not in self.experts.dense_layers)


TARGETS = {
    "qkv": ("attention.qkv",),
    "out": ("attention.out",),
    "gate_up": ("mlp.gate_up", "mlp.shared.gate_up"),
    "down": ("mlp.down", "mlp.shared.down"),
    "expert_gate_up": ("mlp.experts.gate_up",),
    "expert_down": ("mlp.experts.down",),
}
"""Names of targets, and the block's weights that each adapts."""
DEFAULT_TARGETS = ("qkv", "out", "gate_up", "down")
"""What every token passes through. Adapters of rank 16 for all experts of Qwen3-30B-A3B are 629M
parameters, sixty times as many as for its attention, each of which few tokens train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    rank: int = 16
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = DEFAULT_TARGETS
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __post_init__(self):
        if self.rank < 1:
            raise UserError(f"lora rank={self.rank} must be at least 1")
        if unknown := [name for name in self.targets if name not in TARGETS]:
            raise UserError(
                f"lora targets={','.join(unknown)} are not known; use {', '.join(TARGETS)}"
            )
        if not self.targets:
            raise UserError(f"lora targets are empty; give some of {', '.join(TARGETS)}")


def lora_options(rank: int, alpha: float, targets: tuple[str, ...]) -> LoraOptions | None:
    """LoRA options, or None for rank 0, which trains all weights."""
    return LoraOptions(rank=rank, alpha=alpha, targets=targets) if rank else None


def local_config(config: ModelConfig, tp: int) -> ModelConfig:
    """The sizes that each of `tp` tensor-parallel ranks computes with.

    Vocabulary rows are rounded up, so the last ranks may have padding, and key/value heads that are
    fewer than ranks are repeated. Other sizes must divide.
    """
    if problem := tp_problem(config, tp):
        sizes = ", ".join(map(str, tp_sizes(config)))
        raise UserError(f"tp={tp} {problem}; use one of {sizes}")
    experts = config.experts  # `ExpertWeights` knows its part of them
    if experts:
        experts = replace(experts, shared_size=experts.shared_size // tp)
    return replace(
        config,
        experts=experts,
        vocab_size=-(-config.vocab_size // tp),
        intermediate_size=config.intermediate_size // tp,
        num_heads=config.num_heads // tp,
        num_kv_heads=max(1, config.num_kv_heads // tp),
    )


def tp_sizes(config: ModelConfig) -> list[int]:
    """The numbers of tensor-parallel ranks that this model can have."""
    return [tp for tp in range(1, config.num_heads + 1) if not tp_problem(config, tp)]


def tp_problem(config: ModelConfig, tp: int) -> str | None:
    """Why `tp` ranks cannot hold this model together; None if they can."""
    if config.num_heads % tp:
        return f"does not divide {config.num_heads} attention heads"
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        return f"is neither a divisor nor a multiple of {config.num_kv_heads} key/value heads"
    widths = [config.intermediate_size] if len(config.sparse_layers) < config.num_layers else []
    if config.experts:
        widths += [config.experts.size, config.experts.shared_size]
    for width in widths:
        if width % tp:
            return f"does not divide {width} intermediate rows"
    return None


def read_config(folder: str | Path) -> ModelConfig:
    """Errors name the file."""
    hf = read_hf_config(folder)
    try:
        return parse_config(hf)
    except UnsupportedModelError as error:
        place = folder if str(folder).startswith(SHAPE) else Path(folder) / "config.json"
        raise UnsupportedModelError(f"{place}: {error}") from None


def shape_config(name: str) -> ModelConfig:
    return parse_config(hf_shape(name))


def planned_config(model: str | Path) -> ModelConfig:
    """The config of a shape or a folder, for the planner."""
    hf = SHAPES.get(str(model).lower())
    if hf is None and not Path(model).is_dir():
        raise UserError(f"model={model!r} is neither a folder nor one of {', '.join(SHAPES)}")
    return parse_config(hf) if hf else read_config(model)


def read_hf_config(folder: str | Path) -> dict:
    """The config.json of a model folder, unparsed; or of a shape, as in shape:qwen3-0.6b."""
    if str(folder).startswith(SHAPE):
        return hf_shape(str(folder).removeprefix(SHAPE))
    path = Path(folder) / "config.json"
    try:
        found = read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        if (Path(folder) / "manifest.json").exists():
            raise UserError(
                f"{folder} is a checkpoint, not a model folder: `roll-lite export "
                f"{folder} OUT` makes one of it, and evaluate.py takes it as --checkpoint"
            ) from None
        raise UserError(
            f"{folder} is not a model folder: it has no config.json. Give a Hugging Face folder on "
            "this machine, a name on the Hugging Face Hub, as Qwen/Qwen3-0.6B, or make one: "
            "`roll-lite tiny FOLDER`"
        ) from None
    if "starts" in found and "model_type" not in found:
        raise UserError(_where_the_model_is(Path(folder)))
    return found


def _where_the_model_is(run: Path) -> str:
    """What to give instead of a run folder, whose config.json is report/config_file.py's."""
    model = run / "model"
    scores = {path: _score(path) for path in sorted((run / "checkpoints").glob("step-*"))}
    newest = max(scores, default=None)
    has_model = (model / "config.json").exists()
    parts = [f"{run} is a run folder"]
    parts.append(f"its model is {model}" if has_model else "it has written no model yet")
    best = max(scores, key=scores.get, default=None)
    if best is not None and scores[best] > scores[newest]:
        parts.append(f"its best checkpoint is {best}, of which {_export(best)} makes a model")
    elif newest is not None and not has_model:
        parts.append(f"{_export(newest)} makes one of its newest checkpoint")
    return "; ".join(parts)


def _export(checkpoint: Path) -> str:
    return f"`roll-lite export {checkpoint} OUT`"


def _score(checkpoint: Path) -> float:
    """How a checkpoint evaluated, as its manifest says."""
    try:
        score = read_json_object(checkpoint / "manifest.json").get("score")
    except (OSError, ValueError):
        score = None
    return -math.inf if score is None else score


def parse_config(hf: dict) -> ModelConfig:
    """Translate a Hugging Face config; refuses by name what the transformer does not support."""
    model_type = hf.get("model_type")
    if model_type in BIASED_ROUTERS:
        raise UnsupportedModelError(
            f"model_type={model_type!r} is not supported: its router chooses experts with a "
            f"correction bias, which is not trained here; supported mixtures: {', '.join(MIXTURES)}"
        )
    if model_type not in SUPPORTED_MODELS:
        raise UnsupportedModelError(
            f"model_type={model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODELS)}"
        )
    _check_types(hf)
    _refuse_unsupported(hf)
    heads = _size(hf, "num_attention_heads")
    return ModelConfig(
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=_size(hf, "hidden_size"),
        intermediate_size=_size(hf, "intermediate_size"),
        experts=_parse_experts(hf) if model_type in MIXTURES else None,
        num_layers=_size(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(hf, "num_key_value_heads", heads),
        head_dim=_size(hf, "head_dim", _size(hf, "hidden_size") // heads),
        norm_eps=_required(hf, "rms_norm_eps"),
        rope=_parse_rope(hf),
        max_positions=_exact_positions(hf),
        tied_head=bool(hf.get("tie_word_embeddings")),
        qkv_bias=model_type == "qwen2" or (model_type == "qwen2_moe" and hf.get("qkv_bias", True)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
    )


def _parse_experts(hf: dict) -> ExpertsConfig | None:
    """Folders of transformers 5 have num_local_experts, older ones of Qwen num_experts."""
    is_mixtral = hf["model_type"] == "mixtral"
    dense_layers = () if is_mixtral else _dense_layers(hf)
    if len(dense_layers) == _size(hf, "num_hidden_layers"):
        return None
    name = "num_experts" if "num_experts" in hf else "num_local_experts"
    shared = "shared_expert_intermediate_size"
    return ExpertsConfig(
        num_experts=_size(hf, name),
        experts_per_token=_size(hf, "num_experts_per_tok"),
        size=_size(hf, "intermediate_size" if is_mixtral else "moe_intermediate_size"),
        renormalizes=is_mixtral or bool(hf.get("norm_topk_prob", False)),
        shared_size=_size(hf, shared) if hf["model_type"] == "qwen2_moe" else 0,
        dense_layers=dense_layers,
    )


def _dense_layers(hf: dict) -> tuple[int, ...]:
    named = hf.get("mlp_only_layers") or ()
    num_layers = _size(hf, "num_hidden_layers")
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in named):
        raise UnsupportedModelError(f"mlp_only_layers={named!r:.80} must be numbers of layers")
    step = _size(hf, "decoder_sparse_step", 1)
    return tuple(n for n in range(num_layers) if n in named or (n + 1) % step)


def _required(fields: dict, name: str, default: float | None = None) -> int | float:
    """A field that must be a positive number; with a default, it may be missing or 0."""
    value = fields.get(name) or default
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UnsupportedModelError(f"{name}={fields.get(name)!r:.80} must be a positive number")
    return value


def _size(fields: dict, name: str, default: int | None = None) -> int:
    """A number of which the model has that many of something: it is not to fill memory or time."""
    value = _required(fields, name, default)
    most = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
    if not isinstance(value, int) or value > most:
        raise UnsupportedModelError(f"{name}={value!r:.80} must be a whole number up to {most:,}")
    return value


def _check_types(hf: dict) -> None:
    """Refuse wrong types of fields that may be missing."""
    for name, kind in _TYPES.items():
        value = hf.get(name)
        if value is not None and not isinstance(value, kind):
            raise UnsupportedModelError(f"{name}={value!r:.80} must be {kind.__name__} or null")
        if kind is list and not all(isinstance(entry, str) for entry in value or ()):
            raise UnsupportedModelError(f"{name}={value!r:.80} must be a list of texts")
    if (dtype := hf.get("dtype") or hf.get("torch_dtype")) not in (None, *DTYPES):
        raise UnsupportedModelError(f"dtype={dtype!r:.80} is not one of {', '.join(DTYPES)}")


def _refuse_unsupported(hf: dict) -> None:
    wanted = {
        "hidden_act": ("silu", "SwiGLU with silu"),
        "attention_bias": (False, "no bias on Llama, Mistral and Qwen3 attention"),
        "mlp_bias": (False, "no bias in the MLP"),
        "attention_dropout": (0.0, "no dropout"),
        "router_jitter_noise": (0.0, "a router without noise"),
        "partial_rotary_factor": (1.0, "rotation of the whole head"),
        "quantization_config": (None, "bf16, fp16 or fp32 weights"),
    }
    for field, (supported, meaning) in wanted.items():
        value = hf.get(field)
        if value is not None and value != supported:
            raise UnsupportedModelError(f"{field}={value!r} is not supported; supported: {meaning}")


def _exact_positions(hf: dict) -> int:
    """Our attention is full, which equals a sliding window within the window's length."""
    limit = _size(hf, "max_position_embeddings")
    window = _size(hf, "sliding_window", limit)
    layer_types = set(hf.get("layer_types") or ())
    if other := layer_types - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"layer_types has {sorted(other)}; supported: full_attention and, for sequences "
            "within the window, sliding_attention"
        )
    slides = "sliding_attention" in layer_types
    if not layer_types:
        slides = hf["model_type"] in ("mistral", "mixtral") or hf.get("use_sliding_window")
    return min(limit, window) if slides else limit


def _parse_rope(hf: dict) -> RopeConfig:
    """transformers 5 writes rope_parameters; older folders have rope_theta and rope_scaling."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if scaling.get("partial_rotary_factor", 1.0) != 1.0 or any(
        isinstance(value, dict) for value in scaling.values()
    ):
        raise UnsupportedModelError(
            f"rope_parameters={scaling} is not supported; supported: one rotation of whole heads"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in SUPPORTED_ROPE:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}"
        )
    theta = _required(scaling, "rope_theta", _required(hf, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_required(scaling, "factor"))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_required(scaling, "factor"),
        low_freq_factor=_required(scaling, "low_freq_factor"),
        high_freq_factor=_required(scaling, "high_freq_factor"),
        original_positions=_required(scaling, "original_max_position_embeddings"),
    )
