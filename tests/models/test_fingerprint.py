"""The digest of a model's weights: as documented, stable, and sensitive."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from octavo.models.fingerprint import PAGE, fingerprint
from octavo.models.gguf_file import GGUFFile
from octavo.models.loader import load_model_config
from octavo.models.locate import ModelSource, find_model
from tests import tiny


def digest_of(path: Path, load_format: str = "auto", seed: int = 0) -> bytes:
    source = find_model(str(path))
    return fingerprint(source, load_model_config(source), load_format, seed)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(tiny.checkpoint("llama"), tmp_path / "model")
    return tmp_path / "model"


def _record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def test_bytes_are_those_of_the_documentation(copy: Path) -> None:
    """Computed again from the docstring, with nothing but hashlib, json and struct."""
    config = load_model_config(find_model(str(copy)))
    fields = asdict(config)
    for name in ("extra", "bos_token_id", "eos_token_ids"):
        del fields[name]
    data = (copy / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__", None)
    pages = b""
    for begin, end in sorted(e["data_offsets"] for e in entries.values()):
        tensor = data[8 + length + begin : 8 + length + end]
        for k in range(4):
            start = k * len(tensor) // 4
            pages += tensor[start : start + 4096]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    records = [b"octavo-weights-1", text, b"model.safetensors"]
    records += [struct.pack("<Q", len(data)), data[8 : 8 + length], pages]
    assert digest_of(copy) == hashlib.sha256(b"".join(map(_record, records))).digest()


def test_same_in_another_process_and_place(copy: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(copy, moved)
    code = (
        "import sys; from octavo.models.fingerprint import fingerprint\n"
        "from octavo.models.loader import load_model_config; from octavo.models.locate import find_model\n"
        "s = find_model(sys.argv[1]); print(fingerprint(s, load_model_config(s), 'auto', 0).hex())\n"
        "assert 'torch' not in sys.modules"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(moved)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert output.stdout.strip() == digest_of(copy).hex()


def test_a_changed_byte_in_any_sampled_page_shows(copy: Path) -> None:
    from octavo.models.safetensors_file import read_header

    before = digest_of(copy)
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    tensors = list(read_header(path).tensors.values())
    assert max(t.nbytes for t in tensors) > 16384 > min(t.nbytes for t in tensors)
    places = [t.offset + k * t.nbytes // 4 + extra for t in tensors[::5] for k, extra in ((0, 0), (3, 60))]
    seen = {before}
    for at in places:
        data[at] ^= 1
        path.write_bytes(data)
        seen.add(digest_of(copy))
        data[at] ^= 1
    assert len(seen) == len(places) + 1
    path.write_bytes(data)
    assert digest_of(copy) == before


def test_config_name_and_header_enter(copy: Path) -> None:
    source = find_model(str(copy))
    config = load_model_config(source)
    before = fingerprint(source, config, "auto", 0)
    assert fingerprint(source, replace(config, rms_norm_eps=1e-4), "auto", 0) != before
    rope = replace(config.rope, theta=config.rope.theta + 1)
    assert fingerprint(source, replace(config, rope=rope), "auto", 0) != before
    assert fingerprint(source, replace(config, eos_token_ids=(5,), extra={}), "auto", 0) == before
    assert fingerprint(source, config, "auto", 1) == before
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    assert fingerprint(source, config, "auto", 0) != before


def test_dummy_is_config_and_seed(copy: Path) -> None:
    first = digest_of(copy, "dummy", 1)
    assert digest_of(copy, "dummy", 1) == first
    assert len({first, digest_of(copy, "dummy", 2), digest_of(copy)}) == 3
    (copy / "model.safetensors").unlink()
    assert digest_of(copy, "dummy", 1) == first


def test_gguf_by_content_not_by_name(tmp_path: Path) -> None:
    path = tiny.gguf_file("llama", tmp_path / "a.gguf", "Q8_0")
    before = digest_of(path)
    other = path.rename(tmp_path / "b.gguf")
    assert digest_of(other) == before
    data = bytearray(other.read_bytes())
    data[GGUFFile(other).tensors["output_norm.weight"].offset] ^= 1
    other.write_bytes(data)
    changed = digest_of(other)
    again = tiny.gguf_file("llama", tmp_path / "c.gguf", "Q8_0", general__name="renamed")
    assert len({before, changed, digest_of(again)}) == 3


def test_large_tensors_are_sampled_not_read(tmp_path: Path) -> None:
    """Of a tensor of 4 MiB just four pages count: cost does not grow with the model."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    config = load_model_config(find_model(str(tiny.checkpoint("llama"))))
    source = ModelSource("folder", folder, "m")
    weight = torch.zeros(1 << 20)
    seen = set()
    for at in (None, 0, (1 << 18) + 5, PAGE // 4 + 1):
        changed = weight.clone()
        if at is not None:
            changed[at] = 1.0
        save_file({"w": changed}, folder / "model.safetensors")
        seen.add(fingerprint(source, config, "auto", 0))
    assert len(seen) == 3  # the last change lies between sampled pages
