"""What Prometheus is told of one value: gauges, counters and histograms under the server's prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

LABELS = ("model_name", "engine")

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip  # noqa: E501
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip  # noqa: E501
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def powers(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to `most`."""
    values = [float(m * 10**e) for e in range(8) for m in (1, 2, 5)]
    return tuple(v for v in values if v <= most) or (1.0,)


@dataclass(frozen=True)
class Namer:
    """Makes metrics that all bear the server's prefix and the labels `model_name` and `engine`.

    Attributes:
        prefix: stands before the colon of every name.
        values: the labels' values.
    """

    prefix: str
    values: tuple[str, str]

    def name(self, name: str) -> str:
        """The name as Prometheus sees it."""
        return f"{self.prefix}:{name}"

    def gauge(self, name: str, text: str, value: float, **labels: str) -> GaugeMetricFamily:
        """A gauge of one value, with further labels."""
        family = GaugeMetricFamily(self.name(name), text, labels=(*LABELS, *labels))
        family.add_metric((*self.values, *labels.values()), value)
        return family

    def gauges(self, name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
        """A gauge of several values that a label tells apart."""
        family = GaugeMetricFamily(self.name(name), text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self.values, key), value)
        return family

    def counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        """A counter of one value."""
        family = CounterMetricFamily(self.name(name), text, labels=LABELS)
        family.add_metric(self.values, value)
        return family

    def counters(self, name: str, text: str, label: str, values: dict[str, float]) -> CounterMetricFamily:
        """A counter of several values that a label tells apart."""
        family = CounterMetricFamily(self.name(name), text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self.values, key), value)
        return family

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> HistogramMetricFamily:
        """A histogram of counts by bucket (one more than bounds; none counted yet: empty)."""
        edges = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        family = HistogramMetricFamily(self.name(name), text, labels=LABELS)
        cumulative = accumulate(counts or [0] * len(edges))
        family.add_metric(self.values, list(zip(edges, cumulative, strict=True)), total)
        return family


class ValueHistogram:
    """Counts values by bucket, for one thread (the event loop)."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]):
        self._name = name
        self._text = text
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value: in the first bucket whose upper bound is not below it."""
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def family(self, namer: Namer) -> HistogramMetricFamily:
        """What Prometheus is told: cumulative counts and the sum."""
        return namer.histogram(self._name, self._text, self._buckets, self._counts, self._sum)
