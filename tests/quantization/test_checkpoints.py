"""Checkpoints that the real libraries wrote, against what these compute from them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigError
from octavo.kernels.cpu import half
from octavo.kernels.quant_ops import has_kernels
from octavo.layers.attention_layer import Attention
from octavo.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from octavo.models.quantized import checkpoint_quantization
from octavo.parallel.state import TensorParallelGroup
from octavo.quantization.capability import Hardware
from octavo.quantization.checkpoint_runners import DenseRunner, MatricesRunner, PackedRunner
from octavo.quantization.linear_method import linear_method
from octavo.quantization.matrices import Matrix, Matrix8, TilesMatrix
from octavo.worker.weight_bytes import kept_weight_bytes
from tests import tiny
from tests.layers import building
from tests.parallel.threads import on_ranks
from tests.quantization.checkpoints import (
    AMPERE,
    FOLDER,
    HOPPER,
    NAMES,
    WEIGHTS_ONLY,
    changed,
    expected,
    load,
    logits,
    pretend,
    spread,
)

CLOSE = partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5)
INTEGERS = [n for n in NAMES if n.startswith(("w4", "w8", "gptq", "awq", "act", "mixed", "moe", "bnb_int8"))]


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_weights_are_the_library_s(name: str) -> None:
    want = expected(name)
    CLOSE(logits(load(name, dequantize=True), want["tokens"]), want["logits"])


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_products_of_quantized_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    want = expected(name)
    model = load(name)
    CLOSE(logits(model, want["tokens"]), want["logits"])
    assert kinds(model) == {DenseRunner if name == "w8a16_asym" else MatricesRunner}


@pytest.mark.parametrize("name", ["fp8_dynamic", "fp8_static", "fp8_block", "fp8_deepseek"])
def test_fp8_activations_are_rounded_as_the_library_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    want = expected(name)
    got = logits(load(name), want["tokens"])
    CLOSE(got, want["logits_quantized"])
    assert spread(got, want["logits"]) > 0.01
    pretend(monkeypatch, AMPERE)  # which computes on FP8 weights alone
    CLOSE(logits(load(name), want["tokens"]), want["logits"])


def test_int8_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library divides by 127.5, and so rounds other numbers: both are as far from the unquantized."""
    pretend(monkeypatch, HOPPER)
    want = expected("w8a8")
    got = logits(load("w8a8"), want["tokens"])
    noise = spread(want["logits_quantized"], want["logits"])
    assert 0.5 * noise < spread(got, want["logits"]) < 1.5 * noise
    assert spread(got, want["logits_quantized"]) < 2 * noise


@pytest.mark.skipif(not has_kernels(), reason="no kernels for quantized matrices on this CPU")
@pytest.mark.parametrize("name", INTEGERS)
def test_the_cpu_s_own_kernels(name: str) -> None:
    """They round activations to 8 bits, with a scale for every 32 columns."""
    want = expected(name)
    model = load(name)
    assert spread(logits(model, want["tokens"]), want["logits"]) < 0.08
    others = {"moe_fp8": {DenseRunner}, "w8a16_asym": {DenseRunner}, "mixed": {PackedRunner, DenseRunner}}
    assert kinds(model) == others.get(name, {PackedRunner})


def kinds(model: torch.nn.Module) -> set[type]:
    return {type(module.runner) for module in model.modules() if hasattr(module, "runner")}


@pytest.mark.parametrize(
    "name", ["w4a16_asym", "fp8_dynamic", "fp8_block", "w8a8", "gptq_desc_act", "moe_fp8", "moe_w4a16"]
)
@pytest.mark.parametrize("hardware", ["cpu", "hopper"])
def test_chunks_change_nothing(name: str, hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hardware == "hopper":
        pretend(monkeypatch, HOPPER)
    tokens = expected(name)["tokens"]
    model = load(name)
    torch.testing.assert_close(logits(model, tokens, 5), logits(model, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hardware", ["cpu", "hopper"])
def test_what_experts_may_have_comes_after_what_they_must(
    hardware: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero points of symmetric weights, which older files have, lie behind the weights."""
    if hardware == "hopper":
        pretend(monkeypatch, HOPPER)

    def add(found: dict[str, torch.Tensor]) -> None:
        for name in [name for name in found if ".experts." in name and name.endswith(".weight_scale")]:
            zeros = torch.zeros(found[name].shape).to(torch.float8_e4m3fn)
            found[name.replace("weight_scale", "weight_zero_point")] = zeros

    tokens = expected("moe_fp8")["tokens"]
    found = load(changed("moe_fp8", tmp_path, add))
    assert torch.equal(logits(found, tokens), logits(load("moe_fp8"), tokens))


@pytest.mark.parametrize(("name", "most"), [("w4a16", 0.05), ("fp8_dynamic", 0.15), ("bnb_nf4", 0.05)])
def test_activations_of_16_bits(name: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    want = expected(name)
    got = logits(load(name, torch.bfloat16), want["tokens"])
    assert spread(got, want.get("logits_quantized", want["logits"])) < most


@pytest.mark.skipif(not half.panel(), reason="no kernels for 16-bit matrices on this CPU")
@pytest.mark.parametrize("name", ["fp8_dynamic", "bnb_nf4", "w8a16_asym"])
def test_expanded_weights_of_16_bits_beside_float32(name: str) -> None:
    want = expected(name)
    assert spread(logits(load(name, dense="half"), want["tokens"]), want["logits"]) < 2e-3


def test_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that are read as one are one where they can be."""
    pretend(monkeypatch, HOPPER)

    def matrices(name: str, layer: str) -> list[Matrix]:
        runner = load(name).get_submodule(f"model.layers.0.{layer}").runner
        assert isinstance(runner, MatricesRunner)
        return runner.matrices

    (qkv,) = matrices("w4a16", "self_attn.qkv_proj")
    assert isinstance(qkv, TilesMatrix)
    assert qkv.tiles.codes.shape == (2, 128, 32) and qkv.tiles.scales.shape == (8, 128)
    assert qkv.tiles.zeros is None and qkv.perm is None and qkv.tiles.scales.dtype is torch.float32
    (qkv,) = matrices("gptq_desc_act", "self_attn.qkv_proj")
    assert isinstance(qkv, TilesMatrix) and qkv.perm is not None and qkv.tiles.zeros is not None
    assert qkv.tiles.zeros.shape == (1, 128)
    (qkv,) = matrices("fp8_static", "self_attn.qkv_proj")
    assert isinstance(qkv, Matrix8) and qkv.scale.shape == (128,) and qkv.input_scale is not None
    q, v = matrices("mixed", "self_attn.qkv_proj")
    assert isinstance(q, TilesMatrix) and isinstance(v, Matrix8) and v.weight.dtype is torch.int8
    # k's 64 rows are half a block.
    assert [matrix.rows for matrix in matrices("fp8_block", "self_attn.qkv_proj")] == [192, 64]
    (up,) = matrices("fp8_block", "mlp.gate_up_proj")
    assert isinstance(up, Matrix8) and up.scale.shape == (4, 1)
    (up,) = matrices("bnb_nf4_nested", "mlp.gate_up_proj")
    assert isinstance(up, TilesMatrix) and up.tiles.scales.shape == (1, 384) and up.tiles.table is not None


def fill(
    name: str,
    layers: dict[str, MergedColumnParallelLinear | RowParallelLinear],
    group: TensorParallelGroup,
) -> None:
    """Layers of a fixture's first decoder layer on a rank."""
    source = find_model(str(FOLDER / name))
    quantization = checkpoint_quantization(source, load_model_config(source), "auto")
    make = partial(linear_method, quantization)
    build = building.build_context(group=group, linear_method=make)
    weights = load_file(FOLDER / name / "model.safetensors")
    building.fill({f"model.layers.0.{key}": layer for key, layer in layers.items()}, weights, build)


@pytest.mark.parametrize(
    "name", ["w4a16_asym", "gptq_asym_bias", "awq", "w8a8", "fp8_dynamic", "bnb_nf4_nested", "w8a16"]
)
@pytest.mark.parametrize("hardware", ["cpu", "ampere"])
def test_ranks_together_equal_one(name: str, hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hardware == "ampere":
        pretend(monkeypatch, AMPERE)
    x = torch.randn(3, 64)

    def rank(group: TensorParallelGroup) -> torch.Tensor:
        first = MergedColumnParallelLinear(64, {"gate_proj": 192, "up_proj": 192})
        second = RowParallelLinear(192, 64)
        fill(name, {"mlp.gate_up_proj": first}, group)
        gate, up = first(x).chunk(2, -1)
        fill(name, {"mlp.down_proj": second}, group)
        return second(gate * up)

    # Activations are rounded by each rank for itself.
    most = 0.03 if hardware == "cpu" or name == "w8a8" else 1e-5
    one = on_ranks(1, rank)[0]
    for several in on_ranks(2, rank):
        assert spread(several, one) < most


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        (
            "w4a16",
            4,
            r"weight_scale: columns 144 to 192 of the matrix are one rank's, and 32 share",
        ),
        ("awq", 4, r"down_proj\.qzeros: columns .* and 32 share an entry: use .* a multiple of 32 columns"),
        (
            "bnb_nf4",
            4,
            r"weight\.absmax: .* and 64 share an entry: use .* a multiple of 32 columns",
        ),
        ("w4a16", 64, r"down_proj\.weight_packed: columns 189 to 192 .* 8 share .* a multiple of 8 columns"),
    ],
)
def test_columns_of_a_small_group_cannot_be_split(name: str, size: int, message: str) -> None:
    """Before anything is read."""
    source = find_model(str(FOLDER / name))
    quantization = checkpoint_quantization(source, load_model_config(source), "auto")
    group, make = TensorParallelGroup(size - 1, size), partial(linear_method, quantization)
    layer = RowParallelLinear(192, 64)
    layer.create_weights(
        building.build_context(group=group, linear_method=make),
        "model.layers.0.mlp.down_proj",
    )
    with pytest.raises(ConfigError, match=message):
        layer.load_targets("model.layers.0.mlp.down_proj")


def test_scales_of_the_kv_cache_are_the_checkpoint_s() -> None:
    model = load("fp8_static_kv", kv_dtype="fp8")
    stored = load_file(FOLDER / "fp8_static_kv" / "model.safetensors")
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(layers) == 2
    for i, layer in enumerate(layers):
        assert layer.kv_scale is not None
        for part, name in enumerate(("k_scale", "v_scale")):
            want = stored[f"model.layers.{i}.self_attn.{name}"].float().expand(2)
            assert torch.equal(layer.kv_scale[part], want)


def test_parts_may_come_as_one(tmp_path: Path) -> None:
    """As Phi-3 stores q, k and v."""

    def fuse(found: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn."
            for kind in ("weight_packed", "weight_scale", "weight_zero_point", "bias"):
                parts = [found.pop(f"{prefix}{name}_proj.{kind}") for name in "qkv"]
                found[f"{prefix}qkv_proj.{kind}"] = torch.cat(parts)
            for name in "qkv":
                del found[f"{prefix}{name}_proj.weight_shape"]

    want = expected("w4a16_asym")
    folder = changed("w4a16_asym", tmp_path, fuse)
    CLOSE(logits(load(folder, dequantize=True), want["tokens"]), want["logits"])


@pytest.mark.parametrize(
    "name", ["w4a16", "gptq_desc_act", "awq", "fp8_block", "w8a8", "bnb_nf4_nested", "moe_fp8", "mixed"]
)
def test_random_weights_have_the_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    got = logits(load(name, load_format="dummy"), torch.arange(10))
    assert bool(got.isfinite().all()) and float(got.std()) > 0


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_known_before_anything_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    source = find_model(str(FOLDER / name))
    config = load_model_config(source)
    quantization = checkpoint_quantization(source, config, "auto")
    shapes = build_model(config, dtype=torch.float32, device="meta", quantization=quantization)
    layers = shapes.get_submodule("model.layers")
    counted = sum(t.nbytes for t in (*layers.parameters(), *layers.buffers()))
    kept = sum(kept_weight_bytes(load(name).get_submodule("model.layers")).values())
    if name in ("mixed", "fp8_block", "fp8_deepseek"):  # parts differ, or begin within a block
        assert 0.8 < counted / kept < 1.25
    else:
        assert counted == kept


def in_fp8_blocks(source: Path, quantized: Path, plain: Path) -> None:
    """A checkpoint in "fp8" with blocks of 128 x 128, and one of the same numbers that is not quantized."""
    weights: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        weights |= load_file(file)
    stored, same = dict(weights), dict(weights)
    for name, weight in weights.items():
        if weight.dim() != 2 or not name.endswith("_proj.weight") and "_proj_with" not in name:
            continue
        rows, columns = (-(-size // 128) for size in weight.shape)
        blocks = torch.nn.functional.pad(
            weight, (0, 128 * columns - weight.shape[1], 0, 128 * rows - len(weight))
        )
        scale = blocks.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = codes, scale
        same[name] = codes.float() * wide
    raw = json.loads((source / "config.json").read_text())
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for folder, tensors, extra in ((quantized, stored, {"quantization_config": entry}), (plain, same, {})):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw | extra))


@pytest.mark.parametrize("hardware", [AMPERE, None], ids=["ampere", "cpu"])
@pytest.mark.parametrize("variant", ["deepseek-v2-lite", "deepseek-v3"])
def test_latent_attention_and_experts(
    variant: str, hardware: Hardware | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that change places in blocks that share a scale."""
    in_fp8_blocks(Path(tiny.checkpoint(variant)), tmp_path / "fp8", tmp_path / "plain")
    source = find_model(str(tmp_path / "plain"))
    config = load_model_config(source)
    plain = build_model(config, dtype=torch.float32, device="cpu", max_model_len=64, block_size=8)
    targets = load_targets(plain)
    load_weights(
        plain, iterate_weights(source, config, targets, "auto", torch.float32, "cpu", progress=False)
    )
    if hardware is not None:
        pretend(monkeypatch, hardware)
    tokens = torch.tensor(tiny.PROMPTS[0][:30])
    CLOSE(logits(load(tmp_path / "fp8"), tokens), logits(plain, tokens), rtol=1e-4, atol=1e-4)
