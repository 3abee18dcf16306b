"""The environment of processes that run a module of ours."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment(**more: str) -> dict[str, str]:
    """This process's, in which Python finds the package where this one found it; and what is given."""
    package = str(Path(__file__).parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}
