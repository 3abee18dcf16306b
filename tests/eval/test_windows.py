"""Windows: every token is scored once, after context that is the text's own."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.eval.windows import Window, make_batches, make_windows


def documents(*lengths: int) -> list[list[int]]:
    """Texts of distinct ids, so that a token tells where it stood."""
    return [list(range(1000 * (i + 1), 1000 * (i + 1) + n)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("prefix", [[], [7], [7, 8]])
@pytest.mark.parametrize("window", [4, 9, 64])
@pytest.mark.parametrize("stride", [None, 1])
def test_every_token_is_scored_once_after_its_own_context(prefix, window, stride):
    docs = documents(0, 1, 2, window, window + 1, 3 * window + 2)
    windows = make_windows(docs, prefix, window, stride)
    scored: dict[int, list[int]] = {i: [] for i in range(len(docs))}
    for w in windows:
        ids = docs[w.document]
        assert 1 <= w.num_scored < len(w.token_ids) <= window
        assert w.token_ids[: len(prefix)] == prefix
        own = w.token_ids[len(prefix) :]
        end = w.first + w.num_scored
        assert own == ids[end - len(own) : end]
        scored[w.document] += own[-w.num_scored :]
    for i, ids in enumerate(docs):
        assert scored[i] == (ids if prefix else ids[1:])


def test_the_stride_is_what_later_windows_score_and_the_rest_is_context():
    windows = make_windows(documents(100), [], 20, 8)
    assert [w.num_scored for w in windows] == [19] + [8] * 10
    assert all(len(w.token_ids) == 20 for w in windows)
    windows = make_windows(documents(30), [], 20, 8)  # the last one begins where a full one would
    assert [(w.token_ids[0], len(w.token_ids), w.num_scored) for w in windows] == [
        (1000, 20, 19), (1008, 20, 8), (1016, 14, 2)
    ]  # fmt: skip


def test_max_tokens_cuts_the_last_window():
    windows = make_windows(documents(10, 50), [], 16, None, 21)
    assert [w.num_scored for w in windows] == [9, 12]
    assert windows[-1].token_ids == documents(10, 50)[1][:13]


@pytest.mark.parametrize(
    ("prefix", "window", "stride", "most", "told"),
    [
        ([], 1, None, None, "window=1 is too small: give at least 2"),
        ([7], 1, None, None, "window=1 is too small: give at least 2"),
        ([], 8, 8, None, "give from 1 to 7"),
        ([7], 8, 8, None, "give from 1 to 7"),
        ([], 8, None, 0, "max_tokens=0"),
    ],
)
def test_sizes_that_leave_nothing_are_refused(prefix, window, stride, most, told):
    with pytest.raises(ConfigError, match=told):
        make_windows(documents(20), prefix, window, stride, most)


def test_texts_of_single_tokens_are_refused():
    with pytest.raises(ConfigError, match="longer"):
        make_windows([[5], []], [], 8)
    assert make_windows([[5], []], [7], 8) == [Window(0, 0, [7, 5], 1)]


def test_batches_hold_all_windows_in_order_within_their_limits():
    lengths = np.random.default_rng(3).integers(2, 40, 50).tolist()
    windows = make_windows(documents(*lengths), [], 40)
    batches = make_batches(windows, 64, 3)
    assert [w for batch in batches for w in batch] == windows
    assert all(len(batch) <= 3 for batch in batches)
    assert all(len(b) == 1 or sum(len(w.token_ids) for w in b) <= 64 for b in batches)
    assert any(len(batch) == 3 for batch in batches)
    assert [len(batch) for batch in make_batches(windows, 1, 8)] == [1] * len(windows)
