"""`octavo serve` in a process of its own, on a free port, until the block ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx


@contextlib.contextmanager
def running(model: str, *args: str) -> Iterator[tuple[subprocess.Popen[str], str, httpx.Client]]:
    """The process, its address (without `/v1`) and a client of it."""
    command = [
        sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--device", "cpu",
        "--num-threads", "1", "--check-invariants", *args,
    ]  # fmt: skip
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().removeprefix("Octavo is ready: ").strip().removesuffix("/v1")
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield child, url, client
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
