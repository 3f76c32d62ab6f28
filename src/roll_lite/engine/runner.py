"""Runs the model for the engine: builds the tensors of a step from sequences, fills the cache."""

import torch
from torch import Tensor

from roll_lite.engine.attention import DecodeAttention, PrefillAttention, decode_mask
from roll_lite.engine.sampler import sample
from roll_lite.engine.sequence import Sequence
from roll_lite.models.attention import PackedAttention
from roll_lite.models.logprobs import row_chunks, scaled_logits
from roll_lite.models.transformer import Transformer


class Runner:
    def __init__(self, model: Transformer, num_pages: int, page_size: int):
        self.model = model
        self.device = model.embedding.device
        self.page_size = page_size
        self.cache = torch.zeros(
            *cache_shape(model, num_pages, page_size),
            dtype=model.embedding.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence]) -> Tensor:
        """Compute whole sequences into the cache; the hidden state of each one's last token."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        token_ids_T = self._tensor([t for sequence in sequences for t in sequence.token_ids])
        positions_T = self._tensor([p for length in lengths for p in range(length)])
        slots_T = self._tensor(
            [
                page * self.page_size + slot
                for sequence in sequences
                for page in sequence.pages
                for slot in range(self.page_size)
            ]
        )
        # A sequence's pages may end beyond its tokens: keep the slots of the tokens only.
        is_token = [
            slot < length
            for length, sequence in zip(lengths, sequences, strict=True)
            for slot in range(len(sequence.pages) * self.page_size)
        ]
        ends = self._tensor(lengths).cumsum(0)
        cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).int()
        attend = PrefillAttention(
            self.cache,
            slots_T[torch.tensor(is_token, device=self.device)],
            PackedAttention(cu_seqlens, max(lengths)),
        )
        return self.model.hidden_states(token_ids_T, positions_T, attend)[ends - 1]

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence]) -> Tensor:
        """Feed each sequence's last token; the hidden state that predicts the next one."""
        lengths_B = self._tensor([len(sequence.token_ids) for sequence in sequences])
        num_pages = max(len(sequence.pages) for sequence in sequences)
        page_table_BP = self._tensor(
            [s.pages + [s.pages[0]] * (num_pages - len(s.pages)) for s in sequences]
        )
        positions_B = lengths_B - 1
        page_B = page_table_BP.gather(1, (positions_B // self.page_size)[:, None])[:, 0]
        attend = DecodeAttention(
            self.cache,
            page_B * self.page_size + positions_B % self.page_size,
            page_table_BP,
            decode_mask(lengths_B, num_pages * self.page_size),
        )
        token_ids_B = self._tensor([sequence.token_ids[-1] for sequence in sequences])
        return self.model.hidden_states(token_ids_B, positions_B, attend)

    @torch.inference_mode()
    def sample(self, hidden_RH: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        """The next token of each sequence, from its row, and that token's logprob."""
        temperatures_R = self._tensor([s.params.temperature for s in sequences], torch.float32)
        is_greedy_R = temperatures_R == 0
        temperatures_R.masked_fill_(is_greedy_R, 1.0)  # what a greedy token's logprob is under
        keys_R2 = self._tensor([s.noise_key for s in sequences])
        positions_R = self._tensor([len(s.token_ids) for s in sequences])
        token_ids, logprobs = [], []
        for rows in row_chunks(len(sequences)):
            logits_CV = scaled_logits(hidden_RH[rows], self.model.head_weight, temperatures_R[rows])
            token_ids_C, logprobs_C = sample(
                logits_CV, is_greedy_R[rows], keys_R2[rows], positions_R[rows]
            )
            token_ids += token_ids_C.tolist()
            logprobs += logprobs_C.tolist()
        return token_ids, logprobs

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        source, target = self._tensor(copies).unbind(1)
        self.cache[:, :, target] = self.cache[:, :, source]

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def cache_shape(model: Transformer, num_pages: int, page_size: int) -> tuple[int, ...]:
    config = model.config
    return config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim
