"""The bound on spinning reaches the engine's process, and the user's own choice stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from octavo import LLM
assert "torch" not in sys.modules, "PyTorch is loaded before its threads are settled"
from octavo.engine.openmp import settle_waiting
settle_waiting()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize("given, expected", [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
])  # fmt: skip
def test_waiting_is_settled_before_pytorch_is_loaded(given, expected):
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=clean | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
