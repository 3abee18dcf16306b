"""KV blocks on disk: a store behind the host tier that survives a restart."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.errors import ConfigError
from octavo.kv.block_file import HEADER_BYTES, BlockName, CorruptBlockError, read_block, write_block
from octavo.kv.disk_index import DiskIndex
from octavo.kv.tiers import StoreStats

logger = logging.getLogger(__name__)

GIB = 1 << 30
_READERS, _WRITERS = 4, 2
_REFRESH_SECONDS = 10.0
_WARN_SECONDS = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a read leaves between the times of use of one burst's files, so that their order survives a restart.
_STAMP_STEP_NS = 1000


class DiskStore:
    """A `BlockStore` of one file a block, in a folder that other engines may use at the same time.

    A file a block, because blocks are large (a page of all layers: 0.3 to 4 MiB), so that nothing is gained
    by packing them, and because the file system then does what a format of ours would have to: a block
    appears whole (rename) and vanishes (unlink) while others read it, without locks, whoever does it, and
    room comes back at once. The index in memory is a hint that is brought up to date every ten seconds;
    what counts is whether the file can be read and its checksum is right.

    `size` limits the whole folder, other namespaces (models, KV dtypes) and other engines' blocks included:
    the least recently used of them all go first. Files carry the time of their last use. Of the blocks
    that are read between two calls of `poll`, the first is taken for the most recently used: a chain's
    head outlives its tail, which is worth nothing alone.

    Files are readable by their owner alone: they are as private as the texts they were made from.
    """

    def __init__(
        self,
        folder: str | Path,
        size: int,
        namespace: bytes,
        page: Callable[[int], memoryview],
        page_bytes: int,
    ):
        """Open the store, and list what is there.

        Args:
            folder: made if it isn't there.
            size: bytes that the folder may hold.
            namespace: 32 bytes, the root of the block keys (`ModelFacts.cache_root`).
            page: the memory of a host slot, bytes `[page_bytes]`, writable.
            page_bytes: bytes of a block.

        Raises:
            ConfigError: no folder, or no room for a single block.
        """
        self.folder = Path(folder)
        self.size = size
        self._namespace = namespace
        self._page = page
        file_bytes = HEADER_BYTES + page_bytes
        if size < file_bytes:
            raise ConfigError(
                f"kv_disk_size={size / GIB:g} GiB holds no block of {file_bytes} bytes: raise kv_disk_size"
            )
        self._file_bytes = file_bytes
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"kv_disk_path={str(folder)!r} cannot be made a folder: {error.strerror}: choose another"
            ) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            logger.warning("kv_disk_path %s cannot be written to: its blocks are read only", self.folder)
        self._index = DiskIndex(self.folder)
        missing = size - self._index.num_bytes - shutil.disk_usage(self.folder).free
        if missing > 0:
            logger.warning(
                "kv_disk_size is %.2f GiB more than %s has free", missing / GIB, self.folder
            )  # fmt: skip
        self._stats = StoreStats()
        self._ended: list[tuple[int, bool]] = []
        self._news = threading.Condition()  # guards `_ended`, `_stats` and `_warned`
        self._warned: dict[str, float] = {}
        self._room = threading.Lock()  # guards `_writing`, the bytes of files that are being written
        self._writing = 0
        self._tickets = itertools.count()
        self._burst: list[str] = []  # paths read since the last poll
        self._burst_ns = 0
        self._ranked_ns = 0  # when the first block was written with a rank
        self._readers = ThreadPoolExecutor(_READERS, "kv-read")
        self._writers = ThreadPoolExecutor(_WRITERS, "kv-write")
        self._closing = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="kv-refresh", daemon=True)
        self._refresher.start()

    # ---- BlockStore -----------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """How many the folder may hold, if all are of this size."""
        return self.size // self._file_bytes

    def contains(self, group: int, key: bytes) -> bool:
        """Whether a block seems to be there."""
        return self._name(group, key).path in self._index

    def read(self, group: int, key: bytes, slot: int) -> int:
        """Begin to read a block into a host slot; returns the ticket."""
        name, ticket = self._name(group, key), next(self._tickets)
        if not self._burst:
            self._burst_ns = time.time_ns()
        stamp = self._burst_ns - len(self._burst) * _STAMP_STEP_NS
        self._burst.append(name.path)
        self._readers.submit(self._run, self._read, ticket, name, slot, stamp)
        return ticket

    def write(self, group: int, key: bytes, slot: int, rank: int | None = None) -> int:
        """Begin to write a block from a host slot; returns the ticket."""
        name, ticket = self._name(group, key), next(self._tickets)
        stamp = time.time_ns()
        if rank is not None:
            self._ranked_ns = self._ranked_ns or stamp
            stamp = self._ranked_ns - rank * _STAMP_STEP_NS
        self._writers.submit(self._run, self._write, ticket, name, slot, stamp)
        return ticket

    def poll(self) -> list[tuple[int, bool]]:
        """Tickets that ended since the last call, and whether well."""
        for path in reversed(self._burst):
            self._index.use(path)
        self._burst.clear()
        with self._news:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout: float) -> bool:
        """Block until `poll` has something to say, or `timeout` seconds; returns whether it has."""
        with self._news:
            return self._news.wait_for(lambda: bool(self._ended), timeout)

    def stats(self) -> StoreStats:
        """Counters now."""
        with self._news:
            self._stats.blocks, self._stats.num_bytes = len(self._index), self._index.num_bytes
            return StoreStats(**vars(self._stats))

    def close(self) -> None:
        """Drop what has not begun, wait for the rest, end the threads."""
        self._closing.set()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._refresher.join()

    # ---- threads --------------------------------------------------------------------------------

    def _run(
        self, task: Callable[[BlockName, int, int], bool], ticket: int, name: BlockName, slot: int, stamp: int
    ) -> None:
        good = False
        try:
            good = task(name, slot, stamp)
        except Exception:  # a ticket must end, whatever happens
            logger.exception("the disk tier failed at block %s", name.path)
        with self._news:
            self._ended.append((ticket, good))
            self._news.notify_all()

    def _read(self, name: BlockName, slot: int, stamp: int) -> bool:
        page = self._page(slot)
        path = self.folder / name.path
        try:
            read_block(self.folder, name, page)
        except (CorruptBlockError, OSError) as error:
            corrupt = isinstance(error, CorruptBlockError)
            left = False
            if corrupt:
                self._warn("a KV block on disk is damaged and will be recomputed: %s", error)
                left = not _delete(path)
            elif not isinstance(error, FileNotFoundError):
                self._warn("a KV block cannot be read and will be recomputed: %s", error)
                left = True
            self._index.drop(name.path, broken=left)
            self._count(failed_reads=1, corrupt=int(corrupt))
            return False
        with contextlib.suppress(OSError):  # read-only: the order of use is then forgotten at a restart
            os.utime(path, ns=(stamp, stamp))
        self._count(hits=1, bytes_read=page.nbytes)
        return True

    def _write(self, name: BlockName, slot: int, stamp: int) -> bool:
        if name.path in self._index:
            return True
        page = self._page(slot)
        with self._room:
            self._writing += self._file_bytes
            self._evict(self.size - self._writing)
        try:
            self._index.add(name.path, self._write_file(name, page))
        except OSError as error:
            self._warn("a KV block cannot be written to disk: %s", error)
            self._count(failed_writes=1)
            return False
        finally:
            with self._room:
                self._writing -= self._file_bytes
        with contextlib.suppress(OSError):  # the system's own times are coarser than those that reads leave
            os.utime(self.folder / name.path, ns=(stamp, stamp))
        self._count(written=1, bytes_written=page.nbytes)
        return True

    def _write_file(self, name: BlockName, page: memoryview) -> int:
        try:
            return write_block(self.folder, name, page)
        except OSError as error:
            # Full before the limit, by others' files: blocks of ours make room, one for one.
            if error.errno not in _FULL or not self._evict(self._index.num_bytes - self._file_bytes):
                raise
        return write_block(self.folder, name, page)

    def _evict(self, limit: int) -> int:
        """Delete the least recently used files beyond `limit` bytes; returns how many."""
        taken = self._index.take_oldest(limit)
        for path in taken:
            if not _delete(self.folder / path):
                self._index.drop(path, broken=True)
        if taken:
            self._count(evicted=len(taken))
        return len(taken)

    def _refresh(self) -> None:
        while not self._closing.wait(_REFRESH_SECONDS):
            self._index.refresh()

    # ---- small things ---------------------------------------------------------------------------

    def _name(self, group: int, key: bytes) -> BlockName:
        return BlockName(self._namespace, group, key)

    def _count(self, **more: int) -> None:
        with self._news:
            for counter, value in more.items():
                setattr(self._stats, counter, getattr(self._stats, counter) + value)

    def _warn(self, text: str, error: Exception) -> None:
        """Log, but not the same trouble for every block."""
        now = time.monotonic()
        with self._news:
            if now < self._warned.get(text, now):
                return
            self._warned[text] = now + _WARN_SECONDS
        logger.warning(text, error)


def _delete(path: Path) -> bool:
    """Whether a file is gone now."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
