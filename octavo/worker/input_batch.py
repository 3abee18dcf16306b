"""The device's own tables of running requests, and how a step's inputs are gathered from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kv.format import KVGroup
from octavo.layers.attention import AttentionMetadata
from octavo.messages import StepPlan


@dataclass
class StepInputs:
    """What one forward pass reads. Device tensors unless said otherwise.

    Attributes:
        token_ids: int32 `[rows]`; positions: int64 `[rows]`.
        meta: attention metadata per KV group.
        slots: int64 `[n]`, the step's requests; ends: int64 `[n]`, their context lengths after it.
        sample_requests: host, indexes of the requests that sample.
        sample_slots, sample_ends: `slots` and `ends` of those, int64 `[m]`.
        sample_rows: int64 `[m]`, their last rows, or None if these are all rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    meta: list[AttentionMetadata]
    slots: torch.Tensor
    ends: torch.Tensor
    sample_requests: np.ndarray
    sample_slots: torch.Tensor
    sample_ends: torch.Tensor
    sample_rows: torch.Tensor | None


class InputBatch:
    """Owns the tables, one row per slot: known tokens, tokens computed, and block tables.

    A sampled token is written by the device itself, so the next step can be launched before the host
    has seen it; the host only sends what it alone knows (admissions, new blocks, the step's shape).
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, groups: list[KVGroup], device: torch.device):
        self.device = device
        self.groups = groups
        self.max_model_len = max_model_len
        self.block_size = groups[0].format.block_size
        columns = -(-max_model_len // self.block_size)
        self.token_table = _zeros((max_num_seqs, max_model_len), torch.int32, device)
        self.num_computed = _zeros((max_num_seqs,), torch.int64, device)
        self.block_tables = [_zeros((max_num_seqs, columns), torch.int32, device) for _ in groups]
        self.prompt_len = np.zeros(max_num_seqs, np.int64)  # on the host, which alone asks
        self._arange = torch.arange(max(max_model_len, 8192) + 1, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Enter admissions and new blocks; one transfer for each kind."""
        if plan.admissions:
            slots = np.array([a.slot for a in plan.admissions])
            lengths = np.array([len(a.token_ids) for a in plan.admissions])
            places = np.repeat(slots * self.max_model_len - np.cumsum(lengths) + lengths, lengths)
            places += np.arange(len(places))
            tokens = np.concatenate([a.token_ids for a in plan.admissions])
            computed = np.array([a.num_computed for a in plan.admissions])
            d_places, d_tokens, d_slots, d_computed = self._send(places, tokens, slots, computed)
            self.token_table.view(-1)[d_places] = d_tokens.int()
            self.num_computed[d_slots] = d_computed
            self.prompt_len[slots] = [a.prompt_len for a in plan.admissions]
        for group, table in enumerate(self.block_tables):
            update = plan.block_updates[group]
            rows = [np.full(len(a.block_ids[group]), a.slot) for a in plan.admissions]
            columns = [np.arange(len(a.block_ids[group])) for a in plan.admissions]
            blocks = [np.asarray(a.block_ids[group], np.int64) for a in plan.admissions]
            if len(update.slots):
                rows, columns, blocks = (
                    [*rows, update.slots],
                    [*columns, update.columns],
                    [*blocks, update.blocks],
                )
            if rows:
                places = np.concatenate(rows).astype(np.int64) * table.shape[1] + np.concatenate(columns)
                d_places, d_blocks = self._send(places, np.concatenate(blocks))
                table.view(-1)[d_places] = d_blocks.int()

    def gather(self, plan: StepPlan) -> StepInputs:
        """Inputs of a step, from the tables as they are when the device gets there."""
        n, rows = len(plan.slots), plan.total_rows
        single = rows == n
        sample_requests = np.flatnonzero(plan.samples)
        counts = plan.num_rows.astype(np.int64)
        ends_of_rows = np.cumsum(counts)
        slots, counts_d, starts, sampling, last = self._send(
            plan.slots,
            counts,
            np.concatenate(([0], ends_of_rows)),
            sample_requests,
            ends_of_rows[sample_requests] - 1,
        )
        computed = self.num_computed[slots]
        ends = computed + counts_d
        if single:
            row_slots, positions = slots, computed
        else:
            request = torch.repeat_interleave(self._arange[:n], counts_d, output_size=rows)
            row_slots = slots[request]
            if rows > len(self._arange):
                self._arange = torch.arange(rows, device=self.device)
            positions = self._arange[:rows] + (computed - starts[:-1])[request]
        everyone = len(sample_requests) == n
        self.num_computed[slots] = ends
        return StepInputs(
            token_ids=self.token_table[row_slots, positions],
            positions=positions,
            meta=self._attention(plan, slots, row_slots, positions, starts, ends),
            slots=slots,
            ends=ends,
            sample_requests=sample_requests,
            sample_slots=slots if everyone else slots[sampling],
            sample_ends=ends if everyone else ends[sampling],
            sample_rows=None if single and everyone else last,
        )

    def _attention(
        self,
        plan: StepPlan,
        slots: torch.Tensor,
        row_slots: torch.Tensor,
        positions: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
    ) -> list[AttentionMetadata]:
        longest = int((plan.start + plan.num_rows).max())
        columns = -(-longest // self.block_size)
        starts32, ends32 = starts.int(), ends.int()
        block, offset = positions // self.block_size, positions % self.block_size
        return [
            AttentionMetadata(
                query_start=starts32,
                seq_lens=ends32,
                block_table=table[slots, :columns],
                slot_mapping=table[row_slots, block].long() * self.block_size + offset,
                num_requests=len(plan.slots),
                num_rows=plan.total_rows,
                max_query_len=int(plan.num_rows.max()),
                max_seq_len=longest,
                num_decodes=int((plan.num_rows == 1).sum()),
            )
            for table in self.block_tables
        ]

    def _send(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Integer arrays to the device as int64, in one transfer that nobody waits for."""
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
        if self.device.type != "cpu":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return packed.split([len(a) for a in arrays])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        # NumPy's zeros cost no memory until they are written; PyTorch's do.
        return torch.from_numpy(np.zeros(shape, np.int32 if dtype == torch.int32 else np.int64))
    return torch.zeros(shape, dtype=dtype, device=device)
