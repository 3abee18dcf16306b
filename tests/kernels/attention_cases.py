"""Cases of the attention kernels, and how each kernel is held to float64: in the interpreter and on a device.

Inputs are random anew in each run (the seed stands in the message of a failure); outputs, scratch memory and
whatever no row may read hold NaN before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from octavo.kernels.triton import attention, cascade
from octavo.kernels.triton.kv_codes import KVCodes, product_dtype
from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_triton import multiprocessors
from tests.kernels.ragged import (
    attention_float64,
    forget_before_window,
    kv_scales,
    quantize_cache,
    ragged_batch,
    share_beginning,
)

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
# Over quantized caches, whose codes are multiplied in float16 whatever the queries' type.
CODES_TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-3, "float16": 1e-3}
# Of float32 where a cap bends the scores: its tanh is good to 1e-6 of them.
CAPPED_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """Heads, their groups and sizes: head sizes of 64 to 256, 1 to 16 query heads a KV head."""

    heads: int
    kv_heads: int
    dim: int
    block: int
    window: int | None = None
    softcap: float | None = None


CASES = [
    Case(4, 4, 64, 8),
    Case(16, 1, 64, 32, window=9),
    Case(14, 2, 64, 16, softcap=5.0),
    Case(6, 2, 80, 16, window=40, softcap=8.0),
    Case(2, 1, 96, 8, window=20),
    Case(5, 1, 112, 32),
    Case(8, 2, 128, 16),
    Case(9, 1, 128, 8, window=13),
    Case(3, 1, 192, 8),
    Case(8, 2, 256, 32, window=7),
    Case(16, 1, 256, 16, softcap=30.0),
]


@dataclass(frozen=True)
class Codes:
    """How a cache is quantized: `kind` is fp8, fp8_e5m2 or int8; `how` of `KVCodes`."""

    kind: str
    offset: bool = False
    how: int | None = None


ALL_CODES = [Codes("fp8"), Codes("fp8_e5m2"), Codes("int8"), Codes("int8", offset=True)]


class Held:
    """A random batch of a case, with what attention over it comes to."""

    def __init__(
        self,
        case: Case,
        dtype: str,
        shapes: list[tuple[int, int]],
        device: str,
        shared: int = 0,
        codes: Codes | None = None,
    ):
        """`shapes`: (rows, context) of each request; `shared`: blocks that all begin with; `codes`: of a
        cache that is quantized."""
        self.case, self.shapes, self.dtype = case, shapes, dtype
        self.seed = int.from_bytes(os.urandom(4), "little")
        self.scale = case.dim**-0.5
        fmt = KVFormat(dtype, case.block, case.kv_heads, case.dim)
        q, self.cache, self.meta = ragged_batch(shapes, case.heads, fmt, device, seed=self.seed)
        self.quantized, self.codes = codes, None
        if codes is not None:
            self.cache *= torch.logspace(-1, 1, 2 * case.kv_heads, device=device).view(2, -1, 1, 1)
            if codes.offset:
                self.cache += 3 * torch.randn(case.dim, device=device).to(self.cache.dtype)
        if case.softcap is not None:
            q *= 8  # scores that the cap bends
        if shared:
            share_beginning(self.cache, self.meta, shared)
        values = self.cache
        if codes is not None:
            scales = kv_scales(self.cache, codes.kind)
            _, values = quantize_cache(self.cache, codes.kind, codes.offset, scales)
            self.codes = KVCodes(codes.kind, case.block, case.dim, codes.offset, scales, codes.how)
        self.want = attention_float64(q, values, self.meta, self.scale, case.window, case.softcap)
        if case.window is not None:
            forget_before_window(self.cache, self.meta, case.window)
        if codes is not None:
            self.cache, _ = quantize_cache(self.cache, codes.kind, codes.offset, scales)
        # As in an engine: a part of the rows of the QKV product, among rows that belong to nobody.
        wide = torch.full((len(q) + 2, case.heads + 2, case.dim), float("nan"), dtype=q.dtype, device=device)
        wide[:-2, : case.heads] = q
        self.q = wide[:, : case.heads]
        self.out = torch.full(self.q.shape, float("nan"), dtype=q.dtype, device=device)

    @property
    def batch(self) -> tuple[torch.Tensor, ...]:
        """The first arguments of the kernels."""
        meta: AttentionMetadata = self.meta
        return self.q, self.cache, self.out, meta.query_start, meta.seq_lens, meta.block_table

    @property
    def how(self) -> tuple[float, int | None, float | None]:
        """Their last ones."""
        return self.scale, self.case.window, self.case.softcap

    def check(self) -> None:
        """Right where there are rows, untouched elsewhere."""
        bound = (TOLERANCE if self.codes is None else CODES_TOLERANCE)[self.dtype]
        if self.case.softcap is not None:
            bound = max(bound, CAPPED_TOLERANCE)
        got, rest = self.out[:-2].double(), self.out[-2:]
        error = float((got - self.want).norm() / self.want.norm())
        assert error < bound, (
            f"{self.case} {self.dtype} {self.quantized} {self.shapes} seed {self.seed}: error {error:.1e}"
        )
        assert bool(rest.isnan().all()), (
            f"{self.case} {self.dtype} {self.shapes}: rows of nobody were written"
        )


def check_decode(
    case: Case,
    dtype: str,
    shapes: list[tuple[int, int]],
    splits: int,
    device: str,
    shared: int = 0,
    codes: Codes | None = None,
) -> None:
    """`paged_decode`, after `attend_shared` where blocks are shared; several times, since counters must be
    zero, with metadata that it may read early (of a device PyTorch's fills stand before it), and with splits
    that are added up apart."""
    held = Held(case, dtype, shapes, device, shared, codes)
    n, rows = len(shapes), max(rows for rows, _ in shapes)
    group = case.heads // case.kv_heads
    sizes = attention.decode_workspace_sizes(n, case.kv_heads, group, case.dim, rows, splits)
    partials = torch.full((sizes[0],), float("nan"), device=device)
    counters = torch.zeros(sizes[1], dtype=torch.int32, device=device)
    begun = None
    if shared:
        count = held.meta.num_rows
        memory = attention.shared_memory(held.q.device)
        tile = cascade.shared_config(
            count * group, group, case.dim, product_dtype(held.q, held.codes), memory
        )
        pieces = cascade.shared_splits(
            count, case.kv_heads, group, case.dim, shared * case.block, multiprocessors(held.q.device), tile
        )
        size = cascade.shared_workspace_size(count, case.heads, case.dim, pieces)
        scratch = torch.full((size,), float("nan"), device=device)
        assert held.meta.shared_len is not None
        begun = attention.SharedPass(held.meta.shared_len, count, pieces, scratch, tile, cascade.MIN_CHUNK)
    for early, apart in ((False, False), (True, False), (True, not shared), (False, not shared)):
        held.out.fill_(float("nan"))
        if begun is not None:
            cascade.attend_shared(
                held.q, held.cache, held.meta.query_start, held.meta.block_table, n, begun, held.scale,
                case.softcap, held.codes,
            )  # fmt: skip
        attention.paged_decode(
            *held.batch, 0, n, rows, splits, partials, counters, *held.how, shared=begun, codes=held.codes,
            early=early, apart=apart,
        )  # fmt: skip
        held.check()
        assert counters.count_nonzero() == 0


def check_prefill(
    case: Case, dtype: str, shapes: list[tuple[int, int]], device: str, codes: Codes | None = None
) -> None:
    """`paged_prefill`."""
    held = Held(case, dtype, shapes, device, codes=codes)
    attention.paged_prefill(*held.batch, 0, len(shapes), held.meta.num_rows, *held.how, codes=held.codes)
    held.check()
