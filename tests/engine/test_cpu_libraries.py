"""The bounds reach the engine's process, and the user's own choices stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from octavo import LLM
assert "torch" not in sys.modules, "PyTorch is loaded before its threads are settled"
from octavo.engine.cpu_libraries import settle_libraries
settle_libraries()
print(os.environ.get("GOMP_SPINCOUNT"), os.environ["LRU_CACHE_CAPACITY"])
"""


@pytest.mark.parametrize("given, expected", [
    ({}, "10000 256"), ({"GOMP_SPINCOUNT": "7"}, "7 256"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None 256"),
    ({"LRU_CACHE_CAPACITY": "9"}, "10000 9"),
])  # fmt: skip
def test_settled_before_pytorch_is_loaded(given, expected):
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LRU_CACHE_CAPACITY")
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=clean | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
