"""Kernels of experts in the shape of Qwen3-30B-A3B, one layer, beside torch's grouped_mm.

python scripts/bench/experts.py
python scripts/bench/experts.py --tune

Forward passes are replayed as a CUDA graph over several layers with weights and routes of their
own, so that no weights stay in the L2 cache. `memory` and `flops` are shares of what one H200 was
measured to reach: the chosen experts read once, and the products. With --tune each product is
tried alone with other tiles; the last line of a number of tokens is the best.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from roll_lite.kernels import experts
from roll_lite.kernels.experts import Block, expert_mlp, list_pairs, route, tiles_for

HIDDEN, EXPERTS, CHOSEN, INNER, LAYERS = 2048, 128, 8, 768, 4
DECODE, PREFILL = (1, 16, 64, 256, 512, 1024), (8192, 32768)
BYTES, FLOPS = 4.27e12, 777e12  # a second, measured on one H200
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
Action = Callable[[int], object]
"""Something done for a layer."""


def attempt(action: Callable[[], object]) -> object:
    """The result, or None where a kernel fails."""
    try:
        return action()
    except Exception as error:
        print(f"failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def event_ms(action: Callable[[], object]) -> float:
    """Median of five timings, of about 4 ms each."""
    times, repeats = [], 1
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            action()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats)
        repeats = max(1, min(200, int(4 / times[-1])))
    return sorted(times[2:])[2]


def graph_ms(action: Action) -> float:
    """Milliseconds of a layer in a graph over all layers."""
    action(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            action(layer)
    return event_ms(graph.replay) / LAYERS


def eager_ms(action: Action) -> float:
    return event_ms(lambda: [action(layer) for layer in range(LAYERS)]) / LAYERS


def grouped_mm_layer(x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK) -> Tensor:
    """A layer of torch operations."""
    ids_P, order_P = ids_TK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(ids_P, torch.arange(EXPERTS, device=ids_P.device).int(), right=True)
    token_P, offs = order_P // ids_TK.shape[1], ends_E.int()
    gate_PF, up_PF = F.grouped_mm(
        x_TH[token_P], gate_up_E2FH.flatten(1, 2).transpose(1, 2), offs=offs
    ).chunk(2, 1)
    out_PH = F.grouped_mm(F.silu(gate_PF) * up_PF, down_EHF.transpose(1, 2), offs=offs)
    out_PH = out_PH * weights_TK.flatten()[order_P, None]
    return torch.zeros_like(x_TH).index_add_(0, token_P, out_PH)


def loop_layer(x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK) -> Tensor:
    """A layer in fp32, one expert at a time."""
    y_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for e in range(EXPERTS):
        token, k = (ids_TK == e).nonzero(as_tuple=True)
        gate, up = x_TH[token].float() @ gate_up_E2FH[e].float().transpose(1, 2)
        out = (F.silu(gate) * up) @ down_EHF[e].float().T
        y_TH = y_TH.index_add(0, token, weights_TK[token, k, None].float() * out)
    return y_TH


class Layers:
    """Weights of the layers, and inputs for a number of tokens."""

    def __init__(self):
        shapes = (EXPERTS, 2, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
        self.weights = [
            [torch.randn(shape, **BF16) * shape[-1] ** -0.5 for shape in shapes]
            for _ in range(LAYERS)
        ]

    def __getitem__(self, layer: int) -> tuple[Tensor, ...]:
        return self.x_TH, *self.weights[layer], *self.routes[layer]

    def choose(self, T: int) -> None:
        self.T, self.x_TH = T, torch.randn(T, HIDDEN, **BF16)
        self.logits = [torch.randn(T, EXPERTS, **BF16) for _ in range(LAYERS)]
        self.routes = [route(logits_TE, CHOSEN, True) for logits_TE in self.logits]
        self.act_PF, self.out_PH = (torch.randn(T * CHOSEN, n, **BF16) for n in (INNER, HIDDEN))

    def products(self, rows: int) -> dict[str, Callable[[Block], Action]]:
        """Of each product, what runs it alone with a block."""
        lists = [list_pairs(ids_TK, EXPERTS, 0, rows) for ids_TK, _ in self.routes]
        return {
            "gate_up": lambda block: (
                lambda i: experts.gate_up(
                    self.x_TH, self.weights[i][0], lists[i], self.act_PF, None, rows, block
                )
            ),
            "down": lambda block: (
                lambda i: experts.multiply(
                    self.act_PF, self.weights[i][1].transpose(1, 2), lists[i], rows, block
                )
            ),
        }

    def parts(self) -> dict[str, Action]:
        tiles = tiles_for(self.T * CHOSEN, EXPERTS)
        product = self.products(tiles.rows)
        return {
            "routed layer": lambda i: [route(self.logits[i], CHOSEN, True), expert_mlp(*self[i])],
            "grouped_mm layer": lambda i: grouped_mm_layer(*self[i]),
            "route": lambda i: route(self.logits[i], CHOSEN, True),
            "lists": lambda i: list_pairs(self.routes[i][0], EXPERTS, 0, tiles.rows),
            "gate_up": product["gate_up"](tiles.gate_up),
            "down": product["down"](tiles.down),
            "sum": lambda i: experts.sum_pairs(self.out_PH, *self.routes[i], 0, EXPERTS),
        }


def forward(layers: Layers) -> dict[str, object]:
    times = {
        name: attempt(lambda action=action: graph_ms(action))
        for name, action in layers.parts().items()
    }
    chosen = sum(ids_TK.unique().numel() for ids_TK, _ in layers.routes) / LAYERS
    expert = 3 * HIDDEN * INNER * 2  # bytes of an expert, and flops of a pair
    result: dict[str, object] = {"tokens": layers.T}
    if taken := times["routed layer"]:
        result["memory"] = round(1e3 * chosen * expert / BYTES / taken, 3)
        result["flops"] = round(1e3 * layers.T * CHOSEN * expert / FLOPS / taken, 3)
    return result | {f"{name} ms": ms and round(ms, 4) for name, ms in times.items()}


def errors(layers: Layers) -> dict[str, object]:
    """Relative errors against fp32; whether two calls give the same bits."""
    expected = loop_layer(*layers[0])
    got, again, plain = (layer(*layers[0]) for layer in (expert_mlp, expert_mlp, grouped_mm_layer))
    ours, torchs = (((y - expected).norm() / expected.norm()).item() for y in (got, plain))
    same = torch.equal(got, again)
    return {"tokens": layers.T, "error": ours, "grouped_mm error": torchs, "same bits": same}


def candidates(rows: int, matrices: int) -> list[Block]:
    """Blocks that fit shared memory and registers, and load enough ahead."""
    found = []
    for block in itertools.product((32, 64, 128, 256), (64, 128), (4, 8), (3, 4, 5)):
        columns, depth, warps, stages = block
        columns *= matrices
        shared = (rows + columns) * depth * 2 * stages
        values = rows * columns // (warps * 32)  # of a thread
        if 40_000 < shared < 230_000 and 4 <= values <= 128 and 32 < columns <= 256:
            found.append(Block(*block))
    return found


def fastest(layers: Layers, rows: int, name: str) -> tuple[float, Block] | None:
    product = layers.products(rows)[name]
    blocks = candidates(rows, 2 if name == "gate_up" else 1)
    with ThreadPoolExecutor(16) as pool:  # compiles
        done = pool.map(lambda block: attempt(lambda: [product(block)(0)]), blocks)
        blocks = [block for block, works in zip(blocks, done, strict=True) if works]
    times = []
    for block in blocks:
        if ms := attempt(lambda block=block: eager_ms(product(block))):
            print(f"{layers.T:6} {name:8} {rows:4} {tuple(block)!s:20} {ms:.4f} ms", flush=True)
            times.append((ms, block))
    return min(times, default=None)


def try_tiles(layers: Layers) -> None:
    mean, found = layers.T * CHOSEN / EXPERTS, []
    for rows in (16, 32, 64, 128):
        if min(mean, 128) / 2 <= rows <= max(16, 4 * mean):
            best = [fastest(layers, rows, name) for name in ("gate_up", "down")]
            if all(best):
                found.append((sum(ms for ms, _ in best), rows, [tuple(b) for _, b in best]))
    for ms, rows, blocks in sorted(found, reverse=True):
        print(json.dumps({"tokens": layers.T, "products ms": ms, "rows": rows, "blocks": blocks}))


def main(tune: bool = False) -> None:
    """Kernels of experts, beside torch's grouped_mm.

    Args:
        tune: Try other tiles instead.
    """
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device was found; run this where there is one")
    torch.manual_seed(0)
    started, layers = time.perf_counter(), Layers()
    for T in (1, 64, 1024, 4096) if not tune else ():
        layers.choose(T)
        print(json.dumps(attempt(lambda: errors(layers))), flush=True)
    for T in (*DECODE[2 * tune :], *PREFILL):  # launches of fewer tokens take longer than kernels
        layers.choose(T)
        if tune:
            try_tiles(layers)
        else:
            print(json.dumps(forward(layers)), flush=True)
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "seconds": seconds}))


if __name__ == "__main__":
    tyro.cli(main)
