"""What a model costs: parameters, flops and activation bytes. Pure arithmetic: no torch, no device.

Everything is derived from the cost of one attention and one MLP. H hidden, F intermediate,
V vocabulary, D head; `width` is the bytes of an element that models compute in: 2 (bf16) on a GPU,
4 (fp32) on a CPU. Each of `tp` ranks holds an equal share of the heads, of F and of V. A share of V
is rounded up, and key/value heads that are fewer than ranks are repeated.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

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

    def kept(self, width: int) -> int:
        """Bytes per token from forward to backward."""
        return width * self.saved + 4 * self.saved_fp32

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


def _mixture_cost(config: ModelConfig, tp: int, ep: int) -> ModuleCost:
    """Experts as kernels/expert_gradients.py has them: of each pair of a token and an expert, gate
    and up are kept, and the rest is computed again. Each of `tp` ranks has an equal share of every
    expert, and of `ep` ranks an equal share of the experts."""
    mixture, H = config.experts, config.hidden_size
    E, K = mixture.num_experts, mixture.experts_per_token
    F, shared = mixture.size // tp, mixture.shared_size // tp
    rows = rows_per_token(mixture, ep)
    places = K * rows  # of pairs, also of those that are elsewhere
    shared_weights = (3 * mixture.shared_size + 1) * H if shared else 0
    return ModuleCost(
        parameters=E // ep * expert_parameters(config) + E * H + shared_weights,
        active_parameters=K * expert_parameters(config) + E * H + shared_weights,
        # The input, and the rows that arrive; gate and up; as of a dense MLP, and what it returns
        saved=H + ceil(rows * H) * (ep > 1) + 2 * K * F + (3 * shared + H) * (shared > 0),
        saved_fp32=E + K + ceil(3 * places),  # probabilities; lists; ids in 8 bytes, weights
        products=E + (2 * shared + H) * (shared > 0),  # of torch's: the router, the shared expert
        # Gate, up, their product; what comes out of experts
        workspace=3 * K * F + ceil(places * H) + 3 * shared,
    )


def expert_parameters(config: ModelConfig) -> int:
    """Of one expert."""
    return 3 * config.experts.size * config.hidden_size


def rows_per_token(mixture: ExpertsConfig, ep: int) -> float:
    """Ranks that each token travels to, if all experts are chosen equally often: once to each of
    the `ep` ranks that has some of its experts."""
    return ep * (1 - (1 - 1 / ep) ** mixture.experts_per_token)


Blocks = list[tuple[int, ModuleCost]]
"""How many blocks have an MLP of a kind, and what each of them costs."""


def _blocks(config: ModelConfig, tp: int, ep: int) -> Blocks:
    """Decoder blocks: attention and MLP, each behind a norm, on the residual stream."""
    H = config.hidden_size
    # Saved for each norm: its input and 1/rms. The residual stream and what is added to it next
    # are all that full checkpointing keeps.
    norms = ModuleCost(parameters=2 * H, saved=2 * H, saved_fp32=2, products=2 * H, workspace=2 * H)
    rest = norms + attention_cost(config, tp)
    num_sparse = len(config.sparse_layers)
    blocks = [(num_sparse, rest + _mixture_cost(config, tp, ep))] if num_sparse else []
    if num_dense := config.num_layers - num_sparse:
        blocks.append((num_dense, rest + _dense_cost(config, tp)))
    return blocks


def _together(blocks: Blocks) -> ModuleCost:
    names = ModuleCost.__dataclass_fields__
    return ModuleCost(**{n: sum(num * getattr(cost, n) for num, cost in blocks) for n in names})


def _largest(blocks: Blocks) -> ModuleCost:
    """Each number is that of the block where it is largest."""
    names = ModuleCost.__dataclass_fields__
    return ModuleCost(**{n: max(getattr(cost, n) for _, cost in blocks) for n in names})


def block_cost(config: ModelConfig, tp: int = 1, ep: int = 1) -> ModuleCost:
    """The largest decoder block."""
    return _largest(_blocks(config, tp, ep))


def blocks_cost(config: ModelConfig, tp: int = 1, ep: int = 1) -> ModuleCost:
    """All decoder blocks."""
    return _together(_blocks(config, tp, ep))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    block: int
    """The largest decoder block; with `ep`, of its experts those of one rank."""
    root: int
    """The embedding, the last norm and, unless tied, the head."""
    total: int


def count_parameters(config: ModelConfig, tp: int = 1, ep: int = 1) -> ParameterCounts:
    """Over all tensor-parallel ranks."""
    root = tp * vocabulary_rows(config, tp) * config.hidden_size * (1 if config.tied_head else 2)
    root += config.hidden_size
    block = block_cost(config, tp, ep).parameters
    total = blocks_cost(config, tp).parameters + root
    return ParameterCounts(block=block, root=root, total=total)


def vocabulary_rows(config: ModelConfig, tp: int) -> int:
    """Entries of the vocabulary on one tensor-parallel rank."""
    return -(-config.vocab_size // tp)


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token uses: all but the other experts, and as published an untied
    embedding."""
    total = count_parameters(config).total
    if config.experts is None:
        return total
    idle = config.experts.num_experts - config.experts.experts_per_token
    return total - len(config.sparse_layers) * idle * expert_parameters(config)


def adapter_cost(
    config: ModelConfig, rank: int, targets: Collection[str], tp: int = 1, ep: int = 1
) -> tuple[ModuleCost, ModuleCost]:
    """LoRA's adapters in the largest block and in all: parameters, and what of a token is kept.

    Each has a matrix from its inputs to `rank` numbers, and one from these to its outputs.
    """
    H = config.hidden_size
    heads = config.num_heads * config.head_dim
    keys = max(tp, config.num_kv_heads) * config.head_dim

    def mlp(width: int, prefix: str = "") -> dict[str, int]:
        return {f"{prefix}gate_up": H + 2 * width, f"{prefix}down": width + H}

    def cost(sizes: dict[str, int], count: int = 1, pairs: float = 1) -> ModuleCost:
        found = [sizes[target] for target in targets if target in sizes]
        return ModuleCost(
            parameters=count * rank * sum(found), saved=ceil(pairs * rank * len(found))
        )

    attention = cost({"qkv": H + heads + 2 * keys, "out": heads + H})
    blocks = []
    if num_sparse := len(config.sparse_layers):
        mixture = config.experts
        pairs = mixture.experts_per_token * rows_per_token(mixture, ep)
        sparse = cost(mlp(mixture.size, "expert_"), mixture.num_experts // ep, pairs)
        if any(target.startswith("expert_") for target in targets):  # torch's products: `_grouped`
            kept = ceil(pairs * (H + mixture.size // tp))
            sparse += ModuleCost(saved=kept, saved_fp32=ceil(pairs * H))
        sparse += cost(mlp(mixture.shared_size)) if mixture.shared_size else ModuleCost()
        blocks.append((num_sparse, attention + sparse))
    if num_dense := config.num_layers - num_sparse:
        blocks.append((num_dense, attention + cost(mlp(config.intermediate_size))))
    return _largest(blocks), _together(blocks)


def kv_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """Keys and values of one token in all layers."""
    return config.num_layers * 2 * max(1, config.num_kv_heads // tp) * config.head_dim * width


def cache_bytes_per_token(config: ModelConfig, tp: int, width: int) -> int:
    """What the engine's cache holds of a token: keys, values, a byte for each of its experts."""
    chosen = len(config.sparse_layers) * config.experts.experts_per_token if config.experts else 0
    return kv_bytes_per_token(config, tp, width) + chosen


def block_bytes_per_token(config: ModelConfig, tp: int, width: int, ep: int = 1) -> int:
    """What autograd keeps of one token in the largest block, whose pointwise parts are fused."""
    return block_cost(config, tp, ep).kept(width)


def saved_bytes_per_token(
    config: ModelConfig, tp: int, width: int, checkpointing: str = "none", ep: int = 1
) -> int:
    """What is kept of one packed token in all layers from forward to backward."""
    H = config.hidden_size
    cost = blocks_cost(config, tp, ep)
    blocks = {
        "none": cost.kept(width),
        "selective": width * cost.products + 4 * cost.products_fp32,
        "full": config.num_layers * width * 2 * H,
    }[checkpointing]
    # Once per model: the last norm in and out, its rows with a loss, its 1/rms, cos and sin.
    return blocks + width * 3 * H + 4 * (1 + config.head_dim)


def workspace_bytes_per_token(config: ModelConfig, tp: int, width: int, ep: int = 1) -> int:
    """What the largest block holds of a token only while it runs."""
    return width * block_cost(config, tp, ep).workspace


def forward_flops(
    config: ModelConfig, tp: int = 1, *, num_tokens: float, num_pairs: float, num_rows: float
) -> float:
    """`num_pairs` counts (query, key) pairs, len * (len + 1) / 2 for each sequence; `num_rows` the
    tokens that go through the head. Over all tensor-parallel ranks."""
    blocks = blocks_cost(config, tp)
    head = tp * vocabulary_rows(config, tp) * config.hidden_size
    products = 2.0 * (blocks.active_parameters * num_tokens + head * num_rows)
    return products + blocks.pair_flops * num_pairs


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
        blocks = blocks_cost(config)
        return cls(2.0 * blocks.active_parameters, blocks.pair_flops / 2)

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


BY_LENGTH = SequenceCost()
