"""Kept bytes: a bounded cache that processes share, that survives kills, and is never wrong."""

from __future__ import annotations

import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvstore.backup.shard import MemoryBlob
from kvstore.errors import KVStoreError
from kvstore.storage.wrapped import CachedBlob, InDirectory, InMemory, KeptBytes
from tests.harness.seeds import seeded

BOUND = 20_000


def content(name: str, piece: str) -> bytes:
    """The bytes that an entry must have."""
    return random.Random(f"{name} {piece}").randbytes(500 + 17 * len(piece))


def bytes_in(place: Path) -> int:
    return sum(path.stat().st_size for path in place.glob("*/*"))


@pytest.fixture(params=["memory", "directory"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> KeptBytes:
    if request.param == "memory":
        return InMemory(BOUND)
    return InDirectory(tmp_path / "cache", BOUND)


def test_bytes_are_kept_up_to_the_bound_and_the_last_ones_stay(kept: KeptBytes) -> None:
    for number in range(100):
        kept.put("chain/part/a", str(number), content("a", str(number)))
        assert kept.get("chain/part/a", str(number)) == content("a", str(number))
    found = [n for n in range(100) if kept.get("chain/part/a", str(n)) is not None]
    assert 10 < len(found) < 60
    kept.put("chain/part/b", "large", bytes(BOUND + 1))
    assert kept.get("chain/part/b", "large") is None
    kept.forget("chain/part/a")
    assert kept.get("chain/part/a", "99") is None


def test_an_entry_that_was_cut_or_altered_is_no_entry(tmp_path: Path) -> None:
    kept = InDirectory(tmp_path, BOUND)
    kept.put("chain/part/a", "0-5", b"hello")
    (entry,) = tmp_path.glob("*/0-5")
    whole = entry.read_bytes()
    for place in range(len(whole)):
        for data in (whole[:place], whole[:place] + b"\xff" + whole[place + 1 :]):
            entry.write_bytes(data)
            assert kept.get("chain/part/a", "0-5") is None
    assert not entry.exists()
    entry.write_bytes(whole)
    entry.rename(entry.with_name("0-6"))
    assert kept.get("chain/part/a", "0-6") is None


def test_a_note_that_is_torn_is_made_anew(tmp_path: Path) -> None:
    kept = InDirectory(tmp_path, BOUND)
    for note in (b"", b"x", b"00"):
        (tmp_path / "lock").write_bytes(note)
        for number in range(60):
            kept.put("chain/part/a", str(number), content("a", str(number)))
        assert bytes_in(tmp_path) <= BOUND


def test_a_directory_that_refuses_writes_keeps_nothing(tmp_path: Path) -> None:
    kept = InDirectory(tmp_path / "cache", BOUND)
    (tmp_path / "cache" / "lock").mkdir()
    kept.put("chain/part/a", "0-5", b"hello")
    assert kept.get("chain/part/a", "0-5") is None
    (tmp_path / "file").touch()
    with pytest.raises(KVStoreError):
        InDirectory(tmp_path / "file", BOUND)


def test_files_of_others_in_the_directory_stay(tmp_path: Path) -> None:
    """A person may name a directory that has other files."""
    (tmp_path / "letters").mkdir()
    letter = tmp_path / "letters" / "draft"
    letter.write_bytes(bytes(BOUND))
    os.utime(letter, (1, 1))
    kept = InDirectory(tmp_path, BOUND)
    for number in range(100):
        kept.put("chain/part/a", str(number), content("a", str(number)))
        assert kept.get("chain/part/a", str(number)) == content("a", str(number))
    assert letter.stat().st_size == BOUND


def fill(place: Path, seed: int, pipe: Connection) -> None:
    """Keep and look up entries until killed; a wrong one is told."""
    kept, pick = InDirectory(place, BOUND), random.Random(seed)
    pipe.send("begun")
    while True:
        name, piece = f"chain/part/{pick.randrange(9)}", str(pick.randrange(20))
        found = kept.get(name, piece)
        if found not in (None, content(name, piece)):
            pipe.send("wrong")
        kept.put(name, piece, content(name, piece))


def test_processes_that_are_killed_leave_a_bounded_cache_without_a_wrong_entry(
    tmp_path: Path, spawn: Any
) -> None:
    pick = seeded("KVSTORE_CACHE_SEED")
    for _ in range(4):
        pairs = []
        for _ in range(2):
            receiver, sender = spawn.Pipe(duplex=False)
            child = spawn.Process(target=fill, args=(tmp_path, pick.randrange(99), sender))
            child.start()
            sender.close()
            pairs.append((child, receiver))
        for child, receiver in pairs:
            assert receiver.recv() == "begun"
            receiver.poll(pick.random() / 10)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            with pytest.raises(EOFError):  # it has said nothing, and is gone
                receiver.recv()
        assert bytes_in(tmp_path) <= BOUND
    kept = InDirectory(tmp_path, BOUND)
    for name in range(9):
        for piece in map(str, range(20)):
            found = kept.get(f"chain/part/{name}", piece)
            assert found in (None, content(f"chain/part/{name}", piece))


def test_only_parts_are_kept(tmp_path: Path) -> None:
    blob = MemoryBlob()
    cached = CachedBlob(blob, InDirectory(tmp_path, BOUND))
    for name in ("chain/rollup/v1", "chain/part/1"):
        blob.put(name, b"before")
        assert cached.get(name) == b"before"
        assert cached.size(name) == 6
        assert cached.get_range(name, start=1, length=2) == b"ef"
    blob.delete("chain/rollup/v1")
    blob.delete("chain/part/1")
    assert cached.get("chain/rollup/v1") is None
    assert (cached.get("chain/part/1"), cached.size("chain/part/1")) == (b"before", 6)
    assert cached.get_range("chain/part/1", start=1, length=2) == b"ef"
    cached.forget("chain/part/1")
    assert cached.get("chain/part/1") is None
