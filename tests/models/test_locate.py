"""What a user may name, and what is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from octavo.errors import ModelError
from octavo.models import pull
from octavo.models.locate import ModelSource, find_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    folder, file = str(tmp_path / "m"), str(tmp_path / "x.gguf")
    assert find_model(folder) == ModelSource("folder", tmp_path / "m", folder)
    assert find_model(file) == ModelSource("gguf", tmp_path / "x.gguf", file)


def test_folder_with_one_gguf_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert find_model(str(tmp_path)) == ModelSource("gguf", tmp_path / "x.gguf", str(tmp_path))
    (tmp_path / "y.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="2 GGUF models .x.gguf, y.gguf.: name one of them"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).kind == "folder"


def test_default_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="octavo pull"):
        find_model(None)
    path = cache / "models" / pull.FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    with pytest.raises(ModelError, match="octavo pull"):
        find_model(None)
    monkeypatch.setattr(pull, "FILE_BYTES", 4)
    found = ModelSource("gguf", path, "SmolLM2-135M-Instruct")
    assert find_model(None) == found == find_model("SmolLM2-135M-Instruct")


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "no/such/folder", "nothing.gguf", ""])
def test_nothing_there_names_the_value(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        find_model(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="not a .gguf"):
        find_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match="no config.json"):
        find_model(str(tmp_path))
