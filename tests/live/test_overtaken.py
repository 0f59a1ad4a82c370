"""A live reader whose writer removes history in the middle of a read: the read gives the rows of
its time, or raises `HistoryGoneError`. The store is sound, so nothing may say that it is damaged.

The removal comes before each call that the read makes to the engine, one after the other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import LiveReader, Store, Timestamp, bulk
from kvstore.errors import HistoryGoneError, KVStoreError
from kvstore.tables import indexes
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of
from tests.harness.soak import soaked

KEYS = [b"k%d" % number for number in range(8)]
LARGE = b"large" * 500
"""The change index leaves such a value to the versions."""

ENGINE_CALLS = ("cursor", "get", "borrow", "find")


class Overtaken:
    """A store with every kind of row, and a reader that moves when it is told to."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.store: Store = kvstore.open(place / "store", durability="async")
        schema = pa.schema([("id", pa.int64()), ("value", pa.binary())])
        self.table = self.store.table("rows", schema, "id", indexes={"by_value": "value"})
        self.numbers = itertools.count()
        self.at = self.write()
        self.reader: LiveReader = kvstore.follow(place / "store", max_staleness=float("inf"))
        self.engine = parts_of(self.reader).engine
        self.plain = {name: getattr(self.engine, name) for name in ENGINE_CALLS}
        self.rows = self.reader.table("rows")

    def add_import(self, number: int) -> None:
        made = bulk.Import.create(self.place / f"staged-{number}")
        with made.writer() as writer:
            for key in KEYS[1:4]:
                writer.put(key, LARGE)
        made.seal()
        bulk.ingest(self.store, made.staging)

    def write(self, *, imports: bool = True) -> Timestamp:
        """Write versions of all keys twice, and return a time in between."""
        for _ in range(2):
            between = Timestamp(self.store.upper - 1)
            number = next(self.numbers)
            if imports:
                self.add_import(number)
            self.store.put_many(dict.fromkeys(KEYS[2:], LARGE + b"%d" % number))
            self.store.delete_range(KEYS[3], KEYS[5])
            self.store.put(b"expires", b"%d" % number, expires=timedelta(days=1))
            for row in range(3):
                self.table.put({"id": row, "value": b"%d" % number})
        return between

    def begin(self, *, imports: bool) -> None:
        """Write, and have the reader follow."""
        self.at = self.write(imports=imports)
        self.reader.refresh()

    def overtaken(self, read: Callable[[], object], remove: Callable[[], object], at: int) -> bool:
        """Call `read`, and remove history before its call `at` of the engine. Whether there was
        such a call."""
        left = itertools.count(at, -1)

        def hooked(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                if not next(left):
                    remove()
                    self.reader.refresh()
                return self.plain[name](*arguments, **named)

            return call

        for name in ENGINE_CALLS:
            setattr(self.engine, name, hooked(name))
        try:
            read()
        finally:
            for name, plain in self.plain.items():
                setattr(self.engine, name, plain)
        return next(left) < 0


def collect(s: Overtaken) -> None:
    s.store.gc(before=s.store.upper - 1)


def clear(s: Overtaken) -> None:
    s.store.clear_range(KEYS[2], KEYS[6])


def revert(s: Overtaken) -> None:
    """Revert the newest import, and let GC take its rows and its record."""
    s.store.revert_import(s.store.imports.all()[-1].import_id)
    collect(s)


REMOVALS = {"gc": collect, "clear": clear, "revert": revert}


def snapshot(s: Overtaken) -> object:
    with s.reader.snapshot(s.at) as held:
        return dict(held.scan()), held.get_many(KEYS), held.floor(KEYS[7])


def labels(s: Overtaken) -> pa.Table:
    return pa.table({"id": KEYS, "ts": pa.array([s.at] * len(KEYS), pa.int64())})


READS: Mapping[str, Callable[[Overtaken], object]] = {
    "changes": lambda s: list(s.reader.changes(s.at)),
    "changes by time": lambda s: list(s.reader.changes(s.at, order="time")),
    "latest": lambda s: list(s.reader.changes(s.at, revisions="latest")),
    "latest by time": lambda s: list(s.reader.changes(s.at, revisions="latest", order="time")),
    "state": lambda s: list(s.reader.changes(0, s.at, revisions="latest")),
    "a span": lambda s: list(s.reader.changes(s.at, start=KEYS[1], end=KEYS[3])),
    "events": lambda s: list(s.reader.events(s.at)),
    "images": lambda s: list(s.reader.events(s.at, expand="all", images="pre+post")),
    "changes_batches": lambda s: s.reader.changes_batches(s.at).read_all(),
    "get": lambda s: [s.reader.get(key, as_of=s.at) for key in KEYS],
    "get_many": lambda s: s.reader.get_many(KEYS, s.at),
    "get_many, each at its time": lambda s: s.reader.get_many(KEYS, [s.at] * len(KEYS)),
    "floor": lambda s: s.reader.floor(KEYS[4], s.at),
    "floor_many": lambda s: s.reader.floor_many(KEYS, [s.at] * len(KEYS)),
    "scan": lambda s: list(s.reader.scan(as_of=s.at)),
    "scan reverse": lambda s: list(s.reader.scan(as_of=s.at, reverse=True)),
    "keys": lambda s: list(s.reader.keys(as_of=s.at)),
    "count": lambda s: s.reader.count(as_of=s.at),
    "scan_batches": lambda s: s.reader.scan_batches(as_of=s.at).read_all(),
    "snapshot": snapshot,
    "join": lambda s: s.reader.join(labels(s)).read_all(),
    "export": lambda s: s.reader.replication.export(since=s.at, upto=s.reader.upper - 1),
    "rows": lambda s: list(s.rows.rows(as_of=s.at)),
    "find": lambda s: list(s.rows.find("by_value", b"1", as_of=s.at)),
    "changes of a table": lambda s: s.rows.changes(s.at, images="pre+post").read_all(),
}
"""Reads at a time, which may be gone."""

NEWEST: Mapping[str, Callable[[Overtaken], object]] = {
    "get": lambda s: [s.reader.get(key) for key in KEYS],
    "get_many": lambda s: s.reader.get_many(KEYS),
    "floor": lambda s: s.reader.floor(KEYS[4]),
    "floor_many": lambda s: s.reader.floor_many(KEYS),
    "scan": lambda s: list(s.reader.scan()),
    "scan_batches": lambda s: s.reader.scan_batches().read_all(),
    "count": lambda s: s.reader.count(),
    "history": lambda s: [s.reader.history(key) for key in KEYS],
    "ttl": lambda s: s.reader.ttl(b"expires"),
    "get of a table": lambda s: s.rows.get(1),
    "history of a table": lambda s: s.rows.history(1),
    "find": lambda s: list(s.rows.find("by_value", b"1")),
    "find as batches": lambda s: s.rows.find("by_value").read_all(),
    "stats": lambda s: s.reader.stats(),
}
"""Reads of the newest state, which is always there."""


def attack(place: Path, reads: Mapping[str, Any], few: bool) -> list[str]:
    """Overtake each of `reads` at its calls of the engine. Returns the errors, with the names of
    the read and the removal."""
    found: list[str] = []
    s = Overtaken(place)
    try:
        for number, (name, read) in enumerate(reads.items()):
            turn = ["gc", "clear", "gc", "revert"][number % 4]
            for removal in [turn] if few else REMOVALS:
                for at in [1 + number % 3] if few else range(40):
                    s.begin(imports=removal == "revert")
                    try:
                        if not s.overtaken(partial(read, s), partial(REMOVALS[removal], s), at):
                            break
                    except KVStoreError as error:
                        found.append(f"{name}, {removal}, {at}: {type(error).__name__}: {error}")
    finally:
        s.reader.close()
        s.store.close()
    return found


@pytest.mark.parametrize("few", [True, *soaked(False)], ids=["few", "each"])
def test_a_read_at_a_time_that_is_removed_meanwhile_says_so(tmp_path: Path, few: bool) -> None:
    found = attack(tmp_path, READS, few)
    assert [each for each in found if ": HistoryGoneError: " not in each] == []
    assert len(found) > len(READS) // 4


@pytest.mark.parametrize("few", [True, *soaked(False)], ids=["few", "each"])
def test_a_read_of_the_newest_state_does_not_notice_removals(tmp_path: Path, few: bool) -> None:
    assert attack(tmp_path, NEWEST, few) == []


def test_a_reader_that_is_verified_stands_still_meanwhile(tmp_path: Path) -> None:
    """GC of the writer was told as damage of the store."""
    s = Overtaken(tmp_path)
    movers: list[threading.Thread] = []

    def move(_: int) -> None:
        if len(movers) == 3:
            return
        collect(s)
        movers.append(threading.Thread(target=s.reader.refresh))
        movers[-1].start()
        movers[-1].join(0.05)  # it ends once the reader has been verified

    try:
        with bounds(SCAN_CHUNK=1):
            assert s.reader.verify(progress=move).problems == ()
        for each in movers:
            each.join()
        assert s.reader.since == s.store.since
    finally:
        s.reader.close()
        s.store.close()


FINDS: Mapping[str, Callable[[Overtaken], list[bytes]]] = {
    "rows": lambda s: [row["value"] for row in s.rows.find("by_value")],
    "batches": lambda s: s.rows.find("by_value").read_all()["value"].to_pylist(),
}


@pytest.mark.parametrize("find", FINDS.values(), ids=FINDS)
def test_a_find_that_is_overtaken_gives_the_rows_of_one_time(
    tmp_path: Path, find: Callable[[Overtaken], list[bytes]]
) -> None:
    """The removal comes between the read of the index and the read of the rows, among others."""
    s = Overtaken(tmp_path)
    found: list[bytes] = []
    begun = 0

    def replace_and_collect() -> None:
        for row in range(3):
            s.table.put({"id": row, "value": b"new"})
        collect(s)

    def read() -> None:
        found[:] = find(s)

    try:
        for at in itertools.count():
            s.begin(imports=False)
            before = [s.table.get(0)["value"]] * 3
            if not s.overtaken(read, replace_and_collect, at):
                break
            assert found in (before, [b"new"] * 3)
            begun += found != before
        assert begun > 1
    finally:
        s.reader.close()
        s.store.close()


def test_a_find_that_gave_rows_says_that_it_was_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "FIRST_ENTRIES", 1)
    s = Overtaken(tmp_path)
    try:
        rows = s.rows.find("by_value")
        assert next(rows)["id"] == 0
        s.begin(imports=False)
        collect(s)
        s.reader.refresh()
        with pytest.raises(HistoryGoneError):
            list(rows)
        with s.reader.snapshot() as held:
            table = held.table("rows")
            s.begin(imports=False)
            collect(s)
            s.reader.refresh()
            with pytest.raises(HistoryGoneError):
                list(table.find("by_value"))
        assert len(list(s.rows.find("by_value"))) == 3
    finally:
        s.reader.close()
        s.store.close()
