"""Print constraints.txt: the exact version of everything installed beside this interpreter.

No paths, no addresses, no build tags (`2.13.0+cpu` is written `2.13.0`, so that the file fits any
build of PyTorch). A package whose release needs a newer Python than Octavo's oldest is pinned from
there on, and left to pip below. Triton is left out: PyTorch's CUDA build demands a version of its own.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

OLDEST = (3, 10)
LEFT_OUT = {"octavo", "pip", "triton"}
HEADER = """\
# Exact versions that `make` and CI use, written by `make constraints` (tools/write_constraints.py).
# A user's `pip install octavo` is bound by pyproject.toml's ranges only.
"""


def lowest_python(requires: str | None) -> tuple[int, int]:
    """The `>=3.N` of a Requires-Python, or the oldest version that Octavo supports."""
    found = re.search(r">=\s*3\.(\d+)", requires or "")
    return max(OLDEST, (3, int(found.group(1)))) if found else OLDEST


def main() -> None:
    lines = []
    for dist in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower()
        if name in LEFT_OUT:
            continue
        low = lowest_python(dist.metadata["Requires-Python"])
        marker = "" if low == OLDEST else f"; python_version >= '{low[0]}.{low[1]}'"
        lines.append(f"{name}=={dist.version.partition('+')[0]}{marker}")
    sys.stdout.write(HEADER + "\n".join(sorted(set(lines))) + "\n")


if __name__ == "__main__":
    main()
