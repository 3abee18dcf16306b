"""Models that are quantized while they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from octavo.quantization.capability import Hardware
from octavo.quantization.online import NAMES, online
from octavo.worker.device import choose_quantization
from tests import tiny
from tests.quantization.checkpoints import (
    AMPERE,
    FOLDER,
    HOPPER,
    logits,
    pretend,
    source_folder,
    source_weights,
)

CPU = Hardware("cpu", name="this CPU")
FP8 = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
TOKENS = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(7))


def load_online(
    name: str | None, folder: Path, weights: dict[str, torch.Tensor] | None = None, **settings: Any
) -> Any:
    """The model of a folder under a setting (None: unquantized), or the same with other weights."""
    source = find_model(str(folder))
    config = load_model_config(source)
    values: dict[str, Any] = dict(dtype=torch.float32, device="cpu", max_model_len=64, block_size=8)
    quantization = None if name is None else online(name)
    model = build_model(config, quantization=quantization, **values | settings)
    targets = load_targets(model)
    read = iterate_weights(source, config, targets, "auto", torch.float32, "cpu", progress=False)
    load_weights(model, read if weights is None else iter(weights.items()))
    return model


def rounded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The weight as the setting's name says, by arithmetic of its own: per channel in int8 and FP8."""
    wide = weight.double()
    if name in FP8:
        if name == "fp8_per_tensor":
            largest = wide.abs().max().expand(len(wide), 1)
        elif name == "fp8_per_block":
            largest = torch.empty_like(wide)
            for i in range(0, wide.shape[0], 128):
                for j in range(0, wide.shape[1], 128):
                    block = wide[i : i + 128, j : j + 128]
                    largest[i : i + 128, j : j + 128] = block.abs().max()
        else:
            largest = wide.abs().amax(1, keepdim=True)
        scale = (largest / 448).float()
        return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale
    scale = (wide.abs().amax(1, keepdim=True) / 127.5).float()
    return (weight.float() / scale).round().clamp(-128, 127) * scale


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        *((name, hardware) for name in FP8 for hardware in (CPU, AMPERE)),
        ("int8_weight_only", HOPPER),
    ],
    ids=str,
)
@pytest.mark.parametrize("wide", [False, True])
def test_weights_are_the_rounded_ones(
    name: str, hardware: Hardware, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where activations stay as they are: expanded on a CPU, weights of 8 bits on a GPU without FP8."""
    weights = {
        key: rounded(weight, name) if key.endswith("_proj.weight") else weight
        for key, weight in source_weights(wide).items()
    }
    want = logits(load_online(None, source_folder(wide), weights), TOKENS)
    if hardware is not CPU:
        pretend(monkeypatch, hardware)
    found = logits(load_online(name, source_folder(wide)), TOKENS)
    assert float((found - want).std()) < 1e-5 * float(want.std())


@pytest.mark.parametrize("hardware", [CPU, HOPPER, AMPERE], ids=lambda h: h.name)
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_computes_near_the_model(
    name: str, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits(load_online(None, source_folder()), TOKENS)
    if hardware is not CPU:
        pretend(monkeypatch, hardware)
    found = logits(load_online(name, source_folder()), TOKENS)
    error = float((found - plain).std() / plain.std())
    assert 1e-4 < error < (0.45 if "int4" in name else 0.2), error


def test_groups_that_divide_no_matrix_are_refused() -> None:
    with pytest.raises(
        ModelError, match="experts.0.down_proj.weight: a matrix of 40 columns cannot be quantized in"
    ):
        load_online("int4_weight_only", tiny.checkpoint("qwen3-moe"))


def test_the_head_and_what_weighs_experts_stay() -> None:
    config = online("fp8")
    for name in ("lm_head", "model.layers.0.mlp.gate", "model.layers.3.block_sparse_moe.gate"):
        assert config.scheme_for(name) is None, name
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.experts.3.down_proj"):
        assert config.scheme_for(name) is not None, name


@pytest.mark.parametrize(
    ("name", "hardware"),
    [("fp8_per_channel", CPU), ("fp8_per_channel", AMPERE), ("int8_weight_only", HOPPER)],
    ids=str,
)
def test_experts_are_the_rounded_ones(name: str, hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.checkpoint("qwen3-moe")
    stored = load_file(folder / "model.safetensors")
    assert any(".experts.1.up_proj.weight" in key for key in stored)
    weights = {key: rounded(w, name) if key.endswith("_proj.weight") else w for key, w in stored.items()}
    want = logits(load_online(None, folder, weights), TOKENS)
    if hardware is not CPU:
        pretend(monkeypatch, hardware)
    found = logits(load_online(name, folder), TOKENS)
    assert float((found - want).std()) < 1e-5 * float(want.std())


def test_no_unquantized_matrix_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each matrix there are codes and scales alone, as soon as it is read."""
    pretend(monkeypatch, HOPPER)
    source = find_model(str(source_folder()))
    config = load_model_config(source)
    model = build_model(
        config, quantization=online("fp8"), dtype=torch.bfloat16, device="cpu", max_model_len=64
    )
    targets = load_targets(model)
    weights = iterate_weights(source, config, targets, "auto", torch.bfloat16, "cpu", progress=False)
    for name, tensor in weights:
        targets[name].load(tensor)
        for module in model.modules():
            for piece in getattr(module, "pieces", {}).values():
                assert piece.tensors["weight"].dtype is torch.float8_e4m3fn
                assert piece.tensors["weight_scale"].numel() == len(piece.tensors["weight"])


def choose(name: str, folder: Path, device: str = "cpu", **settings: Any) -> Any:
    source = find_model(str(folder))
    model = load_model_config(source)
    return choose_quantization(name, source, "auto", torch.device(device), model, "float32", **settings)


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="quantization='int8': .* is quantized already, by compressed-tensors"
    ):
        choose("int8", FOLDER / "fp8_dynamic")
    with pytest.raises(
        ConfigError, match="quantization_strict: FP8_DYNAMIC would run as dequantized, since CPUs"
    ):
        choose("fp8", source_folder(), strict=True)
    with pytest.raises(ConfigError, match="quantization='fp8_per_blok' is not known: choose .*did you mean"):
        EngineConfig(quantization="fp8_per_blok")
    pretend(monkeypatch, HOPPER)
    assert choose("fp8", source_folder(), strict=True).schemes[0].name == "FP8_DYNAMIC"


def test_a_checkpoint_with_a_nan_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    found = load_file(source_folder() / "model.safetensors")
    found["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(found, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source_folder() / "config.json").read_bytes())
    with pytest.raises(
        ModelError, match="model.layers.1.mlp.up_proj.weight holds nan, which cannot be quantized"
    ):
        load_online("int8_weight_only", tmp_path)


def test_int8_is_a_method_of_its_own_on_a_cpu() -> None:
    assert choose("int8", source_folder()).format == "int8"
    on_gpu = choose("int8", source_folder(), "meta")
    assert on_gpu.title == "online int8" and on_gpu.schemes[0].name == "W8A8"


def test_random_weights() -> None:
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", num_threads=1, max_model_len=64)
    with LLM(str(source_folder()), load_format="dummy", quantization="int8_weight_only",
             skip_tokenizer_init=True, **settings) as llm:  # fmt: skip
        assert llm.facts.summary["weights"].startswith("online int8_weight_only: W8A16 as W8A8, since ")
