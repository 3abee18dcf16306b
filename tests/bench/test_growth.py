"""Growth: predictions from bytes, flags, what doesn't fit; and a run on a small model."""

from __future__ import annotations

import pytest

from octavo import LLM
from octavo.bench.growth import (
    Growth,
    GrowthOptions,
    GrowthPoint,
    MachineRates,
    kv_bytes_per_request,
    measure_growth,
    plot_growth,
    predict,
    render_growth,
    summarize_growth,
)
from octavo.errors import ConfigError
from tests import tiny


def point(context, step_ms, floor_ms):
    return GrowthPoint(context, float(context), 1, step_ms, 10, 20, 30.0, floor_ms)


def test_points_that_grow_otherwise_than_their_bytes_are_flagged():
    points = [point(1, 3.0, 2.0), point(2, 5.0, 4.0), point(4, 9.0 * 1.19, 8.0), point(8, 17.0 * 0.79, 16.0)]
    predict(points)
    assert [p.predicted_ms for p in points] == [3.0, 5.0, 9.0, 17.0]
    assert [p.flagged for p in points] == [False, False, False, True]
    found = Growth(MachineRates(1e9, 1e12), points, [], ["left out"])
    summary = summarize_growth(found)
    assert summary["flagged"] == 1 and summary["worst_deviation"] == pytest.approx(0.21)
    text = render_growth(found)
    assert text.count("%!") == 1 and "note: left out" in text
    assert "predicted" in plot_growth(found, "m")


def test_a_small_model():
    model = str(tiny.checkpoint("llama"))
    options = GrowthOptions((16, 32, 64), (1, 2, 3, 16), batch_size=2, context_len=32, steps=4, num_iters=1)
    with LLM(model, dtype="float32", kv_cache_memory_bytes=1 << 20, num_threads=1, max_model_len=128,
             max_num_seqs=8) as llm:  # fmt: skip
        found = measure_growth(llm, options, MachineRates(1e9, 1e9))
        per_token = kv_bytes_per_request(llm.facts, 1)
        formats = [group.format for group in llm.facts.groups for _ in group.layers]
        assert per_token == sum(2 * f.num_kv_heads * f.head_dim * 4 for f in formats)
        assert llm.facts.step_weight_bytes > 0
        hits = llm.stats().prefix_cache_hits
        with pytest.raises(ConfigError, match="max_model_len"):
            measure_growth(llm, GrowthOptions((1024,), ()), MachineRates(1e9, 1e9))
    assert [p.context_len for p in found.by_context] == [16, 32, 64]
    assert [p.batch_size for p in found.by_batch] == [1, 2, 3]
    assert found.notes == ["16 x 32 tokens left out: max_num_seqs is 8"]
    last = found.by_context[-1]
    assert last.kv_bytes == round(2 * (64 + 1 + 2) * per_token)
    # In float32 each weight's 4 bytes take two operations a row: at these rates 2 rows take as long as they.
    assert last.operations == last.batch_size * last.weight_bytes / 2
    assert last.floor_ms == pytest.approx((last.weight_bytes + last.kv_bytes) / 1e6)
    many = found.by_batch[-1]
    assert many.floor_ms == pytest.approx((many.operations + many.kv_bytes) / 1e6)
    # All four runs of a point find the whole context in the cache, but the first one of the largest points.
    assert hits == 4 * 2 * (16 + 32 + 64) + 4 * 32 * (1 + 2 + 3) - 2 * 64 - 3 * 32


def test_contexts_come_from_the_cache():
    with pytest.raises(ConfigError, match="both empty"):
        GrowthOptions((), ())
    with pytest.raises(ConfigError, match="rising numbers"):
        GrowthOptions((64, 32))
