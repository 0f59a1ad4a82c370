"""The processes of the tests of live readers: writers, and readers that report the states that they
see."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa

import kvstore
from kvstore import LiveReader
from kvstore.errors import HistoryGoneError
from kvstore.testing.model import state_after
from tests.harness.writer import KEYS, State, Writer, key, recent

ALL = [key(number) for number in range(KEYS)]

Seen = tuple[int, State]


def count(path: Path, stamp: int, said: Connection) -> None:
    with kvstore.follow(path) as reader:
        reader.wait_beyond(stamp)
        said.send(len(list(reader.scan())))


def stand(path: Path, said: Connection) -> None:
    with kvstore.follow(path) as reader:
        said.send(len(list(reader.scan())))
        said.recv()
        said.send(dict(reader.scan(as_of=reader.refresh() - 1)))
        said.recv()


def write(place: Path, number: int, seed: int, pipe: Connection) -> None:
    """Write until killed, and report the state behind each commit."""
    writer = Writer(place, "rocksdb", random.Random(seed))
    writer.place = place / f"staged-{number}"
    writer.place.mkdir()
    for record in writer.store.imports.all():
        if record.added is None:  # a clear is refused while an import is being added
            writer.store.imports.abort(record.import_id)
    pipe.send((int(writer.store.upper), dict(writer.store.scan())))
    while True:
        writer.step()
        pipe.send(writer.states.pop())


def read(place: Path, number: int, seed: int, pipe: Connection) -> None:
    """Read until killed, and report each state that was seen."""
    rng = random.Random(seed)
    upper = 0
    with kvstore.follow(place / "store", max_staleness=rng.choice([0.001, 0.02])) as reader:
        while True:
            if rng.random() < 0.3:
                reader.refresh()
            reader.wait_beyond(upper, timeout=0.05)
            assert reader.upper >= upper
            upper = reader.upper
            pipe.send(list(look(reader, rng)))


def look(reader: LiveReader, rng: random.Random) -> Iterator[Seen]:
    """States that the reader shows, at its newest time and at a random older time."""
    newest = int(reader.upper) - 1
    past = recent(rng, min(reader.whole_since, newest), newest)
    for at in {newest, past}:
        with suppress(HistoryGoneError):
            yield at, every_way(reader, at)
    with suppress(HistoryGoneError):
        before = dict(reader.scan(as_of=past))
        changes = list(reader.changes(past, newest, order="time"))
        after = dict(reader.scan(as_of=newest))
        assert state_after(before, changes) == after, (past, newest, reader, changes)


def every_way(reader: LiveReader, at: int) -> State:
    """The state at a time; all kinds of reads must agree about it."""
    with reader.snapshot(at) as snapshot:
        rows = dict(snapshot.scan())
        assert {k: snapshot.get(k) for k in ALL if snapshot.get(k) is not None} == rows
    assert dict(zip(ALL, reader.get_many(ALL, at), strict=True)) == {k: rows.get(k) for k in ALL}
    assert dict(reader.scan(as_of=at, reverse=True)) == rows
    table = reader.scan_batches(as_of=at).read_all()
    assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)) == rows
    below = reader.floor(key(KEYS), at)
    assert below == (max(rows.items()) if rows else None)
    labels = pa.table({"id": ALL, "ts": pa.array([at] * KEYS, pa.int64())})
    joined = reader.join(labels).read_all()
    assert joined["value"].to_pylist() == [rows.get(k) for k in ALL]
    latest = reader.changes(0, at, revisions="latest", order="time")
    assert state_after({}, latest) == rows
    return rows
