"""Sorted files are read in place, and no file is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import kvstore.engine.loose
from bulk.sst import SstFile
from kvstore.engine.loose import LOOSE_ONCE, LooseFile, LooseFiles, Teller
from kvstore.errors import CorruptionError, OutOfSpaceError, StorageError
from kvstore.limits import TOLD_FILES_MAX
from kvstore.testing.bounds import bounds


def sst(path: Path, keys: list[bytes]) -> Path:
    file = SstFile(path)
    file.add(keys, [b"v" + key for key in keys])
    file.finish()
    return path


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for throw-away databases, instead of /dev/shm and /tmp."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(kvstore.engine.loose, "IN_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "memory"))
    return tmp_path / "memory"


def test_files_are_told_and_merged(tmp_path: Path, scratch: Path) -> None:
    one, two = sst(tmp_path / "1.sst", [b"a", b"d"]), sst(tmp_path / "2.sst", [b"b", b"c", b"e"])
    with LooseFiles([two, one]) as loose:
        assert loose.told() == [
            LooseFile(b"a", b"d", one.stat().st_size, 2, 0),
            LooseFile(b"b", b"e", two.stat().st_size, 3, 0),
        ]
        assert [key for keys, _ in loose.rows() for key in keys] == [b"a", b"b", b"c", b"d", b"e"]
        assert loose.get(b"c") == b"vc"
        assert loose.get(b"x") is None
    assert list(scratch.iterdir()) == []


def test_nothing_stays_open_or_on_disk_whether_files_are_sound_or_not(
    tmp_path: Path, scratch: Path
) -> None:
    sound = sst(tmp_path / "1.sst", [b"a"])
    damaged = tmp_path / "2.sst"
    damaged.write_bytes(b"no rows")
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with LooseFiles([sound]) as loose:
            next(loose.rows())
        with pytest.raises(CorruptionError):
            LooseFiles([sound, damaged])
        with pytest.raises(StorageError):
            LooseFiles([tmp_path / "3.sst"])
    assert len(os.listdir("/proc/self/fd")) == opened
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("full", ["memory", "both"])
def test_the_disk_serves_where_memory_is_full(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    made = tempfile.mkdtemp

    def failing(**how: str | None) -> str:
        if how["dir"] is not None or full == "both":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return made(prefix=how["prefix"], dir=tmp_path)

    monkeypatch.setattr(tempfile, "mkdtemp", failing)
    file = sst(tmp_path / "1.sst", [b"a"])
    if full == "both":
        with pytest.raises(OutOfSpaceError):
            LooseFiles([file])
        return
    with LooseFiles([file]) as loose:
        assert loose.get(b"a") == b"va"
    assert list(tmp_path.glob("kvstore-loose-*")) == []


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


FOOTERS = {
    "a block of 2**40 bytes": varint(0) + varint(1 << 40),
    "a block of 2**63 bytes": varint(0) + varint(1 << 63),
    "a block at 2**63": varint(1 << 63) + varint(8),
    "a block over the footer": varint(0) + varint(1 << 20),
    "a number that does not end": b"\xff" * 40,
    "no index": varint(0) + varint(0) + b"\xff" * 20,
}


@pytest.mark.parametrize("name", FOOTERS)
@pytest.mark.parametrize("which", ["metaindex", "index"])
def test_a_footer_is_checked_before_its_sizes_are_allocated(
    tmp_path: Path, name: str, which: str
) -> None:
    """The footer has no checksum of its own, and RocksDB ends the process where an allocation
    fails."""
    file = sst(tmp_path / "1.sst", [b"a"])
    content = bytearray(file.read_bytes())
    handles = FOOTERS[name] if which == "metaindex" else varint(0) + varint(0) + FOOTERS[name]
    content[-52:-12] = handles[:40].ljust(40, b"\x00")
    file.write_bytes(content)
    with pytest.raises(CorruptionError):
        LooseFiles([file])


def test_a_kept_database_tells_files_that_are_gone_from_their_names(
    tmp_path: Path, scratch: Path
) -> None:
    """As in imports, other files get the numbers of closed descriptors, and names are removed."""
    opened = len(os.listdir("/proc/self/fd"))
    teller = Teller()
    for number in range(3 * TOLD_FILES_MAX):
        file = sst(tmp_path / "staged.sst", [b"a", b"key %03d" % number])
        with file.open("rb") as held:
            (told,) = teller.told([f"/proc/self/fd/{held.fileno()}"])
        assert (told.first, told.last) == (b"a", b"key %03d" % number)
        file.unlink()
    teller.close()
    assert list(scratch.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_kept_database_goes_on_after_a_file_that_is_none(tmp_path: Path, scratch: Path) -> None:
    sound, damaged = sst(tmp_path / "1.sst", [b"a"]), tmp_path / "2.sst"
    damaged.write_bytes(b"no rows" * 100)
    teller = Teller()
    for _ in range(3):
        with pytest.raises(CorruptionError):
            teller.told([damaged])
        assert [told.first for told in teller.told([sound])] == [b"a"]
    teller.close()


@pytest.mark.parametrize("most", [0, 100])
def test_the_entries_of_files_are_read_beside_those_of_others(
    tmp_path: Path, scratch: Path, most: int
) -> None:
    """While all entries are few, entries of other files may be among the answers."""
    teller = Teller()
    with bounds(TOLD_ENTRIES_MAX=most):
        for number in range(4):
            file = sst(tmp_path / f"{number}.sst", [b"b", b"key %d" % number, b"z"])
            teller.told([file])
            found = teller.entries([file])
            assert found == sorted(set(found))
            ours = {b"b", b"key %d" % number, b"z"}
            assert ours <= set(found) <= ours | {b"key %d" % n for n in range(number)}
            assert (set(found) == ours) == (not number or not most)
            assert teller.entries([file]) == LOOSE_ONCE.entries([file]) or most
            large = sst(tmp_path / f"large {number}.sst", [b"a", b"large %d" % number, b"z"])
            if not most:  # files whose bounds were asked must not add their entries either
                teller.told([large])
        other = sst(tmp_path / "other.sst", [b"a"])
        assert teller.entries([other]) == [b"a"]
        assert teller.entries([]) == LOOSE_ONCE.entries([]) == []
    teller.close()


def test_the_database_of_a_process_that_was_killed_is_removed(
    tmp_path: Path, scratch: Path
) -> None:
    file = sst(tmp_path / "1.sst", [b"a"])
    program = f"""
import os, signal, kvstore.engine.loose as loose
loose.IN_MEMORY = {str(scratch)!r}
teller = loose.Teller()
teller.told([{str(file)!r}])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = scratch.iterdir()
    teller = Teller()
    teller.told([file])
    assert left not in scratch.iterdir()
    teller.close()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("age_s", [0, 7200])
def test_a_directory_that_a_killed_process_left_without_a_lock_is_removed_when_it_is_old(
    tmp_path: Path, scratch: Path, age_s: int
) -> None:
    """A young directory may belong to a process that is about to make its database."""
    left = scratch / "kvstore-loose-1-left"
    (left / "db").mkdir(parents=True)
    then = time.time() - age_s
    os.utime(left, (then, then))
    teller = Teller()
    teller.told([sst(tmp_path / "1.sst", [b"a"])])
    assert left.exists() == (not age_s)
    teller.close()


def test_a_damaged_block_is_met_by_a_read_of_the_keys(tmp_path: Path, scratch: Path) -> None:
    """RocksDB's iterator ends at a damaged block as it ends after the last entry."""
    keys = [b"key %06d" % number for number in range(5000)]
    file = sst(tmp_path / "1.sst", keys)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    teller = Teller()
    teller.told([file])
    for reader in (teller, LOOSE_ONCE):
        with pytest.raises(CorruptionError):
            reader.entries([file])
    sound = sst(tmp_path / "2.sst", keys)
    assert teller.entries([sound]) == keys
    teller.close()


def test_covered_entries_are_hidden_and_later_ones_are_shown(tmp_path: Path, scratch: Path) -> None:
    with LooseFiles([sst(tmp_path / "1.sst", [b"a", b"b", b"\xff"])]) as loose:
        assert loose.keys(b"", b"\xff", 9) == [b"a", b"b", b"\xff"]
        assert loose.keys(b"b", b"b", 9) == [b"b"]
        assert loose.keys(b"", b"\xff", 2) == [b"a", b"b"]
        loose.cover()
        assert loose.keys(b"", b"\xff", 9) == []
        (told,) = loose.told_further([sst(tmp_path / "2.sst", [b"b", b"c"])])
        assert (told.first, told.last, told.entries, told.deletions) == (b"b", b"c", 2, 0)
        assert loose.keys(b"", b"\xff", 9) == [b"b", b"c"]
