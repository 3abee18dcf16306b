"""PyTorch's own checkpoint files (`pytorch_model*.bin`): checked as archives, then read without running code.

Format: a ZIP archive of stored (never compressed) members, `data.pkl` among them (torch/serialization.py).
The older formats, a bare pickle and a tar of pickles, cannot be mapped or checked and are refused.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelError, first_line
from octavo.models.safetensors_file import list_indexed
from octavo.models.shards import check_shards

if TYPE_CHECKING:
    import torch

INDEX = "pytorch_model.bin.index.json"
_MAX_MEMBERS = 1 << 18
_MAX_PICKLE = 64 << 20  # names and shapes; a model of 100 thousand tensors has 20 MB
_END, _END64 = b"PK\x05\x06", b"PK\x06\x06"
_REMEDY = "fetch it again, or use safetensors"


def list_bins(folder: Path) -> list[Path]:
    """The `.bin` files of a checkpoint folder, by its index if there is one; may be empty.

    Raises:
        ModelError: the index is malformed, or a file is missing.
    """
    if (folder / INDEX).exists():
        return list_indexed(folder / INDEX)
    files = sorted(folder.glob("pytorch_model*.bin"))
    check_shards(files)
    return files


def load_bin(path: Path) -> dict[str, torch.Tensor]:
    """A file's tensors by name, as views of the mapped file.

    Raises:
        ModelError: another format, a compressed or overlapping member, a pickle that asks for anything but
            tensors, or tensors that are not plain ones; nothing has run then.
    """
    import torch

    check_archive(path)
    try:
        # weights_only: the file holds a pickle, which may otherwise run code.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ModelError(f"{path}: cannot be loaded safely ({first_line(error)[:300]}): {_REMEDY}") from None
    if not isinstance(state, dict):
        raise ModelError(f"{path}: holds {type(state).__name__}, not tensors by name: {_REMEDY}")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{path}: holds {str(name)[:100]!r}, which is not a tensor by name: {_REMEDY}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise ModelError(f"{path}: tensor {name[:100]!r} is not a plain one: {_REMEDY}")
    return state


def check_archive(path: Path) -> None:
    """Refuse an archive that could expand, before anything reads it.

    Raises:
        ModelError: not an archive as `torch.save` writes it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4)[:2] != b"PK":
            raise ModelError(
                f"{path}: not a ZIP archive, as PyTorch writes since 1.6, and older formats cannot be read "
                "safely: convert it to safetensors"
            )
        file.seek(max(0, size - 66000))
        tail = file.read()
    # zipfile makes an object per member: their number is looked at before.
    at = tail.rfind(_END)
    count = struct.unpack_from("<H", tail, at + 10)[0] if 0 <= at <= len(tail) - 22 else 0
    at = tail.rfind(_END64)
    if 0 <= at <= len(tail) - 56:
        count = max(count, struct.unpack_from("<Q", tail, at + 32)[0])
    try:
        if count > _MAX_MEMBERS:
            raise zipfile.BadZipFile(f"{count} members")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise ModelError(f"{path}: truncated or corrupt archive ({error}): {_REMEDY}") from None
    if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
        raise ModelError(f"{path}: holds compressed members, which PyTorch never writes: {_REMEDY}")
    if sum(m.file_size for m in members) > size or len({m.filename for m in members}) != len(members):
        raise ModelError(f"{path}: its members overlap: {_REMEDY}")
    if any(m.filename.endswith(".pkl") and m.file_size > _MAX_PICKLE for m in members):
        raise ModelError(f"{path}: its table of tensors is larger than any model's: {_REMEDY}")
