"""A new file has exactly the given bytes, with and without direct writes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from kvstore.storage import local_files

SIZES = [
    0,
    1,
    (64 << 10) - 1,
    64 << 10,
    (64 << 10) + 1,
    700_123,
    (1 << 20) + 4096,
    4 << 20,
    (4 << 20) + 1,
]


@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_are_there_and_no_more(tmp_path: Path, size: int) -> None:
    for number in range(2):  # the second file gets the buffer with the bytes of the first
        data = random.Random(number).randbytes(size)
        local_files.write_synced(tmp_path / str(number), data)
        assert (tmp_path / str(number)).read_bytes() == data


def test_a_large_file_goes_to_the_disk_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fsync of another process on the same disk waits for one slice, not for the whole file."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | local_files.DIRECT))
    except OSError:
        pytest.skip("this file system takes no direct writes")
    write, sizes = os.write, list[int]()

    def counted(file: int, data: memoryview) -> int:
        sizes.append(len(data))
        return write(file, data)

    monkeypatch.setattr(os, "write", counted)
    data = random.Random(0).randbytes((9 << 20) + 5)
    local_files.write_synced(tmp_path / "file", data)
    assert sizes == [1 << 20] * 9 + [4096]
    assert (tmp_path / "file").read_bytes() == data


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"old")
    for size in (10, 100_000):
        with pytest.raises(FileExistsError):
            local_files.write_synced(tmp_path / "taken", bytes(size))
    assert (tmp_path / "taken").read_bytes() == b"old"


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_that_takes_no_direct_writes_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    # a flag by which the test knows direct writes
    monkeypatch.setattr(local_files, "DIRECT", os.O_APPEND)
    call = getattr(os, refused)
    refusals = []

    def refusing(first: Any, second: Any, *more: Any) -> Any:
        is_direct = second & os.O_APPEND if refused == "open" else not refusals
        if is_direct:
            refusals.append(1)
            raise OSError(errno.EINVAL, "not here")
        return call(first, second, *more)

    monkeypatch.setattr(os, refused, refusing)
    local_files.write_synced(tmp_path / "file", b"x" * 100_000)
    assert refusals
    assert (tmp_path / "file").read_bytes() == b"x" * 100_000


def test_who_finds_the_buffer_in_use_does_without(tmp_path: Path) -> None:
    with local_files.write_buffer.lock:
        local_files.write_synced(tmp_path / "file", b"x" * 100_000)
    assert (tmp_path / "file").read_bytes() == b"x" * 100_000


def test_an_error_leaves_the_buffer_free(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        local_files.write_synced(tmp_path / "missing" / "file", b"x" * 100_000)
    assert not local_files.write_buffer.lock.locked()


def test_a_forked_process_has_a_buffer_of_its_own(tmp_path: Path) -> None:
    local_files.write_synced(tmp_path / "before", b"x" * 100_000)  # from here on there is a buffer
    ours = next(local_files.write_buffer.slices(b"o" * 100_000))
    child = os.fork()
    if not child:
        next(local_files.write_buffer.slices(b"c" * 100_000))
        os._exit(0)
    os.waitpid(child, 0)
    assert ours[:100_000] == b"o" * 100_000
