"""Which block files a folder holds, least recently used first: found by listing it, again and again."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict, defaultdict
from pathlib import Path

from octavo.kv.block_file import TEMPORARY

_NAME = re.compile(r"[0-9a-f]{2,64}\.\d{1,6}")
_NAMESPACE, _PART = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{2}")
# A file that is still being written is younger than this; an older one was left by a process that died.
_ABANDONED_SECONDS = 3600.0


class DiskIndex:
    """Paths (relative to the folder) and sizes of all namespaces' block files. Safe to use from threads.

    What it says is a hint, since others may add and drop files at any time; `refresh` takes their changes
    in, at the price of one `stat` for each subfolder that nobody changed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._in_part: defaultdict[str, set[str]] = defaultdict(set)
        self._listed: dict[str, int] = {}  # subfolder -> the change time that it was listed at
        self._broken: set[str] = set()  # files that are wrong and could not be deleted
        self._lock = threading.Lock()
        self.refresh()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, path: str) -> bool:
        return path in self._sizes

    def add(self, path: str, size: int) -> None:
        """A file was written: the most recently used one now."""
        with self._lock:
            self._broken.discard(path)
            self._add(path, size)

    def drop(self, path: str, broken: bool = False) -> None:
        """A file is gone, or is wrong and cannot be deleted."""
        with self._lock:
            self._drop(path)
            if broken:
                self._broken.add(path)

    def use(self, path: str) -> None:
        """A file is the most recently used one now."""
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)

    def take_oldest(self, limit: int) -> list[str]:
        """Take out the least recently used files until at most `limit` bytes are left; returns them."""
        taken = []
        with self._lock:
            while self.num_bytes > limit and self._sizes:
                path = next(iter(self._sizes))
                self._drop(path)
                taken.append(path)
        return taken

    def refresh(self) -> None:
        """Take in what others added and dropped; delete what writers that died left behind."""
        found: list[tuple[int, str, int]] = []
        for part in self._parts():
            with contextlib.suppress(OSError):
                found += self._list(part)
        found.sort()  # by the time of their last use, which files keep as their own
        with self._lock:
            for _, path, size in found:
                if path not in self._broken and path not in self._sizes:
                    self._add(path, size)

    def _parts(self) -> list[str]:
        """Subfolders that hold files, relative to the folder."""
        parts = []
        for namespace in _folders(self.folder, _NAMESPACE):
            parts += [f"{namespace}/{part}" for part in _folders(self.folder / namespace, _PART)]
        return parts

    def _list(self, part: str) -> list[tuple[int, str, int]]:
        """(time of last use, path, size) of a subfolder's files that are new; what is gone is dropped."""
        changed = os.stat(self.folder / part).st_mtime_ns
        if self._listed.get(part) == changed:
            return []
        found, seen, unfinished = [], set(), False
        with os.scandir(self.folder / part) as entries:
            for entry in entries:
                path = f"{part}/{entry.name}"
                if entry.name.endswith(TEMPORARY):
                    unfinished = True
                    _delete_abandoned(entry)
                elif _NAME.fullmatch(entry.name):
                    seen.add(path)
                    if path not in self._sizes:
                        with contextlib.suppress(OSError):  # dropped meanwhile
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime_ns, path, status.st_size))
        with self._lock:
            gone = self._in_part[part] - seen
        for path in gone:
            if not os.path.lexists(self.folder / path):  # else it was written while the folder was listed
                self.drop(path)
        if unfinished:  # looked at again, until it is done or its writer is known to have died
            self._listed.pop(part, None)
        else:
            self._listed[part] = changed
        return found

    def _add(self, path: str, size: int) -> None:
        self._drop(path)
        self._sizes[path] = size
        self._in_part[path.rpartition("/")[0]].add(path)
        self.num_bytes += size

    def _drop(self, path: str) -> None:
        size = self._sizes.pop(path, None)
        if size is not None:
            self._in_part[path.rpartition("/")[0]].discard(path)
            self.num_bytes -= size


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [e.name for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _delete_abandoned(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
            os.unlink(entry.path)
