"""The file of one KV block on disk: written whole or not at all, and checked when it is read.

All numbers are little-endian:

| bytes | |
|---|---|
| 8 | magic `OCTAVOKV` |
| u32 | version, 1 |
| u32 | KV group |
| 32 | namespace: the root of the block keys, a digest of all that makes KV values |
| u32 | length of the key |
| 32 | the block's key, zeros behind it |
| u64 | length of the payload |
| 20 | zeros |
| 16 | XXH3-128 of the 112 bytes above and of the payload: against accidents, not against forgers |
| … | payload: the block as it lies in its host slot |

Nothing in a file is code, and nothing of it is believed before the checksum was right.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

_HEAD = struct.Struct("<8sII32sI32sQ20x")
_MAGIC, _VERSION, _DIGEST = b"OCTAVOKV", 1, 16
HEADER_BYTES = _HEAD.size + _DIGEST
TEMPORARY = ".part"  # a file that is being written; never read
_numbers = itertools.count()


class CorruptBlockError(Exception):
    """A file that is not what its name says: damaged, cut short, or another's."""


@dataclass(frozen=True)
class BlockName:
    """Which block a file holds."""

    namespace: bytes
    group: int
    key: bytes

    @property
    def path(self) -> str:
        """Where it lies in the store's folder: `<namespace>/<first byte of the key>/<key>.<group>`, in hex.

        256 folders a namespace keep each small enough to be listed often.
        """
        digits = self.key.hex()
        return f"{self.namespace.hex()[:32]}/{digits[:2]}/{digits}.{self.group}"

    def header(self, payload: memoryview) -> bytes:
        """The bytes in front of `payload`."""
        head = _HEAD.pack(
            _MAGIC, _VERSION, self.group, self.namespace, len(self.key), self.key, payload.nbytes
        )
        digest = xxhash.xxh3_128(head)
        digest.update(payload)
        return head + digest.digest()


def write_block(folder: Path, name: BlockName, payload: memoryview) -> int:
    """Put a block's file in its place; returns its bytes.

    It is written under another name and renamed, so that no reader meets half of it, nor finds half of it
    after the process died. It isn't forced to the disk first: what a power failure tears, the checksum
    finds, and a cache may lose blocks.

    Raises:
        OSError: full, read-only, gone. Nothing is left behind, as far as the disk allows.
    """
    final = folder / name.path
    temporary = final.with_name(f"{final.name}.{os.getpid()}.{next(_numbers)}{TEMPORARY}")
    header = name.header(payload)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file = os.open(temporary, flags, 0o600)
    except FileNotFoundError:
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(temporary, flags, 0o600)
    try:
        try:
            _write_all(file, header, payload)
        finally:
            os.close(file)
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return len(header) + payload.nbytes


def _write_all(file: int, header: bytes, payload: memoryview) -> None:
    written = os.writev(file, [header, payload])
    if written < len(header):
        raise OSError(f"{written} bytes of a header were written")
    rest = payload[written - len(header) :]
    while rest:
        rest = rest[os.write(file, rest) :]


def read_block(folder: Path, name: BlockName, payload: memoryview) -> None:
    """Read a block's file into `payload`, and check it.

    Raises:
        OSError: it cannot be read.
        CorruptBlockError: it was read and is wrong; `payload` then holds garbage.
    """
    path = folder / name.path
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if size != HEADER_BYTES + payload.nbytes:
            raise CorruptBlockError(f"{path} has {size} bytes, not {HEADER_BYTES + payload.nbytes}")
        header = os.read(file, HEADER_BYTES)
        rest = payload
        while rest:
            read = os.readv(file, [rest])
            if read == 0:
                raise CorruptBlockError(f"{path} ends early")
            rest = rest[read:]
    finally:
        os.close(file)
    if header != name.header(payload):
        raise CorruptBlockError(f"the checksum of {path} is wrong")
