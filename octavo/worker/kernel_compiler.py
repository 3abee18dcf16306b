"""Kernels that a start needs are compiled by a process beside it, while it imports and loads.

The process (`octavo.worker.compile_ahead`) finds out which these are by running the steps of a start on a
pretended GPU, and compiles them into Triton's cache. A kernel that it does not foresee is compiled when it is
launched, as always; one that nobody launches is compiled in vain.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import octavo
from octavo.child_environment import child_environment
from octavo.config import EngineConfig

logger = logging.getLogger(__name__)

_PATIENCE = 120.0  # seconds after which kernels are compiled here, as they are launched
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")  # NVIDIA's, one of them, on Linux


class KernelCompiler:
    """Owns the process. In this order: `begin` or `close`, `wait`, `close`."""

    def __init__(self, config: EngineConfig, stamp: Path):
        """Start it; it imports its libraries until `begin`.

        Args:
            config: the engine's settings.
            stamp: a file that it writes when all that it foresaw is in Triton's cache.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.worker.compile_ahead"],
            env=child_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        )
        self._send({"config": dataclasses.asdict(config), "stamp": str(stamp)})

    def begin(self, facts: dict[str, Any]) -> None:
        """Compile for this GPU (`octavo.worker.pretended_gpu.gpu_facts`)."""
        self._send(facts)

    def wait(self) -> None:
        """Until the kernels of the first steps are there, or cannot be had; others are still compiled."""
        assert self._process.stdout is not None
        end, told = time.monotonic() + _PATIENCE, b""
        fd = self._process.stdout.fileno()
        while b"\n" not in told:
            left = end - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                logger.warning(
                    "kernels were not compiled in %g s: they are when they are launched", _PATIENCE
                )
                self.close()
                return
            piece = os.read(fd, 4096)
            if not piece:
                break
            told += piece
        logger.debug("kernels compiled ahead: %s", told.decode(errors="replace").strip() or "none")
        threading.Thread(target=self._process.wait, name="octavo-compiler", daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # of what was not sent yet
                pass

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended; `wait` sees that
            pass


def start_compiler(config: EngineConfig) -> KernelCompiler | None:
    """The process, where there is a GPU that kernels may have to be compiled for; imports nothing of weight.

    None too if one has done so already for these settings, this version and this cache.
    """
    if config.device == "cpu" or not any(map(os.path.exists, _DRIVERS)):
        return None
    if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
        return None
    try:
        stamp = _stamp(config)
        if stamp.exists():
            return None
        return KernelCompiler(config, stamp)
    except OSError as error:
        logger.debug("no kernels are compiled ahead: %s", error)
        return None


def _stamp(config: EngineConfig) -> Path:
    """A file in Triton's cache, by all that decides which kernels are launched and what they become."""
    home = os.environ.get("TRITON_HOME") or str(Path.home())
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    sources = sorted(Path(octavo.__file__).parent.rglob("*.py"))
    sources += sorted(Path(octavo.__file__).parent.rglob("tuned/*.json"))
    model = Path(config.model or "", "config.json")
    known = [
        repr(dataclasses.asdict(config)),
        *(importlib.metadata.version(name) for name in ("torch", "triton")),
        sys.version,
        platform.node(),
        *(f"{path}:{path.stat().st_mtime_ns}" for path in (*sources, *([model] if model.exists() else []))),
    ]
    return Path(cache, f"octavo-{hashlib.sha256(chr(10).join(known).encode()).hexdigest()[:32]}")
