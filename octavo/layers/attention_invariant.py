"""Attention on NVIDIA GPUs whose rows don't depend on the batch: for `--batch-invariant`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.kernels.triton import invariant_attention as kernels
from octavo.kernels.triton import rotary_kv
from octavo.kernels.triton.workspace import workspace
from octavo.layers.attention import QKV, AttentionMetadata
from octavo.layers.attention_triton import RecordableAttention, multiprocessors

if TYPE_CHECKING:
    from octavo.kv.format import KVFormat


@dataclass(frozen=True)
class _Plan:
    """A step's programs, and scratch memory for the states of chunks and for their maxima and sums."""

    programs: kernels.InvariantPlan
    scratch: tuple[torch.Tensor, torch.Tensor]


class InvariantAttention(RecordableAttention):
    """Paged attention by `octavo.kernels.triton.invariant_attention`, for bfloat16, float16 and float32.

    All rows of a step are one launch (two where contexts are split over programs). Grids follow from the
    metadata's host fields alone, so that a recorded graph serves every step within its bounds; requests added
    as padding have no rows, and output rows of nobody are left unwritten.
    """

    name = "invariant"

    def __init__(
        self,
        num_heads: int,
        fmt: KVFormat,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ):
        super().__init__(num_heads, fmt, scale, sliding_window, softcap)
        self._tile: kernels.InvariantTile | None = None

    def tile(self, device: torch.device) -> kernels.InvariantTile:
        """The one shape of this layer's programs."""
        if self._tile is None:
            fmt, memory = self.fmt, kernels.program_memory(device)
            group = self.num_heads // fmt.num_kv_heads
            self._tile = kernels.tile_config(fmt.head_dim, getattr(torch, fmt.dtype), group, memory)
        return self._tile

    def plan(self, meta: AttentionMetadata) -> None:
        device, fmt = meta.seq_lens.device, self.fmt
        programs = kernels.make_plan(
            self.tile(device),
            self.num_heads,
            fmt.num_kv_heads,
            fmt.head_dim,
            self.sliding_window,
            meta.num_requests,
            meta.num_rows,
            meta.max_query_len,
            meta.max_seq_len,
            multiprocessors(device),
        )
        floats = programs.floats(self.num_heads, fmt.head_dim)
        scratch, _ = workspace(device).reserve(floats)
        states = floats // (fmt.head_dim + 2) * fmt.head_dim
        meta.plan = _Plan(programs, (scratch[:states], scratch[states:]))

    def rotary_and_write_kv(self, qkv: QKV, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        q, k, v, cos_sin, positions, q_weight, k_weight, eps = qkv
        slots = meta.slot_mapping
        rotary_kv.rotary_and_write_kv(q, k, v, cos_sin, positions, cache, slots, q_weight, k_weight, eps)
        return q

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        if not isinstance(meta.plan, _Plan):
            self.plan(meta)
        assert isinstance(meta.plan, _Plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernels.invariant_attention(
            q, cache, out, meta.query_start, meta.seq_lens, meta.block_table,
            meta.plan.programs, self.tile(q.device), meta.plan.scratch,
            self.scale, self.sliding_window, self.softcap,
        )  # fmt: skip
        return out
