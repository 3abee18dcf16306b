"""`octavo eval` as users run it, with a tiny model."""

from __future__ import annotations

import json

import pytest

from octavo.cli.main import main
from tests import tiny

ENGINE = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--disable-tqdm"]
TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny.checkpoint("llama"))


def test_perplexity(model, text, capsys, tmp_path):
    out = tmp_path / "eval.json"
    args = ["--text", text, "--window", "32", "--stride", "16", "--max-tokens", "80", "--json", str(out)]
    assert main(["eval", model, *args, *ENGINE, "--hf-token", "hidden-value"]) == 0
    shown = capsys.readouterr().out
    assert "Perplexity: " in shown and "KL divergence" not in shown
    assert "hidden-value" not in out.read_text()
    found = json.loads(out.read_text())
    config = found["config"]
    assert (config["window"], config["stride"], config["max_tokens"]) == (32, 16, 80)
    assert config["text"]["path"] == text and len(config["text"]["sha256"]) == 64
    assert config["baseline"] is None
    assert config["model"]["settings"]["model"] == model
    assert config["model"]["ran"]["dtype"] == "float32"
    assert set(config["versions"]) >= {"torch", "numpy", "tokenizers"}
    assert found["summary"]["num_tokens"] == sum(r["tokens"] for r in found["requests"]) == 80


def test_a_baseline_with_other_settings(model, text, capsys, tmp_path):
    out = tmp_path / "eval.json"
    args = ["--text", text, "--window", "64", "--baseline-args=--dtype bfloat16 --block-size 8"]
    assert main(["eval", model, *args, *ENGINE, "--seed", "9", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    baseline, summary = found["config"]["baseline"], found["summary"]
    assert baseline["settings"]["model"] == model  # none was named: the same
    assert baseline["ran"]["dtype"] == "bfloat16" and found["config"]["model"]["ran"]["dtype"] == "float32"
    assert baseline["settings"]["block_size"] == 8
    assert baseline["settings"]["seed"] == found["config"]["errors"]["bootstrap_seed"] == 9  # taken over
    assert 0 < summary["kl_mean"] < 0.01
    shown = capsys.readouterr().out
    assert f"{summary['perplexity_ratio']:.3f}" in shown
    for label in ("Ratio (paired)", "99th percentile", "Likeliest token the same", "Likeliest 5 in common"):
        assert label in shown


def test_a_named_baseline_does_not_take_over_what_is_computed(model, text, tmp_path):
    out = tmp_path / "eval.json"
    args = ["--text", text, "--window", "64", "--baseline", model, "--json", str(out), "--max-tokens", "40"]
    assert main(["eval", model, *args, *ENGINE, "--block-size", "32"]) == 0
    baseline = json.loads(out.read_text())["config"]["baseline"]["settings"]
    assert (baseline["block_size"], baseline["num_threads"], baseline["device"]) == (16, 1, "cpu")


def test_thresholds_decide_the_exit_code(model, text, capsys, tmp_path):
    out = tmp_path / "eval.json"
    args = ["--text", text, "--window", "64", "--baseline-args=--dtype bfloat16", "--json", str(out), *ENGINE]
    wide = ["--max-ppl-rise", "50%", "--max-kl", "1", "--min-agreement", "0.5"]
    assert main(["eval", model, *args, *wide]) == 0
    assert capsys.readouterr().out.count(": kept") == 3
    summary = json.loads(out.read_text())["summary"]
    kl = summary["kl_mean"]
    assert 0 < kl < 0.01
    assert summary["thresholds"]["max_ppl_rise"]["found"] == pytest.approx(summary["perplexity_ratio"] - 1)
    assert main(["eval", model, *args, *wide, "--max-kl", str(kl / 2)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("FAILED") == 1 and shown.count(": kept") == 2
    judged = json.loads(out.read_text())["summary"]["thresholds"]
    assert [one["kept"] for one in judged.values()] == [True, False, True]
    for described in ("model", "baseline"):
        told = json.loads(out.read_text())["config"][described]
        assert told["tokens_per_s"] > 0 and told["weight_bytes"] > 0
    config = json.loads(out.read_text())["config"]
    assert config["model"]["weight_bytes"] > 1.5 * config["baseline"]["weight_bytes"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "--text"),
        (["--text", "TEXT", "--max-kl", "0.1"], "--max-kl compares with a baseline: give --baseline"),
        (["--text", "TEXT", "--max-ppl-rise", "high"], "'high' is no share: write for example 0.5%"),
        (["--text", "TEXT", "--min-agreement", "101%"], "'101%' is no share"),
        (["--text", "TEXT", "--max-kl", "nan"], "'nan' is no number of nats"),
        (["--text", "none.txt"], "text='none.txt' cannot be read"),
        (["--text", "TEXT", "--window", "0"], "'0' is not a number of at least 1 token"),
        (["--text", "TEXT", "--window", "1"], "window=1 is too small"),
        (["--text", "TEXT", "--window", "8", "--stride", "8"], "stride=8"),
        (["--text", "TEXT", "--window", "10k"], "window=10000 is beyond the context of 256 tokens"),
        (["--text", "TEXT", "--max-tokens", "many"], "max-tokens"),
        (
            ["--text", "TEXT", "--baseline-args=--dtyp float32"],
            "baseline-args: unrecognized arguments: --dtyp",
        ),
        (["--text", "TEXT", "--baseline-args=--dtype int3"], "baseline-args: argument --dtype"),
        (["--text", "TEXT", "--baseline-args=--dtype 'float32"], "cannot be split"),
        (["--text", "TEXT", "--baseline-args=--block-size 16 other"], "unrecognized arguments: other"),
        (["--text", "TEXT", "--baseline", "./none"], "'./none' is neither a folder"),
        (["--text", "TEXT", "--json", "/none/x.json"], "json='/none/x.json'"),
        (["--text", "TEXT", "--runner", "pooling"], "makes embeddings"),
    ],
)
def test_bad_usage_is_one_line(model, text, args, told, capsys):
    try:
        code = main(["eval", model, *[text if a == "TEXT" else a for a in args], *ENGINE])
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert told in error
    assert error.count("\n") == 1
