"""The Triton kernels that prepare a step; twins of `octavo.kernels.reference_batch`, where the arguments
are documented. One program serves one request, so reading and advancing its count cannot race."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, wait_for_previous

_BLOCK = 256


@triton.jit
def _gather_rows_kernel(
    slots_ptr, starts_ptr, computed_ptr, table_ptr, ids_ptr, positions_ptr, ends_ptr, lens_ptr, stride,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0)
    slot = tl.load(slots_ptr + i)
    first = tl.load(computed_ptr + slot)
    start = tl.load(starts_ptr + i)
    count = tl.load(starts_ptr + i + 1) - start
    for begin in range(0, count, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        mask = j < count
        tokens = tl.load(table_ptr + slot * stride + first + j, mask=mask)
        tl.store(ids_ptr + start + j, tokens, mask=mask)
        tl.store(positions_ptr + start + j, first + j, mask=mask)
    tl.store(computed_ptr + slot, first + count)
    tl.store(ends_ptr + i, first + count)
    tl.store(lens_ptr + i, (first + count).to(tl.int32))


@triton.jit(do_not_specialize=["columns"])
def _map_blocks_kernel(
    slots_ptr, starts_ptr, ends_ptr, table_ptr, rows_ptr, mapping_ptr, stride, rows_stride, block_size,
    columns,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0)
    slot = tl.load(slots_ptr + i)
    table = table_ptr + slot * stride
    for begin in range(0, columns, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        mask = j < columns
        tl.store(rows_ptr + i.to(tl.int64) * rows_stride + j, tl.load(table + j, mask=mask), mask=mask)
    start = tl.load(starts_ptr + i)
    stop = tl.load(starts_ptr + i + 1)
    shift = tl.load(ends_ptr + i) - stop
    for begin in range(start, stop, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        mask = row < stop
        position = row + shift
        block = tl.load(table + position // block_size, mask=mask).to(tl.int64)
        tl.store(mapping_ptr + row, block * block_size + position % block_size, mask=mask)


@triton.jit
def _append_tokens_kernel(
    slots_ptr, ends_ptr, tokens_ptr, table_ptr, tokens_stride, stride, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    i = tl.program_id(0)
    place = tl.load(slots_ptr + i) * stride + tl.load(ends_ptr + i)
    tl.store(table_ptr + place, tl.load(tokens_ptr + i * tokens_stride))


_gather_rows = Launcher(_gather_rows_kernel, overlap=True)
_map_blocks = Launcher(_map_blocks_kernel, overlap=True)
_append_tokens = Launcher(_append_tokens_kernel, overlap=True)


def gather_rows(
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
    token_table: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """See the twin."""
    _gather_rows(
        (len(slots), 1, 1),
        (slots, starts, num_computed, token_table, token_ids, positions, ends, seq_lens),
        (token_table.stride(0),),
        (),
        (_BLOCK,),
        4,
    )


def map_blocks(
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    columns: int,
    block_rows: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See the twin."""
    _map_blocks(
        (len(slots), 1, 1),
        (slots, starts, ends, block_table, block_rows, slot_mapping),
        (block_table.stride(0), block_rows.stride(0), block_size),
        (columns,),
        (_BLOCK,),
        4,
    )


def append_tokens(
    slots: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor, token_table: torch.Tensor
) -> None:
    """See the twin."""
    _append_tokens(
        (len(slots), 1, 1),
        (slots, ends, tokens, token_table),
        (tokens.stride(0), token_table.stride(0)),
        (),
        (),
        1,
    )
