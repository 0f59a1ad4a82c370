"""Live readers of one store: their reads, their refusals, and the files that they leave alone."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvstore
from kvstore import LiveReader, Store, bulk
from kvstore.codec.json import JsonObject, read_object
from kvstore.engine import logs, rocks_secondary
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    HistoryGoneError,
    NotAStoreError,
    NotYetWrittenError,
    StaleReaderError,
    StorageError,
    UsageError,
)
from tests.harness.parts import parts_of
from tests.live import children

pytestmark = pytest.mark.tiny_limits

NEVER = float("inf")
"""Seconds between two looks: the reader looks only when the test asks."""


@pytest.fixture
def reader(store: Store) -> Iterator[LiveReader]:
    """A reader beside `store`, which looks only when the test asks."""
    assert store.path is not None
    store.put(b"a", b"1")
    with kvstore.follow(store.path, max_staleness=NEVER) as opened:
        yield opened


def names(path: Path) -> dict[str, tuple[int, int]]:
    """The files of a directory, with their sizes and times of change."""
    return {each.name: (each.stat().st_size, each.stat().st_ctime_ns) for each in path.rglob("*")}


def test_a_reader_stands_still_until_it_looks(store: Store, reader: LiveReader) -> None:
    assert reader.get(b"a") == b"1"
    before = reader.upper
    stamp = store.put(b"a", b"2")
    assert (reader.get(b"a"), reader.upper) == (b"1", before)
    with pytest.raises(NotYetWrittenError):
        reader.get(b"a", as_of=stamp)
    assert reader.refresh() == stamp + 1
    assert reader.get(b"a") == b"2"
    assert reader.get(b"a", as_of=before - 1) == b"1"
    assert [version.timestamp for version in reader.history(b"a")] == [stamp, before - 1]


def test_upper_moves_by_itself(store: Store) -> None:
    assert store.path is not None
    with kvstore.follow(store.path, max_staleness=0.01) as reader:
        for number in range(20):
            stamp = store.put(b"k", b"%d" % number)
            while reader.upper <= stamp:
                Store.wait_beyond(reader, stamp, timeout=120.0)  # this wait looks at no file
            assert reader.get(b"k") == b"%d" % number


def test_a_reader_waits_for_what_a_writer_hands_over(store: Store, reader: LiveReader) -> None:
    stamp = store.put(b"k", b"v")
    reader.wait_beyond(stamp)
    assert reader.get(b"k") == b"v"
    reader.wait_beyond(stamp + 10**15, timeout=0.01)
    reader.wait_beyond(stamp + 10**15, stop=lambda: True)
    assert reader.upper == stamp + 1
    for each in (store, reader):
        each.wait_beyond(stamp - 1, timeout=float("inf"))
        each.wait_beyond(stamp - 1, timeout=10**400)
        each.wait_beyond(stamp + 10**15, timeout=-1.0)
        with pytest.raises(UsageError, match="timeout='1s'"):
            each.wait_beyond(stamp, timeout="1s")  # type: ignore[arg-type]


def test_records_of_every_kind_follow(store: Store, reader: LiveReader, tmp_path: Path) -> None:
    made = bulk.Import.create(tmp_path / "staged")
    with made.writer() as writer:
        writer.put(b"i", b"imported")
    made.seal()
    stamp = bulk.ingest(store, tmp_path / "staged")
    reader.refresh()
    assert reader.get(b"i") == b"imported"
    assert [each.added for each in reader.imports.all()] == [stamp]
    store.revert_import(made.import_id)
    store.delete_range(b"a", b"b")
    store.reshard(2)
    store.put(b"z", b"1")
    reader.refresh()
    assert dict(reader.scan()) == {b"z": b"1"}
    assert reader.generations() == store.generations()
    assert [change.key for change in reader.changes(stamp)] == [b"a", b"i", b"z"]
    assert list(reader.changes(0)) == list(store.changes(0))
    assert list(reader.events(0)) == list(store.events(0))
    assert reader.changes_batches(0).read_all() == store.changes_batches(0).read_all()
    with store.hold("mine"):
        reader.refresh()
        assert [hold.name for hold in reader.holds.all()] == ["mine"]
    store.sync()
    store.put(b"z", b"2", durability="sync")
    store.close()
    reader.refresh()
    assert len(list(reader.epochs())) > 1


def test_a_reader_keeps_the_newest_values_until_a_commit_changes_them(
    store: Store, reader: LiveReader, tmp_path: Path
) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"a", b"imported")
    staged.seal()
    first = store.put_many({b"a": b"2", b"kept": b"1"})
    writes: list[Callable[[], object]] = [
        lambda: store.put(b"a", b"3"),
        lambda: store.delete(b"a"),
        lambda: store.put_many({b"a": b"4", **{b"b%d" % n: b"" for n in range(300)}}),
        lambda: store.put(b"a", b"5" * 5000),
        lambda: store.delete_range(b"a", b"b"),
        lambda: bulk.ingest(store, tmp_path / "staged"),
        lambda: store.revert_import(staged.import_id),
        lambda: store.put(b"a", b"6"),
        lambda: store.revert_range(b"a", b"b", to=first),
        lambda: store.clear_range(b"a", b"b"),
        lambda: store.put(b"a", b"7"),
    ]
    newest = parts_of(reader).versions.newest
    reader.refresh()
    for write in writes:
        before = reader.get(b"a")
        for _ in range(3):
            assert reader.get(b"kept") == b"1"
            assert reader.get(b"a") == before
        write()
        assert reader.get(b"a") == before
        reader.refresh()
        assert reader.get(b"a") == store.get(b"a") != before
    assert reader.get(b"kept") == b"1"
    hits = newest.hits
    store.put(b"a", b"8")
    reader.refresh()
    assert reader.get(b"kept") == b"1"
    assert newest.hits == hits + 1  # a commit of few keys leaves the others
    assert reader.get(b"a") == b"8"


def test_a_look_decodes_the_records_that_were_written_and_no_others(
    store: Store, reader: LiveReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 30
    for number in range(many):
        store.clear_range(b"c%d" % number, b"c%d~" % number, compact=False)
    for number in range(many):
        with bulk.Import.create(tmp_path / f"{number}") as staged:
            with staged.writer() as writer:
                writer.put(b"%d" % number, b"imported")
            staged.seal()
        bulk.ingest(store, tmp_path / f"{number}")
        store.hold(f"hold {number}")
    reader.refresh()
    store.hold("hold 0")
    reader.refresh()  # the bytes are kept from the second look on
    decoded: list[str] = []

    def counted(data: bytes, *, where: str) -> JsonObject:
        decoded.append(where)
        return read_object(data, where=where)

    monkeypatch.setattr("kvstore.mvcc.meta.read_object", counted)
    store.hold("hold 0")
    imported = store.imports.all()[0].import_id
    store.imports.revert(imported)
    reader.refresh()
    taken = {name for name in decoded if name.startswith(("meta record hold/", "meta record imp"))}
    assert taken == {"meta record hold/hold 0", f"meta record import/{imported:016x}"}
    assert not any("clear/" in name for name in decoded)
    assert reader.get(b"0") is None
    assert [record.timestamp for record in reader.holds.all()] == [
        record.timestamp for record in store.holds.all()
    ]


def test_history_that_the_writer_gives_up_is_refused(store: Store, reader: LiveReader) -> None:
    old = reader.upper - 1
    snapshot = reader.snapshot()
    rows, changes = reader.scan(), reader.changes(0)
    large = b"v" * 100_000
    for number in range(10):
        store.put(b"a", large)
        store.put(b"k%d" % number, large)
    reader.refresh()
    window = reader.changes(old, order="time")
    assert next(window).value == large
    store.gc(before=store.upper - 1, compact=True)
    reader.refresh()
    assert snapshot.as_of == old
    with pytest.raises(HistoryGoneError):
        snapshot.get(b"a")
    with pytest.raises(HistoryGoneError):
        list(window)
    with pytest.raises(HistoryGoneError):
        list(changes)
    assert list(rows) == [(b"a", b"1")]  # an open scan keeps its state
    assert reader.since == store.since > old
    store.clear_range(b"a", b"b")
    reader.refresh()
    with pytest.raises(HistoryGoneError):
        reader.get(b"a", as_of=reader.since)
    assert reader.get(b"a") is None
    assert reader.get(b"k1", as_of=reader.since) == large


def test_a_reader_survives_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "store"
    kvstore.open(path).close()
    with kvstore.follow(path, max_staleness=NEVER) as reader:
        assert list(reader.scan()) == []
        for number in range(3):
            with kvstore.open(path) as store:
                store.put(b"k", b"%d" % number)
                reader.refresh()
                assert reader.get(b"k") == b"%d" % number
            reader.refresh()
        assert [version.value for version in reader.history(b"k")] == [b"2", b"1", b"0"]


def test_only_durable_commits_show_if_that_is_asked(store: Store) -> None:
    assert store.path is not None
    store.put(b"k", b"1", durability="sync")
    with kvstore.follow(store.path, NEVER, durable_only=True) as reader:
        assert reader.get(b"k") == b"1"
        stamp = store.put(b"k", b"2", durability="async")
        assert reader.refresh() <= stamp
        assert reader.get(b"k") == b"1"
        assert reader.durable == reader.upper == store.durable
        store.sync()
        assert reader.refresh() > stamp
        assert reader.get(b"k") == b"2"
        assert reader.durable == store.durable


def test_a_store_without_a_durable_mark_is_refused_where_only_durable_commits_may_show(
    store: Store, tmp_path: Path
) -> None:
    store.put(b"k", b"1")
    store.checkpoint(tmp_path / "copy")
    with pytest.raises(UsageError, match="no durable mark"):
        kvstore.follow(tmp_path / "copy", durable_only=True)
    with kvstore.follow(tmp_path / "copy") as reader:
        assert reader.get(b"k") == b"1"
        assert reader.durable == 0
    assert store.path is not None
    for damaged in (b"", b"short", b"\0" * 12, b"x" * 40):
        (store.path / "DURABLE").write_bytes(damaged)
        with pytest.raises(UsageError, match="no durable mark"):
            kvstore.follow(store.path, durable_only=True)


def test_nothing_is_written_where_the_store_lies(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvstore.open(path) as store:
        store.put(b"k", b"v")
    before = names(path)
    with kvstore.follow(path, max_staleness=0.001) as reader:
        reader.wait_beyond(reader.upper, timeout=0.05)
        assert reader.get(b"k") == b"v"
    assert names(path) == before


def test_writes_are_refused(store: Store, reader: LiveReader) -> None:
    for write in (
        lambda: reader.put(b"k", b"v"),
        lambda: reader.gc(before=1),
        lambda: reader.hold("h"),
    ):
        with pytest.raises(UsageError, match="read only"):
            write()
    assert reader.sync() == reader.upper
    reader.close()
    reader.close()
    with pytest.raises(ClosedError):
        reader.get(b"k")
    with pytest.raises(ClosedError):
        reader.refresh()
    assert store.get(b"a") == b"1"


# -- stores that are missing or were replaced ----------------------------------------------------


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError):
        kvstore.follow(tmp_path / "nothing")
    with kvstore.open(tmp_path / "memory", engine="memory") as store:
        store.put(b"k", b"v")
        with pytest.raises(UsageError, match="in memory"):
            kvstore.follow(tmp_path / "memory")
    with pytest.raises(UsageError):
        kvstore.follow(tmp_path / "nothing", max_staleness=-1)


@pytest.mark.damages_store
@pytest.mark.parametrize("gone", [shutil.rmtree, lambda path: path.rename(f"{path}-away")])
def test_a_store_that_was_removed_ends_the_reader(tmp_path: Path, gone: Any) -> None:
    path = tmp_path / "store"
    with kvstore.open(path) as store:
        store.put(b"k", b"v")
    with kvstore.follow(path, max_staleness=NEVER) as reader:
        gone(path)
        for _ in range(2):
            with pytest.raises(NotAStoreError):
                reader.refresh()
        with pytest.raises(NotAStoreError):
            reader.get(b"k")


def put_back_in_place(copy: Path, path: Path) -> None:
    """As `cp -r copy/* path`, after the newer files were removed."""
    for file in path.iterdir():
        if not (copy / file.name).exists() and file.is_file():
            file.unlink()
    shutil.copytree(copy, path, dirs_exist_ok=True)


def put_back_by_name(copy: Path, path: Path) -> None:
    path.rename(f"{path}-away")
    shutil.copytree(copy, path)


@pytest.mark.damages_store
@pytest.mark.parametrize("put_back", [put_back_in_place, put_back_by_name])
@pytest.mark.parametrize("goes_on", [False, True], ids=["as it was", "and written on"])
def test_a_store_that_was_put_back_from_an_older_copy_ends_the_reader(
    tmp_path: Path, put_back: Any, goes_on: bool
) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    with kvstore.open(path) as store:
        store.put(b"k", b"old")
    shutil.copytree(path, copy)
    with kvstore.open(path) as store:
        store.put(b"k", b"new")
        reader = kvstore.follow(path, max_staleness=NEVER)
    with reader:
        assert reader.get(b"k") == b"new"
        put_back(copy, path)
        if goes_on:
            with kvstore.open(path) as store:
                store.put(b"k", b"other")
        for _ in range(2):
            with pytest.raises(StaleReaderError, match="replaced by another copy"):
                reader.refresh()
        with pytest.raises(StaleReaderError):
            reader.get(b"k")
        with kvstore.follow(path) as anew:
            assert anew.get(b"k") == (b"other" if goes_on else b"old")


@pytest.mark.damages_store
def test_another_store_at_the_same_path_ends_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvstore.open(path) as store:
        store.put(b"k", b"v")
    with kvstore.follow(path, max_staleness=NEVER) as reader:
        shutil.rmtree(path)
        with kvstore.open(path) as store:
            store.put(b"k", b"another")
        with pytest.raises(StaleReaderError):
            reader.refresh()


# -- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [20, pytest.param(100, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_many_readers_at_once(store: Store, spawn: Any, count: int) -> None:
    stamp = store.put(b"a", b"1")
    processes = []
    for _ in range(count):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=children.count, args=(store.path, stamp + 1, theirs))
        process.start()
        theirs.close()
        processes.append((process, ours))
    for number in range(50):
        store.put(b"k%d" % number, b"v")
    for process, ours in processes:
        assert 1 < ours.recv() <= 51
        process.join()
        assert process.exitcode == 0


def test_a_reader_that_was_stopped_holds_nothing_up_and_goes_on(store: Store, spawn: Any) -> None:
    store.put(b"a", b"1")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=children.stand, args=(store.path, theirs))
    process.start()
    assert process.pid is not None
    assert ours.recv() == 1
    os.kill(process.pid, signal.SIGSTOP)
    for number in range(300):
        store.put(b"k%d" % (number % 50), b"%d" % number)
    store.delete_range(b"k2", b"k3")
    store.gc(before=store.upper - 1, compact=True)
    for _ in range(3):
        store.upkeep.compact()
    os.kill(process.pid, signal.SIGCONT)
    ours.send("go on")
    assert ours.recv() == dict(store.scan())
    process.kill()
    process.join()


def test_the_home_of_a_killed_reader_is_removed_by_the_next_one(
    store: Store, spawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = tmp_path / "homes"
    homes.mkdir()
    monkeypatch.setenv("TMPDIR", str(homes))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert store.path is not None
    with kvstore.follow(store.path):
        (alive,) = homes.glob("kvstore-follow-*")
        killed = homes / "kvstore-follow-killed"
        shutil.copytree(alive, killed, symlinks=True)
        with kvstore.follow(store.path) as another:
            assert not killed.exists()
            assert alive.exists()
            another.refresh()
    assert list(homes.iterdir()) == []


@pytest.mark.damages_store
@pytest.mark.parametrize("part", ["%06d.log", "MANIFEST-*", "CURRENT"])
def test_a_damaged_store_is_refused_and_never_shown_in_part(tmp_path: Path, part: str) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, durability="async") as store:
        for number in range(200):
            store.put(b"k%03d" % number, b"v" * 100)
        shutil.copytree(path, tmp_path / "copy")  # a copy as a kill would leave it
    copy = tmp_path / "copy"
    pattern = "*.log" if part.endswith("log") else part
    file = max(copy.glob(pattern), key=lambda each: each.stat().st_size)
    stored = bytearray(file.read_bytes())
    stored[len(stored) // 3] ^= 0xFF
    file.write_bytes(stored)
    with pytest.raises((CorruptionError, StorageError)):
        kvstore.follow(copy)
    with pytest.raises(CorruptionError):
        kvstore.open(copy)


@pytest.mark.damages_store
def test_a_log_that_ends_in_garbage_is_left_to_the_writer(tmp_path: Path) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    with kvstore.open(path, durability="async") as store:
        store.put(b"k", b"v")
        shutil.copytree(path, copy)
    (log,) = (each for each in copy.glob("*.log") if each.stat().st_size)
    # as a power cut may leave the log: its tail looks like a recycled record
    with log.open("ab") as file:
        file.write(b"\x01\x02\x03\x04\x20\x00\x05" + b"x" * 40)
    with pytest.raises(CorruptionError):
        kvstore.follow(copy)
    with kvstore.open(copy) as store, kvstore.follow(copy) as reader:
        assert reader.get(b"k") == store.get(b"k") == b"v"


def test_a_reader_opens_while_its_writer_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is opened again, and so removes the MANIFEST that the reader has just found."""
    place = tmp_path / "store"
    rounds = iter(range(3))

    class Late(rocks_secondary.EditReader):
        def __init__(self, manifest: Path) -> None:
            super().__init__(manifest)
            if manifest != place and next(rounds, None) is not None:
                with kvstore.open(place) as store:
                    store.put(b"a", b"2")
                assert not manifest.exists()

    with kvstore.open(place) as store:
        store.put(b"a", b"1")
    monkeypatch.setattr(rocks_secondary, "EditReader", Late)
    with kvstore.follow(place, max_staleness=NEVER) as reader:
        assert reader.get(b"a") == b"2"
        assert len(list(reader.history(b"a"))) == 4


def purged_at_first(monkeypatch: pytest.MonkeyPatch, place: Path) -> list[object]:
    """Have RocksDB list a log that it then does not find, when it next opens an instance: a writer
    removes useless logs some time after the edit that says so. Returns the instances."""
    log = place / "000001.log"
    plain = rocks_secondary.SecondaryEngine._new_instance
    opened: list[object] = []

    def late(engine: rocks_secondary.SecondaryEngine, cache: Any) -> Any:
        opened.append(plain(engine, cache))
        log.unlink(missing_ok=True)
        return opened[-1]

    monkeypatch.setattr(rocks_secondary.SecondaryEngine, "_new_instance", late)
    log.symlink_to(place / "nowhere")  # it is listed, and cannot be opened
    return opened


def test_a_log_that_is_removed_during_a_look_hides_no_newer_one(
    store: Store, reader: LiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader said that the store was replaced by another copy."""
    assert store.path is not None
    store.put(b"b", b"2")
    reader.refresh()
    parts_of(store).engine.compact("data")
    store.put(b"c", b"3")
    opened = purged_at_first(monkeypatch, store.path)
    assert reader.refresh() == store.upper
    assert opened
    assert dict(reader.scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}


def test_a_reader_that_opens_while_a_log_is_removed_shows_all_commits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader said that no store was there."""
    assert store.path is not None
    store.put(b"a", b"1")
    opened = purged_at_first(monkeypatch, store.path)
    with kvstore.follow(store.path, max_staleness=NEVER) as reader:
        assert opened
        assert reader.get(b"a") == b"1"


def test_a_log_that_came_in_the_same_tick_as_another_change_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory has the same time before and after the log came, so commits in it were not
    noticed."""
    place = str(store.path)
    stands = rocks_secondary.file_end(place)

    def end(path: str) -> logs.FileEnd:
        return stands if path == place else logs.file_end(path)

    clock = SimpleNamespace(monotonic=lambda: 1.0)
    monkeypatch.setattr(rocks_secondary, "file_end", end)
    monkeypatch.setattr(rocks_secondary, "time", clock)
    with kvstore.follow(place, max_staleness=NEVER) as reader:
        store.put(b"a", b"1")
        parts_of(store).engine.compact("data")
        store.put(b"b", b"2")
        clock.monotonic = lambda: 2.0
        for number in range(3):
            store.put(b"c", b"%d" % number)
            assert reader.refresh() == store.upper
            assert reader.get(b"c") == b"%d" % number
