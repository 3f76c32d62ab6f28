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
import tyro
from expert_layers import (
    CHOSEN,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    Layers,
    gradients,
    grouped_mm_layer,
    loop_layer,
)

from roll_lite.kernels.expert_gradients import grouped_mlp
from roll_lite.kernels.experts import Block, Tiles, expert_mlp, tiles_for

CHECKED, DECODE = (16, 256, 4096), (1, 16, 64, 256, 512, 1024)
PREFILL, TRAINED = (8192, 32768), (4096, 16384)
BYTES, FLOPS = 4.27e12, 777e12  # a second, measured on one H200
# Bytes of an expert, and flops of a pair forward. Backward takes twice these flops (gradients of
# inputs and of weights) and reads gate and up (2 F), grad_y and x (2 H) of each pair at least.
EXPERT = 3 * HIDDEN * INNER * 2


def attempt(action: Callable[[], object]) -> object:
    """The result, or None where a kernel fails."""
    try:
        return action()
    except Exception as error:
        print(f"failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def event_ms(action: Callable[[], object]) -> float:
    """Milliseconds of a layer in an action over all: median of five timings of 4 ms or more."""
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
    return round(sorted(times[2:])[2] / LAYERS, 4)


def graph_ms(action: Callable[[int], object]) -> float:
    action(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            action(layer)
    return event_ms(graph.replay)


def eager_ms(action: Callable[[int], object]) -> float:
    return event_ms(lambda: [action(layer) for layer in range(LAYERS)])


def forward(layers: Layers) -> dict[str, object]:
    tiles = tiles_for(layers.T * CHOSEN, EXPERTS)
    parts = layers.parts(tiles, layers.list(tiles.rows)).items()
    times = {name: attempt(lambda action=action: graph_ms(action)) for name, action in parts}
    chosen = sum(ids_TK.unique().numel() for ids_TK, _ in layers.routes) / LAYERS
    result: dict[str, object] = {"tokens": layers.T, "ms": times}
    if taken := times["routed layer"]:
        result["memory"] = round(1e3 * chosen * EXPERT / BYTES / taken, 3)
        result["flops"] = round(1e3 * layers.T * CHOSEN * EXPERT / FLOPS / taken, 3)
    return result


def errors(layers: Layers) -> dict[str, object]:
    """Relative errors of output and gradients against fp32; whether two calls give equal bits."""
    inputs = [t.float() if t.is_floating_point() else t for t in layers[0]]
    exact = gradients(loop_layer, inputs)
    got = [gradients(layer, layers[0]) for layer in (grouped_mlp, grouped_mm_layer, grouped_mlp)]
    kernels, grouped_mm = (
        [f"{((a - b).norm() / b.norm()).item():.2e}" for a, b in zip(tensors, exact, strict=True)]
        for tensors in got[:2]
    )
    same = all(map(torch.equal, got[0], got[2])) and torch.equal(got[0][0], expert_mlp(*layers[0]))
    return {"tokens": layers.T, "error": kernels, "grouped_mm": grouped_mm, "equal bits": same}


def training(layers: Layers) -> dict[str, object]:
    actions = {
        "grouped_mlp": lambda i: gradients(grouped_mlp, layers[i]),
        "experts frozen": lambda i: gradients(grouped_mlp, layers[i], (0, 4)),
        "grouped_mm": lambda i: gradients(grouped_mm_layer, layers[i]),
    }
    times = {
        name: attempt(lambda action=action: eager_ms(action)) for name, action in actions.items()
    }
    result: dict[str, object] = {"tokens": layers.T, "forward and backward ms": times}
    if taken := times["grouped_mlp"]:
        result["flops"] = round(3e3 * layers.T * CHOSEN * EXPERT / FLOPS / taken, 3)
    return result


def candidates(rows: int, matrices: int) -> list[Block]:
    """Blocks that fit shared memory and registers, and load enough ahead."""
    found = []
    for block in itertools.product((32, 64, 128, 256), (64, 128), (4, 8), (3, 4, 5)):
        columns, depth, warps, stages = block
        columns *= matrices
        values = rows * columns // (warps * 32)  # of a thread
        bytes_ahead = (rows + columns) * depth * 2 * stages
        if 48_000 < bytes_ahead < 230_000 and 2 * warps <= values <= 128 and 64 <= columns <= 256:
            found.append(Block(*block))
    return found


def fastest(layers: Layers, rows: int, name: str) -> tuple[float, Block] | None:
    blocks, lists = candidates(rows, 2 if name == "gate_up" else 1), layers.list(rows)
    actions = [layers.parts(Tiles(rows, block, block), lists)[name] for block in blocks]
    with ThreadPoolExecutor(16) as pool:  # compiles
        works = list(pool.map(lambda action: attempt(lambda: [action(0)]), actions))
    times = []
    for block, action, ok in zip(blocks, actions, works, strict=True):
        if ok and (ms := attempt(lambda action=action: eager_ms(action))):
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
    sizes = [(try_tiles, (*DECODE[2:], *PREFILL))]  # launches of fewer take longer than kernels
    if not tune:
        sizes = [(errors, CHECKED), (forward, (*DECODE, *PREFILL)), (training, TRAINED)]
    for measure, numbers in sizes:
        for T in numbers:
            layers.choose(T)
            if result := attempt(lambda measure=measure: measure(layers)):
                print(json.dumps({measure.__name__: result}), flush=True)
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "seconds": seconds}))


if __name__ == "__main__":
    tyro.cli(main)
