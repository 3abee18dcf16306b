"""Models split over several GGUF files, as llama.cpp's gguf-split writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from octavo.errors import ModelError
from octavo.models.fingerprint import fingerprint
from octavo.models.gguf_file import GGUFFile
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import targets_of
from octavo.models.locate import find_model
from octavo.tokenization.tokenizer import load_tokenizer
from tests import tiny

COUNT = 3


def split(whole: Path, folder: Path, count: int = COUNT, name: str = "m", **changes: int) -> list[Path]:
    """Cut a file by the `gguf` package: metadata in the first part, tensors in turn in all but it.

    `changes` overwrite a key of the last part (`no`, `count`, `tensors`).
    """
    folder.mkdir(exist_ok=True)
    reader = GGUFReader(whole)
    parts = []
    tensors = reader.tensors
    for no in range(count):
        path = folder / f"{name}-{no + 1:05d}-of-{count:05d}.gguf"
        writer = GGUFWriter(path, "llama" if no == 0 else "")
        if no == 0:
            for key, value in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    sub = value.types[-1] if len(value.types) > 1 else None
                    writer.add_key_value(key, value.contents(), value.types[0], sub)
        mine = {"no": no, "count": count, "tensors": len(tensors), **(changes if no == count - 1 else {})}
        writer.add_uint16("split.no", mine["no"])
        writer.add_uint16("split.count", mine["count"])
        writer.add_int32("split.tensors.count", mine["tensors"])
        for tensor in tensors[no - 1 :: count - 1] if no else []:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(path)
    return parts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gguf_file("llama", tmp_path_factory.mktemp("whole") / "whole.gguf", "Q8_0")


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    return split(whole, tmp_path / "parts")


def weights(name: Path) -> dict[str, torch.Tensor]:
    source = find_model(str(name))
    config = load_model_config(source)
    pairs = iterate_weights(source, config, targets_of(config), "auto", torch.float32, "cpu", progress=False)
    return dict(pairs)


def test_any_part_and_the_folder_stand_for_all(whole: Path, parts: list[Path]) -> None:
    expected, tokenizer = weights(whole), load_tokenizer(whole)
    text = "An octavo has 8 leaves."
    for name in (*parts, parts[0].parent):
        found = weights(name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        source = find_model(str(name))
        assert load_model_config(source).num_layers == load_model_config(find_model(str(whole))).num_layers
        assert load_tokenizer(source.path).encode(text) == tokenizer.encode(text)


def test_fingerprint_is_of_all_parts(whole: Path, parts: list[Path]) -> None:
    def digest(path: Path) -> bytes:
        source = find_model(str(path))
        return fingerprint(source, load_model_config(source), "auto", 0)

    first = digest(parts[0])
    assert digest(parts[2]) == first == digest(parts[0].parent)
    data = bytearray(parts[2].read_bytes())
    tensor = next(t for t in GGUFFile(parts[0]).tensors.values() if t.path == parts[2])
    data[tensor.offset] ^= 1
    parts[2].write_bytes(data)
    assert digest(parts[0]) != first


def error_of(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        weights(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_faults_are_named(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "a")
    parts[1].unlink()
    assert "m-00002-of-00003.gguf: missing" in error_of(parts[0])
    assert "m-00002-of-00003.gguf: missing" in error_of(parts[2])

    parts = split(whole, tmp_path / "b")
    parts[2].write_bytes(parts[1].read_bytes())
    assert "m-00003-of-00003.gguf: is part 2 of 3" in error_of(parts[0])

    parts = split(whole, tmp_path / "c", tensors=7)
    assert "of a model of 7 tensors, not part 3 of 3" in error_of(parts[0])

    parts = split(whole, tmp_path / "d")
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    assert "part 1 of 3 of a model, which its name doesn't say" in error_of(renamed)

    parts = split(whole, tmp_path / "e", count=2)
    other = split(whole, tmp_path / "f", count=3)
    parts[1].write_bytes(other[1].read_bytes())
    assert "is part 2 of 3" in error_of(parts[0])


def test_several_models_in_a_folder(whole: Path, parts: list[Path]) -> None:
    (parts[0].parent / "other.gguf").write_bytes(whole.read_bytes())
    assert "2 GGUF models" in error_of(parts[0].parent)
