"""Triton's norms, activation, rotary embedding and KV writes against their plain twins and float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import reference
from octavo.kernels.triton import activation, embedding, norm, rotary_kv
from octavo.kv.format import KVFormat
from octavo.layers.attention import AttentionMetadata, TorchAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter rounds to bfloat16 by truncation, so a unit in the last place more is allowed.
BOUNDS = [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 80), (0, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    got = norm.rms_norm(x, weight, 1e-5)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert got.shape == x.shape and got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5), rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_add_rms_norm(dtype: torch.dtype, bound: float) -> None:
    wide = randn(5, 2, 48, dtype=dtype)
    x, residual = wide[:, 0], randn(5, 48, dtype=dtype, seed=1)
    weight = randn(48, dtype=dtype, seed=2)
    want, stream = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, same = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert same is residual
    torch.testing.assert_close(residual, stream, rtol=bound, atol=bound)
    torch.testing.assert_close(got, want, rtol=2 * bound, atol=2 * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_look_up_part(dtype: torch.dtype, ids: torch.dtype) -> None:
    table = randn(20, 100, dtype=dtype)
    tokens = torch.tensor([40, 39, 59, 60, 0, 45, 1000], dtype=ids, device=DEVICE)
    got = embedding.look_up_part(table, tokens, 40)
    assert torch.equal(got, reference.look_up_part(table, tokens, 40))
    assert torch.equal(got[0], table[0]) and torch.equal(got[2], table[19]) and torch.equal(got[5], table[5])
    assert not got[[1, 3, 4, 6]].any()
    assert embedding.look_up_part(table, tokens[:0], 40).shape == (0, 100)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("size", [48, 1100])
def test_silu_and_mul(size: int, dtype: torch.dtype, bound: float) -> None:
    x = randn(3, 2 * size, dtype=dtype)
    got = activation.silu_and_mul(x)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=2 * bound, atol=bound)
    assert got.shape == (3, size) and got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float32_weights(dtype: torch.dtype) -> None:
    """A float32 weight meets the exact norm: one rounding, however the weight would round by itself."""
    x, residual = randn(5, 80, dtype=dtype), randn(5, 80, dtype=dtype, seed=1)
    weight = 1.0 + randn(80, seed=2) * 1e-3  # lost if it were rounded to bfloat16
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    got = norm.rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-6), rtol=bound, atol=1e-6)
    want, stream = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    got, same = norm.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(same, stream, rtol=bound, atol=bound)
    torch.testing.assert_close(got, want, rtol=2 * bound, atol=2 * bound)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(has_bias: bool, dtype: torch.dtype, bound: float) -> None:
    wide = 3.0 + randn(5, 2, 80, dtype=dtype)
    x, residual = wide[:, 1], randn(5, 80, dtype=dtype, seed=1)
    weight = randn(80, dtype=dtype, seed=2)
    bias = randn(80, dtype=dtype, seed=3) if has_bias else None
    got = norm.layer_norm(x, weight, bias, 1e-5)
    assert got.shape == x.shape and got.dtype == dtype
    torch.testing.assert_close(got, reference.layer_norm(x, weight, bias, 1e-5), rtol=bound, atol=2 * bound)
    want, stream = reference.add_layer_norm(x, residual.clone(), weight, bias, 1e-5)
    got, same = norm.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert same is residual
    torch.testing.assert_close(residual, stream, rtol=bound, atol=bound)
    torch.testing.assert_close(got, want, rtol=2 * bound, atol=4 * bound)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_gelu_tanh_and_mul(dtype: torch.dtype, bound: float) -> None:
    x = randn(3, 2 * 48, dtype=dtype) * 4
    x[0, :4] = torch.tensor([-60.0, 60.0, 0.0, -9.0])
    got = activation.gelu_tanh_and_mul(x)
    gate, up = x.double().chunk(2, -1)
    want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(got.double(), want, rtol=2 * bound, atol=bound)
    assert got.shape == (3, 48) and got.dtype == dtype


def test_softcap() -> None:
    """In place on strided rows, as accurate for small values as for large ones; NaN and infinity too."""
    wide = torch.full((2, 1200), 7.0, device=DEVICE)
    x = wide[:, 8:1108]
    x[:] = torch.logspace(-30, 4, 1100) * torch.tensor([[1.0], [-1.0]])
    want = 30.0 * (x.double() / 30.0).tanh()
    assert activation.softcap(x, 30.0) is x
    torch.testing.assert_close(x.double(), want, rtol=1e-6, atol=0)
    assert bool((wide[:, :8] == 7).all()) and bool((wide[:, 1108:] == 7).all())
    odd = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-42]], device=DEVICE)
    torch.testing.assert_close(activation.softcap(odd.clone(), 5.0), 5 * (odd / 5).tanh(), equal_nan=True)
    half = randn(3, 40, dtype=torch.float16) * 40
    want = reference.softcap(half.clone(), 30.0)
    torch.testing.assert_close(activation.softcap(half, 30.0), want, rtol=2e-3, atol=0)


def write_with_torch(k, v, cache, slots) -> None:
    fmt = KVFormat(str(cache.dtype)[6:], cache.shape[3], cache.shape[2], cache.shape[4])
    none = torch.empty(0)
    meta = AttentionMetadata(none, none, none, slots, 1, len(k), 1, 1)
    TorchAttention(k.shape[1], fmt, 1.0).write_kv(k, v, cache, meta)


def test_write_kv() -> None:
    """Scattered slots, dropped rows, strided sources, a cache that is a slice of a pool."""
    qkv = randn(6, 9, 80)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    pool = torch.full((4, 2, 2, 3, 8, 80), -7.0, device=DEVICE)
    want = pool.clone()
    slots = torch.tensor([31, 0, -1, 8, 17, -1], device=DEVICE)
    write_with_torch(k, v, want[:, 1], slots)
    rotary_kv.write_kv(k, v, pool[:, 1], slots)
    assert torch.equal(pool, want)
    assert (pool != -7.0).sum() == 4 * 2 * 3 * 80


@pytest.mark.parametrize(
    ("dtype", "bound", "heads", "kv_heads", "dim", "rot", "weight_dtype"),
    [
        (torch.float32, 2e-6, 4, 2, 64, 64, None),
        (torch.float32, 2e-6, 3, 1, 80, 32, torch.float32),
        (torch.float32, 2e-6, 17, 2, 96, 96, torch.float32),
        (torch.float32, 2e-6, 5, 1, 96, 72, torch.float32),
        (torch.float16, 4e-3, 4, 4, 128, 128, torch.float16),
        (torch.float16, 4e-3, 3, 1, 256, 256, torch.float32),
        (torch.bfloat16, 3.2e-2, 4, 2, 64, 48, None),
        (torch.bfloat16, 3.2e-2, 4, 2, 80, 20, torch.float32),
    ],
)
def test_rotary_and_write_kv(
    dtype: torch.dtype,
    bound: float,
    heads: int,
    kv_heads: int,
    dim: int,
    rot: int,
    weight_dtype: torch.dtype | None,
) -> None:
    rows = 3
    qkv = randn(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    positions = torch.tensor([5, 0, 39], device=DEVICE)
    slots = torch.tensor([9, -1, 16], device=DEVICE)
    angle = torch.arange(40, device=DEVICE)[:, None] * 100.0 ** -torch.linspace(0, 1, rot // 2, device=DEVICE)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    weights = [weight_dtype and randn(dim, dtype=weight_dtype, seed=seed) for seed in (1, 2)]

    q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], 1)
    if weight_dtype:
        q, k = reference.rms_norm(q, weights[0], 1e-6), reference.rms_norm(k, weights[1], 1e-6)
    reference.rotary(q, k, cos_sin, positions)
    want = torch.full((3, 2, kv_heads, 8, dim), -7.0, dtype=dtype, device=DEVICE)
    cache = want.clone()
    write_with_torch(k, v, want, slots)

    before, qkv_before = qkv.clone(), qkv.clone()
    got_q, got_k, got_v = qkv.split([heads, kv_heads, kv_heads], 1)
    rotary_kv.rotary_and_write_kv(got_q, got_k, got_v, cos_sin, positions, cache, slots, *weights)
    torch.testing.assert_close(got_q, q, rtol=bound, atol=bound)
    torch.testing.assert_close(got_k, k, rtol=bound, atol=bound)
    assert torch.equal(got_v, before[:, heads + kv_heads :])
    torch.testing.assert_close(cache, want, rtol=bound, atol=bound)
    assert (cache == -7.0).sum() == (want == -7.0).sum()

    rotary_kv.rotary_and_write_kv(
        before[:, :heads], got_k.clone(), got_v, cos_sin, positions, None, None, *weights
    )
    torch.testing.assert_close(before[:, :heads], q, rtol=bound, atol=bound)

    # The same by each row's own angles.
    by_row = before.clone()
    by_row[:, :heads] = qkv_before[:, :heads]
    rotary_kv.rotary_and_write_kv(
        by_row[:, :heads], got_k.clone(), got_v, cos_sin[positions], None, None, None, *weights
    )
    assert torch.equal(by_row[:, :heads], got_q)
