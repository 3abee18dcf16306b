"""top_k, top_p and min_p against sorting one row at a time; both methods agree."""

import numpy as np
import pytest
import torch

from octavo.sampling.filters import device_thresholds, host_thresholds
from octavo.sampling_params import SamplingParams
from tests.sampling.oracle import kept


def settings(params):
    top_k = np.array([p.top_k for p in params], np.int32)
    top_p = np.array([p.top_p for p in params], np.float32)
    min_p = np.array([p.min_p for p in params], np.float32)
    return top_k, top_p, min_p


def on_device(x, params):
    top_k, top_p, min_p = (torch.from_numpy(a) for a in settings(params))
    top_k = top_k.clamp_max(x.shape[1])  # as `SamplingState` does
    every, none = bool((top_k > 0).all()), not bool((top_k > 0).any())
    return device_thresholds(
        torch.from_numpy(x),
        top_k,
        top_p,
        min_p,
        max_top_k=int(top_k.max()) if every or none else None,
        any_top_p=bool((top_p < 1).any()),
        any_min_p=bool((min_p > 0).any()),
    ).numpy()[:, 0]


def on_host(x, params, candidates=1024):
    return host_thresholds(x, *settings(params), candidates=candidates)


METHODS = {
    "host": on_host,
    "host, few candidates": lambda x, params: on_host(x, params, candidates=4),
    "device": on_device,
}
PARAMS = [
    dict(top_k=1),
    dict(top_k=5),
    dict(top_k=300),
    dict(top_k=100_000),
    dict(top_p=0.01),
    dict(top_p=0.5),
    dict(top_p=0.9),
    dict(top_p=0.999),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(min_p=0.001, top_p=0.9),
    dict(top_k=20, top_p=0.8),
    dict(top_k=50, top_p=0.95, min_p=0.05),
    dict(top_k=500, top_p=0.999),
]


def logits(rows, vocab, scale, seed=0):
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_thresholds_keep_what_sorting_keeps(method, scale):
    params = [SamplingParams(**p) for p in PARAMS]
    x = logits(len(params), 700, scale)
    x[:, ::7] = -np.inf
    for group in (range(len(params)), *([i] for i in range(len(params)))):  # together and alone
        some = list(group)
        t = METHODS[method](x[some], [params[i] for i in some])
        for row, i in enumerate(some):
            np.testing.assert_array_equal(x[i] >= t[row], kept(x[i].astype(np.float64), params[i]), PARAMS[i])


@pytest.mark.parametrize("method", METHODS)
def test_ties_at_the_threshold_are_kept(method):
    x = np.tile(np.array([3, 2, 2, 2, 1, 1, 0, -1], np.float32), (4, 5))
    params = [
        SamplingParams(**p) for p in (dict(top_k=6), dict(top_k=6, top_p=0.4), dict(top_p=0.3), dict(top_k=5))
    ]
    t = METHODS[method](x, params)
    assert t.tolist() == [2, 3, 3, 3]
    for row, p in enumerate(params):
        np.testing.assert_array_equal(x[row] >= t[row], kept(x[row].astype(np.float64), p))


@pytest.mark.parametrize("method", METHODS)
def test_rows_with_few_or_no_allowed_entries(method):
    x = np.full((3, 50), -np.inf, np.float32)
    x[0, 7] = 1.5
    x[1, [3, 4]] = [-2.0, 2.0]
    t = METHODS[method](x, [SamplingParams(top_k=10, top_p=0.9)] * 3)
    assert np.flatnonzero(x[0] >= t[0]).tolist() == [7]
    assert np.flatnonzero(x[1] >= t[1]).tolist() == [4]  # 98% of the rest
    assert not (x[2] >= t[2]).any()


def test_a_large_nucleus_is_found_by_the_full_sort():
    x = logits(3, 6_000, 0.3)
    params = [SamplingParams(top_p=p) for p in (0.95, 0.5, 0.001)]
    t = on_host(x, params)
    sizes = [int((x[i] >= t[i]).sum()) for i in range(3)]
    assert sizes[0] > 4_500 > sizes[1] > 1_500 > sizes[2] > 0
    np.testing.assert_array_equal(t, on_device(x, params))
    for i, p in enumerate(params):
        assert sizes[i] == kept(x[i].astype(np.float64), p).sum()
