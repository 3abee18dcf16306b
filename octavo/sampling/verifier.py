"""Judges drafts: which of the proposed tokens stand, and which token follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels.splitmix import judgement_uniforms
from octavo.sampling import state as st
from octavo.sampling.logprobs import PackedLogprobs
from octavo.sampling.processors import upload
from octavo.sampling.sampler import RowMasks, Sampler


@dataclass
class VerifyOutput:
    """Tokens of a step's requests, on the device.

    Attributes:
        tokens: int32 `[n, k + 1]` (k: most drafts of a request), of which a request's leading `num_tokens`
            count; `[n]` where there were no drafts.
        num_tokens: int32 `[n]`, at least 1; None where there were no drafts: all are 1.
        row_start: int64 `[n + 1]` on the host, each request's first row (entry of `logprobs`); None where
            there were no drafts: request i has row i.
        logprobs: per row, as the sampler gives them; rows past a request's `num_tokens` are void.
    """

    tokens: torch.Tensor
    num_tokens: torch.Tensor | None
    row_start: np.ndarray | None
    logprobs: PackedLogprobs | None


class Verifier:
    """Samples every row with the one pipeline and accepts a draft iff it is the token sampled there.

    A request with k drafts has k + 1 rows: row i is conditioned on the known tokens and on drafts
    1..i, and chooses the token of its position with the noise of that position. Draft i + 1 stands if
    it equals row i's token and all drafts before it stood. So the tokens are those of plain decoding,
    at any draft length (exactly, where the rows' logits are equal).

    With synthetic acceptance chance judges instead, by the request's seed and the position alone: a draft
    that stands is the token of its row, and behind the last of them comes what was drawn there.
    """

    def __init__(self, sampler: Sampler, synthetic: Sequence[float] | None = None):
        """`synthetic`: how likely each draft is to stand if all before it do; None: the rows decide."""
        self.sampler = sampler
        self._rates: torch.Tensor | None = None
        if synthetic is not None:
            self._rates = torch.tensor(synthetic, dtype=torch.float64, device=sampler.state.device)

    def __call__(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        slots_device: torch.Tensor,
        num_known: torch.Tensor,
        token_table: torch.Tensor,
        max_known: np.ndarray | None = None,
        num_drafts: np.ndarray | None = None,
        masks: RowMasks | None = None,
    ) -> VerifyOutput:
        """Tokens of n requests.

        Args:
            logits: `[rows, vocab]`, the rows of request 0, then of request 1, ...
            slots, slots_device: `[n]`, per request (as `Sampler`).
            num_known: integers `[n]` on the device, tokens before the request's first row's choice.
            token_table: int32 `[slots, max_model_len]` on the device, with the drafts of request r at
                `num_known[r]` and after.
            max_known: integers `[n]` on the host, upper bounds of `num_known`.
            num_drafts: integers `[n]` on the host; None: no drafts.
            masks: which tokens some of the rows may draw (row i of a request, those after its i-th draft).
        """
        if num_drafts is None or not num_drafts.any():
            out = self.sampler(logits, slots, slots_device, num_known, token_table, max_known, masks)
            return VerifyOutput(out.tokens, None, None, out.logprobs)
        return self._judge(logits, slots, slots_device, num_known, token_table, max_known, num_drafts, masks)

    def _judge(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        slots_device: torch.Tensor,
        num_known: torch.Tensor,
        token_table: torch.Tensor,
        max_known: np.ndarray | None,
        num_drafts: np.ndarray,
        masks: RowMasks | None,
    ) -> VerifyOutput:
        n, width = len(slots), int(num_drafts.max())
        start = np.concatenate(([0], np.cumsum(num_drafts + 1))).astype(np.int64)
        request = np.repeat(np.arange(n), num_drafts + 1)
        offset = np.arange(len(request)) - start[request]
        # One transfer for all of it: per row its request and offset, per request its first row.
        packed = upload(np.concatenate((request, offset, start[:-1], num_drafts)), logits.device)
        request_d, offset_d, start_d, drafts_d = packed.split((len(request), len(request), n, n))
        known = num_known.long()
        column = torch.arange(width + 1, device=logits.device)[None, :]
        position = known[:, None] + column[:, :-1]
        drafted = token_table[slots_device.long()[:, None], position.clamp_max(token_table.shape[1] - 1)]
        is_draft = column[:, :-1] < drafts_d[:, None]
        chosen = given = None
        if self._rates is not None:
            states, rates = self.chances()
            drawn = judgement_uniforms(states.index_select(0, slots_device)[:, None], position)
            chosen = (drawn < rates[: position.shape[1]]) & is_draft
            given = torch.nn.functional.pad(torch.where(chosen, drafted, -1), (0, 1), value=-1)
            given = given[request_d, offset_d]
        out = self.sampler(
            logits,
            slots[request],
            slots_device[request_d],
            known[request_d] + offset_d,
            token_table,
            None if max_known is None else max_known[request] + offset,
            masks,
            given,
        )
        rows = torch.minimum(start_d[:, None] + column, (start_d + drafts_d)[:, None])
        tokens = out.tokens[rows]
        stands = (drafted == tokens[:, :-1]) & is_draft if chosen is None else chosen
        num_tokens = 1 + stands.int().cumprod(-1).sum(-1)
        return VerifyOutput(tokens, num_tokens.int(), start, out.logprobs)

    @property
    def synthetic(self) -> bool:
        """Whether chance judges."""
        return self._rates is not None

    def chances(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where chance judges: `seed_state` of the slots' requests, int64 `[slots]`, and float64 `[k]`, how
        likely each draft is to stand if all before it do."""
        assert self._rates is not None
        self.sampler.state.flush()
        return self.sampler.state.table.view(torch.int64)[:, st.SEED], self._rates
