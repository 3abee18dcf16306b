"""Norm layers: what they load, in which dtype they keep it, and what they compute."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from octavo.layers.layer import Layer
from octavo.layers.norm import LayerNorm, RMSNorm
from tests.layers.building import build_context


def built(layer: Layer, dtype: torch.dtype, **weights: torch.Tensor) -> None:
    build = build_context(dtype=dtype)
    layer.create_weights(build, "norm")
    targets = layer.load_targets("norm")
    assert targets.keys() == {f"norm.{name}" for name in weights}
    for name, tensor in weights.items():
        assert targets[f"norm.{name}"].shape == tensor.shape
        targets[f"norm.{name}"].load(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_is_added_in_float32(dtype: torch.dtype) -> None:
    """Gemma stores w and multiplies by 1 + w; in bfloat16 the sum would lose w's last bits."""
    torch.manual_seed(0)
    theirs = Gemma2RMSNorm(64, eps=1e-6).to(dtype)
    theirs.weight.data.normal_(std=0.01)
    ours = RMSNorm(64, 1e-6, offset=1.0)
    built(ours, dtype, weight=theirs.weight.data)
    assert ours.weight.dtype == torch.float32
    assert torch.equal(ours.weight, 1.0 + theirs.weight.data.float())
    x, residual = (torch.randn(5, 64).to(dtype) for _ in range(2))
    total = x + residual
    close = dict(rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), **close)
        normed, stream = ours.add(x, residual)
        torch.testing.assert_close(normed, theirs(total), **close)
        assert torch.equal(stream, total)


def test_without_offset_the_weight_keeps_the_model_dtype() -> None:
    weight = torch.randn(16)
    norm = RMSNorm(16, 1e-6)
    built(norm, torch.bfloat16, weight=weight)
    assert torch.equal(norm.weight, weight.bfloat16())


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias: bool) -> None:
    torch.manual_seed(1)
    theirs = torch.nn.LayerNorm(48, eps=1e-5, bias=bias)
    for parameter in theirs.parameters():
        parameter.data.normal_()
    ours = LayerNorm(48, 1e-5, bias)
    built(ours, torch.float32, **{name: x.data for name, x in theirs.named_parameters()})
    x, residual = torch.randn(2, 5, 48)
    with torch.no_grad():
        want = theirs(x + residual)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
        normed, stream = ours.add(x, None)
        assert stream is x
        torch.testing.assert_close(normed, theirs(x), rtol=1e-5, atol=1e-5)
        normed, stream = ours.add(x, residual)
        assert stream is residual
        torch.testing.assert_close(normed, want, rtol=1e-5, atol=1e-5)
