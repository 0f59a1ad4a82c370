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

import kvstore.engine.loose_files
from kvstore.bulk.part import SstFile
from kvstore.engine.loose_files import LooseFiles
from kvstore.errors import CorruptionError, OutOfSpaceError, StorageError


def sst(path: Path, keys: list[bytes]) -> Path:
    file = SstFile(path)
    file.add(keys, [b"v" + key for key in keys])
    file.finish()
    return path


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for throw-away databases, instead of /dev/shm and /tmp."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(kvstore.engine.loose_files, "IN_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "memory"))
    return tmp_path / "memory"


def test_files_are_merged(tmp_path: Path, scratch: Path) -> None:
    one, two = sst(tmp_path / "1.sst", [b"a", b"d"]), sst(tmp_path / "2.sst", [b"b", b"c", b"e"])
    with LooseFiles([two, one]) as loose:
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


def test_the_database_of_a_process_that_was_killed_is_removed(
    tmp_path: Path, scratch: Path
) -> None:
    file = sst(tmp_path / "1.sst", [b"a"])
    program = f"""
import os, signal, kvstore.engine.loose_files as loose
loose.IN_MEMORY = {str(scratch)!r}
held = loose.LooseFiles([{str(file)!r}])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = scratch.iterdir()
    with LooseFiles([file]):
        assert left not in scratch.iterdir()
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
    with LooseFiles([sst(tmp_path / "1.sst", [b"a"])]):
        assert left.exists() == (not age_s)


def test_the_unlocked_directory_of_a_running_process_stays(tmp_path: Path, scratch: Path) -> None:
    """RocksDB makes its lock file first, and locks it then."""
    left = scratch / f"kvstore-loose-{os.getppid()}-begun"
    (left / "db").mkdir(parents=True)
    (left / "db" / "LOCK").touch()
    with LooseFiles([sst(tmp_path / "1.sst", [b"a"])]):
        assert left.exists()
