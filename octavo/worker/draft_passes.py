"""Passes of what drafts beside a target, of fixed shapes and places, so that they can be recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels import ops
from octavo.kernels.batch_ops import draft_kernels
from octavo.layers.attention import AttentionMetadata
from octavo.sampling import state as st
from octavo.sampling.noise import row_keys
from octavo.sampling.processors import upload
from octavo.sampling.sampler import Sampler
from octavo.worker.draft_tables import DraftTables
from octavo.worker.graph_recorder import GraphRecorder
from octavo.worker.graphs import SIZES, graph_sizes

MOST_PASS_ROWS = SIZES[-1]
_SPARE = 256  # positions beyond the longest context that a pass may have rows at, which are nobody's


@dataclass
class DraftPass:
    """What a pass reads: int32 `token_ids`, int64 `positions`, `[rows]`, and each KV group's metadata."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    meta: list[AttentionMetadata]


class DraftPasses:
    """Owns the places of the passes' inputs, and who is drafted for.

    Behind the requests there is padding, whose slot has no blocks and for which nothing is drafted.

    Attributes:
        recorder: of the passes.
        slots, known: int64 `[max_num_seqs]`, the requests and how many of their tokens are known.
        counts: int64 `[max_num_seqs]`, tokens to draft for each.
    """

    def __init__(self, tables: DraftTables, sampler: Sampler, recorder: GraphRecorder):
        batch, device = tables.batch, tables.batch.device
        self._batch, self._sampler = batch, sampler
        self.recorder = recorder
        self._kernels = draft_kernels(device.type)
        self._padding_slot = len(batch.token_table) - 1
        self._sizes = graph_sizes(self._padding_slot)
        n, rows = self._sizes[-1], MOST_PASS_ROWS
        self.slots = torch.full((n,), self._padding_slot, dtype=torch.int64, device=device)
        self.known = torch.zeros(n, dtype=torch.int64, device=device)
        self.counts = torch.zeros(n, dtype=torch.int64, device=device)
        self.zeros = torch.zeros(n, dtype=torch.int64, device=device)
        self._entered: tuple[int, bytes, bytes] | None = None
        self._token_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._mappings = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in batch.block_tables]
        self._lens = torch.zeros(n, dtype=torch.int32, device=device)
        self._starts = torch.arange(0, n + 1, dtype=torch.int32, device=device)
        spare = _SPARE // batch.block_size + 1
        self._block_rows = [
            torch.zeros((n, table.shape[1] + spare), dtype=torch.int32, device=device)
            for table in batch.block_tables
        ]

    def size_for(self, n: int, rows: int = 1) -> int | None:
        """The number of requests that n are padded to, of so many rows each; None: they are too many."""
        size = next((size for size in self._sizes if size >= n), None)
        return None if size is None or size * rows > MOST_PASS_ROWS else size

    def enter(self, size: int, slots: np.ndarray, counts: np.ndarray, known: torch.Tensor) -> None:
        """Draft for these requests from here on.

        Args:
            size: of the padded passes.
            slots, counts: integer `[n]` on the host.
            known: int64 `[n]` on the device.
        """
        n = len(slots)
        entered = size, slots.tobytes(), counts.tobytes()
        if entered != self._entered:
            packed = np.zeros((3, size), np.int64)
            packed[0] = self._padding_slot
            packed[:2, :n] = slots, counts
            both = upload(packed, self.slots.device)
            for place, given in zip((self.slots, self.counts, self.known), both, strict=True):
                place[:size].copy_(given)
            self._entered = entered
        self.known[:n].copy_(known)

    def starts(self, size: int, rows: int) -> torch.Tensor:
        """int32 `[size + 1]`, first rows where each request has so many. Not to be changed."""
        return self._starts[: size + 1] if rows == 1 else self._starts[: size + 1] * rows

    def place(
        self,
        slots: torch.Tensor,
        starts: torch.Tensor,
        first: torch.Tensor,
        limit: torch.Tensor,
        shift: torch.Tensor,
        *,
        offset: int = 0,
        rows: int,
        most: int,
    ) -> DraftPass:
        """The inputs of a pass, placed; arguments as `octavo.kernels.reference_drafts.place_rows` takes them.

        Args:
            rows: of the pass.
            most: of a request.
        """
        size, batch = len(slots), self._batch
        for table, columns, mapping in zip(batch.block_tables, self._block_rows, self._mappings, strict=True):
            self._kernels.place_rows(
                slots, starts, first, limit, shift, batch.token_table, table, offset, batch.block_size,
                self._token_ids[:rows], self._positions[:rows], self._lens[:size], columns[:size],
                mapping[:rows],
            )  # fmt: skip
        meta = [
            AttentionMetadata(
                query_start=starts,
                seq_lens=self._lens[:size],
                block_table=columns[:size],
                slot_mapping=mapping[:rows],
                num_requests=size,
                num_rows=rows,
                max_query_len=most,
                max_seq_len=batch.max_model_len,
                num_decodes=size if most == 1 else 0,
            )
            for columns, mapping in zip(self._block_rows, self._mappings, strict=True)
        ]
        return DraftPass(self._token_ids[:rows], self._positions[:rows], meta)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, position: torch.Tensor, draws: bool
    ) -> torch.Tensor:
        """A token of each row, int64 `[rows]`: the likeliest, or drawn with its request's temperature and the
        noise of its position. What else its request asks for is left to the verifier.

        Args:
            logits: `[rows, vocab]`; where `draws`, vocab is the target's.
            slots, position: int64 `[rows]`; the latter is read only where `draws`.
        """
        if not draws:
            return ops.argmax(logits)
        state = self._sampler.state
        settings = state.table.index_select(0, slots.clamp_max(len(state.table) - 1))
        k0, k1 = row_keys(settings.view(torch.int64)[:, st.SEED], position)
        temperature = settings.view(torch.float32)[:, st.TEMPERATURE].contiguous()
        return ops.gumbel_argmax(logits, temperature, k0, k1)

    def append(self, size: int, tokens: torch.Tensor, offset: int, ids: torch.Tensor | None = None) -> None:
        """Write drafts number `offset`; arguments as `append_drafts` takes them."""
        self._kernels.append_drafts(
            self.slots[:size],
            self.known[:size],
            self.counts[:size],
            tokens,
            ids,
            self._batch.token_table,
            offset,
        )

    def draws(self, slots: np.ndarray) -> bool:
        """Whether tokens of some of these requests (slots on the host) are drawn by chance; then the device
        knows their settings."""
        if not self._sampler.draws(slots):
            return False
        self._sampler.state.flush()
        return True
