"""CPU attention against the plain backend, on ragged batches over a scattered, poisoned cache."""

import logging

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from octavo.kernels.cpu import ops
from octavo.kv.format import KVFormat
from octavo.layers import attention_cpu
from octavo.layers.attention import QKV, AttentionMetadata, TorchAttention
from octavo.layers.attention_cpu import CPUAttention
from tests.kernels.ragged import forget_before_window

needs_kernels = pytest.mark.skipif(not ops.available(), reason=ops.why_not())

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(9, 3, 64), (32, 8, 128), (14, 2, 64), (4, 4, 80), (6, 2, 96), (8, 1, 12)]
HEADS += [(5, 1, 112), (3, 3, 192), (16, 1, 256), (7, 1, 128)]
# Lone tokens, chunks, verifications of drafts, a context of several pieces, a whole prompt.
CONTEXTS, ROWS = [1, 17, 300, 1300, 130, 64, 513], [1, 17, 5, 1, 90, 1, 3]


def paged_attention(
    q, cache, starts, lens, table, scale, window, out, softcap=None, cache_type=None, kv_scale=None
):
    """`ops.attend` for arguments of any one call."""
    heads, kv_heads, block_size, dim = q.shape[1], cache.shape[2], cache.shape[3], q.shape[2]
    kind = cache_type or ops.type_of_cache(cache)
    shape = ops.attention_shape(heads, kv_heads, dim, block_size, scale, window, q.dtype, kind, softcap)
    ops.attend(shape, ops.attention_batch(starts, lens, table), q, cache, out, kv_scale)
    return out


class Batch:
    """A batch whose cache holds NaN wherever no token of it lies."""

    def __init__(self, heads, kv_heads, dim, block_size, dtype, contexts=CONTEXTS, rows=ROWS, seed=0):
        torch.manual_seed(seed)
        needed = [-(-c // block_size) for c in contexts]
        blocks = torch.randperm(sum(needed) + 3, dtype=torch.int32)
        # Spare entries, past a context, name a block of NaN.
        table = blocks[-1].repeat(len(contexts), max(needed) + 2)
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

    def expected(self, window=None, softcap=None):
        """The plain backend in float32."""
        plain = TorchAttention(self.heads, self.format, self.scale, window, softcap)
        return plain.attend(self.q.float(), self.cache.float(), self.meta)

    def actual(self, window=None, softcap=None):
        backend = CPUAttention(self.heads, self.format, self.scale, window, softcap)
        return backend.attend(self.q, self.cache, self.meta)


def close(ours, expected, float32_tolerance=1e-5):
    tolerance = float32_tolerance if ours.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.float(), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_ragged_batch(heads, kv_heads, dim, dtype):
    few = ([1, 300, 530, 64], [1, 5, 1, 40]) if heads * dim > 1024 else (CONTEXTS, ROWS)
    batch = Batch(heads, kv_heads, dim, 16, dtype, *few)
    close(batch.actual(), batch.expected())


@needs_kernels
@pytest.mark.parametrize("dim", [20, 64, 80, 112])  # pairs of vectors, and what is left of them
def test_float32_queries_of_a_bfloat16_cache(dim):
    batch = Batch(6, 2, dim, 16, torch.bfloat16)
    batch.q = batch.q.float()
    close(batch.actual(), batch.expected())


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 50, 600])
@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes_and_windows(dtype, block_size, window):
    batch = Batch(6, 2, 32, block_size, dtype)
    close(batch.actual(window), batch.expected(window))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 16, 60, 600, 5000])
def test_window_never_reads_blocks_it_left_behind(window, dtype):
    """A block that lies wholly before the windows of all rows may hold anything by now: decodes, drafts,
    chunks longer than the window, contexts of several pieces; the plain backend alike."""
    batch = Batch(9, 3, 64, 16, dtype, [400, 777, 33, 1300, 90], [1, 40, 3, 1, 90])
    expected = batch.expected(window)
    assert forget_before_window(batch.cache, batch.meta, window) or window == 5000
    close(batch.actual(window), expected)
    assert torch.equal(batch.expected(window), expected)


@needs_kernels
@pytest.mark.parametrize(("softcap", "window"), [(2.0, None), (50.0, 60)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (8, 2, 256)])
def test_softcap(heads, kv_heads, dim, dtype, softcap, window):
    """Scores far below and far above the cap: lone tokens, drafts, chunks, split contexts."""
    batch = Batch(heads, kv_heads, dim, 8, dtype, [1, 17, 700, 300, 33], [1, 17, 1, 40, 3])
    batch.q.mul_(torch.logspace(-2, 1.0, batch.meta.num_rows)[:, None, None])
    expected = batch.expected(window, softcap)
    assert (expected - batch.expected(window)).abs().max() > 0.01
    # Scores of some tens in float32: against float64 the kernels err by 2e-5, and without a cap by 1e-5.
    close(batch.actual(window, softcap), expected, float32_tolerance=3e-5)


def test_plain_backend_caps_like_transformers():
    """Gemma 2's eager attention: scale, cap, mask, softmax."""
    torch.manual_seed(0)
    batch = Batch(4, 2, 16, 8, torch.float32, [21], [21])
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 2
    kv = batch.cache[batch.meta.block_table[0, :3].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :21]
    mask = torch.full((21, 21), float("-inf")).triu(1)[None, None]
    expected, _ = eager_attention_forward(
        module, batch.q.transpose(0, 1)[None], kv[0][None], kv[1][None], mask, scaling=0.3, softcap=1.5
    )
    actual = TorchAttention(4, batch.format, 0.3, None, 1.5).attend(batch.q, batch.cache, batch.meta)
    torch.testing.assert_close(actual, expected[0], rtol=1e-5, atol=1e-5)


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
        paged_attention(
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
@pytest.mark.parametrize("cache_type", ["float32", "bfloat16", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (700, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 80)])
def test_rows_do_not_depend_on_the_rows_beside_them(heads, kv_heads, dim, window, softcap, cache_type):
    torch.manual_seed(2)
    context, block_size = 1100, 16
    cache = torch.randn(-(-context // block_size), 2, kv_heads, block_size, dim)
    codes = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    if cache_type in codes:
        cache = cache.to(codes[cache_type]).view(torch.uint8)
    else:
        cache = cache.to(getattr(torch, cache_type))
    q = 3 * torch.randn(context, heads, dim)
    table = torch.arange(len(cache), dtype=torch.int32)[None]
    kv_scale = torch.rand(2, kv_heads) + 0.5 if cache_type in codes else None

    def attend(first, last):
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        lens = torch.tensor([last], dtype=torch.int32)
        out = torch.full((last - first, heads, dim), NAN)
        scale = dim**-0.5
        return paged_attention(
            q[first:last], cache, starts, lens, table, scale, window, out, softcap, cache_type, kv_scale
        )

    prompt = attend(0, context)
    assert not prompt.isnan().any()
    for rows in (1, 2, 4, 5, 13, 33, 65, 200):
        for last in (17, 64, 500, 512, 513, 700, 1025, 1100):
            first = max(0, last - rows)
            assert torch.equal(attend(first, last), prompt[first:last]), (rows, last)


@needs_kernels
def test_padding_rows_are_left_alone():
    batch = Batch(9, 3, 64, 16, torch.float32)
    padded = torch.cat([batch.q, torch.full((5, 9, 64), NAN)])
    out = torch.full_like(padded, 3.0)
    meta = batch.meta
    paged_attention(
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
@pytest.mark.parametrize("norms", [None, "same", "float32"])
@pytest.mark.parametrize(("dim", "rot"), [(32, 32), (80, 32), (96, 72)])
def test_rotates_and_stores_like_the_plain_backend(dtype, norms, dim, rot):
    heads, kv_heads, rows = 6, 2, 21
    fmt = KVFormat(str(dtype).removeprefix("torch."), 8, kv_heads, dim)
    fused = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    cos_sin, positions = torch.randn(64, rot), torch.randint(0, 64, (rows,))
    slots = torch.randperm(80)[:rows]
    slots[3] = -1
    weight_dtype = dtype if norms == "same" else torch.float32
    weights = [torch.randn(dim).to(weight_dtype) if norms else None for _ in range(2)]
    meta = AttentionMetadata(*[torch.zeros(1, dtype=torch.int32)] * 3, slots, 1, rows, rows, rows)
    results = []
    for backend in (TorchAttention, CPUAttention):
        cache = torch.zeros(10, 2, kv_heads, 8, dim, dtype=dtype)
        parts = fused.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        q, k, v = (x.unflatten(1, (-1, dim)) for x in parts)
        qkv = QKV(q, k, v, cos_sin, positions, *weights)
        q = backend(heads, fmt, 1.0).rotary_and_write_kv(qkv, cache, meta)
        results.append((q, cache))
    (plain_q, plain_cache), (q, cache) = results
    close(q, plain_q.float())
    close(cache, plain_cache.float())


def test_float16_is_served_by_plain_pytorch_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(attention_cpu, "_announced", set())
    batch = Batch(4, 2, 16, 8, torch.float16, [9, 20], [1, 4])
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
    assert torch.equal(batch.actual(), batch.expected())
