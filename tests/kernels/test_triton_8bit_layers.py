"""Layers of 8 bits through the GPU's kernels, in Triton's interpreter: what a norm, a product and an
activation hand to each other, against the same layers by the plain twins."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import lowbit_ops, ops
from octavo.kernels.triton import lowbit
from octavo.layers.norm import RMSNorm
from octavo.models.llama import LlamaMLP
from octavo.quantization.capability import Hardware
from octavo.quantization.linear_method import linear_method
from octavo.quantization.local_hardware import assumed
from octavo.quantization.online import online
from tests.kernels.lowbit_cases import error
from tests.layers.building import build_context

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors need Triton's interpreter")
HIDDEN, INNER = 96, 128  # of gate and up, each fills its blocks: they are one matrix


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends CPU tensors' products to the GPU's kernels, and keeps the names of those that are called."""
    made: list[str] = []

    def recorded(name: str) -> Any:
        def call(*args: Any) -> Any:
            made.append(name)
            return getattr(lowbit, name)(*args)

        return call

    kernels = SimpleNamespace(**{name: recorded(name) for name in lowbit.__all__})
    kernels.takes_gates = lowbit.takes_gates
    monkeypatch.setattr(lowbit_ops, "_kernels", lambda device_type: kernels)
    return made


def feed_forward(quantization: str) -> tuple[RMSNorm, LlamaMLP]:
    """A norm and a feed-forward whose weights were quantized while they were loaded."""
    config: Any = SimpleNamespace(
        hidden_size=HIDDEN, intermediate_size=INNER, mlp_bias=True, hidden_act="silu"
    )
    mlp, norm = LlamaMLP(config), RMSNorm(HIDDEN, 1e-5)
    build = build_context(linear_method=partial(linear_method, online(quantization)))
    torch.manual_seed(3)
    with torch.no_grad(), assumed(Hardware("cuda", (9, 0))):
        for prefix, layer in (
            ("norm", norm),
            ("mlp.gate_up_proj", mlp.gate_up_proj),
            ("mlp.down_proj", mlp.down_proj),
        ):
            layer.create_weights(build, prefix)
            for target in layer.load_targets(prefix).values():
                if not target.covers:
                    size = target.shape[-1] ** -0.5 if len(target.shape) == 2 else 1.0
                    target.load(torch.randn(target.shape) * size)
            layer.process_after_load()
    return norm, mlp


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor", "fp8_per_block", "int8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_feed_forward(
    quantization: str, rows: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized rows come from the norm and from the activation; one row's are made in its products."""
    norm, mlp = feed_forward(quantization)
    x, stream = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    got, total = mlp.after(norm, x, stream.clone())
    name = {"fp8_per_block": "fp8_block_linear", "int8": "int8_linear"}.get(quantization, "fp8_linear")
    assert calls == ["rms_norm_w8a8_linear", name if rows == 1 else "gated_w8a8_linear"]
    alone = mlp(norm(x + stream))
    with monkeypatch.context() as context:
        context.setattr(lowbit_ops, "_kernels", lambda device_type: lowbit_ops.reference_lowbit)
        want, want_total = mlp.after(norm, x, stream.clone())
        assert not mlp.down_proj.takes_gates(x)
    assert torch.equal(total, want_total)
    # A code in a hundred is rounded the other way: of 128 that are added, each with a step of at most 1/8.
    assert error(got, want) < 0.03
    assert error(alone, want) < 0.03
    exact = unquantized(mlp, norm(x + stream))
    assert error(want, exact) > 5 * error(got, want)


def unquantized(mlp: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
    """The feed-forward of the same matrices with activations as they are."""
    for layer, act in ((mlp.gate_up_proj, ops.silu_and_mul), (mlp.down_proj, None)):
        matrix = layer.runner.matrices[0]  # type: ignore[union-attr]
        x = x @ matrix.dequantize().T + layer.bias
        x = x if act is None else act(x)
    return x
