"""Where what is fetched or built once is kept for later."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Folder `name` in $OCTAVO_CACHE (in which ~ is the home folder), or in `octavo` of the user's caches."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser() / name
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / name
