"""CPU attention against the plain backend, on ragged batches over a scattered, poisoned cache."""

import logging

import pytest
import torch

from octavo.kernels.cpu import ops
from octavo.kv.format import KVFormat
from octavo.layers import attention_cpu
from octavo.layers.attention import AttentionMetadata, TorchAttention
from octavo.layers.attention_cpu import CPUAttention

needs_kernels = pytest.mark.skipif(not ops.available(), reason=ops.why_not())

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(9, 3, 64), (32, 8, 128), (14, 2, 64), (4, 4, 80), (6, 2, 96), (8, 1, 12)]
# Lone tokens, chunks, verifications of drafts, a context of several pieces, a whole prompt.
CONTEXTS, ROWS = [1, 17, 300, 1300, 130, 64, 513], [1, 17, 5, 1, 90, 1, 3]


class Batch:
    """A batch whose cache holds NaN wherever no token of it lies."""

    def __init__(self, heads, kv_heads, dim, block_size, dtype, contexts=CONTEXTS, rows=ROWS, seed=0):
        torch.manual_seed(seed)
        needed = [-(-c // block_size) for c in contexts]
        blocks = torch.randperm(sum(needed) + 3, dtype=torch.int32)
        table = torch.zeros(len(contexts), max(needed) + 2, dtype=torch.int32)
        self.cache = torch.full((len(blocks), 2, kv_heads, block_size, dim), NAN, dtype=dtype)
        first = 0
        for i, (context, n) in enumerate(zip(contexts, needed, strict=True)):
            table[i, :n] = blocks[first : first + n]
            first += n
            tokens = torch.arange(context)
            blocks_of = table[i, tokens // block_size].long()
            self.cache[blocks_of, :, :, tokens % block_size] = torch.randn(context, 2, kv_heads, dim).to(
                dtype
            )
        starts = torch.tensor([0, *rows]).cumsum(0).int()
        total = sum(rows)
        fused = torch.randn(total, (heads + 2 * kv_heads) * dim).to(dtype)
        self.q = fused[:, : heads * dim].unflatten(1, (heads, dim))
        self.meta = AttentionMetadata(
            starts,
            torch.tensor(contexts, dtype=torch.int32),
            table,
            torch.full((total,), -1),
            len(contexts),
            total,
            max(rows),
            max(contexts),
        )
        self.format = KVFormat(str(dtype).removeprefix("torch."), block_size, kv_heads, dim)
        self.heads, self.scale = heads, dim**-0.5

    def expected(self, window=None):
        """The plain backend in float32; positions that nobody may read count as 0 there."""
        plain = TorchAttention(self.heads, self.format, self.scale, window)
        return plain.attend(self.q.float(), self.cache.float().nan_to_num(0.0), self.meta)

    def actual(self, window=None):
        return CPUAttention(self.heads, self.format, self.scale, window).attend(self.q, self.cache, self.meta)


def close(ours, expected):
    tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.float(), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_ragged_batch(heads, kv_heads, dim, dtype):
    few = ([1, 300, 530, 64], [1, 5, 1, 40]) if heads * dim > 1024 else (CONTEXTS, ROWS)
    batch = Batch(heads, kv_heads, dim, 16, dtype, *few)
    close(batch.actual(), batch.expected())


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 50, 600])
@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes_and_windows(dtype, block_size, window):
    batch = Batch(6, 2, 32, block_size, dtype)
    close(batch.actual(window), batch.expected(window))


@needs_kernels
def test_window_never_reads_blocks_it_left_behind():
    batch = Batch(9, 3, 64, 16, torch.float32, [400, 777], [1, 40])
    expected = batch.expected(60)
    table = batch.meta.block_table
    batch.cache[table[0, : (400 - 60) // 16].long()] = NAN
    batch.cache[table[1, : (777 - 40 - 60) // 16].long()] = NAN
    close(batch.actual(60), expected)


@needs_kernels
def test_result_depends_on_neither_threads_nor_neighbours():
    batch = Batch(9, 3, 64, 16, torch.float32)
    expected = batch.actual()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            batch.meta.plan = None
            assert torch.equal(batch.actual(), expected)
    finally:
        torch.set_num_threads(before)
    starts = batch.meta.query_start.tolist()
    for i, context in enumerate(CONTEXTS):
        rows = slice(starts[i], starts[i + 1])
        out = torch.full_like(batch.q[rows], NAN)
        ops.paged_attention(
            batch.q[rows],
            batch.cache,
            torch.tensor([0, ROWS[i]], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            batch.meta.block_table[i : i + 1],
            batch.scale,
            None,
            out,
        )
        assert torch.equal(out, expected[rows])


@needs_kernels
def test_padding_rows_are_left_alone():
    batch = Batch(9, 3, 64, 16, torch.float32)
    padded = torch.cat([batch.q, torch.full((5, 9, 64), NAN)])
    out = torch.full_like(padded, 3.0)
    meta = batch.meta
    ops.paged_attention(
        padded, batch.cache, meta.query_start, meta.seq_lens, meta.block_table, batch.scale, None, out
    )
    close(out[:-5], batch.expected())
    assert (out[-5:] == 3.0).all()


@needs_kernels
def test_large_scores_do_not_overflow():
    batch = Batch(9, 3, 64, 16, torch.float32)
    batch.q.mul_(300)
    # Scores of some thousands: their rounding alone moves the results by more than 1e-5.
    torch.testing.assert_close(batch.actual(), batch.expected(), rtol=2e-3, atol=2e-3)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_rotates_and_stores_like_the_plain_backend(dtype, norms):
    heads, kv_heads, dim, rows = 6, 2, 32, 21
    fmt = KVFormat(str(dtype).removeprefix("torch."), 8, kv_heads, dim)
    fused = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    cos_sin, positions = torch.randn(64, dim), torch.randint(0, 64, (rows,))
    slots = torch.randperm(80)[:rows]
    slots[3] = -1
    weights = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if norms else (None, None)
    meta = AttentionMetadata(*[torch.zeros(1, dtype=torch.int32)] * 3, slots, 1, rows, rows, rows)
    results = []
    for backend in (TorchAttention, CPUAttention):
        cache = torch.zeros(10, 2, kv_heads, 8, dim, dtype=dtype)
        parts = fused.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        q, k, v = (x.unflatten(1, (-1, dim)) for x in parts)
        q = backend(heads, fmt, 1.0).rotary_and_write_kv(q, k, v, cos_sin, positions, cache, meta, *weights)
        results.append((q, cache))
    (plain_q, plain_cache), (q, cache) = results
    close(q, plain_q.float())
    close(cache, plain_cache.float())


def test_float16_is_served_by_plain_pytorch_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(attention_cpu, "_announced", set())
    batch = Batch(4, 2, 16, 8, torch.float16, [9, 20], [1, 4])
    batch.cache = batch.cache.nan_to_num(0.0)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(batch.actual().float(), batch.expected(), rtol=1e-2, atol=1e-2)
        batch.actual()
    said = [x for x in caplog.records if "float16" in x.getMessage()]
    assert len(said) == 1


def test_without_kernels_plain_pytorch_serves(monkeypatch):
    monkeypatch.setattr(ops, "_lib", None)
    monkeypatch.setattr(ops, "_reason", None)
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
    batch = Batch(4, 2, 16, 8, torch.float32, [9, 20], [1, 4])
    batch.cache = batch.cache.nan_to_num(0.0)
    assert torch.equal(batch.actual(), batch.expected())
