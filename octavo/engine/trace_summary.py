"""What a profiler trace says, on one page: where the time of a step goes, on the device and the host."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

STEP = "octavo.step"
STAGES = ("octavo.schedule", "octavo.execute", "octavo.wait", "octavo.update")

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
_TOP = 20  # rows of each table
_NAME = 88  # characters of a kernel's name that are shown

Span = tuple[float, float]


@dataclass
class Entry:
    """Calls of one operator or kernel, and the time in it alone (microseconds)."""

    calls: int = 0
    time_us: float = 0.0


@dataclass
class TraceSummary:
    """Figures of one trace; times in microseconds, of all steps together.

    Attributes:
        steps: steps recorded.
        wall_us: from the first step's begin to the end of the last one's work.
        device_busy_us: time in which any kernel or copy ran.
        stages_us: host time by stage of a step, of those that the trace has; `rest of the step` and `between
            steps` complete the wall time.
        kernels: by name, on the device.
        operators: by name, on the host, without what they call.
    """

    steps: int = 0
    wall_us: float = 0.0
    device_busy_us: float = 0.0
    stages_us: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, Entry] = field(default_factory=dict)
    operators: dict[str, Entry] = field(default_factory=dict)


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, gzipped or not (Chrome's Trace Event Format)."""
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return list(msgspec.json.decode(data)["traceEvents"])


def summarize_trace(events: Iterable[dict[str, Any]]) -> TraceSummary:
    """Figures of the complete events (`"ph": "X"`) of a trace by PyTorch's profiler."""
    device: list[dict[str, Any]] = []
    host: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            if event.get("cat") in _DEVICE:
                device.append(event)
            elif event.get("cat") in _HOST:
                host[event.get("tid")].append(event)
    found = TraceSummary()
    steps = [e for thread in host.values() for e in thread if e["name"] == STEP]
    found.steps = len(steps)
    for event in device:
        _count(found.kernels, event["name"], event["dur"])
    for thread in host.values():
        _add_self_times(thread, found.operators)
    busy = [_span(e) for e in device]
    found.device_busy_us = _union(busy)
    if steps:
        begin = min(e["ts"] for e in steps)
        end = max(s[1] for s in [*map(_span, steps), *busy])
        found.wall_us = end - begin
        for name in STAGES:  # a rank has not all of them
            times = [e["dur"] for thread in host.values() for e in thread if e["name"] == name]
            if times:
                found.stages_us[name] = sum(times)
        inside = sum(e["dur"] for e in steps)
        found.stages_us["rest of the step"] = inside - sum(found.stages_us.values())
        found.stages_us["between steps"] = found.wall_us - inside
    return found


def render_summary(found: TraceSummary, title: str) -> str:
    """The figures as text, per step."""
    steps = max(found.steps, 1)
    lines = [
        title,
        "",
        f"steps recorded      {found.steps}",
        f"wall time of a step {_us(found.wall_us / steps)}",
    ]
    if found.kernels:
        share = found.device_busy_us / found.wall_us if found.wall_us else 0.0
        launches = sum(entry.calls for entry in found.kernels.values()) / steps
        lines += [
            f"device busy         {_us(found.device_busy_us / steps)}  ({share:.1%} of the wall time)",
            f"kernels and copies  {launches:10.1f} a step",
        ]
    else:
        lines.append("device busy         no kernels: the operators below ran on the CPU")
    lines += ["", "host, microseconds of a step (profiling itself adds to them)"]
    lines += [
        f"  {name.removeprefix('octavo.'):18}{value / steps:12.1f}" for name, value in found.stages_us.items()
    ]
    if found.kernels:
        lines += _table("kernels by time", found.kernels, steps, found.device_busy_us)
    total = sum(entry.time_us for entry in found.operators.values())
    lines += _table("host, by time in the operator or range itself", found.operators, steps, total)
    return "\n".join(lines) + "\n"


def _table(title: str, entries: dict[str, Entry], steps: int, whole: float) -> list[str]:
    ordered = sorted(entries.items(), key=lambda item: -item[1].time_us)
    lines = ["", title, f"  {'us a step':>12}{'share':>8}{'calls a step':>14}{'us a call':>12}  name"]
    for name, entry in ordered[:_TOP]:
        shown = name if len(name) <= _NAME else name[: _NAME - 3] + "..."
        lines.append(
            f"  {entry.time_us / steps:12.1f}{entry.time_us / whole if whole else 0.0:8.1%}"
            f"{entry.calls / steps:14.1f}{entry.time_us / entry.calls:12.1f}  {shown}"
        )
    rest = ordered[_TOP:]
    if rest:
        time = sum(entry.time_us for _, entry in rest)
        calls = sum(entry.calls for _, entry in rest)
        lines.append(
            f"  {time / steps:12.1f}{time / whole if whole else 0.0:8.1%}{calls / steps:14.1f}"
            f"{time / calls:12.1f}  {len(rest)} others"
        )
    return lines


def _us(value: float) -> str:
    return f"{value:10.1f} us"


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _count(entries: dict[str, Entry], name: str, time_us: float) -> None:
    entry = entries.setdefault(name, Entry())
    entry.calls += 1
    entry.time_us += time_us


def _union(spans: Sequence[Span]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def _add_self_times(events: list[dict[str, Any]], entries: dict[str, Entry]) -> None:
    """Add the events of one thread, each without those that lie within it."""
    open_: list[tuple[float, dict[str, Any]]] = []  # end, event
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        begin, end = _span(event)
        while open_ and open_[-1][0] <= begin:
            open_.pop()
        if open_:
            entries[open_[-1][1]["name"]].time_us -= min(event["dur"], open_[-1][0] - begin)
        _count(entries, event["name"], event["dur"])
        open_.append((end, event))
