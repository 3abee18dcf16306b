"""The benchmark of the HTTP server runs, and counts what was sent."""

from __future__ import annotations

from benchmarks.http_streaming import measure


def test_every_chunk_is_counted() -> None:
    found = measure("octavo", connections=3, chunks=10, requests=12)
    # Each answer begins with a chunk that tells the role; the figure is of the requests after the warm-up.
    assert found["events"] == 12 * 11
    assert found["events_per_s"] > 0 and found["events_per_cpu_s"] > 0
