"""Activations against Transformers' of the same names."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from octavo.errors import ModelError
from octavo.layers.activation import PLAIN, activation, gated_activation


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_equal_transformers(name: str) -> None:
    torch.manual_seed(0)
    x = 4 * torch.randn(6, 80)
    x[0, :4] = torch.tensor([0.0, -30.0, 30.0, -1e-3])
    theirs = ACT2FN[name]
    torch.testing.assert_close(activation(name)(x), theirs(x), rtol=1e-5, atol=1e-6)
    gate, up = x.chunk(2, dim=-1)
    got = gated_activation(name)(x)
    torch.testing.assert_close(got, theirs(gate) * up, rtol=1e-5, atol=1e-5)
    half = gated_activation(name)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), got, rtol=3e-2, atol=3e-2)


def test_others_are_refused() -> None:
    for choose in (activation, gated_activation):
        with pytest.raises(ModelError, match="hidden_act='mish' is not supported: use .* relu2"):
            choose("mish")
