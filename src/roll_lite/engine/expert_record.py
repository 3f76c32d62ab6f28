"""Which experts the routers chose for each token whose keys are in the KV cache.

The record is laid out like the cache, with a byte for each expert: (page, slot, sparse layer, K).
So pages that sequences share, copy or compute again have the right rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roll_lite.engine.request import check_recordable
from roll_lite.models.config import ModelConfig


class ExpertRecord:
    def __init__(self, pages: Tensor):
        """`pages` is uint8, of the `shape` below."""
        self._pages = pages
        self._stream = None
        if pages.is_cuda:  # reading waits for the batch that wrote the rows, not for the next one
            self._stream = torch.cuda.Stream(pages.device, priority=-1)

    @staticmethod
    def shape(config: ModelConfig, num_pages: int, page_size: int) -> tuple[int, ...]:
        check_recordable(config)
        experts = config.experts.experts_per_token
        return num_pages, page_size, len(config.sparse_layers), experts

    def write(self, slots_T: Tensor, chosen: list[Tensor]) -> None:
        """The experts (T, K) of each sparse layer, at the slots of the tokens' keys."""
        self._pages.flatten(0, 1)[slots_T] = torch.stack(chosen, 1).to(torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._pages[target] = self._pages[source]

    def read(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[bytes]:
        """The rows of sequences, each given as its pages and how many of its tokens have keys.

        The batch that wrote the last of them must have been collected.
        """
        page_size = self._pages.shape[1]
        slots = np.arange(page_size)
        places = [
            (np.array(pages)[:, None] * page_size + slots).ravel()[:length]
            for pages, length in sequences
        ]
        with torch.cuda.stream(self._stream):
            index = torch.from_numpy(np.concatenate(places)).to(self._pages.device)
            rows = self._pages.flatten(0, 1)[index].cpu()
        return [part.numpy().tobytes() for part in rows.split([length for _, length in sequences])]
