"""CPU attention over caches of 8 bits against the plain twins: what is stored, to the bit, and read."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference_kv
from octavo.kernels.cpu import ops
from octavo.kv.format import KVFormat
from octavo.layers.attention import QKV, AttentionBackend, AttentionMetadata, TorchAttention
from octavo.layers.attention_cpu import CPUAttention
from tests.kernels.ragged import attention_float64

needs_kernels = pytest.mark.skipif(not ops.available(), reason=ops.why_not())
KINDS = [("fp8", False), ("fp8_e5m2", False), ("int8", False), ("int8", True)]
DTYPES = [torch.float32, torch.bfloat16]
POISON = 0xFF  # of FP8 a NaN, of scales and offsets one, too


def make_format(kind: tuple[str, bool], block_size: int, kv_heads: int, dim: int) -> KVFormat:
    return KVFormat(kind[0], block_size, kv_heads, dim, offset=kind[1])


def scales_for(fmt: KVFormat) -> torch.Tensor | None:
    """Other ones for every head, so small that some numbers saturate."""
    if fmt.dtype == "int8":
        return None
    return torch.rand(2, fmt.num_kv_heads) * 0.02 + 2.0 / reference_kv.FP8_LARGEST[fmt.dtype]


def with_scales(
    backend: AttentionBackend, scales: torch.Tensor | None, centre: torch.Tensor | None = None
) -> AttentionBackend:
    backend.kv_scale, backend.kv_centre = scales, centre
    return backend


def centre_for(fmt: KVFormat) -> torch.Tensor:
    """Another one for every head."""
    return torch.randn(fmt.num_kv_heads, fmt.head_dim)


class Batch:
    """A ragged batch whose cache holds poison wherever no token lies; keys lie off 0, as with biases."""

    def __init__(self, heads, fmt, dtype, contexts, rows, window=None):
        size, kv_heads, dim = fmt.block_size, fmt.num_kv_heads, fmt.head_dim
        self.heads, self.fmt, self.scale, self.window = heads, fmt, dim**-0.5, window
        self.kv_scale = scales_for(fmt)
        needed = [-(-c // size) for c in contexts]
        blocks = torch.randperm(sum(needed) + 3, dtype=torch.int32)
        table = blocks[-1].repeat(len(contexts), max(needed) + 2)
        self.cache = torch.full((len(blocks), *fmt.layer_block_shape()), POISON, dtype=torch.uint8)
        first, slots = 0, []
        for i, (context, n) in enumerate(zip(contexts, needed, strict=True)):
            table[i, :n] = blocks[first : first + n]
            first += n
            tokens = torch.arange(context)
            if window is not None:  # blocks that no row sees stay poisoned
                tokens = tokens[max(0, context - rows[i] - window + 1) // size * size :]
            slots.append(table[i, tokens // size].long() * size + tokens % size)
        starts = torch.tensor([0, *rows]).cumsum(0).int()
        total, where = sum(rows), torch.cat(slots)
        self.meta = AttentionMetadata(
            starts, torch.tensor(contexts, dtype=torch.int32), table, where,
            len(contexts), total, max(rows), max(contexts),
        )  # fmt: skip
        k = torch.randn(len(where), kv_heads, dim) + 3 * torch.randn(kv_heads, dim)
        v = torch.randn(len(where), kv_heads, dim)
        with_scales(TorchAttention(heads, fmt, 1.0), self.kv_scale).write_kv(k, v, self.cache, self.meta)
        self.q = torch.randn(total, heads, dim).to(dtype)

    def check(self, softcap=None):
        how = self.heads, self.fmt, self.scale, self.window, softcap
        want = with_scales(TorchAttention(*how), self.kv_scale).attend(self.q.float(), self.cache, self.meta)
        got = with_scales(CPUAttention(*how), self.kv_scale).attend(self.q, self.cache, self.meta)
        assert got.dtype is self.q.dtype and bool(want.isfinite().all())
        tolerance = 5e-5 if got.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (14, 2, 64, 8), (4, 4, 80, 32), (8, 1, 12, 4), (4, 4, 128, 16), (7, 1, 256, 16)],
)
def test_attends_like_the_twin(heads, kv_heads, dim, block_size, kind, dtype):
    """Lone tokens, drafts, chunks, whole prompts, contexts in several pieces."""
    fmt = make_format(kind, block_size, kv_heads, dim)
    Batch(heads, fmt, dtype, [1, 17, 300, 1300, 130, 64, 515], [1, 17, 3, 1, 90, 1, 2]).check()


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "softcap"), [(5, None), (60, 3.0), (600, None), (None, 8.0)])
def test_windows_and_softcaps(kind, window, softcap):
    fmt = make_format(kind, 8, 2, 32)
    batch = Batch(6, fmt, torch.float32, [400, 777, 33, 1300, 90], [1, 40, 3, 1, 90], window)
    batch.check(softcap)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [12, 64, 80])
def test_stores_what_the_twin_stores(kind, dim, dtype):
    """To the bit, from rows of a fused product: sizes from subnormal to beyond the largest, zeros, and slots
    that drop their row."""
    fmt = make_format(kind, 8, 3, dim)
    rows, slots = 40, torch.randperm(80)[:40]
    slots[5] = slots[17] = -1
    fused = torch.randn(rows, 6 * dim) * torch.logspace(-9, 3.5, rows)[:, None]
    fused[9], fused[10, ::2], fused[11, 1] = 0, 0, -0.0
    k, v = fused.to(dtype).split(3 * dim, dim=1)
    k, v = k.unflatten(1, (3, dim)), v.unflatten(1, (3, dim))
    meta = AttentionMetadata(*[torch.zeros(1, dtype=torch.int32)] * 3, slots, 1, rows, rows, rows)
    scales = scales_for(fmt)
    stored = []
    for centre in (None, centre_for(fmt)):
        caches = torch.full((2, 10, *fmt.layer_block_shape()), POISON, dtype=torch.uint8)
        for backend, cache in zip((TorchAttention, CPUAttention), caches, strict=True):
            with_scales(backend(6, fmt, 1.0), scales, centre).write_kv(k, v, cache, meta)
        assert torch.equal(*caches)
        stored.append(caches[0])
    assert torch.equal(stored[0][:, 1], stored[1][:, 1])  # values are stored as they are
    assert not torch.equal(stored[0][:, 0], stored[1][:, 0])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_rotates_and_stores(kind):
    """In one pass what `rotary` and `write_kv` do in two."""
    fmt = make_format(kind, 8, 2, 32)
    q, k, v = torch.randn(21, 4, 32), torch.randn(21, 2, 32), torch.randn(21, 2, 32)
    cos_sin, positions, slots = torch.randn(64, 32), torch.randint(0, 64, (21,)), torch.randperm(80)[:21]
    meta = AttentionMetadata(*[torch.zeros(1, dtype=torch.int32)] * 3, slots, 1, 21, 21, 21)
    backend = with_scales(CPUAttention(4, fmt, 1.0), scales_for(fmt), centre_for(fmt))
    together, apart = torch.zeros(2, 10, *fmt.layer_block_shape(), dtype=torch.uint8)
    q2, k2 = q.clone(), k.clone()
    ops.rotary(q2, k2, cos_sin, positions)
    backend.write_kv(k2, v, apart, meta)
    q = backend.rotary_and_write_kv(QKV(q, k, v, cos_sin, positions), together, meta)
    assert torch.equal(q, q2) and torch.equal(together, apart) and bool(apart.any())


@needs_kernels
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", [*reference_kv.FP8_DTYPES, "int8"])
def test_keys_less_a_vector_are_attended_to_as_they_were(kind, window):
    """Against exact attention in float64: keys far from 0 lose most of their error, and nothing else happens,
    in rows that see all of it and in rows that see a window."""
    contexts, rows, dim = [150, 31], [4, 31], 32
    fmt = KVFormat(kind, 8, 2, dim)
    slots = torch.arange(sum(contexts)) + 16  # of the second request from block 21 on
    slots[contexts[0] :] += -int(slots[contexts[0]]) % 8
    table = torch.zeros(2, 20, dtype=torch.int32)
    table[0, :19], table[1, :4] = torch.arange(2, 21), slots[contexts[0]] // 8 + torch.arange(4)
    meta = AttentionMetadata(
        torch.tensor([0, 4, 35], dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32), table, slots,
        2, 35, 31, 150,
    )  # fmt: skip
    centre = 6 * torch.randn(2, dim)
    k, v = centre + torch.randn(len(slots), 2, dim), torch.randn(len(slots), 2, dim)
    q = torch.randn(sum(rows), 4, dim)
    exact = torch.zeros(30, 2, 2, 8, dim)
    for part, x in enumerate((k, v)):
        exact[slots // 8, part, :, slots % 8] = x
    want = attention_float64(q, exact, meta, dim**-0.5, window)
    # Values are rounded as well: of these, as they come back, the error is not the keys'.
    scale = None if kind == "int8" else torch.full((2, 2), 32.0 / reference_kv.FP8_LARGEST[kind])
    for backend_class in (TorchAttention, CPUAttention):
        errors = []
        for vector in (None, centre):
            backend = with_scales(backend_class(4, fmt, dim**-0.5, window), scale, vector)
            cache = torch.full((30, *fmt.layer_block_shape()), POISON, dtype=torch.uint8)
            backend.write_kv(k, v, cache, meta)
            errors.append(float((backend.attend(q, cache, meta) - want).square().mean().sqrt()))
        print(kind, window, backend_class.name, errors)
        assert errors[1] < 0.5 * errors[0]


@needs_kernels
@pytest.mark.parametrize(("kind", "dtype"), list(reference_kv.FP8_DTYPES.items()))
def test_every_code(kind, dtype):
    """A cache of one token whose value is a code: attention gives the code's value times the scale. Written
    again, it is the same code."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.view(dtype).float().isfinite()
    codes = codes[finite].repeat(2)[:256].view(1, 1, 256)
    fmt, scale = KVFormat(kind, 4, 1, 256), torch.tensor([[0.5], [0.25]])
    values = codes.view(dtype).float() * 0.25
    cache = torch.zeros(1, *fmt.layer_block_shape(), dtype=torch.uint8)
    meta = AttentionMetadata(
        torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 1, 1, 1, 1,
    )  # fmt: skip
    backend = with_scales(CPUAttention(1, fmt, 1.0), scale)
    backend.write_kv(torch.zeros_like(values), values, cache, meta)
    assert torch.equal(cache[0, 1, 0, :1], codes[0])
    for q in (torch.zeros(1, 1, 256), torch.zeros(1, 1, 256, dtype=torch.bfloat16)):
        assert torch.equal(backend.attend(q, cache, meta).float(), values.to(q.dtype).float())


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_show(kind):
    """NaN in the scales, or of int8 in a row, makes NaN of results; FP8 saturates what is infinite."""
    fmt = make_format(kind, 4, 1, 16)
    meta = AttentionMetadata(
        torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 1, 1, 1, 1,
    )  # fmt: skip
    x = torch.randn(1, 1, 16)
    for bad in (float("nan"), float("inf")):
        for backend_class in (TorchAttention, CPUAttention):
            backend = with_scales(
                backend_class(1, fmt, 1.0), torch.ones(2, 1) if fmt.dtype != "int8" else None
            )
            cache = torch.zeros(1, *fmt.layer_block_shape(), dtype=torch.uint8)
            v = x.clone()
            if fmt.dtype == "int8":
                v[0, 0, 3] = bad
            elif backend.kv_scale is not None:
                backend.kv_scale[1] = float("nan")
            backend.write_kv(x, v, cache, meta)
            assert bool(backend.attend(x, cache, meta).isnan().any())


@needs_kernels
def test_float16_activations_are_served_by_plain_pytorch():
    batch = Batch(4, make_format(("int8", True), 8, 2, 16), torch.float16, [9, 20], [1, 4])
    how = batch.heads, batch.fmt, batch.scale
    want = TorchAttention(*how).attend(batch.q, batch.cache, batch.meta)
    assert torch.equal(CPUAttention(*how).attend(batch.q, batch.cache, batch.meta), want)


@needs_kernels
def test_bad_arguments_are_refused():
    x, slots = torch.randn(4, 1, 64), torch.arange(4)
    cache = torch.zeros(1, 2, 1, 4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="kv_scale must be given"):
        ops.write_kv(x, x, cache, slots, "fp8")
    with pytest.raises(ValueError, match=r"float32 \[2, 1\]"):
        ops.write_kv(x, x, cache, slots, "fp8", torch.ones(2))
    with pytest.raises(ValueError, match="kv_centre is of caches of 8 bits"):
        ops.write_kv(x, x, cache.float(), slots, "float32", None, torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"float32 \[1, 64\]"):
        ops.write_kv(x, x, cache, slots, "fp8", torch.ones(2, 1), torch.zeros(64))
    with pytest.raises(ValueError, match="of int8"):
        ops.write_kv(x, x, cache, slots, "int8")
    with pytest.raises(ValueError, match="of float32, got torch.uint8"):
        ops.write_kv(x, x, cache, slots, "float32")
    with pytest.raises(TypeError, match="fp4"):
        ops.write_kv(x, x, cache, slots, "fp4", torch.ones(2, 1))
