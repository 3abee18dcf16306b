"""SmolLM2 on real text, English and Chinese: bfloat16, quantized weights and other chunks against float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("LICENSE", "README.zh-CN.md")]
    path.write_text("".join(json.dumps({"text": page[:3000]}) + "\n" for page in pages))
    return str(path)


def compare(model: Path, text: str, out: Path, args: str, baseline: str) -> dict[str, float]:
    words = ["eval", str(model), "--text", text, "--json", str(out), "--disable-tqdm", *args.split()]
    assert main([*words, f"--baseline-args={baseline}"]) == 0
    return json.loads(out.read_text())["summary"]


def test_bfloat16_against_float32(default_model, texts, tmp_path, capsys):
    found = compare(
        default_model, texts, tmp_path / "out.json", "--dtype bfloat16 --quantization none",
        "--dtype float32 --quantization none",
    )  # fmt: skip
    assert 1000 < found["num_tokens"] < 4000
    assert 5 < found["baseline_perplexity"] < 60
    assert 1e-5 < found["kl_mean"] < 0.01 and found["kl_p99"] < 0.1
    assert found["top1_agreement"] > 0.95 and found["top5_overlap"] > 0.95
    assert abs(found["perplexity_ratio"] - 1) < 0.005 + 4 * found["perplexity_ratio_se"]
    assert "bfloat16, cpu" in capsys.readouterr().out


def test_quantized_weights_against_the_same_dequantized(default_model, texts, tmp_path):
    """What computing on the file's own encodings costs: activations are rounded to 8 bits."""
    found = compare(
        default_model, texts, tmp_path / "out.json", "--dtype float32 --max-tokens 1000",
        "--dtype float32 --quantization none",
    )  # fmt: skip
    assert found["kl_mean"] < 0.02 and found["top1_agreement"] > 0.93
    assert abs(found["perplexity_ratio"] - 1) < 0.01 + 4 * found["perplexity_ratio_se"]


def test_float32_in_other_chunks(default_model, texts, tmp_path):
    found = compare(
        default_model, texts, tmp_path / "out.json",
        "--dtype float32 --quantization none --max-tokens 200 --max-num-batched-tokens 7",
        "--dtype float32 --quantization none --max-num-batched-tokens 2048",
    )  # fmt: skip
    assert found["kl_max"] < 1e-6 and found["top1_agreement"] > 0.999
    assert found["perplexity_ratio"] == pytest.approx(1.0, abs=1e-4)
