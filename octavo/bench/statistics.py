"""Figures from samples: means, medians, percentiles, goodput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from octavo.errors import ConfigError


def percentile(ordered: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100) of samples in ascending order, linear between neighbours (NumPy's)."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * p / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe(samples: Iterable[float], percentiles: Sequence[float] = (90.0, 99.0)) -> dict[str, float]:
    """Count, mean, standard deviation (of the samples), minimum, median, maximum and percentiles.

    Names are `mean`, `std`, `min`, `median`, `max`, `p90`…; without samples all but `count` are NaN.
    """
    ordered = sorted(samples)
    n = len(ordered)
    mean = math.fsum(ordered) / n if n else math.nan
    variance = math.fsum((x - mean) ** 2 for x in ordered) / n if n else math.nan
    found = {
        "count": float(n),
        "mean": mean,
        "std": math.sqrt(variance),
        "min": ordered[0] if n else math.nan,
        "median": percentile(ordered, 50.0),
        "max": ordered[-1] if n else math.nan,
    }
    return found | {percentile_name(p): percentile(ordered, p) for p in percentiles}


def percentile_name(p: float) -> str:
    """`p90`, `p99.9`."""
    return f"p{p:g}"


def parse_goodput(items: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` as milliseconds by metric.

    Raises:
        ConfigError: not of that form, or a metric that isn't `known`.
    """
    limits = {}
    for item in items:
        name, _, text = item.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in known or not value > 0 or math.isinf(value):
            raise ConfigError(
                f"goodput={item!r} is not an objective: write METRIC:MILLISECONDS, with {', '.join(known)}"
            )
        limits[name] = value
    return limits


def meets(figures: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    """Whether a request's figures (ms by metric) are all within the limits; a missing one is."""
    return all((value := figures.get(name)) is None or value <= limit for name, limit in limits.items())


def finite(value: object) -> object:
    """A structure for JSON, which has no NaN: those become None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
