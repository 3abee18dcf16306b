"""The layers' operations: the plain versions against Transformers, the dispatched ones against them."""

from __future__ import annotations

import pytest
import torch
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


def test_dispatch_is_by_device_and_dtype():
    assert ops.kernels_for("meta", torch.float32).name == "torch"
    assert ops.kernels_for("cpu", torch.float16).name == "torch"  # the C++ kernels don't take it
