"""Recipes: words of Python and YAML, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import QuantizationModifier
from octavo.errors import ConfigError
from octavo.quantization.compress.modifiers import SCHEMES
from octavo.quantization.compress.recipe import read_recipe, recipe_text

EIGHT = {"targets": ["Linear"], "weights": {"num_bits": 8}}
STAGES = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      targets: ["Linear"]
      scheme: FP8_DYNAMIC
      ignore: ["lm_head", "re:.*gate$"]
"""


def test_yaml_of_llm_compressor(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(STAGES)
    want = QuantizationModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*gate$"])
    for recipe in (STAGES, path, str(path), [want]):
        assert read_recipe(recipe) == want
    short = "QuantizationModifier:\n  scheme: FP8_DYNAMIC\n"
    assert read_recipe(short) == QuantizationModifier(scheme="FP8_DYNAMIC")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written_is_read_again(scheme: str) -> None:
    modifier = QuantizationModifier(scheme=scheme, ignore=["lm_head"])
    again = read_recipe(recipe_text(modifier))
    assert (again.scheme, list(again.ignore)) == (scheme, ["lm_head"])
    assert modifier.config.schemes[0].name == scheme


def test_groups_of_layers() -> None:
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    modifier = QuantizationModifier(
        config_groups={
            "a": {"targets": ["re:.*_proj$"], "weights": four},
            "b": {
                "targets": "model.layers.0.mlp.down_proj",
                "weights": {"num_bits": 8},
                "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
            },
        }
    )
    assert modifier.entry["format"] == "mixed-precision"
    assert [s.name for s in modifier.config.schemes] == ["W4A16", "W8A8"]
    assert read_recipe(recipe_text(modifier)).entry == modifier.entry


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (
            STAGES.replace("FP8_DYNAMIC", "FP8_DINAMIC"),
            "scheme='FP8_DINAMIC' is not known: did you mean FP8_DYNAMIC?",
        ),
        (STAGES.replace("scheme:", "schem:"), "has no 'schem': did you mean scheme?"),
        (STAGES.replace("ignore:", "ignored:"), "has no 'ignored': did you mean ignore?"),
        (
            STAGES.replace("QuantizationModifier", "QuantisationModifier"),
            "did you mean QuantizationModifier?",
        ),
        (STAGES.replace("QuantizationModifier", "GPTQModifier"), "GPTQModifier needs calibration"),
        ("qant_stge:\n  x: 1\n", "recipe: 'qant_stge' is not known: did you mean default_stage?"),
        ("a: [\n", "recipe: no YAML"),
        ("- 1\n- 2\n", "recipe: no mapping"),
        ("QuantizationModifier:\n", "QuantizationModifier has no settings"),
        ("QuantizationModifier:\n  ignore: 3\n", "ignore=3 is no name or list of names"),
        (
            "QuantizationModifier:\n  targets: Linear\n",
            "QuantizationModifier has no scheme: choose FP8_DYNAMIC",
        ),
        (STAGES + "other_stage:\n  QuantizationModifier:\n    scheme: W8A8\n", "a recipe of 2 modifiers"),
        ("no/such/file.yaml", "recipe='no/such/file.yaml' cannot be read: No such file"),
    ],
)
def test_a_wrong_recipe_is_told_the_nearest_word(recipe: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read_recipe(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (dict(scheme="W4A61"), "did you mean W4A16?"),
        (dict(schem="W4A16"), "QuantizationModifier has no 'schem': did you mean scheme?"),
        (dict(scheme="W8A8", igmore=["lm_head"]), "has no 'igmore': did you mean ignore?"),
        (dict(scheme="W8A8", group_size=64), "group_size=64: W8A8 has no groups"),
        (dict(scheme="W4A16", group_size=12), "group_size=12 is no multiple of 8"),
        (dict(scheme="W4A16", config_groups={}), "not both"),
        (dict(scheme=["W4A16"]), r"scheme=\['W4A16'\] is not known: "),
        (dict(scheme={"W4A16": ["Linear"]}), "is not known: "),
        (dict(config_groups={}), r"config_groups=\{\} is no mapping of groups: give"),
        (dict(config_groups=["a"]), "is no mapping of groups"),
        (dict(config_groups={"a": 3}), "a=3 is no mapping: give targets"),
        (
            dict(config_groups={"a": {**EIGHT, "output_activations": {"num_bits": 8}}}),
            "output_activations of a are not supported: leave",
        ),
        (dict(config_groups={"a": {**EIGHT, "format": "float-quantized"}}), "written as 'pack-quantized'"),
        (
            dict(config_groups={"a": {"targets": ["Linear"], "weights": {"num_bit": 4}}}),
            "did you mean num_bits?",
        ),
        (dict(config_groups={"a": {"target": ["Linear"]}}), "did you mean targets?"),
        (dict(config_groups={"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}), "weights of 3 bits"),
        (
            dict(
                config_groups={"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": False}}}
            ),
            "zero points is not made by this version",
        ),
        (
            dict(
                config_groups={
                    "a": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                    }
                }
            ),
            "static activations .FP8. need calibration",
        ),
    ],
)
def test_a_wrong_modifier(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _ = QuantizationModifier(**values).config
