"""An editable install beside a clone of the package's name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_a_script_beside_the_clone_finds_the_package(tmp_path: Path) -> None:
    """Python takes a folder `octavo` in the script's own for the package before it asks an import hook."""
    pytest.importorskip("setuptools", "77")
    clone, site = tmp_path / "octavo", tmp_path / "site"
    (clone / "octavo").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "octavo/version.py"):
        shutil.copy(ROOT / name, clone / name)
    (clone / "octavo" / "__init__.py").write_text("NAME = 'the package'\n")
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    script = tmp_path / "script.py"
    script.write_text(f"import site; site.addsitedir({str(site)!r}); from octavo import NAME; print(NAME)")
    done = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, timeout=60, env={})
    assert done.stdout == "the package\n", done.stderr
