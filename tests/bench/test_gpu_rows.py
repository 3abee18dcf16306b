"""The GPU page's rows: real commands on the agreed workloads, run in one process, judged and written down."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from octavo.bench.workloads import random_requests, shared_prefix_requests
from octavo.cli.bench.options import engine_config, workload
from octavo.cli.main import build_parser
from octavo.models.loader import load_model_config
from octavo.models.locate import configured_model

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table(gpu):
    return gpu.load_rows(ROOT / "benchmarks" / "gpu_rows.json")


def parsed(command):
    words = shlex.split(command)
    assert words[:2] == ["octavo", "bench"]
    return build_parser("bench").parse_args(words[1:])


@pytest.mark.parametrize("file", ["gpu_rows.json", "ranks_rows.json"])
def test_commands_are_real_and_their_shapes_exist(gpu, file, monkeypatch):
    monkeypatch.chdir(ROOT)
    table = gpu.load_rows(ROOT / "benchmarks" / file)
    for row in [*table["rows"], *table["reports"]]:
        args = parsed(row["command"])
        if args.benchmark != "scheduler":
            config = engine_config(args)
            assert config.load_format == "dummy" and config.skip_tokenizer_init
            model = load_model_config(configured_model(config))
            assert (model.hidden_size, model.vocab_size) in ((4096, 128256), (1024, 151936))


def test_workloads_are_the_agreed_ones(gpu, table):
    commands = {row["id"]: row["command"] for row in table["rows"]}
    for row in gpu.load_rows(ROOT / "benchmarks" / "ranks_rows.json")["rows"]:
        name = f"llama-8b/{row['id'].partition('/')[2]}"  # the same as on one GPU, on two
        here, there = vars(parsed(row["command"])), vars(parsed(commands[name]))
        changed = {key for key in here | there if here.get(key) != there.get(key)}
        ways = {"tensor_parallel_size", "pipeline_parallel_size", "pp_layer_partition"}
        assert changed and changed <= {*ways, "disable_custom_all_reduce"}
    for name, count in (("llama-8b", 512), ("qwen3-0.6b", 256)):
        items = workload(parsed(commands[f"{name}/throughput"]), 0).items()
        assert items == random_requests(count, (100, 1024), (100, 1024))
    for name in ("llama-8b/shared-on", "llama-8b/shared-off"):
        args = parsed(commands[name])
        assert workload(args, 0).items() == shared_prefix_requests(64, 4096, 64, 16)
        assert args.enable_prefix_caching == (name == "llama-8b/shared-on")
    for name in ("llama-8b", "qwen3-0.6b"):
        for batch in (1, 32):
            args = parsed(commands[f"{name}/decode-{batch}"])
            assert (args.batch_size, args.input_len, args.output_len, args.num_iters) == (batch, 128, 256, 3)


@pytest.mark.parametrize(
    ("better", "ours", "cells"),
    [
        ("lower", 4.0, ["4", "5", "1.25", "3", "75%", "≤ 4", "reached"]),
        ("lower", 4.5, ["4.5", "5", "1.11", "3", "67%", "≤ 4", "missed"]),
        ("higher", 4.0, ["4", "5", "0.80", "3", "133%", "≥ 4", "reached"]),
        ("lower", None, ["–", "5", "–", "3", "–", "≤ 4", ""]),
    ],
)
def test_a_row_is_judged_by_peer_floor_and_target(gpu, better, ours, cells):
    row = {"figure": "f", "better": better, "peer": 5.0, "floor": 3.0, "target": 4.0}
    assert list(gpu.judge(row, ours).values()) == ["f", *cells]


def test_rows_run_share_an_engine_and_fill_the_page(gpu, tmp_path, capsys, monkeypatch):
    """A failed row leaves the others theirs; a later run adds to the file."""
    import octavo.bench.engines as engines

    loaded = []
    real = engines.LLM
    monkeypatch.setattr(engines, "LLM", lambda **settings: loaded.append(settings) or real(**settings))
    shape = json.loads((ROOT / "benchmarks" / "shapes" / "llama-8b" / "config.json").read_text())
    shape |= dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=16, vocab_size=500, torch_dtype="float32")  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    small = "--input-len 8 --output-len 4 --batch-size 2 --num-iters 1 --num-iters-warmup 0"
    common = {"better": "lower", "peer": 1e9, "floor": None, "target": 1e9}
    bench = f"octavo bench latency {tmp_path} {{engine}}"
    rows = [
        {"id": "a/step", "figure": "step", "value": "median_decode_step_ms", "command": f"{bench} {small}"},
        {"id": "a/whole", "figure": "whole", "value": "median_latency_ms", "scale": 0.001,
         "command": f"{bench} {small} --num-iters 2"},
        {"id": "b/long", "figure": "long", "value": "median_latency_ms",
         "command": f"{bench} --input-len 600"},
    ]  # fmt: skip
    engine = (
        "--load-format dummy --skip-tokenizer-init --num-threads 1 --kv-cache-memory-bytes 4MiB "
        "--max-model-len 64"
    )
    path, results = tmp_path / "rows.json", tmp_path / "results.json"
    content = {"machine": "m", "peer": "p", "floor": "f", "engine": engine, "reports": []}
    path.write_text(json.dumps({**content, "rows": [{**common, **row} for row in rows]}))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu.BEGIN}old\n{gpu.END}after\n")
    gpu.main(["--table", str(path), "--json", str(results), "--page", str(page)])
    found = json.loads(results.read_text())
    assert len(loaded) == 1
    assert found["a/step"]["figure"] == found["a/step"]["summary"]["median_decode_step_ms"] > 0
    assert found["a/whole"]["figure"] == pytest.approx(found["a/whole"]["summary"]["median_latency_ms"] / 1e3)
    assert "max_model_len" in found["b/long"]["error"] and "figure" not in found["b/long"]
    assert "reached" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("| reached |") == 2 and "$ENGINE" in text
    first = found["a/step"]["date"]
    gpu.main(["--table", str(path), "--json", str(results), "--rows", "b/"])
    assert json.loads(results.read_text())["a/step"]["date"] == first
