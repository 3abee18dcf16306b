"""Bounds that a comparison must keep, so that a script can go by the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError


@dataclass(frozen=True)
class Thresholds:
    """Bounds; None: there is none.

    Attributes:
        max_ppl_rise: of the model's perplexity over the baseline's, as a share (0.005 is 0.5%).
        max_kl: of the mean divergence, in nats.
        min_agreement: of the share of positions with the same likeliest token.
    """

    max_ppl_rise: float | None = None
    max_kl: float | None = None
    min_agreement: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """Those that there are."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def judge(self, summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Each bound with what was found, and whether it is kept; a figure that is no number keeps none."""
        found = {
            "max_ppl_rise": summary["perplexity_ratio"] - 1.0,
            "max_kl": summary["kl_mean"],
            "min_agreement": summary["top1_agreement"],
        }
        out = {}
        for name, bound in self.given.items():
            value = float(found[name])
            kept = value >= bound if name.startswith("min") else value <= bound
            out[name] = {"bound": bound, "found": value, "kept": bool(kept)}
        return out


def parse_share(text: str) -> float:
    """`0.5%` or `0.005` as a number.

    Raises:
        ConfigError: neither, or not from 0 to 1.
    """
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{text!r} is no share: write for example 0.5% or 0.005")
    return value
