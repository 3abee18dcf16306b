"""How results are shown and saved, the same for every measurement."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.statistics import finite
from octavo.errors import ConfigError
from octavo.version import __version__

WIDTH = 52

Row = tuple[str, object]


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


def check_writable(path: str | None) -> None:
    """Raises ConfigError now, and not after the measurement, if a result can't be saved."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise ConfigError(f"json={path!r} cannot be written: name a file in a folder that can be written to")


def save(path: str, kind: str, config: dict[str, Any], summary: dict[str, Any], requests: list[Any]) -> None:
    """Write configuration, all figures and one record per request as JSON.

    Raises:
        ConfigError: the file can't be written.
    """
    content = {
        "benchmark": kind,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "octavo": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "config": config,
        "summary": summary,
        "requests": requests,
    }
    try:
        Path(path).write_text(json.dumps(finite(content), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"json={path!r} cannot be written: {error.strerror}") from None
    print(f"octavo: saved {path}", file=sys.stderr)
