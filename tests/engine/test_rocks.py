"""The RocksDB engine: its contract, directories that it refuses, closing beside other calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import rocksdict as rocks

import kvstore
from kvstore.engine import DATA, META
from kvstore.engine.rocks import RocksEngine, require_store_directory
from kvstore.errors import (
    ClosedError,
    FormatVersionError,
    LockedError,
    NotAStoreError,
    StorageError,
)
from kvstore.limits import INGEST_FLUSH_BYTES
from kvstore.testing.engines import DurableEngineContract, read


class TestRocksEngine(DurableEngineContract):
    def open(self, path: Path) -> RocksEngine:
        return RocksEngine(path)


def test_many_entries_in_memory_go_to_a_file_before_an_import_and_few_do_not(
    tmp_path: Path,
) -> None:
    engine = RocksEngine(tmp_path / "db")
    for size, files in [(1000, 0), (INGEST_FLUSH_BYTES, 1)]:
        batch = engine.batch()
        batch.put(b"k", b"v" * size, engine.families[DATA])
        engine.write(batch)
        engine.flush()
        assert engine.stats()[f"{DATA}_files"] == files
    engine.flush()
    assert engine.stats()[f"{DATA}_files"] == 1
    assert engine.get(DATA, b"k") == b"v" * INGEST_FLUSH_BYTES
    engine.close()


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = rocks.Rdict(str(tmp_path / "db"), rocks.Options(raw_mode=True))
    foreign[b"theirs"] = b"data"
    foreign.close()
    with pytest.raises(NotAStoreError) as refused:
        RocksEngine(tmp_path / "db")
    assert refused.value.path == str(tmp_path / "db")
    assert rocks.Rdict.list_cf(str(tmp_path / "db"), rocks.Options()) == ["default"]


def test_a_database_with_families_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    RocksEngine(tmp_path / "db").close()
    options = rocks.Options(raw_mode=True)
    options.create_missing_column_families(True)
    names = rocks.Rdict.list_cf(str(tmp_path / "db"), options)
    families = {name: rocks.Options(raw_mode=True) for name in [*names, "blobs"]}
    rocks.Rdict(str(tmp_path / "db"), options, families).close()
    with pytest.raises(FormatVersionError):
        RocksEngine(tmp_path / "db")


@pytest.mark.parametrize(
    "left",  # as kills left these directories
    [
        ["rocksdict-config.json"],
        ["000000.dbtmp", "LOCK", "LOG", "rocksdict-config.json"],
        ["000001.dbtmp", "IDENTITY", "LOCK", "LOG", "MANIFEST-000001", "rocksdict-config.json"],
    ],
)
def test_a_store_killed_while_it_was_made_can_be_opened(tmp_path: Path, left: list[str]) -> None:
    (tmp_path / "db").mkdir()
    for name in left:
        (tmp_path / "db" / name).touch()
    RocksEngine(tmp_path / "db").close()


def test_a_store_without_families_yet_can_be_opened(tmp_path: Path) -> None:
    rocks.Rdict(str(tmp_path / "db"), rocks.Options(raw_mode=True)).close()
    engine = RocksEngine(tmp_path / "db")
    assert read(engine, META) == []
    engine.close()


def test_only_the_lock_is_reported_as_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "LOCKED"
    engine = RocksEngine(path)
    with pytest.raises(LockedError) as refused:
        RocksEngine(path)
    assert refused.value.owner == "this process"
    with pytest.raises(StorageError):
        engine.checkpoint(path / "no" / "such" / "place")
    engine.close()


def test_directories_of_other_files_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "LOCKSMITHS").touch()
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "locks"):
        with pytest.raises(NotAStoreError):
            require_store_directory(path, create=True)
    with pytest.raises(NotAStoreError):
        require_store_directory(tmp_path / "nothing", create=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


CALLS: dict[str, Callable[[RocksEngine], object]] = {
    "get": lambda engine: engine.get(DATA, b"k"),
    "cursor": lambda engine: engine.cursor(DATA),
    "borrow": lambda engine: engine.borrow(),
    "find": lambda engine: engine.find(b"", b"", b"z"),
    "stats": lambda engine: engine.stats(),
    "compact": lambda engine: engine.compact(DATA),
    "sync": lambda engine: engine.sync(),
    "ingest": lambda engine: engine.ingest([Path("nowhere.sst")]),
    "batch": lambda engine: engine.batch().put(b"k", b"v", engine.families[DATA]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_database_that_another_thread_closes_meanwhile_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[RocksEngine], object]
) -> None:
    """The close comes between the check that the database is open and its use."""
    engine = RocksEngine(tmp_path / "s")
    is_open = engine._open

    def open_no_more() -> object:
        database = is_open()
        engine.close()
        return database

    monkeypatch.setattr(engine, "_open", open_no_more)
    if call is CALLS["batch"]:
        engine.close()
    with pytest.raises(ClosedError):
        call(engine)
    RocksEngine(tmp_path / "s").close()  # nothing keeps the database open or locked


def test_whatever_look_at_the_directory_fails_opening_ends_in_an_error_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "store"
    RocksEngine(place).close()
    looks = 0
    failing = 0

    def faulty(real: Callable[..., object]) -> Callable[..., object]:
        def look(path: object = ".", *rest: object, **options: object) -> object:
            nonlocal looks
            if str(path).startswith(str(place)):
                looks += 1
                if looks == failing:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *rest, **options)

        return look

    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, faulty(getattr(os, name)))
    while looks >= failing:
        looks, failing = 0, failing + 1
        with suppress(StorageError):
            RocksEngine(place).close()
    assert failing > 3


def test_a_refused_store_leaves_no_directory_for_the_files_of_a_store_that_was_renamed(
    tmp_path: Path,
) -> None:
    """RocksDB makes its files by name."""
    name = tmp_path / "named"
    store = kvstore.open(name)
    store.put(b"still", b"here")
    name.rename(tmp_path / "moved")
    with pytest.raises(LockedError):
        kvstore.open(name)
    assert not name.exists()
    with pytest.raises(StorageError, match="moved away"):
        store.close()
    with kvstore.open(tmp_path / "moved") as moved:
        assert moved.get(b"still") == b"here"
    kvstore.open(name).close()
