"""The lean GGUF reader, against the `gguf` package, and on damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int16("a.i16", -300)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_uint64("a.u64", 1 << 40)
    writer.add_string("a.text", "é 😀")
    writer.add_array("a.strings", ["", "x", "世界"])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_array("a.flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.standard_normal((3, 64)).astype(np.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 5, 32)).astype(np.float16))
    blocks = rng.integers(0, 256, (4, 34 * 2), dtype=np.uint8)
    writer.add_tensor("q8", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_package_reads(sample: Path) -> None:
    ours, theirs = GGUFFile(sample), GGUFReader(sample)
    assert ours.version == 3 and ours.architecture == "llama"
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert fields.keys() == ours.metadata.keys()
    for key, value in fields.items():
        mine = ours.metadata[key]
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == value
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.type_name, mine.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert np.array_equal(ours.data(tensor.name), tensor.data.reshape(-1).view(np.uint8))
    assert ours.tensors["q8"].shape == (4, 64) and ours.tensors["q8"].nbytes == 4 * 68
    assert ours.get("{arch}.block_count", 7) == 7 and ours.get("a.u8") == 200


def test_every_truncation_is_one_clear_error(sample: Path, tmp_path: Path) -> None:
    whole = GGUFFile(sample)
    # Padding may follow the last tensor.
    end = max(tensor.offset + tensor.nbytes for tensor in whole.tensors.values())
    data = sample.read_bytes()
    file = tmp_path / "cut.gguf"
    for size in [*range(0, 700, 13), *range(700, end, 97), end - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(ModelError) as caught:
            GGUFFile(file).tensors  # noqa: B018
        assert "\n" not in str(caught.value) and "cut.gguf" in str(caught.value)


def test_what_is_not_gguf(sample: Path, tmp_path: Path) -> None:
    def error(data: bytes) -> str:
        file = tmp_path / "x.gguf"
        file.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            GGUFFile(file).tensors  # noqa: B018
        return str(caught.value)

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    assert "not a GGUF" in error(b"PK\x03\x04" + bytes(40))
    assert "version 1" in error(b"GGUF" + struct.pack("<I", 1) + bytes(40))
    assert "version" in error(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "truncated" in error(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(40))
    assert "truncated" in error(head + struct.pack("<Q", 1 << 62) + bytes(40))
    key = struct.pack("<Q1s", 1, b"k")
    assert "unknown type 77" in error(head + key + struct.pack("<I", 77) + bytes(8))
    assert "truncated" in error(head + key + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(8))
    assert "truncated" in error(head + key + struct.pack("<IIQ", 9, 6, 1 << 61) + bytes(8))
    assert "UTF-8" in error(head + struct.pack("<Q1s", 1, b"\xff") + struct.pack("<I", 0) + bytes(8))
    with pytest.raises(ModelError, match="nowhere"):
        GGUFFile(tmp_path / "nowhere.gguf")


def test_the_default_models_metadata_takes_no_seconds(default_model: Path) -> None:
    import time

    began = time.process_time()
    file = GGUFFile(default_model)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152 and len(file.tensors) == 272
    # The gguf package's reader takes over five; this one 0.1.
    assert time.process_time() - began < 1.5
