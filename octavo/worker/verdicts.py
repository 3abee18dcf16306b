"""What became of a recorded step's drafts, at fixed places of the device: the next drafts begin there."""

from __future__ import annotations

import torch

from octavo.kernels.batch_ops import draft_kernels
from octavo.sampling.verifier import Verifier, VerifyOutput
from octavo.worker.input_batch import InputBatch, Padding, StepInputs


class Verdicts:
    """Owns them, for the requests of the step that was judged last, padding included.

    Attributes:
        counts: int32 `[max_num_seqs]`, tokens that each yielded: its drafts that stood, and one.
        known: int64 `[max_num_seqs]`, its tokens known then.
    """

    def __init__(self, batch: InputBatch, verifier: Verifier, most_drafts: int):
        """`most_drafts`: of a request's step."""
        slots, device = len(batch.token_table) - 1, batch.device
        self._batch, self._verifier = batch, verifier
        kernels = draft_kernels(device.type)
        self._judge, self._chance = kernels.judge_drafts, kernels.stands_by_chance
        self._tokens = torch.zeros(slots * (most_drafts + 1), dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self.known = torch.zeros(slots, dtype=torch.int64, device=device)
        self._stands = torch.zeros(slots * most_drafts, dtype=torch.bool, device=device)

    def judge(self, inputs: StepInputs, chosen: torch.Tensor) -> VerifyOutput:
        """Judge the drafts of a padded step in which every row chose its likeliest token (`[rows]`), and
        append what stands."""
        assert inputs.padding is not None
        size, _, most = inputs.padding
        batch, tokens = self._batch, self._tokens[: size * most].view(size, most)
        self._judge(
            inputs.slots,
            inputs.starts,
            inputs.ends,
            inputs.drafts,
            chosen,
            self._by_chance(inputs, inputs.padding) if self._verifier.synthetic and most > 1 else None,
            batch.token_table,
            batch.num_computed,
            tokens,
            self.counts[:size],
            self.known[:size],
        )
        n = inputs.num_requests
        if most == 1:
            return VerifyOutput(tokens[:n, 0], None, None, None)
        return VerifyOutput(tokens[:n], self.counts[:n], None, None)

    def settle(self, inputs: StepInputs, sampled: VerifyOutput) -> None:
        """Take in what the verifier said of a padded step all of whose requests yielded tokens."""
        n, size = inputs.num_requests, len(inputs.slots)
        stood = 1 if sampled.num_tokens is None else sampled.num_tokens
        torch.add(self._batch.sample_ends(inputs), stood, out=self.known[:n])
        self.counts[:size].fill_(1)
        if sampled.num_tokens is not None:
            self.counts[:n].copy_(sampled.num_tokens)

    def _by_chance(self, inputs: StepInputs, padding: Padding) -> torch.Tensor:
        """Which drafts are to stand, bool `[size, most - 1]`."""
        size, most = padding.requests, padding.most - 1
        stands = self._stands[: size * most].view(size, most)
        states, rates = self._verifier.chances()
        self._chance(inputs.slots, inputs.ends, inputs.drafts, states, rates, stands)
        return stands
