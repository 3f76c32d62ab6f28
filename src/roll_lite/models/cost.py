"""What a model costs: parameters, flops and activation bytes. Pure arithmetic: no torch, no device.

Everything is derived from the cost of one attention and one MLP. H hidden, F intermediate,
V vocabulary, D head; `width` is the bytes of an element that models compute in: 2 (bf16) on a GPU,
4 (fp32) on a CPU. Each of `tp` ranks holds an equal share of the heads, of F and of V. A share of V
is rounded up, and key/value heads that are fewer than ranks are repeated.
"""

from collections.abc import Collection
from dataclasses import dataclass

from roll_lite.models.config import ExpertsConfig, ModelConfig

DENSE_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Peak flops per second by a part of the device's name, as published by the vendors (SXM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """Cost of one module. Activations are elements per token on one tensor-parallel rank."""

    parameters: int = 0
    """Over all tensor-parallel ranks."""
    active_parameters: int = 0
    """Matrix weights that one token is multiplied with, over all tensor-parallel ranks."""
    pair_flops: int = 0
    """Flops of one (query, key) pair, over all tensor-parallel ranks."""
    saved: int = 0
    """Kept from forward to backward."""
    saved_fp32: int = 0
    """Kept in fp32, whatever the compute dtype."""
    products: int = 0
    """Outputs of matrix products, which selective checkpointing keeps."""
    products_fp32: int = 0
    workspace: int = 0
    """Alive only while the module runs, forward without autograd or backward."""

    def __add__(self, other: "ModuleCost") -> "ModuleCost":
        names = self.__dataclass_fields__
        return ModuleCost(**{name: getattr(self, name) + getattr(other, name) for name in names})


def attention_cost(config: ModelConfig, tp: int = 1) -> ModuleCost:
    H, D, num_heads = config.hidden_size, config.head_dim, config.num_heads
    heads = num_heads // tp
    kv_heads = max(1, config.num_kv_heads // tp)
    qkv_rows = tp * (heads + 2 * kv_heads) * D
    weights = qkv_rows * H + num_heads * D * H
    qkv = (heads + 2 * kv_heads) * D
    # The input of qkv; rotated queries and keys, values; the output, for attention and `out`.
    saved = H + qkv + heads * D
    saved_fp32 = heads  # log-sum-exp
    if config.qk_norm:
        saved += qkv  # before its norms
        saved_fp32 += heads + kv_heads  # 1/rms of every normed head
    return ModuleCost(
        parameters=weights + qkv_rows * config.qkv_bias + 2 * D * config.qk_norm,
        active_parameters=weights,
        pair_flops=4 * num_heads * D,  # the score, and the weighted value
        saved=saved,
        saved_fp32=saved_fp32,
        products=qkv + heads * D + H,  # qkv, attention, `out`
        products_fp32=heads,
    )


def mlp_cost(config: ModelConfig, tp: int = 1) -> ModuleCost:
    """The largest of the model: where there are experts, the mixture."""
    if config.experts:
        return _mixture_cost(config.experts, config.hidden_size, tp)
    return _dense_cost(config, tp)


def _dense_cost(config: ModelConfig, tp: int) -> ModuleCost:
    H, F = config.hidden_size, config.intermediate_size // tp
    weights = 3 * config.intermediate_size * H
    return ModuleCost(
        parameters=weights,
        active_parameters=weights,
        saved=H + 3 * F,  # the input; gate and up, for silu and the product; the product, for down
        products=2 * F,  # gate and up; the output of down is in the residual stream
        workspace=3 * F,
    )


def _mixture_cost(config: ExpertsConfig, H: int, tp: int) -> ModuleCost:
    """Experts on tokens that are copied once for each of their experts, sorted, and summed again.

    Each of `tp` ranks holds an equal share of every expert.
    """
    E, K = config.num_experts, config.experts_per_token
    F = (K * config.size + config.shared_size) // tp
    expert = 3 * config.size * H
    shared = (3 * config.shared_size + 1) * H if config.shared_size else 0
    return ModuleCost(
        parameters=E * (expert + H) + shared,
        active_parameters=K * expert + E * H + shared,
        saved=H + 2 * K * H + 3 * F,  # as of a dense MLP; the copies, and their outputs
        saved_fp32=E,  # the router's probabilities
        products=K * H + 2 * F,
        products_fp32=E,
        workspace=2 * K * H + 3 * F,
    )


def block_cost(config: ModelConfig, tp: int = 1) -> ModuleCost:
    """One decoder block: attention and MLP, each behind a norm, on the residual stream."""
    H = config.hidden_size
    # Saved for each norm: its input and 1/rms. The residual stream and what is added to it next
    # are all that full checkpointing keeps.
    norms = ModuleCost(parameters=2 * H, saved=2 * H, saved_fp32=2, products=2 * H, workspace=2 * H)
    return norms + attention_cost(config, tp) + mlp_cost(config, tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    block: int
    """One decoder block."""
    root: int
    """The embedding, the last norm and, unless tied, the head."""
    total: int


def count_parameters(config: ModelConfig, tp: int = 1) -> ParameterCounts:
    """Over all tensor-parallel ranks."""
    block = block_cost(config, tp).parameters
    root = tp * vocabulary_rows(config, tp) * config.hidden_size * (1 if config.tied_head else 2)
    root += config.hidden_size
    num_dense = config.num_layers - len(config.sparse_layers) if config.experts else 0
    less = mlp_cost(config, tp).parameters - _dense_cost(config, tp).parameters
    total = config.num_layers * block - num_dense * less + root
    return ParameterCounts(block=block, root=root, total=total)


def vocabulary_rows(config: ModelConfig, tp: int) -> int:
    """Entries of the vocabulary on one tensor-parallel rank."""
    return -(-config.vocab_size // tp)


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token uses: all but the other experts, and as published an untied
    embedding."""
    mlp = mlp_cost(config)
    num_sparse = len(config.sparse_layers) if config.experts else config.num_layers
    idle = num_sparse * (mlp.parameters - mlp.active_parameters)
    return count_parameters(config).total - idle


def adapter_parameters(
    config: ModelConfig, rank: int, targets: Collection[str], tp: int = 1
) -> int:
    """Parameters of a block's LoRA adapters: each has a matrix from its inputs to `rank` numbers,
    and one from these to its outputs."""
    H = config.hidden_size
    F = config.experts.size if config.experts else config.intermediate_size
    heads = config.num_heads * config.head_dim
    keys = max(tp, config.num_kv_heads) * config.head_dim
    experts = config.experts.num_experts if config.experts else 1
    sizes = {
        "qkv": H + heads + 2 * keys,
        "out": heads + H,
        "gate_up": experts * (H + 2 * F),
        "down": experts * (F + H),
    }
    return rank * sum(sizes[target] for target in targets)


def kv_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """Keys and values of one token in all layers."""
    return config.num_layers * 2 * max(1, config.num_kv_heads // tp) * config.head_dim * width


def block_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """What autograd keeps of one token in one block, whose pointwise parts are fused."""
    cost = block_cost(config, tp)
    return width * cost.saved + 4 * cost.saved_fp32


def saved_bytes_per_token(
    config: ModelConfig, tp: int, width: int, checkpointing: str = "none"
) -> int:
    """What is kept of one packed token in all layers from forward to backward."""
    H = config.hidden_size
    cost = block_cost(config, tp)
    block = {
        "none": block_bytes_per_token(config, tp, width),
        "selective": width * cost.products + 4 * cost.products_fp32,
        "full": width * 2 * H,
    }[checkpointing]
    # Once per model: the last norm in and out, its rows with a loss, its 1/rms, cos and sin.
    return config.num_layers * block + width * 3 * H + 4 * (1 + config.head_dim)


def workspace_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """What one block holds of a token only while it runs."""
    return width * block_cost(config, tp).workspace


def forward_flops(
    config: ModelConfig, tp: int = 1, *, num_tokens: float, num_pairs: float, num_rows: float
) -> float:
    """`num_pairs` counts (query, key) pairs, len * (len + 1) / 2 for each sequence; `num_rows` the
    tokens that go through the head. Over all tensor-parallel ranks."""
    block = block_cost(config, tp)
    layers = config.num_layers
    head = tp * vocabulary_rows(config, tp) * config.hidden_size
    products = 2.0 * (layers * block.active_parameters * num_tokens + head * num_rows)
    return products + layers * block.pair_flops * num_pairs


def training_flops(config: ModelConfig, *, is_frozen: bool = False, **counts: float) -> float:
    """Forward and backward; a frozen model has no gradients of weights.

    What checkpointing recomputes does not count.
    """
    return (2 if is_frozen else 3) * forward_flops(config, **counts)


def device_flops(name: str) -> float | None:
    """Peak bf16 flops per second of a device by its name; None if unknown."""
    return next((flops for part, flops in DENSE_BF16.items() if part in name), None)


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Work of a sequence, linear * length + quadratic * length^2, in any unit."""

    linear: float = 1.0
    quadratic: float = 0.0

    @classmethod
    def of(cls, config: ModelConfig) -> "SequenceCost":
        """Forward flops of the blocks; the backward pass is a multiple of them.

        Two flops per weight and token; half of the length^2 (query, key) pairs are causal.
        """
        block = block_cost(config)
        layers = config.num_layers
        return cls(2.0 * block.active_parameters * layers, block.pair_flops / 2 * layers)

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


BY_LENGTH = SequenceCost()
