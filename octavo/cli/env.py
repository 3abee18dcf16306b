"""`octavo env`: the hardware and libraries that were found, and what each enables."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.planning.hardware import GpuInfo, Hardware

SUMMARY = "show the hardware and libraries found, and what each enables"

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def run(args: argparse.Namespace) -> int:
    report = collect()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def collect() -> dict[str, Any]:
    """Everything that the command tells, as JSON values. Memory is in bytes."""
    from octavo.planning.hardware import detect
    from octavo.version import __version__

    found = detect()
    return {
        "octavo": __version__,
        "python": found.python,
        "system": found.system,
        "cpu": _cpu(found),
        "memory": {
            "total_bytes": found.memory.total,
            "available_bytes": found.memory.available,
            "limited_by_cgroup": found.memory.limited_by_cgroup,
        },
        "gpus": [_gpu(gpu) for gpu in found.gpus.gpus],
        "gpu_note": found.gpus.note,
        "cuda": found.gpus.cuda_version,
        "compiler": None
        if found.compiler is None
        else {"path": found.compiler.path, "version": found.compiler.version},
        "libraries": found.libraries,
        "default_model": _default_model(),
    }
