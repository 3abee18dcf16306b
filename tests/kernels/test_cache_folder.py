"""Where the cache is, by the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.kernels.cache_folder import cache_folder
from octavo.kernels.cpu import build
from octavo.models import pull


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "own"))
    assert cache_folder("models") == tmp_path / "own" / "models"
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_folder("models") == tmp_path / "xdg" / "octavo" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("models") == tmp_path / "home" / ".cache" / "octavo" / "models"


def test_models_and_kernels_are_in_one_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where a settings file, which no shell has expanded, names the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OCTAVO_CACHE", "~/own")
    monkeypatch.setattr(build, "_run", lambda command: "a compiler")
    assert pull.default_model_path().parent == tmp_path / "own" / "models"
    assert build.library_path("cc").parent.parent == tmp_path / "own" / "kernels"
