"""Layers whose weights stay 16-bit floats on a CPU that computes in float32, and models made of them."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octavo.kernels import ops
from octavo.kernels.cpu import half
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.layer import Layer
from octavo.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import ModelSource, find_model
from octavo.parallel.state import TensorParallelGroup
from octavo.planning.hardware import detect_cpu
from octavo.quantization.half_method import HalfMethod
from octavo.quantization.linear_method import linear_method
from octavo.quantization.scheme import setting
from octavo.worker import device as worker_device
from octavo.worker.device import choose_quantization
from tests import tiny
from tests.layers.building import CPU, build_context, fill
from tests.models.paged import PagedRun
from tests.parallel.threads import on_ranks

if not half.panel():
    pytest.skip("no kernels for 16-bit matrices on this CPU", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16]


def built(
    layers: dict[str, Layer],
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    group: TensorParallelGroup | None = None,
) -> None:
    group, method = group or TensorParallelGroup(), partial(linear_method, setting("half"))
    fill(layers, weights, build_context(dtype=dtype, group=group, linear_method=method))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", DTYPES)
def test_matrices_of_one_layer(stored: torch.dtype) -> None:
    parts = {"q": 16, "k": 8, "v": 9}
    weights = {f"a.{k}.weight": torch.randn(n, 50).to(stored) for k, n in parts.items()}
    biases = {f"a.{k}.bias": torch.randn(n) for k, n in parts.items()}
    layer = MergedColumnParallelLinear(50, parts, bias=True)
    built({"a.qkv": layer}, weights | biases)
    assert "weight" not in layer._parameters and layer.panels.dtype is stored
    whole, bias = torch.cat(list(weights.values())).float(), torch.cat(list(biases.values()))
    x = torch.randn(3, 50)
    close(layer(x), x @ whole.T + bias)
    for dtype in DTYPES:  # of activations
        layer.bias.data = bias.to(dtype)
        got = layer(x.to(dtype))
        assert got.dtype is dtype
        want = x.to(dtype).double() @ whole.double().T + bias.to(dtype).double()
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("inner", [2 * half.panel(), 24])
@pytest.mark.parametrize("act", [ops.silu_and_mul, ops.gelu_tanh_and_mul, lambda x: x.tanh().chunk(2, 1)[0]])
def test_gated(act: Any, inner: int) -> None:
    layer = MergedColumnParallelLinear(64, {"gate": inner, "up": inner})
    weights = {f"{k}.weight": torch.randn(inner, 64).bfloat16() for k in ("gate", "up")}
    built({"gate_up": layer}, weights)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 64).to(dtype)
        # Beside one kernel's, two have the roundings of product, activation and both halves' product.
        tolerance = 2e-6 if dtype is torch.float32 else 2**-6
        torch.testing.assert_close(layer.gated(act, x), act(layer(x)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "types",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.float16)],
)
def test_pieces_of_two_types_make_a_float32_matrix(types: tuple[torch.dtype, torch.dtype]) -> None:
    weights = {f"{k}.weight": torch.randn(8, 50).to(t) for k, t in zip("kv", types, strict=True)}
    layer = MergedColumnParallelLinear(50, {"k": 8, "v": 8})
    built({"kv": layer}, weights)
    x = torch.randn(3, 50)
    close(layer(x), x @ torch.cat([w.float() for w in weights.values()]).T)
    assert not list(layer.buffers())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_16_bit_activations_have_weights_of_their_type(stored: torch.dtype) -> None:
    weight, layer = torch.randn(24, 50).to(stored), RowParallelLinear(50, 24)
    built({"a": layer}, {"a.weight": weight}, torch.bfloat16)
    assert layer.panels.dtype is torch.bfloat16
    assert torch.equal(layer(torch.eye(50).bfloat16()), weight.bfloat16().T)


def test_large_matrices_are_copied_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.quantization.half_method._STEP", 100)
    weight, layer = torch.randn(37, 20).half(), RowParallelLinear(20, 37)
    built({"a": layer}, {"a.weight": weight})
    close(layer(torch.eye(20)), weight.T)


@pytest.mark.parametrize("head", ["absent", "same", "other", "float32"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_an_embedding_and_the_head_tied_to_it(head: str, stored: torch.dtype) -> None:
    table, other = torch.randn(50, 48).to(stored), torch.randn(50, 48).to(stored)
    embedding = VocabEmbedding(50, 48)
    lm_head = LMHead(50, 48, embedding)
    own = {"same": table, "other": other, "float32": other.float()}
    built(
        {"e": embedding, "h": lm_head}, {"e.weight": table} | ({"h.weight": own[head]} if head in own else {})
    )
    ids = torch.tensor([0, 49, 7, 7])
    assert torch.equal(embedding(ids), table[ids].float())
    assert torch.equal(embedding(ids[None]), embedding(ids)[None])
    x = torch.randn(2, 48)
    close(lm_head(x), x @ (table if head in ("absent", "same") else other).float().T)
    if stored is torch.bfloat16 and head in ("absent", "same"):
        assert lm_head.half_matrix is embedding.half_matrix
        assert lm_head.panels.data_ptr() == embedding.panels.data_ptr()


def test_ranks_together_equal_one() -> None:
    up, down, table = (torch.randn(*size).bfloat16() for size in ((128, 64), (64, 128), (51, 64)))
    x, ids = torch.randn(3, 64), torch.tensor([0, 50, 26, 25])

    def rank(group: TensorParallelGroup) -> tuple[torch.Tensor, ...]:
        first, second = MergedColumnParallelLinear(64, {"": 128}), RowParallelLinear(128, 64)
        embedding = VocabEmbedding(51, 64)
        head = LMHead(51, 64, embedding)
        weights = {"a.weight": up, "b.weight": down, "e.weight": table}
        built({"a": first, "b": second, "e": embedding, "h": head}, weights, group=group)
        return second(first(x)), embedding(ids), head(x)

    one = on_ranks(1, rank)[0]
    for several in on_ranks(2, rank):
        for a, b in zip(several, one, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_bytes_are_known_before_anything_is_loaded() -> None:
    method, layer = HalfMethod(), MergedColumnParallelLinear(64, {"k": 8, "v": 9})
    built({"kv": layer}, {"k.weight": torch.randn(8, 64).half(), "v.weight": torch.randn(9, 64).half()})
    parts = [(8, "float16"), (9, "float16")]
    assert method.kept_bytes(parts, 64, torch.float32, CPU) == sum(b.nbytes for b in layer.buffers())
    assert method.kept_bytes([(8, "BF16"), (9, "F32")], 64, torch.float32, CPU) == 17 * 64 * 4
    assert method.kept_bytes([(17, "float32")], 64, torch.bfloat16, CPU) == 32 * 64 * 2
    assert method.tied_bytes(parts, 64, torch.float32, CPU) == 0
    meta = nn.Module()
    method.create_weights(meta, 17, 64, torch.float32, torch.device("meta"))
    assert sum(p.nbytes for p in meta.parameters()) == 17 * 64 * 2


def load(path: Path, quantization: str | None, dtype: torch.dtype = torch.float32) -> Any:
    source = find_model(str(path))
    config = load_model_config(source)
    model = build_model(
        config,
        dtype=dtype,
        device="cpu",
        max_model_len=tiny.CONTEXT,
        block_size=8,
        quantization=None if quantization is None else setting(quantization),
    )
    weights = iterate_weights(source, config, load_targets(model), "auto", dtype, "cpu", progress=False)
    load_weights(model, weights)
    return model


@pytest.mark.parametrize("qtype", ["BF16", "F16"])
@torch.inference_mode()
def test_a_gguf_file_of_floats(qtype: str, tmp_path: Path) -> None:
    path = tiny.gguf_file("qwen2-tied", tmp_path / "m.gguf", qtype)
    model, plain = load(path, "half"), load(path, None)
    kept = [m.half_matrix for m in model.modules() if hasattr(m, "half_matrix")]
    assert kept and all(matrix is not None for matrix in kept)
    prompts = tiny.PROMPTS[:3]
    longest = max(map(len, prompts))
    want = PagedRun(plain, len(prompts), longest).prompts(prompts, 1000)
    for chunk in (1000, 5):
        for a, b in zip(PagedRun(model, len(prompts), longest).prompts(prompts, chunk), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_when_16_bit_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = ModelSource("gguf", Path("m.gguf"), "m"), ModelSource("folder", Path("m"), "m")
    checkpoint = load_model_config(find_model(str(tiny.checkpoint("llama"))))
    bf16, f32 = (dataclasses.replace(checkpoint, dtype=name) for name in ("bfloat16", "float32"))
    half_file = dataclasses.replace(bf16, extra={"general.file_type": 32})
    monkeypatch.setattr(worker_device, "has_kernels", lambda: True)
    monkeypatch.setattr(worker_device, "cpu_lacks", lambda dtype: True)
    cpu = dataclasses.replace(detect_cpu(), model="AMD EPYC 9R14", instruction_sets=("avx512", "avx512_bf16"))
    monkeypatch.setattr(worker_device, "detect_cpu", lambda: cpu)

    def choice(
        name: str | None, source: ModelSource, model: Any, dtype: str, device: str = "cpu"
    ) -> str | None:
        found = choose_quantization(name, source, "auto", torch.device(device), model, dtype)
        return None if found is None else found.format

    assert choice(None, folder, bf16, "float32") == choice("none", folder, bf16, "float32") == "half"
    assert choice(None, folder, bf16, "bfloat16") == "half"
    assert choice(None, folder, f32, "float32") is None
    assert choice(None, folder, f32, "bfloat16") == "half"
    assert choice(None, folder, bf16, "float32", "cuda") is None
    assert choice("int8", folder, bf16, "float32") == "int8"
    assert choice(None, file, half_file, "float32") == "half"
    assert choice(None, file, bf16, "float32") == "gguf"  # of quantized matrices
    assert choice("none", file, bf16, "float32") is None
    assert choice("none", file, bf16, "bfloat16") == "half"
    monkeypatch.setattr(worker_device, "cpu_lacks", lambda dtype: False)
    assert choice(None, folder, bf16, "bfloat16") is None
    assert choice(None, folder, bf16, "float32") == "half"
    cpu = dataclasses.replace(cpu, model="Intel(R) Xeon(R) Processor")
    assert choice(None, folder, bf16, "bfloat16") == "half"
    assert choice(None, folder, bf16, "float16") is None
    monkeypatch.setattr(half, "panel", lambda: 0)
    assert choice(None, folder, bf16, "float32") is None
