"""The memory engine in a store: with a journal it survives, without one it needs no disk."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import bulk
import kvstore
from backup import Collection
from kvstore import ManualClock, Store
from kvstore.engine.api import CHANGES, DATA, FAMILIES
from kvstore.engine.memory import MemoryEngine
from kvstore.engine.state import CONTENT, State, decode, encode
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    FormatVersionError,
    JournalDamagedError,
    LockedError,
    NotAStoreError,
    OutOfSpaceError,
    PoisonedError,
    StorageError,
    UsageError,
)
from kvstore.journal import Journal, Sync, compact, inspect
from kvstore.opening import engine_at
from kvstore.testing.disk import Disk

PATH = Path("/store")


def open_memory(path: Path | None, **options: object) -> Store:
    return kvstore.open(path, engine="memory", clock=ManualClock(1), **options)  # type: ignore[arg-type]


def stage(directory: Path, rows: dict[bytes, bytes], import_id: int | None = None) -> bulk.Import:
    made = bulk.Import.create(directory, import_id=import_id)
    with made.writer() as writer:
        for key, value in sorted(rows.items()):
            writer.put(key, value)
    made.seal()
    return made


def entries(engine: MemoryEngine) -> dict[str, dict[bytes, bytes]]:
    return {name: dict(zip(*engine.cursor(name).take(10_000), strict=True)) for name in FAMILIES}


def put(engine: MemoryEngine, key: bytes, value: bytes, family: str = DATA) -> None:
    batch = engine.batch()
    batch.put(key, value, engine.families[family])
    engine.write(batch)


# -- without a directory ----------------------------------------------------------------------


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


# -- opening ----------------------------------------------------------------------------------


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
    running = store.scan()
    store.close()
    open_memory(tmp_path / "s").close()
    with pytest.raises(ClosedError):
        next(running)


def test_a_store_killed_before_its_first_file_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "LOCK").touch()
    open_memory(tmp_path / "s").close()


# -- reading beside writes --------------------------------------------------------------------


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


# -- crashes ----------------------------------------------------------------------------------


def on_disk(disk: Disk) -> MemoryEngine:
    return MemoryEngine(PATH, files=disk, compact_bytes=200)


def test_every_power_cut_leaves_a_prefix_with_all_that_was_synced() -> None:
    disk = Disk()
    engine = on_disk(disk)
    states, synced = [entries(engine)], 0
    for number in range(12):
        batch = engine.batch()
        batch.put(b"k%d" % (number % 5), b"%d" % number, engine.families[DATA])
        batch.put(b"%d" % number, b"", engine.families[CHANGES])
        batch.delete(b"k%d" % (number % 3), engine.families[DATA])
        engine.write(batch)
        states.append(entries(engine))
        if number % 4 == 1:
            engine.sync()
            synced = number + 1
        for cut in disk.power_cuts():
            again = MemoryEngine(PATH, files=cut)
            assert entries(again) in states[synced:]
        if number % 5 == 4:
            engine.close()
            engine = on_disk(disk)
            assert entries(engine) == states[-1]
            synced = number + 1


def test_a_flipped_bit_is_named_not_served() -> None:
    disk = Disk()
    engine = on_disk(disk)
    for number in range(5):
        put(engine, b"%d" % number, b"v")
    engine.sync()
    (live,) = (path for path in disk.inodes if path.endswith("-journal"))
    whole = entries(engine)[DATA]
    for at in range(len(disk.inodes[live].live)):
        image = {path: bytearray(inode.live) for path, inode in disk.inodes.items()}
        image[live][at] ^= 4
        try:
            found = entries(on_disk(Disk({p: bytes(data) for p, data in image.items()})))[DATA]
        except (CorruptionError, NotAStoreError, FormatVersionError):
            continue
        assert list(found.items()) == list(whole.items())[: len(found)]
        assert len(found) >= 4, "only the last record may look torn"


def test_a_failed_write_leaves_the_store_poisoned_and_what_was_there() -> None:
    disk = Disk()
    engine = on_disk(disk)
    put(engine, b"a", b"1")
    engine.sync()
    disk.fail = lambda step: OSError(28, "full") if step.startswith("write") else None
    with pytest.raises(OutOfSpaceError):
        put(engine, b"a", b"2")
    disk.fail = lambda step: None
    with pytest.raises(PoisonedError):
        put(engine, b"a", b"3")
    engine.close()
    assert entries(on_disk(disk.killed()))[DATA] == {b"a": b"1"}


def test_a_failed_fsync_poisons_too() -> None:
    disk = Disk()
    engine = on_disk(disk)
    put(engine, b"a", b"1")
    disk.fail = lambda step: OSError(5, "gone") if step.startswith("sync") else None
    with pytest.raises(StorageError):
        engine.sync()
    disk.fail = lambda step: None
    with pytest.raises(PoisonedError):
        engine.sync()


def test_an_interrupt_between_journal_and_memory_poisons(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine(None)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        put(engine, b"a", b"1")
    monkeypatch.undo()
    for call in (lambda: put(engine, b"a", b"1"), lambda: engine.get(DATA, b"a"), engine.borrow):
        with pytest.raises(PoisonedError):
            call()


CHILD = """
import os, sys
import kvstore
store = kvstore.open(sys.argv[1], engine="memory", durability=sys.argv[2])
number = int(store.get(b"n", default=b"0"))
while True:
    number += 1
    with store.batch() as batch:
        batch.put(b"n", b"%d" % number)
        batch.put(b"k%d" % number, b"x" * (number % 700))
    print(number, flush=True)
"""


@pytest.mark.parametrize("durability", ["sync", "group", "async"])
def test_a_killed_store_has_all_that_it_told_of(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "s"
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), durability], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            told = [int(child.stdout.readline()) for _ in range(40)]
            child.send_signal(signal.SIGKILL)
            told += map(int, child.stdout.read().split())
        with kvstore.open(path, engine="memory") as store:
            newest = int(store.get(b"n") or b"0")
            assert told[-1] <= newest <= told[-1] + 1
            rows = dict(store.scan(prefix=b"k"))
            assert rows == {b"k%d" % n: b"x" * (n % 700) for n in range(1, newest + 1)}


# -- ingests ----------------------------------------------------------------------------------


def crash_before(path: Path, engine: MemoryEngine, method: str, nth: int) -> None:
    """Keep a copy of the directory as it is before the `nth` call of `method`."""
    original, calls = getattr(engine, method), itertools.count(1)

    def copying(*arguments: object) -> object:
        if next(calls) == nth:
            copy = path.with_name("crashed")
            copy.mkdir()
            for file in path.iterdir():
                if file.is_file():
                    (copy / file.name).write_bytes(file.read_bytes())
        return original(*arguments)

    setattr(engine, method, copying)


@pytest.mark.parametrize(
    ("method", "nth", "linked"),
    [("_stage", 1, 0), ("_stage", 99, 0), ("_take", 1, 100), ("sync", 2, 100)],
)
def test_an_ingest_cut_off_is_all_there_or_not_at_all(
    tmp_path: Path, method: str, nth: int, linked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engine.state.MEMORY_RECORD_BYTES", 100)
    staged = stage(tmp_path / "in", {b"%04d" % n: b"v" * 50 for n in range(100)}, import_id=1)
    store = open_memory(tmp_path / "s")
    crash_before(tmp_path / "s", store._engine, method, nth)  # type: ignore[arg-type]
    bulk.ingest(store, staged.staging)
    store.close()
    with open_memory(tmp_path / "crashed") as crashed:
        assert crashed.get(b"0000") is None
        assert len(crashed._engine.cursor(DATA).take(1000)[0]) == linked
        bulk.ingest(crashed, staged.staging)
        assert len(list(crashed.scan())) == 100


def test_rows_of_an_ingest_that_failed_are_gone(tmp_path: Path) -> None:
    staged = stage(tmp_path / "in", {b"%05d" % n: os.urandom(60) for n in range(20_000)})
    (part,) = staged.staging.glob("*.sst")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    engine = MemoryEngine(tmp_path / "s")
    put(engine, b"a", b"1")
    with pytest.raises(CorruptionError):
        engine.ingest([part])
    assert engine._state.ingests == {}
    assert part.exists()
    engine.close()
    engine = MemoryEngine(tmp_path / "s")
    assert entries(engine)[DATA] == {b"a": b"1"}
    engine.close()


# -- compaction -------------------------------------------------------------------------------


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
    engine._journal._rotate()  # what a full file brings about
    compacted = compact(path, State(), content=CONTENT)
    assert compacted.snapshot is not None
    put(engine, b"b", b"2")
    with engine._writing:
        engine._append(3, (1).to_bytes(8, "little"), then=lambda: engine._take(1))
    expected = entries(engine)
    assert expected[DATA].keys() == {b"a", b"b", b"r1", b"r2"}
    engine.close()
    assert entries(MemoryEngine(path)) == expected


def test_rows_of_a_dead_process_do_not_outlive_its_successors_first_write(tmp_path: Path) -> None:
    path = tmp_path / "s"
    engine = MemoryEngine(path)
    engine._stage(1, [b"r"], [b""])
    engine.close()
    engine = MemoryEngine(path)
    put(engine, b"a", b"1")
    engine.close()
    state = State()
    with Journal.open(
        path, restore=state.restore, apply=state.apply, content=CONTENT, sync=Sync.never()
    ):
        assert state.ingests == {}


# -- bytes ------------------------------------------------------------------------------------


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


def test_damage_names_the_journal_file(tmp_path: Path) -> None:
    with open_memory(tmp_path / "s") as store:
        for number in range(5):
            store.put(b"%d" % number, b"v" * 50)
    (live,) = (tmp_path / "s").glob("*-journal")
    content = bytearray(live.read_bytes())
    content[len(content) // 2] ^= 1
    live.write_bytes(content)
    with pytest.raises(JournalDamagedError) as found:
        open_memory(tmp_path / "s")
    assert found.value.path == str(live)
