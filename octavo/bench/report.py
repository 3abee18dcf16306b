"""How results are shown and saved, the same for every measurement."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.bench.statistics import finite
from octavo.errors import ConfigError
from octavo.speculative.synthetic import show_rates
from octavo.version import __version__

WIDTH = 52

Row = tuple[str, object]


@dataclass(frozen=True)
class Report:
    """What a measurement found.

    Attributes:
        kind: its name.
        settings: what was measured, all of it.
        summary: the figures.
        records: one per request, iteration or point.
        text: the figures for people.
        failed: whether there is nothing to go by.
    """

    kind: str
    settings: dict[str, Any]
    summary: dict[str, Any]
    records: list[Any]
    text: str
    failed: bool = False

    def marked(self, synthetic: Sequence[float] | None) -> Report:
        """This report, which tells that drafts stood by chance (`synthetic`: by which rates); None: they
        didn't."""
        if synthetic is None:
            return self
        summary = {"synthetic_acceptance": list(synthetic), **self.summary}
        note = f"note: SYNTHETIC acceptance of drafts, {show_rates(synthetic)}: no text was the model's"
        return replace(self, summary=summary, text=f"{self.text}\n{note}")


def table(title: str, sections: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Named sections of named figures, one a line."""
    lines = [f" {title} ".center(WIDTH, "=")]
    for name, rows in sections:
        if not rows:
            continue
        if name:
            lines.append(name.center(WIDTH, "-"))
        lines += [f"{label}: {_figure(value).rjust(WIDTH - len(label) - 2)}" for label, value in rows]
    return "\n".join([*lines, "=" * WIDTH])


def _figure(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "-"
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.4f}"


def check_writable(path: str | None, name: str = "json") -> None:
    """Raises ConfigError now, and not after the measurement, if a file (option `name`) can't be written."""
    if path is None:
        return
    there = os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
        if not there:
            os.unlink(path)
    except OSError as error:
        raise ConfigError(
            f"{name}={path!r} cannot be written ({error.strerror}): name a file in a folder that can be "
            "written to"
        ) from None


def make_folder(path: str, name: str) -> None:
    """Make a folder for results, if it is not there. Raises ConfigError: it can't be made or written to."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name}={path!r} cannot be written to ({error.strerror}): name a folder that can"
        ) from None


def as_json(report: Report) -> dict[str, Any]:
    """A report as values for JSON, with what ran it and where."""
    content = {
        "benchmark": report.kind,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "octavo": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "config": report.settings,
        "summary": report.summary,
        "requests": report.records,
    }
    return dict(finite(content))  # type: ignore[call-overload]


def save(path: str, report: Report) -> None:
    """Write configuration, all figures and every record as JSON.

    Raises:
        ConfigError: the file can't be written.
    """
    write(path, json.dumps(as_json(report), indent=1) + "\n", "json")


def write(path: str, text: str, name: str) -> None:
    """Write a file that the option `name` asks for, and say so.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}={path!r} cannot be written: {error.strerror}") from None
    print(f"octavo: saved {path}", file=sys.stderr)
