"""Router replay: a policy is trained with the experts that the engine used for its samples.

Rounding and updates since make a router choose others now and then, and then a token's logprob
jumps. With the recorded ones the engine's function is what is trained. The weights of the experts
are the router's own probabilities of them, so that it gets its gradient (R3, 2510.11370).
"""

import torch
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.models.config import ModelConfig
from roll_lite.train.batch import MicroBatch


class RecordedExperts:
    """What the routers of a forward pass are to choose: the `choose` of the transformer."""

    def __init__(self, micro: MicroBatch, config: ModelConfig, places: Tensor | slice):
        """`places` are those of the tokens that are read here."""
        sizes = len(config.sparse_layers), config.experts.experts_per_token
        if (width := micro.experts_TK.shape[1]) != sizes[0] * sizes[1]:
            raise UserError(
                f"samples have records of {width} experts a token, and this model {sizes[0]} layers"
                f" of {sizes[1]}: they are another model's; take --router own"
            )
        self._experts_TLK = micro.experts_TK[places].unflatten(1, sizes)
        self._is_recorded_T = micro.is_recorded_T[places]
        self._differs_TL = torch.zeros_like(self._experts_TLK[:, :, 0], dtype=torch.bool)

    def __call__(self, number: int, own_TK: Tensor) -> Tensor:
        """The recorded experts of a sparse layer; the router's own for tokens without a record."""
        recorded_TK = self._experts_TLK[:, number].to(own_TK.dtype)
        used_TK = recorded_TK.where(self._is_recorded_T[:, None], own_TK)
        self._differs_TL[:, number] = (used_TK.sort().values != own_TK.sort().values).any(1)
        return used_TK

    @property
    def differing_T(self) -> Tensor:
        """The share of each token's layers whose router would have chosen other experts."""
        return self._differs_TL.float().mean(1)
