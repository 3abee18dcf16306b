"""The disk tier: round trips, restarts, limits, two engines on one folder, and the faults a disk can have."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kv import block_file, disk_store
from octavo.kv.block_file import HEADER_BYTES, TEMPORARY, BlockName
from octavo.kv.disk_index import DiskIndex
from octavo.kv.disk_store import DiskStore

PAGE, SLOTS = 4096, 16
FILE = PAGE + HEADER_BYTES
ROOT, OTHER = b"r" * 32, b"o" * 32


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


class Bench:
    """A store with host slots of its own."""

    def __init__(self, folder: Path, blocks: int = 100, namespace: bytes = ROOT):
        self.memory = np.random.default_rng(0).integers(0, 256, (SLOTS, PAGE), np.uint8)
        self.store = DiskStore(
            folder, blocks * FILE, namespace, lambda slot: memoryview(self.memory[slot]), PAGE
        )

    def finish(self, *tickets: int) -> list[bool]:
        """Whether each ticket ended well."""
        ended: dict[int, bool] = {}
        limit = time.monotonic() + 20
        while not set(tickets) <= set(ended):
            assert time.monotonic() < limit, "tickets did not end"
            self.store.wait(0.05)
            ended.update(self.store.poll())
        return [ended[ticket] for ticket in tickets]

    def put(self, number: int, group: int = 0, slot: int = 0) -> bool:
        """Write block `number`, whose bytes are a function of it."""
        self.memory[slot] = content(number)
        return self.finish(self.store.write(group, key(number), slot))[0]

    def holds(self, number: int, group: int = 0) -> bool:
        """Whether the block can be read; if so its bytes are right."""
        self.memory[-1] = 0
        good = self.finish(self.store.read(group, key(number), SLOTS - 1))[0]
        if good:
            assert (self.memory[-1] == content(number)).all()
        return good

    def file(self, number: int, group: int = 0) -> Path:
        return self.store.folder / BlockName(ROOT, group, key(number)).path


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE, np.uint8)


@pytest.fixture
def bench(tmp_path):
    made: list[Bench] = []

    def make(*args, **kwargs) -> Bench:
        made.append(Bench(tmp_path, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


def test_blocks_come_back_by_group_and_key_after_a_restart_too(bench):
    first = bench()
    assert not first.store.contains(0, key(1))
    assert first.put(1) and first.put(2, group=3)
    assert first.store.contains(0, key(1)) and not first.store.contains(3, key(1))
    assert first.holds(1) and first.holds(2, group=3)
    first.store.close()
    again = bench()
    assert again.store.contains(0, key(1)) and again.store.contains(3, key(2))
    assert again.holds(1) and again.holds(2, group=3)
    stats = again.store.stats()
    assert (stats.blocks, stats.num_bytes, stats.hits, stats.bytes_read) == (2, 2 * FILE, 2, 2 * PAGE)
    assert again.file(1).stat().st_mode & 0o777 == 0o600
    assert again.file(1).parent.stat().st_mode & 0o077 == 0


def test_many_reads_and_writes_at_once_end_once_each(bench):
    here = bench()
    tickets = []
    for slot in range(10):
        here.memory[slot] = content(slot)
        tickets.append(here.store.write(0, key(slot), slot))
    assert here.finish(*tickets) == [True] * 10
    reads = [here.store.read(0, key(9 - slot), slot) for slot in range(10)]
    assert here.finish(*reads) == [True] * 10
    assert all((here.memory[slot] == content(9 - slot)).all() for slot in range(10))
    assert here.store.poll() == []
    assert len(set(tickets + reads)) == 20


def test_another_model_has_blocks_of_its_own(bench):
    ours, theirs = bench(), bench(namespace=OTHER)
    assert ours.put(1)
    theirs.store._index.refresh()
    assert not theirs.store.contains(0, key(1)) and not theirs.holds(1)
    # Not even if its file is put where ours would be: the namespace is in what is checked.
    moved = theirs.store.folder / BlockName(OTHER, 0, key(1)).path
    moved.parent.mkdir(parents=True)
    moved.write_bytes(ours.file(1).read_bytes())
    assert not theirs.holds(1)
    assert theirs.store.stats().corrupt == 1 and not moved.exists()
    assert ours.holds(1)


def _flip(at: int):
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return damage


DAMAGES = {
    "magic": _flip(0),
    "version": _flip(8),
    "group": _flip(12),
    "namespace": _flip(20),
    "key": _flip(60),
    "length": _flip(86),
    "checksum": _flip(HEADER_BYTES - 1),
    "first byte": _flip(HEADER_BYTES),
    "last byte": _flip(-1),
    "cut short": lambda file: os.truncate(file, FILE - 1),
    "header only": lambda file: os.truncate(file, HEADER_BYTES),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: os.truncate(file, FILE + 1),
    "zeros": lambda file: file.write_bytes(bytes(FILE)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_dropped_and_counted(bench, damage, caplog):
    here = bench()
    assert here.put(1) and here.put(2)
    DAMAGES[damage](here.file(1))
    assert not here.holds(1)
    stats = here.store.stats()
    assert (stats.corrupt, stats.failed_reads, stats.blocks, stats.hits) == (1, 1, 1, 0)
    assert not here.file(1).exists() and not here.store.contains(0, key(1))
    assert "damaged" in caplog.text
    assert here.holds(2)
    assert here.put(1) and here.holds(1)  # it may be written again


@settings(max_examples=40, deadline=None)
@given(st.integers(0, FILE - 1), st.integers(1, 255))
def test_no_damage_goes_unseen(tmp_path_factory, at, flipped):
    folder = tmp_path_factory.mktemp("flips")
    payload = memoryview(content(7)).cast("B")
    name = BlockName(ROOT, 1, key(7))
    block_file.write_block(folder, name, payload)
    read = np.zeros(PAGE, np.uint8)
    block_file.read_block(folder, name, memoryview(read))
    assert (read == content(7)).all()
    data = bytearray((folder / name.path).read_bytes())
    data[at] ^= flipped
    (folder / name.path).write_bytes(data)
    with pytest.raises(block_file.CorruptBlockError):
        block_file.read_block(folder, name, memoryview(read))


def test_a_file_that_vanished_is_a_failed_read(bench):
    here = bench()
    here.put(1)
    here.file(1).unlink()
    assert here.store.contains(0, key(1))  # a hint
    assert not here.holds(1)
    assert not here.store.contains(0, key(1))
    stats = here.store.stats()
    assert (stats.failed_reads, stats.corrupt) == (1, 0)


def test_a_crash_in_the_middle_of_a_write_leaves_nothing_that_is_read(bench, monkeypatch):
    here = bench()
    here.put(1)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(block_file.os, "replace", crash)
    monkeypatch.setattr(block_file.os, "unlink", crash)  # the process is gone: nobody cleans up
    with pytest.raises(KeyboardInterrupt):
        block_file.write_block(here.store.folder, BlockName(ROOT, 0, key(2)), memoryview(content(2)))
    monkeypatch.undo()
    left = list(here.store.folder.rglob(f"*{TEMPORARY}"))
    assert len(left) == 1
    again = bench()
    assert not again.store.contains(0, key(2)) and not again.holds(2)
    assert left[0].exists()  # perhaps another engine is at it
    os.utime(left[0], (0, 0))
    after = bench()
    assert not left[0].exists()
    assert after.holds(1) and after.put(2) and after.holds(2)


def test_what_a_crash_left_is_deleted_once_it_is_old_without_a_restart(tmp_path):
    part = tmp_path / ("0" * 32) / "ab"
    part.mkdir(parents=True)
    left = part / f"ab00.0.1.2{TEMPORARY}"
    left.write_bytes(b"half a block")
    index = DiskIndex(tmp_path)
    assert left.exists() and len(index) == 0  # perhaps another engine is at it
    os.utime(left, (0, 0))
    index.refresh()
    assert not left.exists()


def test_the_least_recently_used_go_first_and_that_survives_a_restart(bench):
    here = bench(blocks=4)
    for number in range(4):
        assert here.put(number)
    assert here.holds(0)
    assert here.put(4)
    assert [here.store.contains(0, key(n)) for n in range(5)] == [True, False, True, True, True]
    assert here.store.stats().evicted == 1 and here.store.stats().num_bytes == 4 * FILE
    here.store.close()
    again = bench(blocks=4)
    assert again.put(5)
    assert [again.store.contains(0, key(n)) for n in range(6)] == [True, False, False, True, True, True]
    files = sum(f.stat().st_size for f in again.store.folder.rglob("*") if f.is_file())
    assert files == 4 * FILE


def test_of_blocks_written_together_the_first_was_used_last(bench):
    here = bench(blocks=4)
    for rank in range(4):
        here.memory[rank] = content(rank)
    assert here.finish(*(here.store.write(0, key(rank), rank, rank) for rank in range(4))) == [True] * 4
    here.store.close()
    again = bench(blocks=4)
    assert again.store.num_blocks == 4
    for number in (7, 8):
        assert again.put(number)
    assert [again.holds(number) for number in range(4)] == [True, True, False, False]


def test_of_blocks_read_together_the_first_outlives_the_others(bench):
    here = bench(blocks=4)
    for number in range(4):
        here.put(number)
    assert here.finish(*[here.store.read(0, key(n), n) for n in range(4)]) == [True] * 4
    here.put(4), here.put(5)
    assert [here.store.contains(0, key(n)) for n in range(6)] == [True, True, False, False, True, True]
    here.store.close()
    again = bench(blocks=4)
    again.put(6)
    assert [again.store.contains(0, key(n)) for n in range(7)] == [True] + [False] * 3 + [True] * 3


def test_the_limit_holds_for_a_smaller_size_after_a_restart_and_for_other_models(bench):
    here = bench(blocks=8)
    for number in range(8):
        here.put(number)
    here.store.close()
    again = bench(blocks=3, namespace=OTHER)
    assert again.put(9)
    stats = again.store.stats()
    assert (stats.num_bytes, stats.blocks, stats.evicted) == (3 * FILE, 3, 6)
    assert len([f for f in again.store.folder.rglob("*") if f.is_file()]) == 3


def test_a_full_disk_drops_old_blocks_for_new_ones_and_then_gives_up(bench, monkeypatch, caplog):
    here = bench()
    here.put(1), here.put(2)
    real, room = os.writev, [0]

    def writev(file, parts):
        if len([f for f in here.store.folder.rglob("*") if f.is_file() and f.stat().st_size]) >= room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, parts)

    monkeypatch.setattr(block_file.os, "writev", writev)
    room[0] = 2
    assert here.put(3)  # for the oldest
    assert [here.store.contains(0, key(n)) for n in (1, 2, 3)] == [False, True, True]
    room[0] = 0
    assert not here.put(4)
    stats = here.store.stats()
    assert stats.failed_writes == 1 and stats.written == 3
    assert "No space left" in caplog.text
    assert not list(here.store.folder.rglob(f"*{TEMPORARY}"))
    monkeypatch.undo()
    assert here.put(4) and here.holds(4)


def test_a_real_quota_is_met_by_short_writes(bench, monkeypatch):
    here = bench()
    real = os.writev
    # A disk may take part of what it is given; the rest follows.
    monkeypatch.setattr(block_file.os, "writev", lambda file, parts: real(file, [parts[0], parts[1][:1000]]))
    assert here.put(1) and here.holds(1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_read_only(bench, caplog):
    here = bench()
    here.put(1)
    folders = [here.store.folder, *(f for f in here.store.folder.rglob("*") if f.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    try:
        again = bench()
        assert "read only" in caplog.text
        assert again.holds(1)
        assert not again.put(2)
        assert again.store.stats().failed_writes == 1
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_read_only_disk_goes_on_being_read(bench, monkeypatch, caplog):
    here = bench()
    here.put(1), here.put(2)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    real = os.open
    for name in ("replace", "unlink", "mkdir", "utime"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os, "open", lambda *args: refuse() if args[1] & os.O_CREAT else real(*args))
    assert not here.put(3)
    assert here.holds(1)
    assert here.store.stats().failed_writes == 1 and "Read-only file system" in caplog.text
    _flip(-1)(here.file(2))
    assert not here.holds(2)  # wrong, and there to stay
    os.close(real(here.file(2).parent / "x", os.O_CREAT | os.O_WRONLY))  # as if another changed the folder
    here.store._index.refresh()
    assert not here.store.contains(0, key(2)) and here.store.contains(0, key(1))
    monkeypatch.undo()
    assert here.put(2) and here.holds(2)


def test_two_engines_share_a_folder(bench):
    one, two = bench(blocks=6), bench(blocks=6)
    assert one.put(1)
    assert not two.store.contains(0, key(1))
    two.store._index.refresh()
    assert two.store.contains(0, key(1)) and two.holds(1)
    assert two.put(1) and two.store.stats().written == 0  # it is there already
    # Both write the same block, and others, at the same time, and drop each other's.
    tickets: list[list[int]] = [[], []]
    for number in range(2, 12):
        for side, here in enumerate((one, two)):
            slot = number % (SLOTS - 1)
            here.memory[slot] = content(number)
            tickets[side].append(here.store.write(0, key(number), slot))
    assert one.finish(*tickets[0]) == two.finish(*tickets[1]) == [True] * 10
    for here in (one, two):
        here.store._index.refresh()
        for number in range(1, 12):
            here.holds(number)  # right or absent
        assert here.store.stats().corrupt == 0
        assert here.holds(11)
    assert one.put(20) and one.store.stats().num_bytes <= 6 * FILE


def test_what_is_not_ours_stays(bench, tmp_path):
    here = bench(blocks=1)
    here.put(1)
    (tmp_path / "notes.txt").write_text("keep")
    (here.file(1).parent / "notes.txt").write_text("keep")
    (tmp_path / "outside").mkdir()
    (tmp_path / ("a" * 32)).symlink_to(tmp_path / "outside")
    here.put(2)
    here.store._index.refresh()
    assert len(list(tmp_path.rglob("notes.txt"))) == 2
    assert here.store.stats().blocks == 1


def test_folders_and_sizes_that_cannot_work_are_refused(tmp_path):
    def make(folder: Path, size: int) -> None:
        DiskStore(folder, size, ROOT, lambda slot: memoryview(b""), PAGE)

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk_path=.*file.*: File exists") as caught:
        make(tmp_path / "file", 1 << 20)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="Not a directory"):
        make(tmp_path / "file" / "below", 1 << 20)
    with pytest.raises(ConfigError, match="kv_disk_size"):
        make(tmp_path, PAGE)


def test_an_index_of_many_files_is_listed_once(tmp_path, monkeypatch):
    part = tmp_path / ("0" * 32) / "ab"
    part.mkdir(parents=True)
    for number in range(50):
        (part / f"ab{number:04x}.0").write_bytes(b"x")
    index = DiskIndex(tmp_path)
    assert (len(index), index.num_bytes) == (50, 50)
    scans = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scans.append(path) or real(path))
    index.refresh()
    assert part not in scans
    (part / "ab0000.0").unlink()
    index.refresh()
    assert part in scans and len(index) == 49


def test_a_failure_that_nobody_foresaw_ends_its_ticket(bench, caplog):
    here = bench()
    assert here.finish(here.store.write(0, key(1), SLOTS + 5)) == [False]  # no such slot
    assert "the disk tier failed" in caplog.text
    assert here.put(1)


def test_warnings_of_one_kind_come_once(bench, monkeypatch, caplog):
    here = bench()
    monkeypatch.setattr(disk_store, "write_block", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    assert not here.put(1) and not here.put(2)
    assert here.store.stats().failed_writes == 2
    assert caplog.text.count("cannot be written") == 1
