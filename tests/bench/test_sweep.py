"""Sweeps: a point per number of requests, offline and of a server, bounded in time."""

from __future__ import annotations

import asyncio
import time

import pytest

from octavo import LLM
from octavo.bench.client import HttpClient, Target
from octavo.bench.serve import Driver
from octavo.bench.sweep import (
    Sweep,
    SweepOptions,
    SweepPoint,
    _is_over,
    plot_sweep,
    render_sweep,
    serve_options,
    sweep_offline,
    sweep_server,
)
from octavo.bench.words import WordText
from octavo.errors import ConfigError
from tests import tiny
from tests.server.conftest import running
from tests.server.fakes import FakeEngine


def check(found: Sweep, options: SweepOptions) -> None:
    assert [p.concurrency for p in found.points] == list(options.concurrency)
    for p in found.points:
        assert p.num_requests % p.concurrency == 0
        assert p.output_throughput == pytest.approx(p.num_requests * options.output_len / p.duration_s)
        assert 0 <= p.itl_ms["median"] <= p.itl_ms["p99"] and p.itl_ms["mean"] > 0
        assert p.ttft_ms["mean"] > 0
    assert plot_sweep(found, options, "m").count("<circle") == 3 * len(found.points)
    assert render_sweep(found, options).count("\n") >= len(found.points) + 2


def test_offline():
    options = SweepOptions((1, 3), input_len=6, output_len=5, seconds=0.05)
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", kv_cache_memory_bytes=4 << 20, num_threads=1,
             max_num_seqs=3) as llm:  # fmt: skip
        begin = time.perf_counter()
        check(sweep_offline(llm, options), options)
        assert time.perf_counter() - begin < 20
        huge = SweepOptions((1,), input_len=6, output_len=5, seconds=0, seed=1 << 80)
        check(sweep_offline(llm, huge), huge)
        with pytest.raises(ConfigError, match="max_num_seqs=3"):
            sweep_offline(llm, SweepOptions((4,)))
        with pytest.raises(ConfigError, match="max_model_len"):
            sweep_offline(llm, SweepOptions((1,), input_len=100_000))


def test_of_a_server():
    options = SweepOptions((1, 4), input_len=6, output_len=5, seconds=2.0)
    with running(FakeEngine(text="plain text ", delay=0.03)) as server:

        async def main() -> Sweep:
            client = HttpClient(Target.parse(server.url))
            try:
                driver = Driver(client, serve_options(options, None), WordText())
                return await sweep_server(driver, options, (0, 255))  # the fake engine's bytes
            finally:
                client.close()

        found = asyncio.run(main())
    check(found, options)
    assert found.points[1].num_requests > 4  # fast requests are repeated for as long as asked


def test_a_sweep_ends_before_points_that_take_too_long():
    options = SweepOptions((1, 8), max_seconds=1.0)
    figures = {"mean": 1.0, "median": 1.0, "p99": 1.0}
    found = Sweep([SweepPoint(1, 1, 1.0, 1.0, 1.0, figures, figures)])
    assert not _is_over(found, options, 8, 0.5)
    assert _is_over(found, options, 8, 0.6)
    assert "stopped before concurrency 8" in found.notes[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": (2, 1)},
        {"concurrency": ()},
        {"output_len": 1},
        {"seconds": -1},
        {"seconds": float("inf")},
    ],
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SweepOptions(**wrong)
