"""`octavo quantize` as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from tests import tiny


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny.checkpoint("llama"))


def test_what_is_written_is_served(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["quantize", model, "--scheme", "W8A8", "-o", out, "--disable-tqdm"]) == 0
    assert capsys.readouterr().out.strip() == out
    with LLM(out, device="cpu", num_threads=1) as llm:
        assert llm.facts.summary["weights"].startswith("compressed-tensors: W8A8 (")
        assert (
            llm.generate(["The quick"], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
        )


def test_a_recipe(model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("QuantizationModifier:\n  scheme: FP8_DYNAMIC\n  ignore: ['re:.*down_proj', lm_head]\n")
    out = tmp_path / "out"
    assert main(["quantize", model, "--recipe", str(recipe), "-o", str(out), "--disable-tqdm"]) == 0
    entry = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in entry["ignore"] and entry["format"] == "float-quantized"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "no --scheme: choose FP8_DYNAMIC"),
        (["--scheme", "W8A88"], "did you mean W8A8?"),
        (["--recipe", "x.yaml", "--scheme", "W8A8"], "--scheme beside --recipe"),
        (["--recipe", "x.yaml"], "recipe='x.yaml' cannot be read"),
        (["--scheme", "W4A16", "--group-size", "100"], "group_size=100 is no multiple of 8"),
    ],
)
def test_wrong_usage(
    model: str, args: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", model, *args, "-o", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1
