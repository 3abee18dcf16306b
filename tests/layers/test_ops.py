"""The layers' operations: the plain versions against Transformers, the dispatched ones against them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from octavo.kernels import ops, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


def _table(positions: int, dim: int) -> torch.Tensor:
    inv_freq = 1e4 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(positions), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [reference, ops])
def test_rms_norm_equals_transformers(implementation, dtype: torch.dtype):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(5, 3 * 48).to(dtype).view(5, 3, 48)[:, :2]  # heads of a wider row, as q is of qkv
    with torch.no_grad():
        expected = norm(x)
        actual = implementation.rms_norm(x, norm.weight, 1e-5)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [reference, ops])
def test_add_rms_norm(implementation, dtype: torch.dtype):
    torch.manual_seed(1)
    x, residual = (torch.randn(4, 40).to(dtype) for _ in range(2))
    weight = torch.rand(40).to(dtype)
    total = x + residual
    expected = reference.rms_norm(total, weight, 1e-6)
    normed, stream = implementation.add_rms_norm(x, residual, weight, 1e-6)
    assert stream is residual
    torch.testing.assert_close(stream, total, rtol=0, atol=0)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [reference, ops])
def test_float32_weight_equals_gemma(implementation, dtype: torch.dtype):
    """Gemma multiplies by 1 + w in float32 and rounds once."""
    torch.manual_seed(4)
    norm = Gemma2RMSNorm(48, eps=1e-6).to(dtype)
    norm.weight.data.normal_(std=0.3)
    x = torch.randn(5, 48).to(dtype)
    with torch.no_grad():
        expected = norm(x)
        actual = implementation.rms_norm(x, 1.0 + norm.weight.float(), 1e-6)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype] / 4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("implementation", [reference, ops])
def test_layer_norm_equals_pytorch(implementation, has_bias: bool, dtype: torch.dtype):
    torch.manual_seed(5)
    norm = torch.nn.LayerNorm(48, eps=1e-5, bias=has_bias, dtype=dtype)
    norm.weight.data.normal_()
    if has_bias:
        norm.bias.data.normal_()
    x, residual = (torch.randn(5, 48).to(dtype) for _ in range(2))
    close = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    with torch.no_grad():
        torch.testing.assert_close(
            implementation.layer_norm(x, norm.weight, norm.bias, 1e-5), norm(x), **close
        )
        total = x + residual
        normed, stream = implementation.add_layer_norm(x, residual, norm.weight, norm.bias, 1e-5)
        assert stream is residual
        torch.testing.assert_close(stream, total, rtol=0, atol=0)
        torch.testing.assert_close(normed, norm(total), **close)


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [reference, ops])
def test_rotary_equals_transformers_in_place(implementation, dtype: torch.dtype, rotary_dim: int):
    torch.manual_seed(2)
    rows, heads, kv_heads, dim = 6, 4, 2, 16
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = (x.clone() for x in qkv.split([heads, kv_heads, kv_heads], dim=1))
    positions = torch.tensor([0, 1, 9, 50, 3, 3])
    table = _table(64, rotary_dim)
    cos, sin = (torch.cat((x, x), dim=-1).to(dtype)[None] for x in table[positions].chunk(2, dim=-1))
    turned = [
        apply_rotary_pos_emb(x[None, ..., :rotary_dim], x[None, ..., :rotary_dim], cos, sin, unsqueeze_dim=2)[
            0
        ][0]
        for x in (q, k)
    ]
    views = qkv.split([heads, kv_heads, kv_heads], dim=1)
    implementation.rotary(views[0], views[1], table, positions)
    for view, before, expected in zip(views, (q, k), turned, strict=False):
        torch.testing.assert_close(
            view[..., :rotary_dim], expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
        )
        assert torch.equal(view[..., rotary_dim:], before[..., rotary_dim:])
    assert torch.equal(views[2], v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [reference, ops])
def test_silu_and_mul(implementation, dtype: torch.dtype):
    torch.manual_seed(3)
    x = (3 * torch.randn(5, 64)).to(dtype)
    expected = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    torch.testing.assert_close(
        implementation.silu_and_mul(x), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [reference, ops])
def test_gelu_tanh_and_mul(implementation, dtype: torch.dtype):
    torch.manual_seed(6)
    x = (3 * torch.randn(5, 64)).to(dtype)
    expected = torch.nn.functional.gelu(x[:, :32].float(), approximate="tanh") * x[:, 32:].float()
    torch.testing.assert_close(
        implementation.gelu_tanh_and_mul(x).float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [reference, ops])
def test_softcap_is_in_place_and_exact(implementation, dtype: torch.dtype):
    torch.manual_seed(7)
    x = (40 * torch.randn(3, 500)).to(dtype)
    expected = (30 * (x.double() / 30).tanh()).to(dtype)
    assert implementation.softcap(x, 30.0) is x
    torch.testing.assert_close(x, expected, rtol=TOLERANCE[dtype] / 4, atol=1e-6)


def test_dispatch_is_by_device_and_dtype():
    assert ops.kernels_for("meta", torch.float32).name == "torch"
    assert ops.kernels_for("cpu", torch.float16).name == "torch"  # the C++ kernels don't take it
