"""Layers whose weights stay quantized on a CPU, and models made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError, ModelError
from octavo.kernels import ops, quant_ops
from octavo.kernels.cpu import quant
from octavo.kernels.reference_quant import BLOCK, PlainMatrix, QuantizedMatrix, dequantize
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.layer import Layer
from octavo.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from octavo.models.gguf_file import GGUFFile
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import ModelSource, find_model
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.linear_method import linear_method
from octavo.quantization.quantized_tensor import QuantizedTensor
from octavo.quantization.scheme import setting
from octavo.worker.device import choose_quantization
from tests import tiny
from tests.kernels.quant_cases import FORMATS, matrix
from tests.layers.building import CPU, build_context, fill
from tests.models.paged import PagedRun
from tests.parallel.threads import on_ranks


@pytest.fixture(params=["kernels", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Both ways in which a matrix is multiplied."""
    if request.param == "plain":
        monkeypatch.setattr(quant_ops, "has_kernels", lambda: False)
        return PlainMatrix
    if not quant_ops.has_kernels():
        pytest.skip("no kernels for quantized matrices on this CPU")
    return quant.PackedMatrix


def built(
    layers: dict[str, Layer],
    weights: dict[str, torch.Tensor],
    quantization: str,
    dtype: torch.dtype = torch.float32,
    group: TensorParallelGroup | None = None,
    device: torch.device = CPU,
) -> None:
    group, method = group or TensorParallelGroup(), partial(linear_method, setting(quantization))
    fill(layers, weights, build_context(dtype=dtype, device=device, group=group, linear_method=method))


def kept(name: str, rows: int, columns: int, seed: int) -> QuantizedMatrix:
    return matrix(FORMATS[name], rows, columns, torch.Generator().manual_seed(seed))


def tensor(of: QuantizedMatrix) -> torch.Tensor:
    return QuantizedTensor.of(of)


def close(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, slack: float = 1e-5) -> None:
    """Within what 8 bits of x leave: half a step of its blocks for each weight."""
    pad = -x.shape[1] % BLOCK
    wide, weight = F.pad(x.double(), (0, pad)), F.pad(weight.double(), (0, pad))
    step = wide.unflatten(1, (-1, BLOCK)).abs().amax(2).repeat_interleave(BLOCK, 1) / 127
    want = wide @ weight.T
    bound = 0.5 * step @ weight.abs().T + slack * want.abs().max()
    assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("encodings", [("q4-minimum", "q4-minimum", "q4-minimum"), ("q5", "q5", "q8")])
def test_matrices_of_one_layer(form: type, encodings: tuple[str, ...]) -> None:
    parts = {"q": 16, "k": 8, "v": 8}
    stored = {f"a.{k}.weight": kept(e, n, 64, n) for (k, n), e in zip(parts.items(), encodings, strict=True)}
    layer = MergedColumnParallelLinear(64, parts, bias=True)
    biases = {f"a.{k}.bias": torch.randn(n) for k, n in parts.items()}
    built({"a.qkv": layer}, {k: tensor(m) for k, m in stored.items()} | biases, "gguf")
    assert isinstance(layer.store.matrix, form)
    whole = torch.cat([dequantize(m) for m in stored.values()])
    for rows in (1, 5):
        x = torch.randn(rows, 64)
        close(layer(x) - torch.cat(list(biases.values())), x, whole)


@pytest.mark.parametrize("act", [ops.silu_and_mul, ops.gelu_tanh_and_mul, lambda x: x[:, :32] + x[:, 32:]])
def test_gated(form: type, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer = MergedColumnParallelLinear(64, {"gate": 32, "up": 32})
    stored = {f"{k}.weight": tensor(kept("q4", 32, 64, i)) for i, k in enumerate(("gate", "up"))}
    built({"gate_up": layer}, stored, "gguf")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3, 64).to(dtype)
        got = layer.gated(act, x)
        assert got.dtype is dtype
        torch.testing.assert_close(
            got, act(layer(x)), rtol=2e-6 if dtype is torch.float32 else 2**-7, atol=1e-6
        )


def test_a_matrix_that_is_partly_stored_plain_is_plain() -> None:
    layer = MergedColumnParallelLinear(64, {"k": 8, "v": 8})
    k, v = kept("q5", 8, 64, 0), torch.randn(8, 64)
    built({"kv": layer}, {"k.weight": tensor(k), "v.weight": v}, "gguf")
    assert layer.store.matrix is None
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ torch.cat([dequantize(k), v]).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [64, 45])
def test_int8_while_loading(form: type, columns: int) -> None:
    layer = RowParallelLinear(columns, 24)
    weight = torch.randn(24, columns).bfloat16()
    built({"a": layer}, {"a.weight": weight}, "int8")
    assert isinstance(layer.store.matrix, form)
    x = torch.randn(4, columns)
    close(layer(x), x, weight.float(), slack=0.02)
    for bad in (float("nan"), float("inf"), 1e30):
        weight = torch.ones(24, columns)
        weight[3, 7] = bad
        with pytest.raises(ModelError, match="load it without quantization"):
            built({"a": RowParallelLinear(columns, 24)}, {"a.weight": weight}, "int8")


@pytest.mark.parametrize("source", ["q8", "plain"])
@pytest.mark.parametrize("head", ["absent", "same", "other"])
def test_an_embedding_and_the_head_tied_to_it(form: type, source: str, head: str) -> None:
    table = kept("q8", 50, 64, 3)
    numbers = dequantize(table)
    values = tensor(table) if source == "q8" else numbers
    quantization = "gguf" if source == "q8" else "int8"
    embedding = VocabEmbedding(50, 64)
    lm_head = LMHead(50, 64, embedding)
    other = kept("q8", 50, 64, 4)
    stored = {"same": values, "other": tensor(other) if source == "q8" else dequantize(other)}
    weights = {"e.weight": values} | ({"h.weight": stored[head]} if head in stored else {})
    built({"e": embedding, "h": lm_head}, weights, quantization)
    assert (lm_head.store is embedding.store) == (head != "other")
    ids = torch.tensor([0, 49, 7, 7])
    slack = 0 if source == "q8" else numbers.abs().max() / 120  # int8 of what was Q8_0 is not quite the same
    assert bool(((embedding(ids) - numbers[ids]).abs() <= slack).all())
    assert torch.equal(embedding(ids[None]), embedding(ids)[None])  # as Transformers' code calls it
    x = torch.randn(2, 64)
    close(
        lm_head(x),
        x,
        dequantize(other) if head == "other" else numbers,
        slack=1e-5 if source == "q8" else 0.02,
    )


def test_a_tied_table_stored_plain_stays_so() -> None:
    embedding = VocabEmbedding(50, 64)
    lm_head = LMHead(50, 64, embedding)
    numbers = torch.randn(50, 64)
    built({"e": embedding, "h": lm_head}, {"e.weight": numbers}, "gguf")
    assert torch.equal(embedding(torch.tensor([3, 4])), numbers[3:5])
    x = torch.randn(2, 64)
    torch.testing.assert_close(lm_head(x), x @ numbers.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_equal_one(size: int) -> None:
    up, down, table = kept("q4-minimum", 128, 64, 0), kept("q6-group16", 64, 128, 1), kept("q8", 51, 64, 2)
    x, ids = torch.randn(3, 64), torch.tensor([0, 50, 26, 25])

    def rank(group: TensorParallelGroup) -> tuple[torch.Tensor, ...]:
        first, second = MergedColumnParallelLinear(64, {"": 128}), RowParallelLinear(128, 64)
        embedding = VocabEmbedding(51, 64)
        head = LMHead(51, 64, embedding)
        weights = {"a.weight": tensor(up), "b.weight": tensor(down), "e.weight": tensor(table)}
        built({"a": first, "b": second, "e": embedding, "h": head}, weights, "gguf", group=group)
        return second(first(x)), embedding(ids), head(x)

    one = on_ranks(1, rank)[0]
    for several in on_ranks(size, rank):
        for a, b in zip(several, one, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_columns_that_share_a_scale_cannot_be_split() -> None:
    group, weights = TensorParallelGroup(1, 2), {"mlp.down_proj.weight": tensor(kept("q8", 8, 96, 0))}
    with pytest.raises(
        ConfigError,
        match=r"mlp\.down_proj\.weight: columns 48 to 96 .* 32 share a scale: use .* multiple of 32",
    ):
        built({"mlp.down_proj": RowParallelLinear(96, 8)}, weights, "gguf", group=group)


def test_sizes_are_known_before_anything_is_loaded() -> None:
    layer = MergedColumnParallelLinear(64, {"k": 8, "v": 8})
    built({"kv": layer}, {}, "int8", device=torch.device("meta"))
    assert sum(b.nbytes for b in layer.buffers()) == 16 * 64 * 34 // 32
    loaded = MergedColumnParallelLinear(64, {"k": 8, "v": 8})
    weights = {f"{k}.weight": torch.randn(8, 64) for k in "kv"}
    built({"kv": loaded}, weights, "int8")
    assert sum(b.nbytes for b in loaded.buffers()) == 16 * 64 * 34 // 32
    with pytest.raises(ConfigError, match="runs on a CPU"):
        linear_method(setting("int8"), "a").create_weights(layer, 8, 8, torch.float32, torch.device("cuda"))


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


@pytest.mark.parametrize("quantization", [None, "gguf", "half"])
def test_a_scale_that_is_no_number_is_refused(quantization: str | None, tmp_path: Path) -> None:
    path = tiny.gguf_file("llama", tmp_path / "m.gguf", "Q8_0")
    tensor = GGUFFile(path).tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset + 34 * 5)
        file.write(torch.tensor([float("nan")]).half().numpy().tobytes())
    with pytest.raises(ModelError, match="'blk.1.ffn_down.weight' has a scale that is not finite: .* fetch"):
        load(path, quantization)


# Where a model has experts, small differences choose others.
@pytest.mark.parametrize(
    ("variant", "qtype", "tolerance"),
    [
        ("llama", "Q4_0", 0.08),
        ("qwen2-tied", "Q8_0", 0.08),
        ("gemma3", "Q5_1", 0.08),
        ("mixtral", "Q8_0", 0.3),
    ],
)
@torch.inference_mode()
def test_a_gguf_file_s_model_kept_and_expanded(
    variant: str, qtype: str, tolerance: float, tmp_path: Path
) -> None:
    path = tiny.gguf_file(variant, tmp_path / "m.gguf", qtype)
    model = load(path, "gguf")
    stores = [module.store for module in model.modules() if hasattr(module, "store")]
    assert stores and all(store.matrix is not None for store in stores)
    compare(model, load(path, None), tolerance)


@pytest.mark.parametrize("variant", ["qwen3", "deepseek-v2-lite"])
@torch.inference_mode()
def test_a_folder_s_model_in_int8(variant: str) -> None:
    path = tiny.checkpoint(variant)
    compare(load(path, "int8"), load(path, None), 0.3 if variant.startswith("deepseek") else 0.08)


def compare(model: Any, expanded: Any, tolerance: float) -> None:
    """The error of a model's logits against their spread, in one chunk and in several."""
    prompts = tiny.PROMPTS[:3]
    longest = max(map(len, prompts))
    want = PagedRun(expanded, len(prompts), longest).prompts(prompts, 1000)
    for chunk in (1000, 5):
        got = PagedRun(model, len(prompts), longest).prompts(prompts, chunk)
        for a, b in zip(got, want, strict=True):
            assert float((a - b).std() / b.std()) < tolerance


def test_what_the_setting_means(monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = ModelSource("gguf", Path("m.gguf"), "m"), ModelSource("folder", Path("m"), "m")
    model = replace(load_model_config(find_model(str(tiny.checkpoint("llama")))), dtype="float32")

    def choice(name: str | None, source: ModelSource, load_format: str, device: str = "cpu") -> str | None:
        found = choose_quantization(name, source, load_format, torch.device(device), model, "float32")
        return None if found is None else found.format

    monkeypatch.setattr("octavo.worker.device.has_kernels", lambda: True)
    assert choice(None, file, "auto") == "gguf"
    assert choice(None, file, "dummy") is None
    assert choice(None, file, "auto", "cuda") is None
    assert choice(None, folder, "auto") is None
    assert choice("none", file, "auto") is None
    assert choice("int8", folder, "auto") == "int8"
    with pytest.raises(ConfigError, match="m is none: leave it out"):
        choice("gguf", folder, "auto")
    with pytest.raises(ConfigError, match="random weights have none: leave it out"):
        choice("gguf", file, "dummy")
    monkeypatch.setattr("octavo.worker.device.has_kernels", lambda: False)
    assert choice(None, file, "auto") is None
    assert choice("gguf", file, "auto") == "gguf"


def test_plain_pytorch_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quant_ops, "has_kernels", lambda: False)
    quant_ops._announce.cache_clear()
    with caplog.at_level(logging.WARNING, logger="octavo"):
        for _ in range(2):
            quant_ops.make_matrix([kept("q8", 8, 32, 0)], 32)
    assert sum("plain PyTorch multiplies them" in r.message for r in caplog.records) == 1
