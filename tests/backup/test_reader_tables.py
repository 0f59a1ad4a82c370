"""Tables of collections, snapshots, live readers and clients: history, changes, latest rows and
joins, as the store has them."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, Store, Timestamp, backup
from kvstore.errors import ClosedError, NotYetWrittenError, UsageError
from kvstore.server import ListenAddress, app, serving
from kvstore.tables import Table
from tests.harness.seeds import seeded

pytestmark = pytest.mark.tiny_limits

SECOND = 10**9
PEOPLE = pa.schema([("id", pa.int64()), ("name", pa.string()), ("age", pa.int64())])
SEEN = pa.schema([("device", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("x", pa.int64())])


def at(second: int) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def written(store: Store, clock: ManualClock, made: backup.Collection) -> list[Timestamp]:
    """Rows that come, change and go, between backups; a column goes in the middle. Returns the
    time after each step."""
    pick, marks = seeded(), []
    people = store.table("people", PEOPLE, key=["id"], indexes={"by_name": ["name"]})
    seen = store.table("seen", SEEN, key=["device"], event_time="ts")
    for step in range(9):
        for number in pick.sample(range(6), 3):
            people.put({"id": number, "name": pick.choice("abc")})
            seen.put({"device": f"d{number % 2}", "ts": at(pick.randrange(9)), "x": step})
        people.delete(pick.randrange(6))
        if step == 4:
            people.alter(drop=["age"])
        clock.advance(SECOND)
        marks.append(Timestamp(store.sync() - 1))
        if step % 3 == 2:
            made.backup(store)
    return marks


def rows_of(reader: pa.RecordBatchReader) -> list[dict[str, Any]]:
    return reader.read_all().to_pylist()  # type: ignore[no-any-return]


def answers(people: Table, seen: Table, marks: list[Timestamp]) -> list[Any]:
    """Each question that needs history, asked of both tables."""
    first, middle, last = marks[0], marks[5], marks[-1]
    labels = pa.table({"id": [0, 1, 2, 3, 9] * 2, "ts": [*[middle] * 5, *[last] * 5]})
    found: list[Any] = [people.history(number) for number in range(7)]
    found += [rows_of(people.changes(since, last)) for since in (first, middle)]
    found += [rows_of(people.changes(first, middle, images="post", columns=["name"]))]
    found += [rows_of(seen.changes(first))]
    for until in (None, at(4), at(0)):
        for known in (None, middle):
            found += [seen.latest(f"d{n}", at=until, known_at=known) for n in range(3)]
    found += [rows_of(people.join(labels, on="id"))]
    found += [rows_of(people.join(labels, on="id", columns=["name"], prefix="p_"))]
    found += [rows_of(kvstore.join(labels, [kvstore.Join(people, key="id")]))]
    pick = random.Random(7)
    events = pa.table(
        {
            "device": [f"d{pick.randrange(3)}" for _ in range(80)],
            "when": [at(pick.randrange(11)) for _ in range(80)],
            "known": pa.array([int(pick.choice(marks)) for _ in range(80)], pa.int64()),
        }
    )
    for choices in (
        {},
        {"known_at": "known"},
        {"known_at": middle, "columns": ["x"], "prefix": "f_"},
        {"known_at": "known", "max_age": timedelta(seconds=2)},
    ):
        found += [rows_of(seen.join(events, on="device", at="when", **choices))]
    return found


def test_a_table_answers_alike_by_each_handle_that_has_its_history(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000 * SECOND)
    made = backup.Collection(tmp_path / "backups", clock=clock)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        marks = written(store, clock, made)
        expected = answers(store.table("people"), store.table("seen"), marks)
        with (
            serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
            kvstore.connect(running.url) as client,
            kvstore.follow(tmp_path / "store") as live,
            made.open() as reader,
        ):
            of_now = [live, client, reader]
            then = [each.snapshot(marks[-1]) for each in (store, live, client)]
            for source in (*of_now, *then):
                assert answers(source.table("people"), source.table("seen"), marks) == expected
            assert len({len(source.table("people")) for source in (store, *of_now, *then)}) == 1
            for source in [each.snapshot(marks[5]) for each in (store, live, client)]:
                _require_refusals(source.table("people"), source.table("seen"), marks)
                assert len(source.table("people")) == store.table("people").count(as_of=marks[5])
                assert "age" not in source.table("people").schema.names
                people = source.table("people")
                found = list(people.find("by_name", "a")), people.get(1), list(people.rows())
                its = store.table("people")
                assert found[0] == list(its.find("by_name", "a", as_of=marks[5]))
                assert found[1:] == (its.get(1, as_of=marks[5]), list(its.rows(as_of=marks[5])))
                source.close()
                for late, key in ((people.get, [1]), (people.count, []), (people.history, [1])):
                    with pytest.raises(ClosedError):
                        late(*key)
            _require_refusals(
                reader.table("people", marks[5]), reader.table("seen", marks[5]), marks
            )


def _require_refusals(then: Table, seen: Table, marks: list[Timestamp]) -> None:
    """`then` and `seen` are as of the sixth mark."""
    assert all(version.timestamp <= marks[5] for n in range(6) for version in then.history(n))
    with pytest.raises(NotYetWrittenError):
        then.changes(marks[0], marks[6])
    with pytest.raises(NotYetWrittenError):
        seen.latest("d0", known_at=marks[6])
    with pytest.raises(UsageError, match="one time"):
        then.get(1, as_of=marks[4])
    late = pa.table({"id": [1, 2], "ts": [marks[5], marks[6]]})
    with pytest.raises(NotYetWrittenError):
        then.join(late, on="id").read_all()
    assert rows_of(then.join(late.slice(0, 1), on="id")) == rows_of(
        then.join(late.slice(0, 1), on="id", at=None)
    )
    events = pa.table({"device": ["d0"], "ts": [at(5)], "known": pa.array([int(marks[6])])})
    for known in ("known", marks[6]):
        with pytest.raises(NotYetWrittenError):
            seen.join(events, "device", known_at=known).read_all()
    for write in (
        lambda: then.alter(drop=["name"]),
        lambda: then.revert(marks[0]),
        lambda: then.persist(1),
        then.clear,
        then.drop,
        lambda: then.put({"id": 1}),
        lambda: then.delete_range(prefix=()),
    ):
        with pytest.raises(UsageError, match=r"table of the store|write to the store"):
            write()
