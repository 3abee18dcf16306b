"""The CPU's norms, activations and softcap against their plain twins in float32."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import norm_act, ops
from tests.kernels.cpu_tensors import DTYPES, close, strided

pytestmark = pytest.mark.skipif(not ops.available(), reason=ops.why_not())


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_weights(dtype):
    """A float32 weight meets the exact norm: one rounding, however the weight would round by itself."""
    x, residual = strided(7, 577, dtype), torch.randn(7, 577).to(dtype)
    weight = 1.0 + torch.randn(577) * 1e-3  # lost if it were rounded to bfloat16
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    bound = 1e-6 if dtype is torch.float32 else 2**-8  # half a unit in the last place, and no more
    torch.testing.assert_close(norm_act.rms_norm(x, weight, 1e-6).double(), exact, rtol=bound, atol=0)
    expected, stream = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    normed, same = norm_act.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(same, stream)
    close(normed, expected)


@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (33, 577), (0, 64)])
def test_layer_norm(dtype, rows, size, has_bias, wide_weight):
    x, residual = strided(rows, size, dtype) + 3.0, torch.randn(rows, size).to(dtype)
    weight = torch.randn(size).to(torch.float32 if wide_weight else dtype)
    bias = torch.randn(size).to(weight.dtype) if has_bias else None
    close(norm_act.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    expected, expected_residual = reference.add_layer_norm(x, residual.clone(), weight, bias, 1e-5)
    normed, same = norm_act.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert same is residual
    assert torch.equal(residual, expected_residual)
    close(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 9000), (33, 1536), (4, 11)])
def test_gelu_tanh_and_mul(dtype, rows, size):
    x = strided(rows, 2 * size, dtype) * 4
    x[0, :4] = torch.tensor([-200.0, -9.0, 200.0, 0.0])
    close(norm_act.gelu_tanh_and_mul(x), reference.gelu_tanh_and_mul(x))


def test_softcap():
    """In place on strided rows, as accurate for small values as for large ones; NaN and infinity too."""
    x = strided(2, 5000, torch.float32)
    x[:] = torch.logspace(-30, 4, 5000) * torch.tensor([[1.0], [-1.0]])
    expected = 30.0 * (x.double() / 30.0).tanh()
    assert norm_act.softcap(x, 30.0) is x
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=0)
    assert x._base.isnan().sum() == 2 * 24  # around the rows nothing was touched
    odd = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-42]])
    torch.testing.assert_close(norm_act.softcap(odd.clone(), 5.0), 5 * (odd / 5).tanh(), equal_nan=True)
    half = 40 * torch.randn(3, 4000).bfloat16()
    close(norm_act.softcap(half.clone(), 30.0), reference.softcap(half, 30.0))


def test_bad_arguments_are_refused():
    x = torch.randn(4, 64)
    with pytest.raises(TypeError, match="float16"):
        norm_act.silu_and_mul(x.half())
    with pytest.raises(TypeError, match="dtypes differ"):
        norm_act.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(TypeError, match="dtypes differ"):
        norm_act.layer_norm(x, torch.ones(64), torch.ones(64, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(TypeError, match="dtypes differ"):
        norm_act.add_rms_norm(x, x.bfloat16(), torch.ones(64), 1e-5)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        norm_act.add_layer_norm(x[:, :32], x[:, 32:], torch.ones(32), None, 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        norm_act.rms_norm(x.t(), torch.ones(4), 1e-5)
