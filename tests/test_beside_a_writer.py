"""Readers beside a process that writes: they show the writer's state at their `upper`.

A process writes as fast as it can, by every kind of write, and records the state behind each
commit. Another process opens the store to be read again and again, and compares all answers.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.engine import rocks
from kvstore.engine.moment import Moment
from kvstore.errors import NotYetWrittenError
from kvstore.store import Store
from kvstore.testing.model import state_after
from tests.harness.parts import parts_of
from tests.harness.seeds import seed_of
from tests.harness.writer import KEYS, State, Writer, check, key, recent

pytestmark = pytest.mark.on_disk

STATES = 40


def write(place: Path, engine: str, seed: int, pipe: Connection) -> None:
    """Write until told to stop; then send the state behind each commit."""
    writer = Writer(place, engine, random.Random(seed))
    with writer.store:
        writer.put()
        pipe.send("there is a store")
        while not pipe.poll():
            writer.step()
    pipe.send(writer.states)


@contextmanager
def writing(
    spawn: Any, place: Path, engine: str, seed: int
) -> Iterator[tuple[Any, list[tuple[int, State]]]]:
    """A writer beside the block: its process, and the list that gets its states at the end."""
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=write, args=(place, engine, seed, theirs))
    process.start()
    theirs.close()
    states: list[tuple[int, State]] = []
    try:
        ours.recv()
        yield process, states
        ours.send("stop")
        states += ours.recv()
    finally:
        process.kill()
        process.join()


def look(store: Store, rng: random.Random) -> list[tuple[int, State]]:
    """States that the reader shows, at its newest time and at a random older time."""
    newest = store.upper - 1
    rows = dict(store.scan())
    assert [batch.num_rows for batch in store.scan_batches()] in ([], [len(rows)])
    assert {k: store.get(k) for k in map(key, range(KEYS))} == {
        k: rows.get(k) for k in map(key, range(KEYS))
    }
    assert state_after({}, store.changes(0, revisions="latest", order="time")) == rows
    assert all(version.timestamp <= newest for k in rows for version in store.history(k))
    assert all((each.added or 0) <= newest for each in store.imports.all())
    with pytest.raises(NotYetWrittenError):  # `newest`, rounded up to microseconds, is read
        store.get(b"k", as_of=newest + 1000)
    seen = [(newest, rows)]
    if store.whole_since <= newest:
        past = recent(rng, store.whole_since, newest)
        seen.append((past, dict(store.scan(as_of=past))))
        assert state_after(dict(seen[-1][1]), store.changes(past, order="time")) == rows
    return seen


def compare(spawn: Any, place: Path, engine: str, seed: int) -> None:
    """Open the store until `STATES` of its states were seen."""
    rng = random.Random(seed)
    seen: list[tuple[int, State]] = []
    uppers = [0]
    with writing(spawn, place, engine, seed) as (process, states):
        while len(uppers) < STATES:
            assert process.is_alive()
            with kvstore.open_read_only(place / "store") as store:
                assert store.upper >= uppers[-1]
                if store.upper == uppers[-1]:
                    continue
                uppers.append(store.upper)
                seen += look(store, rng)
                if len(uppers) % 10 == 0:
                    assert store.verify().ok
    check(seen, states)


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(40, marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_a_reader_shows_the_writers_state_at_its_upper(
    tmp_path: Path, spawn: Any, engine: str, rounds: int
) -> None:
    for number in range(rounds):
        place = tmp_path / str(number)
        place.mkdir()
        compare(spawn, place, engine, seed_of())
        shutil.rmtree(place)


def test_a_file_that_the_writer_removes_meanwhile_is_no_reason_to_sum_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB tells a file that is gone as damage. The checksums of all logs were then computed
    before the next look, which took seconds beside a writer that imports."""
    with kvstore.open(tmp_path / "store") as store:
        engine = parts_of(store).engine
        store.put_many({b"a": b"1", b"z": b"v"})
        engine.compact("data")
        summed: list[Path] = []
        moments: list[Moment] = []

        def moment_of(directory: Path) -> Moment:
            moments.append(found := of(directory))
            if len(moments) == 1:
                before = {*directory.glob("*.sst")}
                store.put(b"a", b"3")
                engine.compact("data")
                assert store.get(b"a") == b"3"  # the last reader of the old files
                assert not before <= {*directory.glob("*.sst")}
            return found

        of = Moment.of
        monkeypatch.setattr(Moment, "of", staticmethod(moment_of))
        monkeypatch.setattr(rocks, "find_damage", summed.append)
        with kvstore.open_read_only(tmp_path / "store") as reader:
            assert dict(reader.scan()) == {b"a": b"3", b"z": b"v"}
        assert len(moments) == 2
        assert summed == []
