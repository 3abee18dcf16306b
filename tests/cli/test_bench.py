"""`octavo bench` as users run it, with a tiny model or a server over a fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.engine.trace_summary import read_trace, summarize_trace
from octavo.errors import RequestError
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
    args += ["--num-iters-warmup", "1", *ENGINE, "--json", str(out)]
    args += ["--hf-token", "a secret", "--profile", str(tmp_path / "traces")]
    assert main(["bench", "latency", model, *args]) == 0
    shown = capsys.readouterr().out
    assert "3 x (8 in, 6 out)" in shown
    found = result(out)
    times = sorted(r["latency_ms"] for r in found["requests"])
    summary = found["summary"]
    assert len(times) == summary["num_iters"] == 4
    assert summary["median_latency_ms"] == pytest.approx((times[1] + times[2]) / 2)
    firsts = sorted(r["first_token_ms"] for r in found["requests"])
    assert summary["median_first_token_ms"] == pytest.approx((firsts[1] + firsts[2]) / 2)
    steps = sorted((r["latency_ms"] - r["first_token_ms"]) / 5 for r in found["requests"])
    assert summary["median_decode_step_ms"] == pytest.approx((steps[1] + steps[2]) / 2)
    assert summary["ms_per_token"] == pytest.approx(summary["median_latency_ms"] / 6)
    assert summary["output_throughput"] == pytest.approx(18 / summary["median_latency_ms"] * 1e3)
    assert found["config"]["batch_size"] == 3
    assert "a secret" not in out.read_text()
    assert found["config"]["engine"]["model"] == model
    profile = summary["profile"]
    assert profile["num_steps"] == summarize_trace(read_trace(profile["trace"])).steps == 6
    assert profile["trace"] in shown and Path(profile["trace"]).parent == tmp_path / "traces"


def test_latency_of_prompts_alone(model, tmp_path, capsys):
    out = tmp_path / "latency.json"
    args = ["--input-len", "8", "--output-len", "1", "--num-iters", "1", *ENGINE, "--json", str(out)]
    assert main(["bench", "latency", model, *args]) == 0
    summary = result(out)["summary"]
    assert summary["median_decode_step_ms"] is None
    assert summary["median_first_token_ms"] == summary["median_latency_ms"]
    assert "decode step" not in capsys.readouterr().out


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


def test_throughput_of_several_runs(model, tmp_path, capsys):
    """The median run's figures; every run begins with an empty cache; warm-ups leave nothing behind."""
    out = tmp_path / "throughput.json"
    args = ["--dataset-name=shared-prefix", "--prefix-len=32", "--input-len=4", "--max-num-seqs=1"]
    args += ["--num-prompts=4", "--output-len=3", "--num-iters=3", "--num-warmups=2", *ENGINE]
    args += ["--profile", str(tmp_path), "--profiler-max-iterations", "2", "--profiler-delay-iterations", "1"]
    assert main(["bench", "throughput", model, *args, "--json", str(out)]) == 0
    summary = result(out)["summary"]
    durations = summary["durations_s"]
    assert len(durations) == 3 and summary["duration_s"] == sorted(durations)[1]
    assert summary["cached_tokens"] == 3 * 32
    assert summary["num_requests"] == 4 and summary["total_output_tokens"] == 12
    assert summary["profile"]["num_steps"] == 2
    assert "profile:" in capsys.readouterr().out


def test_startup(model, tmp_path, capsys):
    out = tmp_path / "startup.json"
    args = ["--num-iters-cold", "1", "--num-iters-warm", "0", *ENGINE, "--json", str(out)]
    assert main(["bench", "startup", model, *args]) == 0
    found = result(out)
    [start] = found["requests"]
    assert 0 < start["ready_s"] < start["first_token_s"] == found["summary"]["cold_first_token_s"]
    assert start["cold"] and found["summary"]["warm_ready_s"] is None
    assert start["peak_rss_bytes"] > 50e6
    assert "cold caches" in capsys.readouterr().out


def test_a_start_that_fails_says_why(capsys):
    args = ["--num-iters-cold", "0", "--num-iters-warm", "1", "--disable-tqdm"]
    assert main(["bench", "startup", "no/such/folder/here", *args]) == 1
    assert "no/such/folder/here" in capsys.readouterr().err


def test_sweep_and_growth_write_pictures(model, tmp_path, capsys):
    picture, out = tmp_path / "picture.svg", tmp_path / "out.json"
    tail = [*ENGINE, "--plot", str(picture), "--json", str(out)]
    args = ["--concurrency", "1", "2", "--input-len", "8", "--output-len", "4", "--seconds", "0"]
    assert main(["bench", "sweep", model, *args, *tail]) == 0
    assert [p["num_requests"] for p in result(out)["summary"]["points"]] == [1, 2]
    assert "Time between tokens" in picture.read_text()
    args = ["--context-lens", "16", "32", "--batch-sizes", "--steps", "3", "--num-iters", "1"]
    assert main(["bench", "growth", model, *args, "--bandwidth", "10", *tail]) == 0
    summary = result(out)["summary"]
    assert summary["bandwidth_bytes_per_s"] == 1e10
    assert [p["context_len"] for p in summary["by_context"]] == [16, 32] and summary["by_batch"] == []
    assert "against context" in picture.read_text()


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


def test_serve_lets_the_server_profile(tmp_path, capsys):
    out = tmp_path / "serve.json"
    args = ["--num-prompts", "2", "--input-len", "5", "--vocab-size", "250", "--disable-tqdm", "--profile"]
    with running(FakeEngine(torch_profiler_dir="traces")) as server:
        assert main(["bench", "serve", "--base-url", server.url, *args, "--json", str(out)]) == 0
        assert not server.engine.profiles
    assert result(out)["summary"]["profile"]["num_steps"] == 3
    assert "profile, on the server: t.json.gz" in capsys.readouterr().out
    with running() as server:
        assert main(["bench", "serve", "--base-url", server.url, *args]) == 1
    assert "--torch-profiler-dir" in capsys.readouterr().err


def test_serve_tells_its_figures_without_the_profile(capsys, monkeypatch):
    async def stop_profile(self):
        raise RequestError("the disk is full")

    monkeypatch.setattr(FakeEngine, "stop_profile", stop_profile)
    args = ["--num-prompts", "2", "--input-len", "5", "--vocab-size", "250", "--disable-tqdm", "--profile"]
    with running(FakeEngine(torch_profiler_dir="traces")) as server:
        assert main(["bench", "serve", "--base-url", server.url, *args]) == 0
    shown = capsys.readouterr().out
    assert "P99 E2EL (ms):" in shown and "the disk is full" in shown


def test_latency_tells_its_figures_without_the_profile(model, tmp_path, capsys):
    args = ["--input-len", "8", "--output-len", "2", "--num-iters", "1", *ENGINE]
    args += ["--profile", str(tmp_path), "--profiler-delay-iterations", "1000"]
    assert main(["bench", "latency", model, *args]) == 0
    shown = capsys.readouterr().out
    assert "Time of a decode step (ms):" in shown
    assert "note: no profile: the engine ran no step to record" in shown


def test_sweep_of_a_server_with_few_tokens(tmp_path, capsys):
    args = ["--concurrency", "1", "--input-len", "5", "--output-len", "4", "--seconds", "0", "--disable-tqdm"]
    with running() as server:
        args += ["--base-url", server.url]
        assert main(["bench", "sweep", *args]) == 1  # ids beyond the fake's vocabulary
        assert "token id" in capsys.readouterr().err
        assert main(["bench", "sweep", *args, "--vocab-size", "250"]) == 0


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
        (["throughput", "--random-input-len-range", "9", "3"], "input_range=9 3"),
        (["throughput", "--random-output-len-range", "1", "3", "--dataset-name=repetitive"], "output_range"),
        (["throughput", "--num-iters", "0"], "num_iters=0"),
        (["startup", "--num-iters-cold", "0", "--num-iters-warm", "0"], "num_iters_cold=0"),
        (["sweep", "--concurrency", "4", "2"], "concurrency=[4, 2]"),
        (["sweep", "--plot", "no/such/folder/x.svg"], "plot='no/such/folder/x.svg'"),
        (["growth", "--context-lens", "0"], "context_lens=[0]"),
        (["growth", "--bandwidth", "nan"], "bandwidth=nan"),
        (["growth", "--bandwidth", "inf"], "bandwidth=inf"),
        (["growth", "--matrix-rate", "0"], "matrix_rate=0"),
        (["scheduler", "--num-seqs", "0"], "num_seqs=0"),
        (["scheduler", "--num-seqs", "100000000"], "num_seqs=100000000"),
        (["sweep", "--seconds", "inf"], "seconds=inf"),
        (["sweep", "--base-url", "http://127.0.0.1:1", "--vocab-size", "3"], "vocab_size=3"),
        (["latency", "--profile", "/proc/none"], "profile='/proc/none' cannot be written to"),
        (["throughput", "--profile", ""], "profile='' cannot be written to"),
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
