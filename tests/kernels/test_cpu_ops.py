"""The CPU's rotary and cache kernels against their plain twins in float32."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import ops
from tests.kernels.cpu_tensors import DTYPES, NAN, close, strided

pytestmark = pytest.mark.skipif(not ops.available(), reason=ops.why_not())


@pytest.mark.parametrize("positions_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot"), [(9, 3, 64, 64), (4, 2, 80, 32), (5, 1, 96, 72), (2, 1, 12, 12)]
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
    with pytest.raises(ValueError, match="cache must be"):
        ops.write_kv(x.view(4, 1, 64), x.view(4, 1, 64), torch.zeros(1, 2, 2, 4, 64), torch.arange(4))
    with pytest.raises(TypeError, match="int64"):
        ops.write_kv(x.view(4, 1, 64), x.view(4, 1, 64), torch.zeros(1, 2, 1, 4, 64), torch.arange(4).int())
