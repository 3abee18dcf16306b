"""Latent attention on NVIDIA GPUs: Triton kernels over the paged cache, ready for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.kernels.triton import latent as kernels
from octavo.kernels.triton.attention import choose_splits
from octavo.kernels.triton.attention_tiles import shared_memory
from octavo.kernels.triton.launch import ceil_div, power_of_2
from octavo.kernels.triton.workspace import workspace
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_triton import multiprocessors
from octavo.layers.latent_attention import LatentBackend

# Rows of a request up to which it is decoded: more share one pass over the context in the prefill kernel.
_MAX_DECODE_ROWS = 8


@dataclass(frozen=True)
class _Decode:
    """One launch of the decode kernel: requests `first .. last` of at most `max_rows` rows each."""

    first: int
    last: int
    max_rows: int
    splits: int
    partials: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """Launches of a layer: decode kernels, then the prefill kernel on what remains."""

    decodes: tuple[_Decode, ...]
    prefill_from: int
    prefill_rows: int


class TritonLatentAttention(LatentBackend):
    """Latent attention by `octavo.kernels.triton.latent`, for bfloat16, float16 and float32.

    What goes to which kernel, and the grids, follow from the metadata's host fields alone, as in
    `TritonAttention`: a recorded graph serves every step within the bounds that it was recorded with.
    """

    name = "triton"
    recordable = True

    def _decode(self, meta: AttentionMetadata, first: int, last: int, max_query_len: int) -> _Decode:
        device = meta.seq_lens.device
        max_rows, requests = power_of_2(max_query_len), last - first
        tile = kernels.decode_tile(self.num_heads, getattr(torch, self.fmt.dtype), shared_memory(device))
        programs = requests * ceil_div(max_rows * self.num_heads, tile.lanes)
        # A tile's vectors fill most of a multiprocessor's shared memory: one or two programs fit.
        at_once = 8 // tile.warps
        splits = choose_splits(
            programs, meta.max_seq_len, multiprocessors(device), at_once, kernels.MIN_CHUNK
        )
        size = kernels.latent_workspace_size(requests, self.num_heads, max_rows, self.kv_rank, splits)
        return _Decode(first, last, max_rows, splits, workspace(device).reserve(size)[0])

    def plan(self, meta: AttentionMetadata) -> None:
        n = meta.num_requests
        singles = n if meta.max_query_len == 1 else meta.num_decodes
        decodes = []
        if singles:
            decodes.append(self._decode(meta, 0, singles, 1))
        rest = singles
        if rest < n and meta.max_query_len <= _MAX_DECODE_ROWS:
            decodes.append(self._decode(meta, rest, n, meta.max_query_len))
            rest = n
        meta.plan = _Plan(tuple(decodes), rest, meta.num_rows - singles)

    def rotate_and_write(
        self,
        q_pe: torch.Tensor,
        q_out: torch.Tensor,
        kv: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> None:
        kernels.rotate_and_write_latent(
            q_pe, q_out, kv, weight, eps, cos_sin, positions, cache, meta.slot_mapping
        )

    def attend(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        if not isinstance(meta.plan, _Plan):
            self.plan(meta)
        plan = meta.plan
        assert isinstance(plan, _Plan)
        out = q.new_empty(*q.shape[:2], self.kv_rank)
        for part in plan.decodes:
            kernels.latent_decode(
                q, cache, out, meta.query_start, meta.seq_lens, meta.block_table,
                part.first, part.last, part.max_rows, part.splits, part.partials, self.kv_rank, self.scale,
            )  # fmt: skip
        if plan.prefill_from < meta.num_requests:
            kernels.latent_prefill(
                q, cache, out, meta.query_start, meta.seq_lens, meta.block_table,
                plan.prefill_from, meta.num_requests, plan.prefill_rows, self.kv_rank, self.scale,
            )  # fmt: skip
        return out

    def prepare_capture(self, meta: AttentionMetadata) -> None:
        # Grids come from the host's bounds in `meta`, which the recorded launches keep.
        self.plan(meta)

    def prepare_replay(self, meta: AttentionMetadata) -> None:
        # Everything that changes is read from the metadata's tensors.
        pass
