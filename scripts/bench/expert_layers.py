"""What experts.py measures: layers in the shape of Qwen3-30B-A3B, and the same with plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.kernels import experts
from roll_lite.kernels.experts import Tiles, expert_mlp, list_pairs, route

HIDDEN, EXPERTS, CHOSEN, INNER, LAYERS = 2048, 128, 8, 768, 4
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


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

    def list(self, rows: int) -> list:
        return [list_pairs(ids_TK, EXPERTS, 0, rows) for ids_TK, _ in self.routes]

    def parts(self, tiles: Tiles, lists: list) -> dict[str, Callable[[int], object]]:
        x_TH, w, rows = self.x_TH, self.weights, tiles.rows
        return {
            "routed layer": lambda i: [route(self.logits[i], CHOSEN, True), expert_mlp(*self[i])],
            "route": lambda i: route(self.logits[i], CHOSEN, True),
            "lists": lambda i: list_pairs(self.routes[i][0], EXPERTS, 0, rows),
            "gate_up": lambda i: experts.gate_up(
                x_TH, w[i][0], lists[i], self.act_PF, None, rows, tiles.gate_up
            ),
            "down": lambda i: experts.multiply(
                self.act_PF, w[i][1].transpose(1, 2), lists[i], rows, tiles.down
            ),
            "sum": lambda i: experts.sum_pairs(self.out_PH, *self.routes[i], 0, EXPERTS),
            "grouped_mm layer": lambda i: grouped_mm_layer(*self[i]),
        }


def grouped_mm_layer(x_TH, gate_up_E2FH, down_EHF, ids_TK, weights_TK) -> Tensor:
    """A layer of torch operations."""
    ids_P, order_P = ids_TK.flatten().sort(stable=True)
    token_P = order_P // CHOSEN
    e = torch.arange(EXPERTS, dtype=ids_P.dtype, device=ids_P.device)
    offs = torch.searchsorted(ids_P, e, right=True).int()
    gate_up_EH2 = gate_up_E2FH.flatten(1, 2).transpose(1, 2)
    gate_PF, up_PF = F.grouped_mm(x_TH[token_P], gate_up_EH2, offs=offs).chunk(2, 1)
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


def gradients(layer: Callable[..., Tensor], inputs, trained=(0, 1, 2, 4)) -> list[Tensor]:
    """Output, and gradients of the `trained` inputs: all but ids, or x alone."""
    inputs = [t.detach() for t in inputs]
    for i in trained:
        inputs[i].requires_grad_()
    y_TH = layer(*inputs)
    direction_TH = inputs[0].detach().to(y_TH.dtype)
    return [y_TH, *torch.autograd.grad(y_TH, [inputs[i] for i in trained], direction_TH)]
