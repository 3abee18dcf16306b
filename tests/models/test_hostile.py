"""Files that somebody made to do harm: one clear line, in bounded memory and time, and nothing runs.

Cases that could take memory run in a process of their own whose address space is limited to little more
than what Python needs, so that a reader that believes the file dies instead of passing.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ModelError
from octavo.models.bin_file import load_bin
from octavo.models.gguf_file import GGUFFile
from octavo.models.json_file import read_json
from octavo.models.locate import find_model
from octavo.models.safetensors_file import INDEX, list_files, read_header
from tests import tiny

ROOT = Path(__file__).parents[2]
LIMIT = 1 << 30
SECONDS = 30  # on a machine that does other things beside; none takes more than 3 alone

READERS = {
    "safetensors": "from octavo.models.safetensors_file import read_header as read",
    "gguf": "from octavo.models.gguf_file import GGUFFile\nread = lambda path: GGUFFile(path).tensors",
    "json": "from octavo.models.json_file import read_json as read",
}


def error_of(read: Any, *args: Any) -> str:
    with pytest.raises(ModelError) as caught:
        read(*args)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def error_under_limit(kind: str, path: Path) -> str:
    """The message of a ModelError raised by a reader in a process with `LIMIT` of address space."""
    code = (
        f"{READERS[kind]}\nimport sys; from pathlib import Path; from octavo.errors import ModelError\n"
        "try: read(Path(sys.argv[1]))\nexcept ModelError as error: print(error)"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - began < SECONDS
    assert done.stdout.count("\n") == 1
    return done.stdout


# ---- safetensors --------------------------------------------------------------------------------------


def safetensors(
    path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None
) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


HUGE = 1 << 62


@pytest.mark.parametrize(
    "header, words",
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, "'b' overlaps another"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, "overlaps another"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, "leaves a gap"),
        ({"a": entry(4, 8)}, "leaves a gap"),
        ({"a": entry(0, 1 << 44, [1 << 42])}, "truncated"),
        ({"a": entry(0, 16, [-1, -4])}, "no possible shape"),
        ({"a": entry(0, 16, [True, 4])}, "no possible shape"),
        ({"a": entry(0, 16, [4.0])}, "no possible shape"),
        ({"a": entry(0, 4, [HUGE, HUGE, HUGE])}, "no possible shape"),
        ({"a": entry(0, 4, [1] * 9)}, "no possible shape"),
        ({"a": entry(0, 4, [1 << 47] * 8)}, "size of tensor 'a' is wrong"),
        ({"a": entry(0, 12, [4])}, "size of tensor 'a' is wrong"),
        ({"a": entry(-4, 0)}, "no possible place"),
        ({"a": entry(8, 4, [1])}, "no possible place"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, "no possible place"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "corrupt"),
        ({"a": entry(0, 4, dtype="PICKLE")}, "unknown type"),
        ({"a": entry(0, 4, dtype=["F32"])}, "corrupt"),
        ({"a": []}, "corrupt"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"__metadata__": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}', "corrupt"),
        (b'[{"a": 1}]', "list, not a JSON object"),
        (b"\xff\xfe{}", "corrupt"),
        (b"{}" + b"\0" * 6, "corrupt"),
    ],
)
def test_headers_of_safetensors(header: Any, words: str, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", header, bytes(16))
    assert words in error_of(read_header, path)


def test_a_header_of_terabytes_is_not_read(tmp_path: Path) -> None:
    for length in (1 << 44, (1 << 64) - 1, 1 << 63, 0, 1):
        path = safetensors(tmp_path / "x.safetensors", b"{}", bytes(64), length)
        assert "truncated or not a safetensors file" in error_of(read_header, path)
    with path.open("r+b") as file:  # sparse: as long as it claims
        file.write(struct.pack("<Q", 1 << 36))
        file.truncate(1 << 37)
    assert "truncated or not a safetensors file" in error_under_limit("safetensors", path)


@pytest.mark.parametrize("kind", ["names", "lists", "dimensions"])
def test_headers_of_100_megabytes(kind: str, tmp_path: Path) -> None:
    """As large as the format allows: of tensors without bytes, of empty lists, of one shape."""
    size = 99_000_000
    if kind == "names":
        one = '"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        raw = ("{" + ",".join(one % i for i in range(size // 60)) + "}").encode()
    elif kind == "lists":
        raw = b'{"__metadata__":[' + b"[]," * (size // 3) + b"[]]}"
    else:
        raw = b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"9," * (size // 2) + b"0]}}"
    path = safetensors(tmp_path / "x.safetensors", raw)
    assert "values, more than" in error_under_limit("safetensors", path)


def test_a_long_product_of_dimensions_takes_no_time(tmp_path: Path) -> None:
    shape = b"999999999," * 300_000 + b"1"
    raw = b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[' + shape + b"]}}"
    began = time.process_time()
    assert "no possible shape" in error_of(
        read_header, safetensors(tmp_path / "x.safetensors", raw, bytes(4))
    )
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a/../../b.safetensors", "..\\x", "a\0b", "sub/x"],
)
def test_an_index_that_leads_out(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    assert "no file of this folder" in error_of(list_files, tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", 3])
def test_an_index_without_a_map(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "has no weight_map" in error_of(list_files, tmp_path)


def test_a_shard_that_is_a_link_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to("../elsewhere.safetensors")
    assert "a link to" in error_of(find_model, str(folder))


# ---- JSON ---------------------------------------------------------------------------------------------


def test_json_bombs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"[" * 1_000_000)
    assert "nested too deeply" in error_of(read_json, path)
    path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    assert "nested too deeply" in error_of(read_json, path)
    path.write_bytes(b'{"a":[' + b"{}," * 20_000_000 + b"1]}")
    assert "values, more than" in error_under_limit("json", path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "bytes of JSON" in error_under_limit("json", path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": (1 << 31) - 1},
        {"hidden_size": 1 << 30, "num_attention_heads": 4, "head_dim": 1 << 28},
        {"vocab_size": (1 << 31) - 1, "hidden_size": 1 << 30, "head_dim": 16},
        {"intermediate_size": (1 << 31) - 1, "hidden_size": (1 << 31) - 4, "head_dim": (1 << 31) - 2},
        {"num_attention_heads": 1 << 30, "num_key_value_heads": 1 << 30, "head_dim": 1 << 30},
    ],
    ids=lambda c: next(iter(c)),
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(
    changes: dict[str, int], tmp_path: Path
) -> None:
    from octavo import LLM
    from octavo.errors import OctavoError

    shutil.copytree(tiny.checkpoint("llama"), tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**raw, **changes}))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for load_format in ("auto", "dummy"):
        with pytest.raises(OctavoError) as caught:
            LLM(str(tmp_path / "m"), load_format=load_format, skip_tokenizer_init=True)
        assert "\n" not in str(caught.value)
    assert time.process_time() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


# ---- GGUF ---------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(path: Path, keys: list[bytes], tensors: list[bytes] = [], tail: bytes = b"", **counts: int) -> Path:  # noqa: B006
    count = {"num_tensors": len(tensors), "num_keys": len(keys), **counts}
    head = b"GGUF" + struct.pack("<IQQ", 3, count["num_tensors"], count["num_keys"])
    path.write_bytes(head + b"".join(keys) + b"".join(tensors) + tail)
    return path


def u32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    number = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", number, *dims, kind, offset)


ALIGN = "general.alignment"


@pytest.mark.parametrize(
    "keys, tensors, counts, words",
    [
        ([], [], {"num_tensors": 1 << 60}, "truncated"),
        ([], [], {"num_keys": 1 << 60}, "truncated"),
        ([], [], {"num_keys": (1 << 64) - 1}, "truncated"),
        ([struct.pack("<Q", 1 << 63) + b"x"], [], {}, "truncated"),
        ([text("k") + struct.pack("<IQ", 8, 1 << 63)], [], {}, "truncated"),
        ([text("k") + struct.pack("<IIQ", 9, 8, 10**12)], [], {}, "truncated"),
        ([text("k") + struct.pack("<IIQ", 9, 4, 10**12)], [], {}, "truncated"),
        ([text("k") + struct.pack("<IIQ", 9, 7, (1 << 64) - 1)], [], {}, "truncated"),
        ([text("k") + struct.pack("<IIQ", 9, 9, 1)], [], {}, "an array holds arrays"),
        ([text("k") + struct.pack("<IIQ", 9, 9, 1) * 1000], [], {}, "an array holds arrays"),
        ([u32("k", 1), u32("k", 2)], [], {}, "two metadata keys are 'k'"),
        ([u32(ALIGN, 0)], [tensor("a", [4])], {}, "general.alignment is 0"),
        ([u32(ALIGN, 33)], [tensor("a", [4])], {}, "general.alignment is 33"),
        ([u32(ALIGN, 1 << 31)], [tensor("a", [4])], {}, "general.alignment"),
        ([text(ALIGN) + struct.pack("<I", 8) + text("32")], [tensor("a", [4])], {}, "general.alignment"),
        ([], [tensor("a", [4]), tensor("a", [4], offset=32)], {}, "two tensors are named 'a'"),
        ([], [tensor("a", [16]), tensor("b", [16], offset=32)], {}, "overlaps another"),
        ([], [tensor("a", [4], offset=8)], {}, "not aligned"),
        ([], [tensor("a", [4], offset=1 << 63)], {}, "truncated"),
        ([], [tensor("a", [1 << 62] * 4)], {}, "truncated"),
        ([], [tensor("a", [4], num_dims=(1 << 32) - 1)], {}, "4294967295 dimensions"),
        ([], [tensor("a", [4], kind=4_000_000_000)], {}, "unknown GGML type"),
        ([], [tensor("a", [33], kind=8)], {}, "not a multiple of 32"),
    ],
)
def test_gguf_headers(
    keys: list[bytes], tensors: list[bytes], counts: dict[str, int], words: str, tmp_path: Path
) -> None:
    path = gguf(tmp_path / "x.gguf", keys, tensors, bytes(256), **counts)
    assert words in error_of(lambda: GGUFFile(path).tensors)


def test_gguf_metadata_that_fills_a_large_file(tmp_path: Path) -> None:
    """Not a lie: as many strings, keys or tensors as there is room for, in a file of its size."""
    path = tmp_path / "x.gguf"
    strings = 30_000_000
    gguf(path, [text("k") + struct.pack("<IIQ", 9, 8, strings)])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + strings * 8)  # zeros: empty strings
    assert "strings in its metadata" in error_under_limit("gguf", path)
    gguf(path, [], num_keys=20_000_000)
    with path.open("r+b") as file:
        file.truncate(1 << 29)
    assert "more than any model's" in error_under_limit("gguf", path)
    gguf(path, [], num_tensors=5_000_000)
    with path.open("r+b") as file:
        file.truncate(1 << 29)
    assert "more than any model's" in error_under_limit("gguf", path)
    gguf(path, [text("k") + struct.pack("<IIQ", 9, 0, 500_000_000)])
    with path.open("r+b") as file:
        file.truncate(600_000_000)
    assert "bytes of metadata" in error_under_limit("gguf", path)


def test_gguf_values_of_the_wrong_kind(tmp_path: Path) -> None:
    path = gguf(tmp_path / "x.gguf", [u32("general.architecture", 3)])
    assert "general.architecture is missing" in error_of(lambda: GGUFFile(path).architecture)
    path = gguf(tmp_path / "x.gguf", [text("split.count") + struct.pack("<I", 8) + text("many")])
    assert "split.count is 'many'" in error_of(GGUFFile, path)
    path = gguf(tmp_path / "m-00001-of-99999.gguf", [u32("split.count", 99999)])
    assert "m-00002-of-99999.gguf: missing" in error_of(GGUFFile, path)
    path = gguf(tmp_path / "x.gguf", [u32("split.count", 4_000_000_000)])
    assert "split.count" in error_of(GGUFFile, path)


# ---- PyTorch's own files ------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch " + str(TRACE),)


TRACE = Path(tempfile.gettempdir()) / f"octavo-test-trace-{os.getpid()}"


@pytest.fixture(autouse=True)
def nothing_ran() -> Any:
    TRACE.unlink(missing_ok=True)
    yield
    ran = TRACE.exists()
    TRACE.unlink(missing_ok=True)
    assert not ran


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    import pickle
    import tarfile

    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": Evil()}, path)
    assert "cannot be loaded safely" in error_of(load_bin, path)
    path.write_bytes(pickle.dumps({"w": Evil()}))
    assert "not a ZIP archive" in error_of(load_bin, path)
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert "not a ZIP archive" in error_of(load_bin, path)
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "pickle")
    assert "not a ZIP archive" in error_of(load_bin, path)
    path.write_bytes(b"")
    assert "not a ZIP archive" in error_of(load_bin, path)


def test_what_is_not_plain_tensors_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    for value, words in (
        ([torch.zeros(2)], "holds list"),
        ({"step": 3}, "not a tensor by name"),
        ({3: torch.zeros(2)}, "not a tensor by name"),
        ({"w": torch.zeros(3, 3).to_sparse()}, "not a plain one"),
        ({"w": torch.empty(1 << 40, device="meta")}, "not a plain one"),
    ):
        torch.save(value, path)
        assert words in error_of(load_bin, path)
    torch.save({"w": torch.ones(2).expand(1 << 40, 2)}, path)  # small in the file, and in memory
    assert load_bin(path)["w"].shape == (1 << 40, 2)


def rezip(source: Path, target: Path, compression: int = zipfile.ZIP_STORED, **extra: bytes) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        for name, data in extra.items():
            new.writestr(name, data)


def test_zip_bombs(tmp_path: Path) -> None:
    good, path = tmp_path / "good.bin", tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(1 << 20)}, good)
    assert load_bin(good)["w"].shape == (1 << 20,)
    rezip(good, path, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 16
    assert "compressed members" in error_of(load_bin, path)

    # Many members over the same bytes.
    data = good.read_bytes()
    end = data.rfind(b"PK\x05\x06")
    size, start = struct.unpack_from("<II", data, end + 12)
    if start == 0xFFFFFFFF:  # PyTorch writes the 64-bit form
        end64 = data.rfind(b"PK\x06\x06")
        size, start = struct.unpack_from("<QQ", data, end64 + 40)
    table = data[start : start + size]
    count = 1000
    tail = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(table) * count, start, 0)
    path.write_bytes(data[:start] + table * count + tail)
    assert "overlap" in error_of(load_bin, path) or "corrupt archive" in error_of(load_bin, path)

    tail = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 1 << 40, 1 << 40, 1 << 44, 0)
    path.write_bytes(data[:start] + wide + struct.pack("<IIQI", 0x07064B50, 0, start, 1) + tail)
    assert "corrupt archive (1099511627776 members)" in error_of(load_bin, path)

    path.write_bytes(data[: len(data) // 2])
    assert "corrupt archive" in error_of(load_bin, path)


# ---- a checkpoint's own code --------------------------------------------------------------------------


def test_custom_code_is_never_run(tmp_path: Path) -> None:
    """A checkpoint that asks for its own classes, of a family that Octavo knows, and of one it doesn't."""
    from octavo import LLM, SamplingParams
    from octavo.errors import OctavoError

    folder = tmp_path / "m"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    poison = f"import os\nos.system('touch {TRACE}')\nclass X: pass\n"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(poison)
    auto_map = {
        "AutoConfig": "configuration_x.X",
        "AutoModelForCausalLM": "modeling_x.X",
        "AutoTokenizer": ["tokenization_x.X", None],
    }
    for file in ("config.json", "tokenizer_config.json"):
        raw = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**raw, "auto_map": auto_map}))
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        out = llm.generate({"prompt_token_ids": tiny.PROMPTS[0]}, params, use_tqdm=False)
    assert list(out[0].outputs[0].token_ids) == tiny.greedy("llama", 0)[:4]
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**raw, "architectures": ["XForCausalLM"], "model_type": "x"})
    )
    with pytest.raises(OctavoError):
        LLM(str(folder))
    with pytest.raises(OctavoError):
        LLM(str(folder), trust_remote_code=True)
