"""Sums over the GPUs of one host, each in one kernel that writes into the others' memory.

Every rank has a box that all ranks can write. A program takes one row: it writes its rank's part into every
other rank's box, waits until theirs are in its own, and adds all up in the order of ranks, so that all get
the same bits. Nothing says that an element is there but the element itself: a box is filled with a pattern
that no part has (the negative zero, sent as zero), and who has read an element puts the pattern back. So
nobody waits for a fence or a flag, and it doesn't matter in which order elements come. (The idea of
TensorRT-LLM's "Lamport" kernels, which have three boxes by turns and clear them whole.)

A row has two places in a box, used in turn; a counter of its own, in device memory, says whose turn it is, so
that kernels may be recorded in graphs, and graphs and single launches follow each other in any order. Two are
enough: a rank writes a place for the second time when it has seen its reader's next part, which that sends in
a later kernel than the one that read the place and emptied it.

A row waits for the same row of the other ranks alone, and the hardware starts programs in order, so that the
first unfinished row is at work on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import Launcher, power_of_2, wait_for_previous
from octavo.kernels.triton.sampling import MAX_PARTS, largest_in_parts

__all__ = ["PeerBox", "best_over_ranks", "largest_in_parts", "sum_add_rms_norm", "sum_over_ranks"]

FEW_ROWS = 32
"""Rows up to which a program that waits looks at its whole row, to see it the moment it is there."""

WORDS = (torch.int16, torch.int32)
"""What parts are sent as, by the size of their elements: 2 or 4 bytes."""


class PeerBox(NamedTuple):
    """A rank's box for elements of one size, and where it finds the others'.

    Attributes:
        rank, ranks: of the group.
        words: its memory, of one of `WORDS`, `[2, ranks, rows, row words]`: by turn and sender. At first
            every word is the sign bit alone: nothing has come.
        addresses: int64 `[ranks]`, of all ranks' boxes as this one sees them.
        turns: int32 `[rows]`, zero at first.
    """

    rank: int
    ranks: int
    words: torch.Tensor
    addresses: torch.Tensor
    turns: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows that are under way at once; the others follow in the same places."""
        return self.words.shape[2]

    @property
    def row_words(self) -> int:
        """Most elements of a row, a multiple of 16 bytes."""
        return self.words.shape[3]


@triton.jit
def _send(words, addresses_ptr, place, cols, mask, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Writes words into this rank's `place` of every other rank's box."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            box = tl.load(addresses_ptr + peer).to(tl.pointer_type(words.dtype))
            tl.store(tl.multiple_of(box, 16) + place + cols, words, mask=mask)


@triton.jit
def _take(box_ptr, place, cols, mask, EMPTY: tl.constexpr, LAST: tl.constexpr):
    """Waits for all words of a place, and empties it. With LAST only that word is looked at between a first
    look at all and its coming: many programs that read whole rows again and again would be in the way."""
    at = box_ptr + place + cols
    words = tl.load(at, mask=mask, other=0, volatile=True)
    while tl.max((words == EMPTY).to(tl.int32), axis=0) != 0:
        if LAST > 0:
            last = tl.load(box_ptr + place + LAST, volatile=True)
            while last == EMPTY:
                last = tl.load(box_ptr + place + LAST, volatile=True)
        words = tl.load(at, mask=mask, other=0, volatile=True)
    tl.debug_barrier()  # warps that hold the same words each wait for them by themselves
    tl.store(at, tl.full(words.shape, EMPTY, words.dtype), mask=mask)
    return words


@triton.jit
def _place(turn, sender, row, RANKS: tl.constexpr, ROWS: tl.constexpr, ROW_WORDS: tl.constexpr):
    return (((turn & 1) * RANKS + sender) * ROWS + row) * ROW_WORDS


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, box_ptr, addresses_ptr, turns_ptr,
    x_stride, residual_stride, eps, rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr, NORM: tl.constexpr, MANY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program p: the sums of rows p, p + ROWS, …; with NORM each is added to the stream's row, and that is
    normalized."""
    place = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    EMPTY: tl.constexpr = -0x8000 if box_ptr.dtype.element_ty == tl.int16 else -0x80000000
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    wait_for_previous(OVERLAP)
    turn = tl.load(turns_ptr + place, volatile=True)
    for row in range(place, rows, ROWS):
        x = tl.load(x_ptr + tl.cast(row, tl.int64) * x_stride + cols, mask=mask, other=0.0)
        own = x.to(box_ptr.dtype.element_ty, bitcast=True)
        own = tl.where(own == EMPTY, 0, own).to(box_ptr.dtype.element_ty)
        _send(own, addresses_ptr, _place(turn, RANK, place, RANKS, ROWS, ROW_WORDS), cols, mask, RANK, RANKS)
        residual_at = residual_ptr + tl.cast(row, tl.int64) * residual_stride + cols
        if NORM:
            residual = tl.load(residual_at, mask=mask, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for sender in tl.static_range(RANKS):
            if sender == RANK:
                part = own
            else:
                at = _place(turn, sender, place, RANKS, ROWS, ROW_WORDS)
                part = _take(box_ptr, at, cols, mask, EMPTY, SIZE - 1 if MANY else 0)
            total += part.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        total = total.to(x_ptr.dtype.element_ty)
        if NORM:
            # Each step is rounded as by kernels that follow each other (`octavo.kernels.triton.norm`).
            total = (total.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
            tl.store(residual_at, total, mask=mask)
            wide = total.to(tl.float32)
            wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
            if weight_ptr.dtype.element_ty == out_ptr.dtype.element_ty:
                wide = wide.to(out_ptr.dtype.element_ty).to(tl.float32)
            total = (wide * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + tl.cast(row, tl.int64) * SIZE + cols, total, mask=mask)
        turn += 1
        if row + ROWS < rows:
            # What empties a place is to be seen before the next part is, as between kernels.
            tl.debug_barrier()
            tl.atomic_xchg(turns_ptr + place, turn, sem="acq_rel")
        tl.debug_barrier()
    tl.store(turns_ptr + place, turn)


@triton.jit(do_not_specialize=["parts", "first"])
def _best_kernel(
    value_ptr, index_ptr, out_ptr, box_ptr, addresses_ptr, turns_ptr, parts, first,
    BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program r: of row r's best entries in each of `parts` pieces, and the other ranks' best, the best."""
    EMPTY: tl.constexpr = -0x80000000
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    turn = tl.load(turns_ptr + row, volatile=True)
    lanes = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * parts + lanes
    values = tl.load(value_ptr + at, mask=lanes < parts, other=float("-inf"))
    indices = tl.load(index_ptr + at, mask=lanes < parts, other=2147483647)
    value = tl.max(values, axis=0)
    index = tl.min(tl.where((values == value) & (lanes < parts), indices + first, 2147483647), axis=0)
    value += 0.0  # a negative zero is none any more: that says that nothing has come
    pair = tl.arange(0, 2)
    both = pair >= 0
    own = tl.where(pair == 0, value.to(tl.int32, bitcast=True), index)
    _send(own, addresses_ptr, _place(turn, RANK, row, RANKS, ROWS, ROW_WORDS), pair, both, RANK, RANKS)
    best = float("-inf")
    chosen = 2147483647
    for sender in tl.static_range(RANKS):
        if sender == RANK:
            words = own
        else:
            words = _take(box_ptr, _place(turn, sender, row, RANKS, ROWS, ROW_WORDS), pair, both, EMPTY, 0)
        theirs = tl.sum(tl.where(pair == 0, words, 0), axis=0).to(tl.float32, bitcast=True)
        where = tl.sum(tl.where(pair == 1, words, 0), axis=0)
        better = (theirs > best) | ((theirs == best) & (where < chosen))
        best = tl.where(better, theirs, best)
        chosen = tl.where(better, where, chosen)
    tl.debug_barrier()
    tl.store(turns_ptr + row, turn + 1)
    tl.store(out_ptr + row, chosen)


_sum = Launcher(_sum_kernel, overlap=True)
_best = Launcher(_best_kernel, overlap=True)


def _launch_sum(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    box: PeerBox,
) -> torch.Tensor:
    rows, size = x.shape
    if size > box.row_words or x.element_size() != box.words.element_size():
        raise ValueError(f"rows of {size} {x.dtype} don't fit a box of {box.words.dtype} {box.words.shape}")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block = power_of_2(size)
    stream = x if residual is None else residual
    _sum(
        (min(rows, box.rows), 1, 1),
        (x, stream, x if weight is None else weight, out, box.words, box.addresses, box.turns),
        (x.stride(0), stream.stride(0)),
        (eps, rows),
        (size, block, box.rank, box.ranks, box.rows, box.row_words, weight is not None, rows > FEW_ROWS),
        max(1, min(16, block // 512)),  # as the norm alone has, so that both add up in one order
    )
    return out


def sum_over_ranks(x: torch.Tensor, box: PeerBox) -> torch.Tensor:
    """The sum of every rank's `x`, in the order of ranks and in float32, rounded once.

    All ranks launch this kernel, and the others of this module, in the same order with as many rows.

    Args:
        x: `[rows, size]`, float32, bfloat16 or float16, any number of rows no longer than the box's.
        box: for elements of that size.

    Returns:
        A new tensor, the same bits on all ranks.
    """
    return _launch_sum(x, None, None, 0.0, box)


def sum_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, box: PeerBox
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.add_rms_norm` of the sum of every rank's `x`.

    Args:
        x, box: as for `sum_over_ranks`.
        residual: `[rows, size]` of `x`'s dtype, contiguous in the last dimension; overwritten.
        weight, eps: as for `norm.add_rms_norm`.
    """
    return _launch_sum(x, residual, weight, eps, box), residual


def best_over_ranks(values: torch.Tensor, indices: torch.Tensor, first: int, box: PeerBox) -> torch.Tensor:
    """The index of each row's largest value on any rank; of equals the lowest.

    Args:
        values: float32 `[rows, parts]`, the largest of each part of this rank's columns (`largest_in_parts`).
        indices: int32 `[rows, parts]`, where they are among this rank's columns.
        first: this rank's first column.
        box: for elements of 4 bytes.

    Returns:
        int32 `[rows]`, the same on all ranks.
    """
    rows, parts = values.shape
    if rows > box.rows or box.words.dtype != torch.int32:
        raise ValueError(f"{rows} rows don't fit a box of {box.words.dtype} {box.words.shape}")
    out = torch.empty(rows, dtype=torch.int32, device=values.device)
    if rows:
        _best(
            (rows, 1, 1),
            (values, indices, out, box.words, box.addresses, box.turns),
            (),
            (parts, first),
            (MAX_PARTS, box.rank, box.ranks, box.rows, box.row_words),
            4,
        )
    return out
