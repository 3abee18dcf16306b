"""The CPU kernels as a processor with AVX2 alone has them, tested on one that may have more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.planning.hardware import detect_cpu

ROOT = Path(__file__).parents[2]
# The library's name depends on the flags: it is built once beside this machine's own.
RUN = """
import sys, pytest
from octavo.kernels.cpu import build, ops
build.FLAGS = tuple("-march=haswell" if flag == "-march=native" else flag for flag in build.FLAGS)
assert ops.vector_width() == 8
sys.exit(pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not detect_cpu().has("avx2"), reason="no AVX2")
@pytest.mark.parametrize(
    "file",
    [
        "kernels/test_cpu_half.py",
        "kernels/test_cpu_ops.py",
        "kernels/test_cpu_norm_act.py",
        "layers/test_attention_cpu.py",
    ],
)
def test_with_avx2(file: str) -> None:
    command = [sys.executable, "-c", RUN, f"tests/{file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
