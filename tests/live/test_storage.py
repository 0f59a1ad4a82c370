"""Live readers on storage that takes no writes: read-only mounts, and full disks."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import OutOfSpaceError

NEVER = 1e6
"""Seconds between two looks; so long that the reader looks only when the test asks."""


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A full file system, which has the directory for temporary files."""
    place = tmp_path / "full"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no byte on a file system."""
    with (place / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def mount(*arguments: str) -> None:
    """Mount a file system, or skip the test where that is not allowed."""
    if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")


def test_a_store_on_a_read_only_mount_is_followed_and_read(tmp_path: Path) -> None:
    """The writer has the directory, and the reader sees it through a mount that takes no writes."""
    seen = tmp_path / "seen"
    seen.mkdir()
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"k", b"1")
        mount("--bind", str(tmp_path / "store"), str(seen))
        try:
            mount("-o", "remount,bind,ro", str(seen))
            with pytest.raises(OSError, match="Read-only"):
                (seen / "new").touch()
            with kvstore.follow(seen, max_staleness=NEVER) as reader:
                for number in range(20):
                    stamp = store.put(b"k", b"%d" % number)
                    if number % 5 == 0:
                        store.gc(before=stamp)
                    reader.wait_beyond(stamp, timeout=60)
                    assert reader.get(b"k") == b"%d" % number
            with kvstore.open_read_only(seen) as still:
                assert still.get(b"k") == b"19"
        finally:
            subprocess.run(["umount", "-l", str(seen)], check=True)


def test_a_full_disk_of_a_reader_is_an_error_of_the_reader_alone(
    tmp_path: Path, full: Path
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"k", b"0")
        with kvstore.follow(tmp_path / "store", max_staleness=NEVER) as reader:
            fill(full)
            with pytest.raises(OutOfSpaceError):
                kvstore.follow(tmp_path / "store")
            for number in range(1, 30):
                stamp = store.put(b"k", b"%d" % number)
                if number % 10 == 0:
                    store.gc(before=stamp)  # flushes, so the reader opens its files again
                try:
                    assert reader.refresh() > stamp
                    assert reader.get(b"k") == b"%d" % number
                except OutOfSpaceError:
                    with pytest.raises(OutOfSpaceError):  # it never answers with a torn state
                        reader.get(b"k")
            (full / "filler").unlink()
            assert reader.refresh() == store.upper
            assert reader.get(b"k") == b"29"
