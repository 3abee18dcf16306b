"""`octavo bench` as users run it, with a tiny model or a server over a fake engine."""

from __future__ import annotations

import json

import pytest

from octavo.cli.main import main
from tests import tiny
from tests.server.conftest import running
from tests.server.fakes import FakeEngine

ENGINE = ["--dtype", "float32", "--kv-cache-memory-bytes", "4MiB", "--num-threads", "1", "--disable-tqdm"]


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny.checkpoint("llama"))


def result(path):
    return json.loads(path.read_text())


def test_latency(model, tmp_path, capsys):
    out = tmp_path / "latency.json"
    args = ["--input-len", "8", "--output-len", "6", "--batch-size", "3", "--num-iters", "4"]
    assert (
        main(["bench", "latency", model, *args, "--num-iters-warmup", "1", *ENGINE, "--json", str(out)]) == 0
    )
    shown = capsys.readouterr().out
    assert "3 x (8 in, 6 out)" in shown
    found = result(out)
    times = sorted(r["latency_ms"] for r in found["requests"])
    summary = found["summary"]
    assert len(times) == summary["num_iters"] == 4
    assert summary["median_latency_ms"] == pytest.approx((times[1] + times[2]) / 2)
    assert summary["ms_per_token"] == pytest.approx(summary["median_latency_ms"] / 6)
    assert summary["output_throughput"] == pytest.approx(18 / summary["median_latency_ms"] * 1e3)
    assert found["config"]["batch_size"] == 3
    assert found["config"]["engine"]["model"] == model


@pytest.mark.parametrize(
    ("workload", "hits"),
    [
        (["--input-len", "20"], 0),
        # The first request computes the 32 shared tokens for all others that come after it.
        (
            ["--dataset-name=shared-prefix", "--prefix-len=32", "--input-len=4", "--max-num-seqs=1"],
            7 * 32,
        ),
        # Of each second turn the whole blocks of the first one's prompt.
        (["--dataset-name", "multi-turn", "--turns", "2", "--input-len", "32", "--turn-len", "8"], 4 * 32),
        (["--dataset-name", "repetitive", "--input-len", "30", "--period", "5"], 0),
    ],
)  # fmt: skip
def test_throughput(model, tmp_path, capsys, workload, hits):
    out = tmp_path / "throughput.json"
    args = ["--num-prompts", "8", "--output-len", "4", *workload, *ENGINE, "--json", str(out)]
    assert main(["bench", "throughput", "--model", model, *args]) == 0
    found = result(out)
    summary = found["summary"]
    prompt = sum(r["prompt_tokens"] for r in found["requests"])
    assert summary["num_requests"] == len(found["requests"]) == 8
    assert summary["total_output_tokens"] == 8 * 4
    assert summary["total_input_tokens"] == prompt
    assert summary["cached_tokens"] == hits
    assert summary["cache_hit_rate"] == pytest.approx(hits / prompt)
    assert summary["total_token_throughput"] == pytest.approx((prompt + 32) / summary["duration_s"])
    assert all(0 < r["ttft_ms"] <= r["e2el_ms"] for r in found["requests"])
    assert f"{summary['output_throughput']:.2f}" in capsys.readouterr().out


def test_throughput_of_a_file(model, tmp_path, capsys):
    path, out = tmp_path / "work.jsonl", tmp_path / "out.json"
    lines = [
        {"prompt": "The quick brown fox", "max_tokens": 5},
        {"messages": [{"role": "user", "content": "hello"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    args = ["--dataset-path", str(path), "--ignore-eos", "--output-len", "3", *ENGINE, "--json", str(out)]
    assert main(["bench", "throughput", model, *args]) == 0
    assert [r["output_tokens"] for r in result(out)["requests"]] == [5, 3]


def test_serve(tmp_path, capsys):
    out = tmp_path / "serve.json"
    with running(FakeEngine(text="some text of the fake ", delay=0.001)) as server:
        args = [
            "--base-url", server.url, "--endpoint", "chat", "--num-prompts", "6", "--random-input-len", "5",
            "--random-output-len", "8", "--max-concurrency", "3", "--request-rate", "200", "--seed", "4",
            "--goodput", "ttft:60000", "e2el:0.0001", "--percentile-metrics", "ttft,e2el",
            "--metric-percentiles", "50,99.9", "--api-key", "secret", "--disable-tqdm", "--json", str(out),
        ]  # fmt: skip
        assert main(["bench", "serve", *args]) == 0
    shown = capsys.readouterr()
    assert "P99.9 E2EL (ms):" in shown.out
    assert "note: prompts are English words" in shown.out
    assert "ITL" not in shown.out
    found = result(out)
    assert "secret" not in out.read_text()
    assert found["summary"]["completed"] == 6
    assert found["summary"]["total_output_tokens"] == 48
    assert found["summary"]["request_goodput"] == 0.0
    assert found["summary"]["max_concurrent_requests"] <= 3
    assert "p99.9_itl_ms" in found["summary"]
    assert len(found["requests"]) == 6
    assert found["config"]["goodput"] == {"ttft": 60000.0, "e2el": 0.0001}
    assert found["config"]["workload"]["seed"] == 4


def test_serve_fails_if_every_request_does(capsys):
    with running() as server:
        args = ["--base-url", server.url, "--num-prompts", "2", "--input-len", "5", "--disable-tqdm"]
        assert main(["bench", "serve", *args]) == 1  # ids beyond the fake's vocabulary
    assert "failed 1x: HTTP 400: token id" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "BENCHMARK"),
        (["speed"], "speed"),
        (["latency", "--batch-size", "0", "--model", "none"], "batch_size=0"),
        (["throughput", "--dataset-name", "sharegpt"], "dataset_name='sharegpt' is not known"),
        (["throughput", "--dataset-path", "no-such.jsonl"], "'no-such.jsonl' cannot be read"),
        (["throughput", "--temperature", "nan"], "temperature=nan"),
        (["throughput", "--json", "no/such/folder/x.json"], "json='no/such/folder/x.json'"),
        (["serve", "--base-url", "localhost"], "base_url='localhost'"),
        (["serve", "--endpoint", "embeddings"], "choose completions or chat"),
        (["serve", "--goodput", "speed:3"], "goodput='speed:3'"),
        (["serve", "--percentile-metrics", "ttft,x"], "'x' is not known"),
        (["serve", "--metric-percentiles", "101"], "'101'"),
        (["serve", "--request-rate", "0"], "request_rate=0.0"),
        (["serve", "--extra-body", "[1]"], "not a JSON object"),
        (["serve", "--header", "x"], "header='x'"),
        (["serve", "--input-len", "-1"], "input_len=-1"),
    ],
)
def test_bad_usage_is_one_line(args, told, capsys):
    try:
        code = main(["bench", *args])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert told in error
    assert error.count("\n") == 1


def test_lengths_beyond_the_context_are_told_before_the_run(model, capsys):
    for benchmark in ("latency", "throughput"):
        assert main(["bench", benchmark, model, "--input-len", "250", "--output-len", "10", *ENGINE]) == 2
        assert "(max_model_len)" in capsys.readouterr().err
