"""Figures from samples, against NumPy."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from octavo.bench.statistics import describe, finite, meets, parse_goodput, percentile
from octavo.errors import ConfigError


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_figures_are_numpy_s(count):
    rng = random.Random(count)
    samples = [rng.lognormvariate(0, 2) for _ in range(count)]
    found = describe(samples, (0, 50, 90, 99, 99.9, 100))
    assert found["count"] == count
    for name, value in {
        "mean": np.mean(samples), "std": np.std(samples), "median": np.median(samples),
        "min": min(samples), "max": max(samples), "p0": min(samples), "p100": max(samples),
        "p90": np.percentile(samples, 90), "p99": np.percentile(samples, 99),
        "p99.9": np.percentile(samples, 99.9),
    }.items():  # fmt: skip
        assert found[name] == pytest.approx(value, rel=1e-12), name


def test_no_samples_have_no_figures():
    found = describe([])
    assert found.pop("count") == 0
    assert all(math.isnan(value) for value in found.values())
    assert math.isnan(percentile([], 50))
    assert json.dumps(finite({"a": [math.nan, 1.5, (math.inf, 2)]})) == '{"a": [null, 1.5, [null, 2]]}'


def test_goodput_objectives():
    limits = parse_goodput(["ttft:500", "tpot:12.5"], ("ttft", "tpot"))
    assert limits == {"ttft": 500.0, "tpot": 12.5}
    assert meets({"ttft": 500.0, "tpot": 12.5, "e2el": 1e9}, limits)
    assert not meets({"ttft": 500.1, "tpot": 1.0}, limits)
    assert meets({"ttft": 1.0, "tpot": None}, limits)  # one token alone has no time per output token


@pytest.mark.parametrize(
    "item", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:0", "speed:3", "ttft:nan", "ttft:inf"]
)
def test_a_wrong_objective_is_named(item):
    with pytest.raises(ConfigError, match=f"goodput='{item}'"):
        parse_goodput([item], ("ttft", "tpot"))
