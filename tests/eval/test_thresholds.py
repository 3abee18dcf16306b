"""Bounds of a comparison."""

from __future__ import annotations

import math

import pytest

from octavo.errors import ConfigError
from octavo.eval.thresholds import Thresholds, parse_share

FOUND = {"perplexity_ratio": 1.004, "kl_mean": 0.02, "top1_agreement": 0.97}


@pytest.mark.parametrize(
    ("thresholds", "kept"),
    [
        (Thresholds(), []),
        (Thresholds(0.005, 0.02, 0.97), [True, True, True]),
        (Thresholds(0.003), [False]),
        (Thresholds(max_kl=0.019), [False]),
        (Thresholds(min_agreement=0.98), [False]),
    ],
)
def test_judgement(thresholds: Thresholds, kept: list[bool]) -> None:
    assert [one["kept"] for one in thresholds.judge(FOUND).values()] == kept


def test_no_number_keeps_no_bound() -> None:
    nothing = dict.fromkeys(FOUND, math.nan)
    assert not any(one["kept"] for one in Thresholds(1.0, 1.0, 0.0).judge(nothing).values())


def test_shares() -> None:
    assert [parse_share(text) for text in ("0.5%", "0.005", "100%", "0")] == [0.005, 0.005, 1.0, 0.0]
    for text in ("", "%", "nan", "-1%", "1.5", "half"):
        with pytest.raises(ConfigError, match="is no share: write for example"):
            parse_share(text)
