"""Adding up what the splits of contexts came to, by a kernel of its own.

For few requests: the last program of a KV head's would have all its partial results to read, of several
rows hundreds of KiB, while the other multiprocessors wait. (H200, microseconds of a layer of Llama-8B: six
rows of one request take 125.3, 126.1 and 129.0 with contexts of 256, 400 and 1500, and with the last program
125.3, 135.8 and 162.2; a single row 112.1, 112.8 and 114.6, and 112.7, 113.4 and 116.7.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.attention_steps import combine_splits, pieces_of
from octavo.kernels.triton.kv_codes import AS_IS, CacheView, units
from octavo.kernels.triton.launch import Launcher, power_of_2, wait_for_previous

_MOST_AT_ONCE = 16  # partial results of a lane that a program holds


class Pieces(NamedTuple):
    """How the decode kernel splits contexts: see `octavo.kernels.triton.attention_steps.pieces_of`."""

    min_chunk: int
    whole: int
    block_n: int


@triton.jit(do_not_specialize=["first_request", "splits"])
def _combine_kernel(
    out_ptr, query_start_ptr, seq_len_ptr, partial_ptr, kv_scale_ptr, out_row, first_request, splits,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    KIND: tl.constexpr, HOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (lane of TILE, kv head, request - first_request) adds up that lane's partial results."""
    wait_for_previous(OVERLAP)
    lane, kv_head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, v_unit = units(kv_scale_ptr, kv_head, KV_HEADS, KIND, HOW)
    request = first_request + slot
    context = tl.load(seq_len_ptr + request)
    first_row = tl.load(query_start_ptr + request).to(tl.int64)
    rows = (tl.load(query_start_ptr + request + 1) - first_row).to(tl.int32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(context - rows - WINDOW + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    _, used = pieces_of(context - low, splits, True, WHOLE, MIN_CHUNK, BLOCK_N)
    if (used == 1) | (lane >= rows * GROUP):
        return
    all_tiles = tl.num_programs(2).to(tl.int64) * splits * (KV_HEADS * TILE)
    max_ptr = partial_ptr + all_tiles * HEAD_DIM
    base = (slot * KV_HEADS + kv_head).to(tl.int64) * splits
    combine_splits(
        out_ptr, out_row, first_row, rows, kv_head, lane, partial_ptr, max_ptr, max_ptr + all_tiles, base,
        used, v_unit, GROUP, HEAD_DIM, BLOCK_D, TILE, 1, BLOCK_S, KIND != AS_IS,
    )  # fmt: skip


_combine = Launcher(_combine_kernel, overlap=True)


def combine(
    out: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    partials: torch.Tensor,
    first_request: int,
    num_requests: int,
    max_rows: int,
    splits: int,
    kv_heads: int,
    window: int | None,
    pieces: Pieces,
    view: CacheView,
) -> None:
    """Write the heads of all rows whose contexts were split.

    Args:
        out, query_start, seq_lens, first_request, num_requests, max_rows, splits, window: as
            `octavo.kernels.triton.attention.paged_decode` takes them.
        partials: what its kernel left.
    """
    head_dim = out.shape[2]
    group = out.shape[1] // kv_heads
    _combine(
        (max_rows * group, kv_heads, num_requests - first_request),
        (out, query_start, seq_lens, partials, view.scale),
        (out.stride(0),),
        (first_request, splits),
        (
            window or 0, kv_heads, group, head_dim, view.block_size, max_rows * group, *pieces,
            power_of_2(head_dim), min(power_of_2(splits), _MOST_AT_ONCE), view.kind, view.how,
        ),
        4,
    )  # fmt: skip
