"""What PyTorch's libraries for CPUs read from the environment; to be settled before it is imported."""

from __future__ import annotations

import os

SPIN_COUNT = "10000"
# Products compiled for a shape that oneDNN, and PyTorch's layer over it, keep: about 1 MB each, and 1024 by
# default in either.
CACHED_PRODUCTS = "256"


def settle_libraries() -> None:
    """Bound how long threads spin and how much is kept for shapes met before. The user's own settings stay.
    No effect once PyTorch is loaded.

    PyTorch's OpenMP runtime (libgomp) spins for milliseconds by default; bounded, waiting threads sleep after
    microseconds. When anything else wants the cores, a spinning thread keeps the one that it waits for from
    running: beside two busy processes on two cores, decoding was measured 7 to 10 times as fast with this
    bound as without.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, CACHED_PRODUCTS)
