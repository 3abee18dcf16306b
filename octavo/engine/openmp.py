"""How the model's CPU threads wait for each other; to be settled before PyTorch is imported."""

from __future__ import annotations

import os

SPIN_COUNT = "10000"


def settle_waiting() -> None:
    """Let waiting OpenMP threads sleep after microseconds instead of milliseconds of spinning.

    PyTorch's OpenMP runtime (libgomp) spins long by default. When anything else wants the cores, a
    spinning thread keeps the one that it waits for from running: beside two busy processes on two
    cores, decoding was measured 7 to 10 times as fast with this bound as without. The user's own
    settings stay. No effect once PyTorch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
