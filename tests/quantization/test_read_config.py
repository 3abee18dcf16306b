"""Quantization as configs state it, and what runs of it where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.loader import load_model_config
from octavo.models.locate import find_model
from octavo.models.quantized import checkpoint_quantization
from octavo.quantization.capability import SCHEMES, Hardware, running, table
from octavo.quantization.read_config import limited_to, read_quantization
from octavo.quantization.scheme import ActivationScheme, QuantizationConfig, Rule, WeightScheme
from octavo.worker.device import choose_kv_dtype, choose_quantization
from tests import tiny
from tests.quantization.checkpoints import AMPERE, FOLDER, HOPPER, NAMES, pretend

NAMED = {
    "actorder_group": "W4A16", "actorder_static": "W4A16", "awq": "W4A16_ASYM", "bnb_int8": "W8A16",
    "bnb_nf4": "NF4", "bnb_nf4_nested": "NF4", "fp8_block": "FP8_BLOCK", "fp8_deepseek": "FP8_BLOCK",
    "fp8_dynamic": "FP8_DYNAMIC", "fp8_static": "FP8", "fp8_static_kv": "FP8", "gptq": "W4A16",
    "gptq_8bit": "W8A16", "gptq_asym_bias": "W4A16_ASYM", "gptq_desc_act": "W4A16_ASYM",
    "gptq_v2": "W4A16_ASYM", "mixed": "W4A16 W8A16 W4A16_ASYM", "moe_fp8": "FP8_DYNAMIC",
    "moe_w4a16": "W4A16", "w4a16": "W4A16", "w4a16_asym": "W4A16_ASYM", "w8a16": "W8A16",
    "w8a16_asym": "W8A16_ASYM", "w8a8": "W8A8",
}  # fmt: skip


def config_of(name: str) -> QuantizationConfig:
    raw = json.loads((FOLDER / name / "config.json").read_text())
    config = read_quantization(raw, "config.json")
    assert config is not None
    return config


@pytest.mark.parametrize("name", NAMES)
def test_schemes(name: str) -> None:
    config = config_of(name)
    assert " ".join(scheme.name for scheme in config.schemes) == NAMED[name]
    assert config.kv_cache == ("fp8" if name.endswith("_kv") else None)
    assert any(s.act_order for s in config.schemes) == (
        name in ("actorder_group", "gptq_desc_act", "gptq_v2")
    )


def test_layers_of_a_config() -> None:
    config = config_of("mixed")

    def scheme(layer: str) -> str | None:
        found = config.scheme_for(f"model.layers.{layer}")
        return None if found is None else found.name

    assert scheme("0.self_attn.q_proj") == scheme("1.mlp.gate_proj") == "W4A16"
    assert scheme("1.self_attn.v_proj") == "W8A16"
    assert scheme("0.mlp.down_proj") == "W4A16_ASYM"
    assert scheme("1.mlp.down_proj") is scheme("1.self_attn.k_proj") is scheme("0.self_attn.o_proj") is None
    assert config.scheme_for("lm_head") is None


def test_names_come_before_classes() -> None:
    wide, narrow = WeightScheme("int8", "channel"), WeightScheme("int4", "group", 32)
    config = QuantizationConfig(
        "compressed-tensors", (Rule(("Linear",), wide), Rule(("re:.*down_proj$", "a.b"), narrow)), ("a.c",)
    )
    assert config.scheme_for("model.layers.0.mlp.down_proj") == narrow == config.scheme_for("a.b")
    assert config.scheme_for("a.bb") == wide
    assert config.scheme_for("a.c") is None
    assert config.scheme_for("model.embed_tokens") is None


def read(entry: dict[str, Any]) -> QuantizationConfig:
    config = read_quantization({"quantization_config": entry}, "config.json")
    assert config is not None
    return config


def test_gptqmodel_s_overrides() -> None:
    config = read(
        {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
            "dynamic": {
                "-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}, ".*o_proj": {"sym": False},
            },
        }
    )  # fmt: skip
    found = {n: config.scheme_for(f"m.{n}_proj") for n in ("q", "k", "down", "o")}
    assert found["q"] == WeightScheme("int4", "group", 128)
    assert found["k"] is None
    assert found["down"] == WeightScheme("int8", "group", 32)
    assert found["o"] == WeightScheme("int4", "group", 128, symmetric=False)
    assert config.scheme_for("lm_head") is None


def test_older_files() -> None:
    entry = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    config = read(entry)
    assert config.format == "awq" and config.schemes == (WeightScheme("int4", "group", 128, symmetric=False),)
    assert read({"bits": 4, "group_size": -1}).schemes == (WeightScheme("int4", "channel"),)
    old = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "frozen",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"},
                                      "input_activations": {"num_bits": 8, "type": "float"}}},
    }  # fmt: skip
    assert read(old).schemes == (
        WeightScheme("fp8", "tensor", activations=ActivationScheme("fp8", False, "tensor")),
    )
    tensor = read({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["a.gate_up"]})
    assert tensor.schemes == old_scheme() and tensor.scheme_for("a.gate_up") is None


def old_scheme() -> tuple[WeightScheme, ...]:
    return (WeightScheme("fp8", "tensor", activations=ActivationScheme("fp8", False, "tensor")),)


def test_side_files(tmp_path: Path) -> None:
    raw = json.loads((FOLDER / "gptq" / "config.json").read_text())
    entry = raw.pop("quantization_config")
    del entry["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "quantize_config.json").write_text(json.dumps(entry))
    (tmp_path / "model.safetensors").write_bytes((FOLDER / "gptq" / "model.safetensors").read_bytes())
    source = find_model(str(tmp_path))
    found = checkpoint_quantization(source, load_model_config(source), "auto")
    assert found is not None and found.label == "gptq (W4A16)"
    assert found.source == str(tmp_path / "quantize_config.json")


def test_tensors_say_what_is_quantized() -> None:
    config = read({"quant_method": "gptq", "bits": 4, "group_size": 32})
    limited = limited_to(config, ["a.q.qweight", "a.q.scales", "a.shared_gate.weight"])
    assert limited.scheme_for("a.q") is not None
    assert limited.scheme_for("a.shared_gate") is None


COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
    },
}


def with_weights(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["g"]
    return {**COMPRESSED, "config_groups": {"g": {**group, "weights": {**group["weights"], **changes}}}}


def of_8_bits(
    kind: str, by: str, activations: str | None = None, symmetric: bool = True, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": by, "symmetric": symmetric, "group_size": 32}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**weights, "block_structure": [128, 128]}}
    if activations is not None:
        rows = {"num_bits": 8, "type": activations, "dynamic": True, "strategy": "token"}
        group["input_activations"] = {**rows, **more}
    return {**COMPRESSED, "format": f"{kind}-quantized", "config_groups": {"g": group}}


def test_8_bits_that_are_multiplied() -> None:
    assert read(of_8_bits("int", "channel", "int")).schemes[0].name == "W8A8"
    assert read(of_8_bits("float", "tensor", "float")).schemes[0].name == "FP8_DYNAMIC"
    groups = {"strategy": "group", "group_size": 128}
    assert read(of_8_bits("float", "block", "float", **groups)).schemes[0].name == "FP8_BLOCK"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_method": "hqq"}, "quantization by 'hqq' is not supported: use .*gptq"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "weights of 3 bits are not supported"),
        ({"quant_method": "gptq", "group_size": 32}, "has no bits: fetch"),
        ({"quant_method": "gptq", "bits": "4"}, "bits='4' is no integer"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 20}, "group_size=20 is no multiple of 8: use"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype='int64'.*packed in int32"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, r"'re:\(' is no regular expression"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not .*use .*'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits is not supported: use"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point=false is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 of format 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme='odd'"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "x"}, "type='x'"),
        ({**COMPRESSED, "format": "marlin-24"}, "format 'marlin-24' of g is not supported: use"),
        ({**COMPRESSED, "config_groups": {}}, "has no config_groups"),
        ({**COMPRESSED, "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, "with kv_cache_dtype"),
        ({**COMPRESSED, "config_groups": {"g": 5}}, "malformed quantization_config"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-bitmask"}}, "sparse weights"),
        ({**COMPRESSED, "ignore": ["re:["]}, "is no regular expression"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme of 4 bits"),
        (with_weights(num_bits=3), "weights of 3 bits of type int .* are not supported"),
        (with_weights(strategy="odd"), "strategy 'odd'"),
        (with_weights(group_size=12), "group_size=12 .* no multiple of 8"),
        (with_weights(strategy="block", block_structure=[64, 64]), "block_structure"),
        (with_weights(num_bits=8, type="float"), "weights of fp8 .* not supported"),
        (with_weights(actorder="groups"), "actorder='groups' .* not supported: use"),
        (with_weights(actorder=2), "actorder=2 .* not supported"),
        (with_weights(strategy="block", block_structure=[128, 128]), "weights of int 4 by block .* use FP8"),
        (of_8_bits("int", "block"), "weights of int 8 by block"),
        (of_8_bits("float", "channel", symmetric=False), "weights of float 8 with zero points"),
        (of_8_bits("int", "channel", "float"), "of fp8 by token with weights of int 8 by channel"),
        (of_8_bits("float", "channel", "int"), "of int8 by token with weights of float 8"),
        (of_8_bits("float", "channel", "float", strategy="group", group_size=128), "of fp8 by group with"),
        (of_8_bits("float", "block", "float"), "of fp8 by token with weights of float 8 by block"),
        (of_8_bits("int", "group", "int"), "activations of int8 by token with weights of int 8 by group"),
        ({**of_8_bits("int", "channel", "int"), "format": "pack-quantized"}, "quantized activations .g."),
        ({**COMPRESSED, "config_groups": {"g": {"weights": {}}}}, "g of config_groups has no targets: fetch"),
        ({**COMPRESSED, "config_groups": {"g": {"targets": "Linear"}}}, "targets='Linear' is no list"),
        ({**COMPRESSED, "ignore": "lm_head"}, "ignore='lm_head' is no list of names: fetch"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "lm_head"}, "='lm_head' is no list"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
         "activation_scheme='static' with blocks is not supported: use .* dynamic"),
    ],
)  # fmt: skip
def test_what_is_not_supported(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(entry)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


def test_modes_by_hardware() -> None:
    def modes(hardware: Hardware) -> dict[str, str]:
        return {name: run.mode for name, run in table(hardware)}

    asked = {
        "FP8_DYNAMIC": "W8A8", "FP8": "W8A8", "FP8_BLOCK": "W8A8", "W8A8": "W8A8", "W8A16": "W8A16",
        "W4A16": "W4A16", "W4A16_ASYM": "W4A16", "NF4": "W4A16",
    }  # fmt: skip
    assert modes(HOPPER) == asked
    assert modes(AMPERE) == asked | dict.fromkeys(("FP8_DYNAMIC", "FP8", "FP8_BLOCK"), "W8A16")
    assert set(modes(Hardware("cuda", (7, 5))).values()) == {"dequantized"}
    small = WeightScheme("int4", "group", 16)
    assert running(small, HOPPER).reason == "groups of 16 columns are no multiples of 32"
    assert modes(Hardware("cpu")) == {
        **dict.fromkeys(("FP8_DYNAMIC", "FP8", "FP8_BLOCK", "NF4"), "dequantized"),
        "W8A8": "W8A8", "W8A16": "W8A8", "W4A16": "W4A8", "W4A16_ASYM": "W4A8",
    }  # fmt: skip
    assert set(modes(Hardware("cpu", kernels=False)).values()) == {"dequantized"}
    reason = running(SCHEMES["FP8"], AMPERE).reason
    assert reason == "FP8 is multiplied from compute capability 8.9 on, an A100 has 8.0"
    assert running(SCHEMES["FP8"], HOPPER).reason is None


def choice(fixture: str, name: str | None = None, strict: bool = False) -> QuantizationConfig | None:
    source = find_model(str(FOLDER / fixture))
    model = load_model_config(source)
    return choose_quantization(name, source, "auto", torch.device("cpu"), model, "float32", strict)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, expanded = choice("gptq"), choice("gptq", "none")
    assert kept is not None and not kept.dequantize and kept == choice("gptq", "gptq")
    assert expanded is not None and expanded.dequantize
    for name in ("awq", "int8"):
        with pytest.raises(ConfigError, match=f"quantization='{name}': .* quantized already, by gptq: leave"):
            choice("gptq", name)
    pretend(monkeypatch, AMPERE)
    assert choice("gptq", strict=True) == kept
    with pytest.raises(
        ConfigError, match="FP8_DYNAMIC would run as W8A16, since .*: leave quantization_strict"
    ):
        choice("fp8_dynamic", strict=True)


def test_the_kv_cache_is_what_a_checkpoint_has_scales_for() -> None:
    def chosen(fixture: str, name: str | None = None, **settings: Any) -> str:
        model = load_model_config(find_model(str(FOLDER / fixture)))
        return choose_kv_dtype(EngineConfig(**settings), model, choice(fixture, name))

    assert chosen("fp8_static_kv") == "fp8"
    assert chosen("fp8_static") == chosen("fp8_static_kv", "none") == "auto"
    assert chosen("fp8_static_kv", kv_cache_dtype="bfloat16") == "bfloat16"
    assert chosen("fp8_static", kv_cache_dtype="int8") == "int8"
    assert chosen("fp8_static_kv", batch_invariant=True) == "auto"
    model = load_model_config(find_model(str(tiny.checkpoint("deepseek-v3"))))
    assert choose_kv_dtype(EngineConfig(), model, choice("fp8_static_kv")) == "auto"
