"""An engine's process as the CPU benchmark sees it: started, given work, paused while others run, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu_work import Request
from benchmarks.peers.engine import EngineSpec, Peer, Tokens

ROOT = Path(__file__).parent.parent
WORKER = "benchmarks.peers.worker"


class EngineError(Exception):
    """An engine's process ended; one line says with what last words."""


class EngineProcess:
    """One engine in a process group of its own, so that a pause reaches all that it started."""

    def __init__(self, peer: Peer, python: Path, spec: EngineSpec, log: Path) -> None:
        kept: Mapping[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [str(python), "-m", WORKER, peer.key, json.dumps(asdict(spec))],
                cwd=ROOT,
                env={**kept, "OMP_NUM_THREADS": str(spec.threads), **peer.variables(spec.threads)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            words = [
                text.strip() for text in self._log.read_text(errors="replace").splitlines() if text.strip()
            ]
            raise EngineError(f"exit code {code}: {words[-1][:200] if words else 'no words'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait_ready(self) -> None:
        """Until the model is loaded. Raises EngineError."""
        self._answer()

    def generate(self, requests: list[Request]) -> tuple[float, Tokens]:
        """Seconds (measured there) and tokens. Raises EngineError."""
        assert self._process.stdin is not None
        prompts, lengths = zip(*requests, strict=True)
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "lengths": lengths}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it ended; what it last said is read below
        answer = self._answer()
        return answer["seconds"], answer["tokens"]

    def pause(self) -> None:
        """Let it take no processor time, whatever its threads wait for."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def peak_rss(self) -> int:
        """Most bytes that its processes held, each at its own peak (elsewhere than on Linux: hold now)."""
        total = 0
        root = psutil.Process(self._process.pid)
        for process in [root, *root.children(recursive=True)]:
            status = Path(f"/proc/{process.pid}/status")
            if status.exists():
                [peak] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
                total += int(peak.split()[1]) * 1024
            else:
                total += process.memory_info().rss
        return total

    def stop(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass
