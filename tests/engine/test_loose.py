"""Sorted files that no store has taken: passes and look-ups, and that nothing is left behind."""

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
from hypothesis import given
from hypothesis import strategies as st

import kvstore.engine.loose_files
from kvstore.bulk.part import SstFile
from kvstore.engine.loose_files import LooseDatabase, LooseFiles
from kvstore.errors import CorruptionError, OutOfSpaceError, StorageError
from tests.harness.bounds import bounds


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


KEYS = st.sets(st.integers(0, 40).map(lambda key: b"%02d" % key), min_size=1, max_size=12)


@given(
    files=st.lists(KEYS, max_size=9),
    start=st.sampled_from([b"", b"05", b"205"]),
    last=st.sampled_from([None, b"\0", b"12", b"39"]),
    ahead=st.integers(1, 4),
    chunk=st.integers(1, 5),
)
def test_a_pass_gives_the_rows_of_all_files_once_and_holds_those_that_cross(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[set[bytes]],
    start: bytes,
    last: bytes | None,
    ahead: int,
    chunk: int,
) -> None:
    place = tmp_path_factory.mktemp("loose")
    paths = [sst(place / f"{at}.sst", sorted(keys)) for at, keys in enumerate(files)]
    wanted = sorted(key for key in set().union(*files) if start <= key <= (last or b"9"))
    depth = max((sum(min(f) <= key <= max(f) for f in files) for key in wanted), default=0)
    opened = descriptors()
    with bounds(LOOSE_FILES_MAX=ahead, SCAN_CHUNK=chunk):
        found = []
        for keys, values in LooseFiles(paths).rows(start, last):
            assert len(keys) <= chunk
            assert descriptors() - opened <= depth + ahead
            found += list(zip(keys, values, strict=True))
    assert found == [(key, b"v" + key) for key in wanted]
    assert descriptors() == opened


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_look_up_finds_an_entry_in_any_file(tmp_path: Path, scratch: Path) -> None:
    one, two = sst(tmp_path / "1.sst", [b"a", b"d"]), sst(tmp_path / "2.sst", [b"b", b"c", b"e"])
    with LooseDatabase([two, one]) as loose:
        assert [key for keys, _ in loose.rows() for key in keys] == [b"a", b"b", b"c", b"d", b"e"]
        assert loose.get(b"c") == b"vc"
        assert loose.get(b"x") is None
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("kind", [LooseFiles, LooseDatabase])
def test_nothing_stays_open_or_on_disk_whether_files_are_sound_or_not(
    tmp_path: Path, scratch: Path, kind: type[LooseFiles | LooseDatabase]
) -> None:
    sound = sst(tmp_path / "1.sst", [b"a"])
    damaged = tmp_path / "2.sst"
    damaged.write_bytes(b"no rows")
    opened = descriptors()
    for _ in range(20):
        loose = kind([sound])
        rows = loose.rows()
        next(rows)
        rows.close()
        if isinstance(loose, LooseDatabase):
            loose.close()
        with pytest.raises(CorruptionError):
            kind([sound, damaged])
        with pytest.raises(StorageError):
            kind([tmp_path / "3.sst"])
    assert descriptors() == opened
    assert list(scratch.iterdir()) == []


def test_a_block_that_is_damaged_names_its_file(tmp_path: Path) -> None:
    keys = [b"%06d" % number for number in range(5000)]
    paths = [sst(tmp_path / "1.sst", keys), sst(tmp_path / "2.sst", [key + b"x" for key in keys])]
    data = bytearray(paths[1].read_bytes())
    data[len(data) // 2] ^= 1
    loose = LooseFiles(paths)
    paths[1].write_bytes(data)
    with pytest.raises(
        CorruptionError, match=r"2\.sst is damaged: the checksum of a block differs"
    ):
        list(loose.rows())
    paths[1].unlink()
    with pytest.raises(StorageError, match=r"2\.sst"):
        list(loose.rows())


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
            LooseDatabase([file])
        return
    with LooseDatabase([file]) as loose:
        assert loose.get(b"a") == b"va"
    assert list(tmp_path.glob("kvstore-loose-*")) == []


def test_the_database_of_a_process_that_was_killed_is_removed(
    tmp_path: Path, scratch: Path
) -> None:
    file = sst(tmp_path / "1.sst", [b"a"])
    program = f"""
import os, signal, kvstore.engine.loose_files as loose
loose.IN_MEMORY = {str(scratch)!r}
held = loose.LooseDatabase([{str(file)!r}])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = scratch.iterdir()
    with LooseDatabase([file]):
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
    with LooseDatabase([sst(tmp_path / "1.sst", [b"a"])]):
        assert left.exists() == (not age_s)


def test_the_unlocked_directory_of_a_running_process_stays(tmp_path: Path, scratch: Path) -> None:
    """RocksDB makes its lock file first, and locks it then."""
    left = scratch / f"kvstore-loose-{os.getppid()}-begun"
    (left / "db").mkdir(parents=True)
    (left / "db" / "LOCK").touch()
    with LooseDatabase([sst(tmp_path / "1.sst", [b"a"])]):
        assert left.exists()
