"""Environments of the peers: made once under the project's cache folder, each marked with what it holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.engine import Peer
from octavo.kernels.cache_folder import cache_folder


class InstallError(Exception):
    """An environment could not be made; one line says why."""


def bench_folder() -> Path:
    """Where environments and converted models are kept."""
    return cache_folder("bench")


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Environment:
    """A virtual environment: `python`, and commands run in it by their names."""

    def __init__(self, key: str, minutes: float) -> None:
        self.folder = bench_folder() / "peers" / key
        self.log = bench_folder() / "logs" / f"install-{key}.log"
        self._deadline = time.monotonic() + 60 * minutes
        self._minutes = minutes

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *words: object) -> None:
        """Run a command of the environment, at the lowest priority, into the log.

        Raises:
            InstallError: it failed, or the time that this environment may take is over.
        """
        command = [str(self.folder / "bin" / str(words[0])), *map(str, words[1:])]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
            process = subprocess.Popen(
                ["nice", "-n", "19", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise InstallError(f"not done within {self._minutes:g} minutes: run again to go on") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, 15)
                    process.wait()
        if code:
            last = [line for line in self.log.read_text(errors="replace").splitlines() if "rror" in line]
            raise InstallError((last or [f"exit code {code}"])[-1].strip()[:200])

    def create(self, requirements: tuple[str, ...], torch_index: str | None) -> None:
        """Make it, empty but for pip, and install; PyTorch first, so that nothing chooses another build."""
        if not self.python.exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        first = [r for r in requirements if r.startswith("torch==")]
        index = ["--extra-index-url", torch_index] if torch_index else []
        if first:
            self.run("python", "-m", "pip", "install", "-q", *index, *first)
        self.run("python", "-m", "pip", "install", "-q", *index, *requirements)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def install(peer: Peer, minutes: float, torch_index: str | None, retry: bool) -> Path:
    """The peer's Python, in its environment; made unless it is there. It is this process's own without needs.

    Raises:
        InstallError: it cannot be made, or could not the last time (unless `retry`).
    """
    if not peer.requirements:
        return Path(sys.executable)
    env = Environment(peer.key, minutes)
    mark, failed = env.folder / ".installed", env.folder.with_suffix(".failed")
    wanted = json.dumps(peer.requirements)
    if mark.exists() and mark.read_text() == wanted:
        return env.python
    if failed.exists() and not retry:
        raise InstallError(failed.read_text())
    say(f"{peer.name}: making its environment (at most {minutes:g} minutes)")
    begin = time.monotonic()
    try:
        env.create(peer.requirements, torch_index)
        if peer.build:
            peer.build(env.folder, env.run)
    except InstallError as error:
        env.folder.parent.mkdir(parents=True, exist_ok=True)
        failed.write_text(str(error))
        raise
    failed.unlink(missing_ok=True)
    mark.write_text(wanted)
    say(f"{peer.name}: installed in {time.monotonic() - begin:.0f} s")
    return env.python
