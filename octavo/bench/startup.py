"""How long a fresh process takes until its engine is ready, and until its first token."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo import errors
from octavo.bench.bounds import at_least
from octavo.bench.report import Row, table
from octavo.bench.statistics import describe
from octavo.child_environment import child_environment
from octavo.errors import ConfigError, OctavoError

CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
"""Variables that say where compiled GPU kernels are kept."""


@dataclass(frozen=True)
class StartupOptions:
    """Starts with empty caches of compiled GPU kernels, then starts with those that the last one left.

    Without cold starts, warm ones find the user's own caches.
    """

    num_iters_cold: int = 1
    num_iters_warm: int = 3
    input_len: int = 16

    def __post_init__(self) -> None:
        at_least(self, num_iters_cold=0, num_iters_warm=0, input_len=1)
        if not self.num_iters_cold + self.num_iters_warm:
            raise ConfigError("num_iters_cold=0 and num_iters_warm=0: give at least one start")


@dataclass(frozen=True)
class Start:
    """One start: seconds from the process's start, and the most memory that it held, bytes."""

    cold: bool
    ready_s: float
    first_token_s: float
    peak_rss_bytes: int


def measure_startup(
    engine: dict[str, Any], options: StartupOptions, on_start: Callable[[], None] = lambda: None
) -> list[Start]:
    """Start an engine again and again, each time in a process of its own.

    Args:
        engine: its settings.

    Raises:
        OctavoError: it cannot be started; of the class that a start in this process would raise.
    """
    starts = []
    with ExitStack() as stack:
        caches: dict[str, str] = {}
        for number in range(options.num_iters_cold + options.num_iters_warm):
            cold = number < options.num_iters_cold
            if cold:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-startup-"))
                caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
            wanted = {"engine": engine, "input_len": options.input_len}
            starts.append(_start(wanted, caches, cold))
            on_start()
    return starts


def _start(wanted: dict[str, Any], caches: dict[str, str], cold: bool) -> Start:
    events: dict[str, tuple[float, dict[str, Any]]] = {}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.bench.first_token"],
        env=child_environment(**caches),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            now = time.perf_counter() - begin
            if line.startswith('{"event":'):  # libraries may write as well
                event = json.loads(line)
                events[event.pop("event")] = (now, event)
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    if "error" in events:
        told = events["error"][1]
        raise getattr(errors, told["kind"], OctavoError)(told["message"])
    if "first_token" not in events:
        raise OctavoError(f"the process that was started ended with exit code {code} before its first token")
    return Start(cold, events["ready"][0], events["first_token"][0], events["first_token"][1]["peak_rss"])


def summarize_startup(starts: list[Start]) -> dict[str, Any]:
    """Medians and all values, cold and warm; None where there was no such start."""
    summary: dict[str, Any] = {}
    for name, chosen in (
        ("cold", [s for s in starts if s.cold]),
        ("warm", [s for s in starts if not s.cold]),
    ):
        for figure in ("ready_s", "first_token_s"):
            values = [getattr(start, figure) for start in chosen]
            summary[f"{name}_{figure}"] = describe(values)["median"] if values else None
    return {**summary, "peak_rss_bytes": max(start.peak_rss_bytes for start in starts)}


def render_startup(starts: list[Start], summary: dict[str, Any]) -> str:
    """The figures as a table."""
    sections: list[tuple[str, list[Row]]] = []
    for name in ("cold", "warm"):
        if summary[f"{name}_ready_s"] is not None:
            count = sum(start.cold == (name == "cold") for start in starts)
            rows: list[Row] = [
                ("Ready after (s)", summary[f"{name}_ready_s"]),
                ("First token after (s)", summary[f"{name}_first_token_s"]),
            ]
            sections.append((f"{name} caches, median of {count}", rows))
    sections.append(("", [("Most memory held (GB)", summary["peak_rss_bytes"] / 1e9)]))
    return table("Start of a process", sections)
