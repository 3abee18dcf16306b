"""The CPU's norm, activation, rotary and cache kernels against their plain twins in float32."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import norm_act, ops

pytestmark = pytest.mark.skipif(not ops.available(), reason=ops.why_not())

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NAN = float("nan")


def close(ours: torch.Tensor, twin: torch.Tensor) -> None:
    assert ours.dtype == twin.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, twin, rtol=tolerance, atol=tolerance)


def strided(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """`[rows, size]` whose rows lie in wider ones, full of NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, size + 24), NAN, dtype=dtype)
    view = wide[:, 8 : 8 + size]
    view.copy_(torch.randn(rows, size, generator=generator))
    return view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 64), (33, 577), (5, 7), (0, 64)])
def test_rms_norm(dtype, rows, size):
    x, weight = strided(rows, size, dtype), torch.randn(size).to(dtype)
    close(norm_act.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads(dtype):
    x = strided(9, 3 * 128, dtype).view(9, 3, 128)
    weight = torch.randn(128).to(dtype)
    close(norm_act.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (40, 576), (5, 7)])
def test_add_rms_norm(dtype, rows, size):
    x, weight = strided(rows, size, dtype), torch.randn(size).to(dtype)
    residual = torch.randn(rows, size).to(dtype)
    expected, expected_residual = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    normed, same = norm_act.add_rms_norm(x, residual, weight, 1e-5)
    assert same is residual
    assert torch.equal(residual, expected_residual)
    close(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (1, 9000), (33, 1536), (4, 11)])
def test_silu_and_mul(dtype, rows, size):
    x = strided(rows, 2 * size, dtype) * 4
    x[0, :4] = torch.tensor([-200.0, -88.0, 200.0, 0.0])
    close(norm_act.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize("positions_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot"), [(9, 3, 64, 64), (4, 2, 80, 32), (2, 1, 12, 12)]
)
def test_rotary_and_write(dtype, positions_dtype, heads, kv_heads, dim, rot):
    rows, block_size = 37, 8
    qkv = strided(rows, (heads + 2 * kv_heads) * dim, dtype)
    cos_sin = torch.randn(500, rot)
    positions = torch.randint(0, 500, (rows,)).to(positions_dtype)
    slots = torch.randperm(20 * block_size)[:rows]
    slots[::5] = -1

    def parts(x):
        q, k, v = x.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        return q.unflatten(1, (heads, dim)), k.unflatten(1, (kv_heads, dim)), v.unflatten(1, (kv_heads, dim))

    def cache():
        return torch.full((20, 2, kv_heads, block_size, dim), -7.0, dtype=dtype)

    twin, separate = qkv.clone(), qkv.clone()
    q, k, v = parts(twin)
    reference.rotary(q, k, cos_sin, positions.long())
    expected = cache()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, :, slot % block_size] = k[row]
            expected[slot // block_size, 1, :, slot % block_size] = v[row]

    fused_cache, separate_cache = cache(), cache()
    ops.rope_and_write_kv(*parts(qkv), cos_sin, positions, fused_cache, slots)
    close(qkv, twin)
    close(fused_cache, expected)
    q, k, v = parts(separate)
    ops.rotary(q, k, cos_sin, positions)
    ops.write_kv(k, v, separate_cache, slots)
    assert torch.equal(separate, qkv)
    assert torch.equal(separate_cache, fused_cache)


def test_write_kv_converts_to_the_cache_dtype():
    k, v = torch.randn(2, 5, 2, 16)
    cache = torch.zeros(2, 2, 2, 4, 16, dtype=torch.bfloat16)
    ops.write_kv(k, v, cache, torch.arange(5))
    stored = cache.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :5]
    assert torch.equal(stored, torch.stack([k, v]).bfloat16())


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    x = torch.tensor([1.00390625, 1.01171875, NAN, float("inf"), -float("inf"), 3.4e38, 1e-40, -0.0])
    weight = torch.zeros(1, 2, 1, 4, 8, dtype=torch.bfloat16)
    ops.write_kv(x.view(1, 1, 8), x.view(1, 1, 8), weight, torch.tensor([0]))
    torch.testing.assert_close(weight[0, 0, 0, 0], x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_bad_arguments_are_refused():
    x = torch.randn(4, 64)
    with pytest.raises(TypeError, match="float16"):
        norm_act.silu_and_mul(x.half())
    with pytest.raises(TypeError, match="dtypes differ"):
        norm_act.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        norm_act.rms_norm(x.t(), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="cache must be"):
        ops.write_kv(x.view(4, 1, 64), x.view(4, 1, 64), torch.zeros(1, 2, 2, 4, 64), torch.arange(4))
    with pytest.raises(TypeError, match="int64"):
        ops.write_kv(x.view(4, 1, 64), x.view(4, 1, 64), torch.zeros(1, 2, 1, 4, 64), torch.arange(4).int())
