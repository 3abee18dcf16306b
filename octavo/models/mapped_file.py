"""Files mapped into memory: pages are asked for before they are touched and given back after.

A page that is touched before it is there stops its reader for one small read of the disk; a range
that is asked for comes in large ones (`MADV_POPULATE_READ`, Linux 5.14 and later: without it pages
come as they are touched). Pages of a mapping count in the process's resident memory until they are
given back (`MADV_DONTNEED`); the system's page cache keeps them, so that giving back too early costs
no read. See madvise(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from octavo.errors import ModelError

_DONTNEED = 4
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_EHWPOISON = 133  # which the errno module does not know
PAGE = mmap.PAGESIZE
_TOUCH_BYTES = 32 << 20
_ANNOUNCED = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """madvise(2) on whole pages; 0 or the error number. The interpreter's lock is free meanwhile."""
    done: int = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return ctypes.get_errno() if done else 0


def populate(address: int, nbytes: int) -> int:
    """Bring mapped bytes into memory, the pages at both ends included; 0 or an error number."""
    start = address // PAGE * PAGE
    return _advise(start, address + nbytes - start, _POPULATE_READ) if nbytes else 0


def give_back(address: int, nbytes: int) -> None:
    """Let go of the whole pages among file-mapped, unmodified bytes. Touching them again reads them again."""
    start = -(-address // PAGE) * PAGE
    end = (address + nbytes) // PAGE * PAGE
    if end > start:
        _advise(start, end - start, _DONTNEED)


def release_freed() -> None:
    """Let the allocator return what was freed to the system (glibc's, which keeps it in each thread's own
    heap; of others nothing is asked)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextlib.contextmanager
def touched_ahead(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside the block a thread makes the system provide the memory of tensors that will be written.

    Memory that was only asked for comes at the first touch, 4 KiB each time, which on one core is slower
    than a fast disk; here it comes ahead, and on another core. What is written meanwhile stays.
    """
    pending = [t for t in tensors if t.device.type == "cpu" and t.is_contiguous()]
    stop = threading.Event()

    def touch() -> None:
        for tensor in pending:
            start, end = tensor.data_ptr() // PAGE * PAGE, tensor.data_ptr() + tensor.nbytes
            for address in range(start, end, _TOUCH_BYTES):
                if stop.is_set() or _advise(address, min(_TOUCH_BYTES, end - address), _POPULATE_WRITE):
                    return

    thread = threading.Thread(target=touch, name="octavo-touch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class MappedFile:
    """A file's bytes, mapped privately: read on touch, never written back.

    Attributes:
        data: uint8 `[size]`; not to be written.

    Raises:
        ModelError: it cannot be opened.
    """

    def __init__(self, path: Path, size: int):
        self.path = path
        self.size = size
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}): give a readable file") from None
        self.data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self.address = self.data.data_ptr()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._file)

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]` from `offset` on: a view."""
        return self.data[offset : offset + nbytes]

    def announce(self, offset: int, nbytes: int) -> None:
        """Let the system start to read bytes that will be wanted soon; doesn't wait for them."""
        with contextlib.suppress(OSError):  # a hint
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring bytes into memory.

        Raises:
            ModelError: the disk or the file system could not read them, or the file has shrunk.
        """
        error = populate(self.address + offset, nbytes)
        if error in (errno.EFAULT, errno.EIO, _EHWPOISON):
            raise ModelError(
                f"{self.path}: bytes {offset} to {offset + nbytes} cannot be read: check the disk, and that "
                "nothing writes the file meanwhile"
            )

    def give_back(self, offset: int, nbytes: int) -> None:
        """Let go of bytes' pages."""
        give_back(self.address + offset, nbytes)

    @contextlib.contextmanager
    def reading(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        """`bytes`, in memory inside the block and let go after it; what follows them is announced.

        Raises:
            ModelError: as `populate`.
        """
        self.announce(offset + nbytes, _ANNOUNCED)
        self.populate(offset, nbytes)
        try:
            yield self.bytes(offset, nbytes)
        finally:
            self.give_back(offset, nbytes)
