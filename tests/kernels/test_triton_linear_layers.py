"""Whole models whose products go through the GPU's kernels, in Triton's interpreter, against Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels import ops
from octavo.kernels.triton import linear, linear_choice, skinny_linear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.quantization import gpu_linear, linear_method
from octavo.quantization.linear_method import LinearMethod, UnquantizedLinearMethod
from tests import tiny
from tests.models.parity import check, read

ON_GPU = torch.cuda.is_available()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends CPU tensors' products to the GPU's kernels, and keeps the names of those that are called."""
    made: list[str] = []

    def record(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return kernel(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    record(linear, "few_rows_linear")
    record(linear, "rms_norm_few_rows_linear")
    record(skinny_linear, "skinny_linear")
    monkeypatch.setattr(gpu_linear, "serves", lambda x: True)
    monkeypatch.setattr(linear_method, "packs", lambda *_: False)
    return made


@pytest.mark.skipif(ON_GPU, reason="CPU tensors need Triton's interpreter")
@pytest.mark.parametrize(
    ("variant", "rows", "after_norm", "alone"),
    # Products of a step. In three layers there are twelve, half of them after a norm; the head's is one more.
    # StableLM's norms are layer norms, which no product takes in.
    [("llama-biases", 1, 6, 7), ("qwen3", 2, 0, 13), ("gemma3", 1, 6, 7), ("stablelm-biases", 1, 0, 13)],
)
def test_models(
    variant: str, rows: int, after_norm: int, alone: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter's time is that of programs: few and large ones.
    monkeypatch.setattr(linear, "few_rows_config", lambda *_: linear.FewRowsConfig(64, 64, 4))
    steps = 2
    check(read(tiny.checkpoint(variant)), variant, 1, [prompt[:steps] for prompt in tiny.PROMPTS[:rows]])
    assert calls.count("rms_norm_few_rows_linear") == steps * after_norm
    assert calls.count("few_rows_linear") == steps * alone


def gpu_tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape).to("cuda" if ON_GPU else "cpu", dtype)


def relu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """A gated activation that no kernel has."""
    gate, up = x.chunk(2, dim=-1)
    return F.relu(gate) * up


@pytest.mark.parametrize("act", [None, ops.silu_and_mul, ops.gelu_tanh_and_mul, relu_and_mul])
@pytest.mark.parametrize(
    ("kind", "rows", "config", "after_norm"),
    [
        ("few_rows", 3, (8, 64, 4), False),
        ("few_rows", 1, (8, 64, 4), True),
        ("skinny", 3, (16, 64, 2, 4), False),
        ("skinny", 1, (16, 64, 2, 4), True),
        ("cublas", 1, None, False),
    ],
)
def test_choices(
    kind: str,
    rows: int,
    config: tuple[int, ...] | None,
    after_norm: bool,
    act: Any,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel of a choice, with activations that it can and cannot end with."""
    cut = skinny_linear.SkinnyConfig(*config) if config and kind == "skinny" else config
    asked: list[tuple[Any, ...]] = []

    def choose(*args: Any) -> linear_choice.Choice:
        asked.append(args)
        return linear_choice.Choice(kind, cut)  # type: ignore[arg-type]

    monkeypatch.setattr(linear_choice, "choose", choose)
    layer, method = torch.nn.Module(), UnquantizedLinearMethod()
    method.create_weights(layer, 24, 40, torch.float16, torch.device("cuda" if ON_GPU else "cpu"))
    layer.weight.copy_(gpu_tensor(24, 40) / 40**0.5)
    method.process_after_load(layer)
    x, residual, bias = gpu_tensor(rows, 40), gpu_tensor(rows, 40), gpu_tensor(24)
    norm = RMSNorm(40, 1e-5)
    norm.weight = torch.nn.Parameter(gpu_tensor(40, dtype=torch.float32), requires_grad=False)

    product = F.linear(x.double(), layer.weight.double(), bias.double()).to(x.dtype)
    want = product if act is None else act(product)
    out = method.apply(layer, x, bias) if act is None else method.apply_gated(layer, x, bias, act)
    assert (out.double() - want.double()).norm() < 3e-3 * want.double().norm()
    fused = act is not None and act is not relu_and_mul
    assert asked == [(rows, 40, 24, fused, x.device)]
    names = {"few_rows": ["few_rows_linear"], "skinny": ["skinny_linear"], "cublas": []}[kind]
    assert calls == names

    # After a norm. What is not done in one kernel overwrites the stream, so each takes its own.
    want_out, want_stream = LinearMethod.apply_after(method, layer, norm, x, residual.clone(), bias, act)
    calls.clear()
    before = residual.clone()
    out, stream = method.apply_after(layer, norm, x, before, bias, act)
    assert (out.double() - want_out.double()).norm() < 3e-3 * want_out.double().norm()
    assert torch.equal(stream, want_stream)
    assert calls == (["rms_norm_few_rows_linear"] if after_norm else names)
    assert torch.equal(before, residual) == after_norm


@pytest.mark.parametrize("act", [None, ops.silu_and_mul])
def test_no_rows(act: Any, calls: list[str]) -> None:
    layer, method = torch.nn.Module(), UnquantizedLinearMethod()
    method.create_weights(layer, 8, 16, torch.float16, torch.device("cuda" if ON_GPU else "cpu"))
    layer.weight.copy_(gpu_tensor(8, 16))
    method.process_after_load(layer)
    norm = RMSNorm(16, 1e-5)
    norm.weight = torch.nn.Parameter(gpu_tensor(16), requires_grad=False)
    x = gpu_tensor(0, 16)
    out, stream = method.apply_after(layer, norm, x, None, None, act)
    assert out.shape == (0, 8 if act is None else 4) and stream.shape == x.shape
    assert method.apply(layer, x, None).shape == (0, 8)
    assert not calls


def test_layer_norms_are_told_apart() -> None:
    norm = LayerNorm(16, 1e-5)
    norm.weight = torch.nn.Parameter(torch.ones(16), requires_grad=False)
    assert norm.rms_weight is None
