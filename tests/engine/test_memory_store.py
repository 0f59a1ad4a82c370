"""The memory engine in a store: with a journal the store survives, without one it needs no disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.engine.api import CHANGES, DATA
from kvstore.engine.memory_engine import CONTENT, MemoryEngine, MemoryState, decode, encode
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    FormatVersionError,
    LockedError,
    NotAStoreError,
    UsageError,
)
from kvstore.opening import engine_at
from kvstore.storage.journal import Journal, compact, inspect
from tests.engine.memory_store import entries, open_memory, put, stage


def test_a_store_without_a_directory_does_all_and_touches_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_memory(None) as store:
        first = store.put(b"a", b"1")
        store.put(b"a", b"2")
        store.delete_range(b"b", b"c")
        with store.batch(durability="sync") as batch:
            batch.put(b"x", b"y")
        assert store.get(b"a", as_of=first) == b"1"
        assert store.sync() == store.upper == store.durable
        with store.snapshot() as snapshot:
            store.put(b"a", b"3")
            assert snapshot.get(b"a") == b"2"
        store.gc(before=store.upper - 1, compact=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ClosedError):
        store.get(b"a")


def test_a_path_is_only_left_out_for_memory(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        kvstore.open(None)
    with pytest.raises(UsageError):
        kvstore.open(None, engine="memory", create=False)
    with pytest.raises(UsageError):
        kvstore.open(tmp_path / "s", engine="paper")


@pytest.mark.parametrize("move", [False, True])
def test_an_import_into_a_store_without_a_directory_leaves_the_staging_as_it_should(
    tmp_path: Path, move: bool
) -> None:
    staged = stage(tmp_path / "in", {b"a": b"1", b"b": b"2"})
    before = sorted(os.listdir(tmp_path / "in"))
    with open_memory(None) as store:
        stamp = bulk.ingest(store, staged.staging, move=move, on_conflict="error")
        assert dict(store.scan()) == {b"a": b"1", b"b": b"2"}
        assert bulk.ingest(store, staged.staging) == stamp
    assert sorted(os.listdir(tmp_path / "in")) == (["import.json"] if move else before)
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_a_store_without_a_directory_is_backed_up_and_checkpointed(tmp_path: Path) -> None:
    with open_memory(None) as store:
        store.put(b"a", b"1")
        collection = Collection(tmp_path / "backups")
        assert collection.backup(store).rows == 1
        store.put(b"a", b"2")
        at = store.put(b"b", b"2")
        assert collection.backup(store).rows == 2
        store.checkpoint(tmp_path / "copy")
        store.put(b"c", b"later")
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored, open_memory(tmp_path / "copy") as copy:
        assert dict(restored.scan()) == dict(copy.scan()) == {b"a": b"2", b"b": b"2"}
        assert list(restored.changes(0, at)) == list(copy.changes(0, at))


def test_each_engine_says_whose_store_it_is(tmp_path: Path) -> None:
    for made, other in (("memory", "rocksdb"), ("rocksdb", "memory")):
        path = tmp_path / made
        kvstore.open(path, engine=made).close()
        assert engine_at(path) == made
        with pytest.raises(NotAStoreError) as refused:
            kvstore.open(path, engine=other)
        assert f"engine {made!r}" in str(refused.value)
        assert f'engine="{made}"' in refused.value.remedy
        kvstore.open(path, engine=made, create=False).close()
    assert engine_at(tmp_path) is None


def test_foreign_directories_files_and_journals_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(NotAStoreError):
            open_memory(path)
    with pytest.raises(NotAStoreError):
        open_memory(tmp_path / "nothing", create=False)
    assert not (tmp_path / "nothing").exists()
    for content, error in (("queue", NotAStoreError), ("kvstore-memory-2", FormatVersionError)):
        Journal.open(tmp_path / content, content=content).close()
        with pytest.raises(error):
            open_memory(tmp_path / content)


def test_a_second_handle_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    store = open_memory(tmp_path / "s")
    with pytest.raises(LockedError) as refused:
        open_memory(tmp_path / "s")
    assert refused.value.path == str(tmp_path / "s")
    store.put_many({b"%03d" % number: b"" for number in range(100)})
    running = store.scan()
    store.close()
    open_memory(tmp_path / "s").close()
    with pytest.raises(ClosedError):
        list(running)


def test_large_batches_are_seen_whole_or_not_at_all() -> None:
    engine = MemoryEngine(None)
    done, torn = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            values = set(engine.cursor(DATA).take(10_000)[1])
            if len(values) > 1:
                torn.append(values)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(30):
        batch = engine.batch()
        for key in range(3_000 if number % 2 else 1_000):
            batch.put(b"%04d" % key, b"%d" % number, engine.families[DATA])
        batch.delete_range(b"1000", b"9999", engine.families[DATA])
        engine.write(batch)
    done.set()
    watcher.join()
    assert not torn


def test_what_readers_let_go_of_is_not_copied_again() -> None:
    engine = MemoryEngine(None)
    put(engine, b"a", b"1")
    edition = engine._state.families[0]
    for _ in range(3):
        ticket, reader = engine.borrow()
        engine.give_back(ticket, reader)
        cursor = engine.cursor(DATA)
        while cursor.take(1)[0]:
            pass
        engine.cursor(DATA).close()
        put(engine, b"a", b"2")
    assert engine._state.families[0] is edition
    held = engine.cursor(DATA)
    put(engine, b"a", b"3")
    assert engine._state.families[0] is not edition
    assert held.take(1) == ([b"a"], [b"2"])


def test_a_long_journal_becomes_a_snapshot_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "s"
    engine = MemoryEngine(path)
    for number in range(500):
        put(engine, b"%d" % (number % 7), os.urandom(100))
    expected = entries(engine)
    engine.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    again = MemoryEngine(path, compact_bytes=1000)
    assert entries(again) == expected
    again.close()
    assert sum(file.stat().st_size for file in path.iterdir()) < size / 10
    assert entries(MemoryEngine(path)) == expected


def test_compact_rewrites_the_journal_once_for_all_families(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path / "s")
    for number in range(50):
        put(engine, b"k", b"%d" % number)
    engine.compact(DATA)
    names = sorted(os.listdir(tmp_path / "s"))
    engine.compact(CHANGES)
    assert sorted(os.listdir(tmp_path / "s")) == names
    put(engine, b"l", b"1")
    engine.close()
    assert entries(MemoryEngine(tmp_path / "s"))[DATA] == {b"k": b"49", b"l": b"1"}


def test_another_process_compacts_beside_a_store_even_inside_an_ingest(tmp_path: Path) -> None:
    path = tmp_path / "s"
    engine = MemoryEngine(path)
    put(engine, b"a", b"1")
    engine._stage(1, [b"r1", b"r2"], [b"", b""])
    assert engine._journal is not None
    engine._journal._rotate()  # as a full journal file would
    compacted = compact(path, MemoryState(), content=CONTENT)
    assert compacted.snapshot is not None
    put(engine, b"b", b"2")
    with engine._writing:
        engine._append(3, (1).to_bytes(8, "little"), then=lambda: engine._take(1))
    expected = entries(engine)
    assert expected[DATA].keys() == {b"a", b"b", b"r1", b"r2"}
    engine.close()
    assert entries(MemoryEngine(path)) == expected


def test_entries_are_columns_as_documented() -> None:
    packed = encode(b"\x00\x07\x08", [b"k", b"ab", b""], [b"v1", b"", b"zz"])
    assert packed.hex(" ") == (
        "03 00 00 00 00 07 08 "
        "01 00 00 00 02 00 00 00 00 00 00 00 "
        "02 00 00 00 00 00 00 00 02 00 00 00 "
        "6b 61 62 76 31 7a 7a"
    )
    assert decode(packed) == (b"\x00\x07\x08", [b"k", b"ab", b""], [b"v1", b"", b"zz"])
    for wrong in (packed[:-1], packed + b"x", packed[:9], b"", bytes(4)):
        with pytest.raises(CorruptionError):
            decode(wrong)


GOLDEN = Path(__file__).parent / "golden" / "memory-v1"


def test_a_store_of_format_1_reads_as_it_was_written(tmp_path: Path) -> None:
    for file in GOLDEN.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert [file.content for file in inspect(GOLDEN).files] == [CONTENT] * 2
    with open_memory(tmp_path) as store:
        assert [tuple(change) for change in store.changes(0, order="time")] == [
            (1, "put", b"a", None, b"1"),
            (2, "put", b"b", None, b"\x00\xff"),
            (3, "delete", b"a", None, None),
            (4, "delete_range", b"b", b"c", None),
            (5, "put", b"imported", None, b"row"),
            (6, "put", b"z", None, b"last"),
        ]
