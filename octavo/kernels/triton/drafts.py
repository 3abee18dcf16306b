"""The Triton kernels between a step that judges drafts and the drafts after it; twins of
`octavo.kernels.reference_drafts`, where the arguments are documented. One program serves one request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels import splitmix
from octavo.kernels.triton.launch import Launcher, ceil_div, power_of_2, wait_for_previous

_BLOCK = 256
_GOLDEN, _MUL1, _MUL2 = (tl.constexpr(x) for x in (splitmix.GOLDEN, splitmix.MUL1, splitmix.MUL2))
_JUDGEMENT = tl.constexpr(splitmix.JUDGEMENT)


@triton.jit
def _splitmix64(x):
    """See `octavo.kernels.splitmix`; `x` int64."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MUL1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MUL2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _chance_kernel(
    slots_ptr, ends_ptr, drafts_ptr, states_ptr, rates_ptr, stands_ptr, states_stride, num_states, width,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    mask = column < width
    slot = tl.minimum(tl.load(slots_ptr + i), num_states - 1)
    state = tl.load(states_ptr + slot * states_stride)
    position = tl.load(ends_ptr + i) - tl.load(drafts_ptr + i) + column
    key = _splitmix64(_splitmix64(state ^ _JUDGEMENT) + position * _GOLDEN)
    drawn = ((key >> 11) & ((1 << 53) - 1)).to(tl.float64) * (1.0 / (1 << 53))
    good = drawn < tl.load(rates_ptr + column, mask=mask, other=0.0)
    tl.store(stands_ptr + i * width + column, good.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["n"])
def _begin_follow_kernel(
    slots_ptr, starts_ptr, ends_ptr, drafts_ptr, counts_ptr, begin_ptr, first_ptr, limit_ptr, shift_ptr,
    last_ptr, n,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    begin = tl.load(begin_ptr + tl.load(slots_ptr + i, mask=mask), mask=mask)
    start, stop = tl.load(starts_ptr + i, mask=mask), tl.load(starts_ptr + i + 1, mask=mask)
    limit = tl.load(ends_ptr + i, mask=mask) - begin
    tl.store(limit_ptr + i, limit, mask=mask)
    tl.store(first_ptr + i, limit - (stop - start), mask=mask)
    tl.store(shift_ptr + i, begin + 1, mask=mask)
    last = stop - tl.load(drafts_ptr + i, mask=mask) + tl.load(counts_ptr + i, mask=mask) - 2
    tl.store(last_ptr + i, last, mask=mask)


@triton.jit(do_not_specialize=["n"])
def _begin_chain_kernel(
    slots_ptr, known_ptr, counts_ptr, begin_ptr, first_ptr, limit_ptr, shift_ptr, n,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    begin = tl.load(begin_ptr + tl.load(slots_ptr + i, mask=mask), mask=mask)
    first = tl.load(known_ptr + i, mask=mask) - 2 - begin
    counts = tl.load(counts_ptr + i, mask=mask)
    tl.store(first_ptr + i, first, mask=mask)
    tl.store(limit_ptr + i, tl.where(counts == 0, 0, first + counts), mask=mask)
    tl.store(shift_ptr + i, begin + 1, mask=mask)


@triton.jit
def _judge_kernel(
    slots_ptr, starts_ptr, ends_ptr, drafts_ptr, chosen_ptr, stands_ptr, table_ptr, computed_ptr, tokens_ptr,
    counts_ptr, known_ptr, stride, width, stands_stride, tokens_stride,
    COLUMNS: tl.constexpr, GIVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0)
    slot = tl.load(slots_ptr + i)
    drafts = tl.load(drafts_ptr + i)
    before = tl.load(ends_ptr + i) - drafts
    row = tl.load(starts_ptr + i + 1) - 1 - drafts
    column = tl.arange(0, COLUMNS)
    place = tl.minimum(column, drafts)
    is_draft = column < drafts
    own = tl.load(chosen_ptr + row + place).to(tl.int32)
    tokens_at = table_ptr + slot * stride + before
    drafted = tl.load(tokens_at + column, mask=is_draft, other=-1)
    if GIVEN:
        good = is_draft & (tl.load(stands_ptr + i * stands_stride + column, mask=is_draft, other=0) != 0)
        own = tl.where(good, drafted, own)
    else:
        good = is_draft & (drafted == own)
    # How many stand: as many as come before the first that does not.
    stood = tl.min(tl.where(good, COLUMNS, column), axis=0)
    tl.store(tokens_ptr + i * tokens_stride + column, own, mask=column < width)
    # All threads have read their drafts before one writes over them.
    tl.debug_barrier()
    tl.store(tokens_at + column, own, mask=column <= drafts)
    known = before + stood + 1
    tl.store(counts_ptr + i, stood + 1)
    tl.store(known_ptr + i, known)
    tl.store(computed_ptr + slot, known - 1)


@triton.jit(do_not_specialize=["rows", "offset"])
def _place_kernel(
    slots_ptr, starts_ptr, first_ptr, limit_ptr, shift_ptr, table_ptr, blocks_ptr, ids_ptr, positions_ptr,
    lens_ptr, block_rows_ptr, mapping_ptr, stride, blocks_stride, rows_stride, width, length, block_size,
    rows, offset,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0)
    start = tl.load(starts_ptr + i)
    if i == tl.num_programs(0) - 1:  # rows that are nobody's
        for begin in range(start, rows, BLOCK):
            row = begin + tl.arange(0, BLOCK)
            mask = row < rows
            tl.store(ids_ptr + row, tl.zeros([BLOCK], tl.int32), mask=mask)
            tl.store(positions_ptr + row, tl.zeros([BLOCK], tl.int64), mask=mask)
            tl.store(mapping_ptr + row, tl.full([BLOCK], -1, tl.int64), mask=mask)
    else:
        slot = tl.load(slots_ptr + i)
        count = tl.load(starts_ptr + i + 1) - start
        first = tl.load(first_ptr + i) + offset
        limit = tl.load(limit_ptr + i)
        shift = tl.load(shift_ptr + i)
        blocks = blocks_ptr + slot * blocks_stride
        for begin in range(0, width, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            mask = j < width
            entries = tl.load(blocks + j, mask=mask)
            tl.store(block_rows_ptr + i.to(tl.int64) * rows_stride + j, entries, mask=mask)
        for begin in range(0, count, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            mask = j < count
            at = first + j
            within = tl.maximum(tl.minimum(at, limit - 1), 0)
            live = (at >= 0) & (at < limit)
            source = tl.minimum(tl.maximum(within + shift, 0), length - 1)
            token = tl.load(table_ptr + slot * stride + source, mask=mask)
            block = tl.load(blocks + tl.minimum(within // block_size, width - 1), mask=mask).to(tl.int64)
            tl.store(ids_ptr + start + j, token, mask=mask)
            tl.store(positions_ptr + start + j, within, mask=mask)
            place = tl.where(live, block * block_size + within % block_size, -1)
            tl.store(mapping_ptr + start + j, place, mask=mask)
        tl.store(lens_ptr + i, tl.maximum(first + count, count.to(tl.int64)).to(tl.int32))


@triton.jit(do_not_specialize=["offset"])
def _append_kernel(
    slots_ptr, known_ptr, counts_ptr, tokens_ptr, ids_ptr, table_ptr, tokens_stride, stride, offset,
    MAPPED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0)
    if tl.load(counts_ptr + i) > offset:
        token = tl.load(tokens_ptr + i * tokens_stride)
        if MAPPED:
            token = tl.load(ids_ptr + token)
        place = tl.load(slots_ptr + i) * stride + tl.load(known_ptr + i) + offset
        tl.store(table_ptr + place, token.to(tl.int32))


_judge = Launcher(_judge_kernel, overlap=True)
_chance = Launcher(_chance_kernel, overlap=True)
_begin_follow = Launcher(_begin_follow_kernel, overlap=True)
_begin_chain = Launcher(_begin_chain_kernel, overlap=True)
_place = Launcher(_place_kernel, overlap=True)
_append = Launcher(_append_kernel, overlap=True)


def judge_drafts(
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    chosen: torch.Tensor,
    stands: torch.Tensor | None,
    token_table: torch.Tensor,
    num_computed: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    known: torch.Tensor,
) -> None:
    """See the twin."""
    width = tokens.shape[1]
    given = counts if stands is None else stands.view(torch.uint8)
    _judge(
        (len(slots), 1, 1),
        (slots, starts, ends, drafts, chosen, given, token_table, num_computed, tokens, counts, known),
        (token_table.stride(0), width, 0 if stands is None else stands.stride(0), tokens.stride(0)),
        (),
        (power_of_2(width), stands is not None),
        1,
    )


def stands_by_chance(
    slots: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    states: torch.Tensor,
    rates: torch.Tensor,
    stands: torch.Tensor,
) -> None:
    """See the twin."""
    width = stands.shape[1]
    _chance(
        (len(slots), 1, 1),
        (slots, ends, drafts, states, rates, stands.view(torch.uint8)),
        (states.stride(0), len(states), width),
        (),
        (power_of_2(width),),
        1,
    )


def begin_follow(
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    begin: torch.Tensor,
    first: torch.Tensor,
    limit: torch.Tensor,
    shift: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """See the twin."""
    n, block = len(slots), min(_BLOCK, power_of_2(len(slots)))
    _begin_follow(
        (ceil_div(n, block), 1, 1),
        (slots, starts, ends, drafts, counts, begin, first, limit, shift, last),
        (),
        (n,),
        (block,),
        1,
    )


def begin_chain(
    slots: torch.Tensor,
    known: torch.Tensor,
    counts: torch.Tensor,
    begin: torch.Tensor,
    first: torch.Tensor,
    limit: torch.Tensor,
    shift: torch.Tensor,
) -> None:
    """See the twin."""
    n, block = len(slots), min(_BLOCK, power_of_2(len(slots)))
    _begin_chain(
        (ceil_div(n, block), 1, 1),
        (slots, known, counts, begin, first, limit, shift),
        (),
        (n,),
        (block,),
        1,
    )


def place_rows(
    slots: torch.Tensor,
    starts: torch.Tensor,
    first: torch.Tensor,
    limit: torch.Tensor,
    shift: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    offset: int,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_rows: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See the twin."""
    _place(
        (len(slots) + 1, 1, 1),
        (
            slots, starts, first, limit, shift, token_table, block_table, token_ids, positions, seq_lens,
            block_rows, slot_mapping,
        ),
        (
            token_table.stride(0), block_table.stride(0), block_rows.stride(0), block_table.shape[1],
            token_table.shape[1], block_size,
        ),
        (len(token_ids), offset),
        (_BLOCK,),
        4,
    )  # fmt: skip


def append_drafts(
    slots: torch.Tensor,
    known: torch.Tensor,
    counts: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor | None,
    token_table: torch.Tensor,
    offset: int,
) -> None:
    """See the twin."""
    _append(
        (len(slots), 1, 1),
        (slots, known, counts, tokens, tokens if ids is None else ids, token_table),
        (tokens.stride(0), token_table.stride(0)),
        (offset,),
        (ids is not None,),
        1,
    )
