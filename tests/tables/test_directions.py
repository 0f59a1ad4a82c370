"""Rows by their event times in every direction, and rows that are valid until a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import backup
from kvstore.errors import CorruptionError, NotYetWrittenError, UsageError
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.tables.definition import Definition
from tests.harness.bounds import bounds
from tests.harness.parts import data_family
from tests.harness.seeds import seed_of
from tests.tables.test_event_labels import (
    EVENT_UNITS,
    LABEL_UNITS,
    ages_of,
    as_type,
    compare,
    labels_of,
    nanoseconds,
    times_of,
)

WAYS = [
    {"direction": direction, "allow_exact": exact}
    for direction in ("backward", "forward", "nearest")
    for exact in (True, False)
]
US = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", pa.string()), ("e", US), ("n", pa.int64()), ("until", US)])


def moment(minute: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=minute)


def chosen(
    events: list[int], at: int, age: int | None, *, direction: str, allow_exact: bool
) -> int | None:
    """The event time that a label at `at` gets."""
    least = 0 if allow_exact else 1
    before = max((each for each in events if at - each >= least), default=None)
    behind = min((each for each in events if each - at >= least), default=None)
    sides = {"backward": [before], "forward": [behind], "nearest": [before, behind]}[direction]
    found = [each for each in sides if each is not None]
    found = [each for each in found if age is None or abs(each - at) <= age]
    return min(found, key=lambda each: abs(each - at), default=None)


@given(st.data())
@settings(max_examples=50)
def test_labels_of_every_unit_and_century_find_the_event_beside_them(data: st.DataObject) -> None:
    event = data.draw(st.sampled_from(sorted(EVENT_UNITS, key=str)))
    labels = [each for each in sorted(LABEL_UNITS, key=str) if compare(event, each)]
    label = data.draw(st.sampled_from(labels))
    events = data.draw(st.lists(times_of(event), min_size=1, max_size=6, unique=True))
    near = [each * EVENT_UNITS[event] + more for each in events for more in (-1, 0, 1)]
    asked = data.draw(st.lists(labels_of(label, near), min_size=1, max_size=6))
    age = data.draw(ages_of(event, events, label, asked))
    way: dict[str, Any] = data.draw(st.sampled_from(WAYS))
    with kvstore.open(None, engine="memory") as store:
        schema = pa.schema([("k", pa.int64()), ("e", event), ("n", pa.int64())])
        table = store.table("t", schema, key=["k"], event_time="e")
        numbers = pa.array(range(len(events)))
        ones = pa.array([1] * len(events))
        table.put_batch(pa.table({"k": ones, "e": as_type(events, event), "n": numbers}))
        table.put_batch(  # neighbours, which no label may get
            pa.table({"k": [0, 2], "e": as_type(events[:1] * 2, event), "n": [-1, -2]})
        )
        given_labels = pa.table({"k": pa.array([1] * len(asked)), "at": as_type(asked, label)})
        with bounds(JOIN_PASS_LABELS_MIN=data.draw(st.sampled_from([1, 1 << 62]))):
            answered = table.join(given_labels, "k", "at", max_age=age, columns=["n"], **way)
            found = answered.read_all()
    most = nanoseconds(age)
    exact = [each * EVENT_UNITS[event] for each in events]
    answers = [chosen(exact, each * LABEL_UNITS[label], most, **way) for each in asked]
    places = [None if each is None else exact.index(each) for each in answers]
    assert found.column("n").to_pylist() == places


@pytest.mark.parametrize("batch_rows", [1, 3, 4096])
def test_a_pass_answers_labels_as_seeks_do(tmp_path: Path, batch_rows: int) -> None:
    """Labels of one time that lie closely are answered by a pass over the keys of rows."""
    pick = random.Random(seed_of("KVSTORE_TABLE_PASS_SEED"))
    schema = pa.schema([("s", pa.string()), ("k", pa.int64()), *list(SCHEMA)[1:]])
    with kvstore.open(tmp_path / "store", durability="async") as store:
        plain = store.table("plain", schema, key=["s", "k"], event_time="e")
        ended = store.table("ended", schema, key=["s", "k"], event_time="e", valid_to="until")
        times = []
        for step in range(12):
            rows = [
                {"s": pick.choice(["", "\0", "a", "ab"]), "k": pick.randrange(-2, 3)}
                | {"e": moment(pick.randrange(20)), "n": step}
                | {"until": pick.choice([None, moment(pick.randrange(30))])}
                for _ in range(20)
            ]
            for table in (plain, ended):
                table.put_batch(rows)
                for row in rows[:5]:
                    table.delete(row["s"], row["k"], row["e"])
            times.append(int(store.upper) - 1)
            if step % 5 == 0:
                data_family(store).flush()
        count = 120
        labels = pa.table(
            {
                "s": [pick.choice(["", "\0", "a", "ab", "b"]) for _ in range(count)],
                "k": [pick.randrange(-3, 4) for _ in range(count)],
                "at": [moment(pick.randrange(-1, 22)) for _ in range(count)],
            }
        )
        for way in WAYS:
            how: dict[str, Any] = {"on": ["s", "k"], "at": "at", "columns": ["e", "n"], **way}
            how["known_at"] = pick.choice([None, *times])
            how["max_age"] = pick.choice([None, timedelta(minutes=3)])
            tables = [plain, ended] if way["direction"] == "backward" else [plain]
            for table in tables:
                with bounds(JOIN_PASS_LABELS_MIN=1 << 62):
                    expected = table.join(labels, **how).read_all()
                dense = {"JOIN_PASS_LABELS_MIN": 1, "JOIN_PASS_BYTES_MAX": 1 << 50}
                with bounds(dense, ARROW_ROWS_MAX=batch_rows, COLUMNS_FLUSH_BYTES_MIN=0):
                    assert table.join(labels, **how).read_all().equals(expected)
                assert 0 < expected["n"].null_count < count


def test_both_axes_at_every_door(tmp_path: Path) -> None:
    """Restated, late and deleted rows, rows that end: a label gets what was known of its time."""
    pick = random.Random(seed_of("KVSTORE_TABLE_DIRECTION_SEED"))
    collection = backup.Collection(tmp_path / "collection")
    with kvstore.open(tmp_path / "store", durability="async") as store:
        plain = store.table("plain", SCHEMA, key=["k"], event_time="e")
        ended = store.table("ended", SCHEMA, key=["k"], event_time="e", valid_to="until")
        times = [int(store.sync()) - 1]
        known: dict[int, dict[tuple[str, int], tuple[int, int | None]]] = {times[0]: {}}
        rows: dict[tuple[str, int], tuple[int, int | None]] = {}
        for step in range(50):
            key, at = pick.choice("abc"), pick.randrange(20)
            if pick.random() < 0.25:
                rows.pop((key, at), None)
                plain.delete(key, moment(at))
                ended.delete(key, moment(at))
            else:
                until = pick.choice([None, at + pick.randrange(8)])
                rows[key, at] = step, until
                row = {"k": key, "e": moment(at), "n": step}
                row["until"] = None if until is None else moment(until)
                plain.put(row)
                ended.put(row)
            times.append(int(store.upper) - 1)
            known[times[-1]] = dict(rows)
            if step == 25:
                collection.backup(store)
        collection.backup(store)
        asked = [
            (pick.choice("abcd"), pick.randrange(-1, 22), pick.choice(times)) for _ in range(40)
        ]
        labels = pa.table(
            {
                "k": [key for key, _, _ in asked],
                "at": [moment(at) for _, at, _ in asked],
                "known": pa.array([at for _, _, at in asked], pa.int64()),
            }
        )
        with ExitStack() as opened:
            running = opened.enter_context(serving(app(store), ListenAddress("127.0.0.1", 0)))
            client = opened.enter_context(kvstore.connect(running.url))
            others = [opened.enter_context(each) for each in (collection.open(), store.snapshot())]
            doors: list[Any] = [store, client, *others]
            for number, way in enumerate(WAYS):
                age = pick.choice([None, timedelta(minutes=3)])
                how: dict[str, Any] = {"known_at": "known", "columns": ["n"], "max_age": age}
                answers = []
                for key, at, when in asked:
                    events = [each for name, each in known[when] if name == key]
                    most = None if age is None else 3
                    event = chosen(events, at, most, **way)  # type: ignore[arg-type]
                    answers.append(None if event is None else known[when][key, event])
                for door in doors:
                    found = door.table("plain").join(labels, "k", "at", **how, **way).read_all()
                    assert found["n"].to_pylist() == [a and a[0] for a in answers], (door, way)
                    if number > 1:
                        continue
                    found = door.table("ended").join(labels, "k", "at", **how, **way).read_all()
                    valid = [
                        answer[0] if answer and (answer[1] is None or at < answer[1]) else None
                        for answer, (_, at, _) in zip(answers, asked, strict=True)
                    ]
                    assert found["n"].to_pylist() == valid, (door, way)
        for key, at, when in asked:
            row = ended.latest(key, at=moment(at), known_at=when)
            before = [each for name, each in known[when] if name == key and each <= at]
            newest = known[when][key, max(before)] if before else None
            is_valid = newest is not None and (newest[1] is None or at < newest[1])
            assert (row and row["n"]) == (newest[0] if newest and is_valid else None)


YEAR_9999 = (253_402_300_000, pa.timestamp("s", "UTC"))
MILLENNIA = timedelta(days=8000 * 366)


@pytest.mark.parametrize(
    ("event", "label", "less", "enough", "direction"),
    [
        ((127, pa.int8()), (1000, pa.int64()), 872, 873, "backward"),
        ((-128, pa.int8()), (127, pa.int8()), 254, 255, "backward"),
        ((127, pa.int8()), (-128, pa.int8()), 254, 255, "forward"),
        ((0, pa.uint64()), (-5, pa.int64()), 4, 5, "forward"),
        (((1 << 63) - 1, pa.int64()), ((1 << 64) - 1, pa.uint64()), 1 << 62, 1 << 63, "nearest"),
        (((1 << 63) - 1, pa.timestamp("ns", "UTC")), YEAR_9999, "1s", MILLENNIA, "backward"),
    ],
)
def test_no_tolerance_reaches_an_event_behind_the_range_of_its_column(
    store: kvstore.Store, event: Any, label: Any, less: Any, enough: Any, direction: Any
) -> None:
    schema = pa.schema([("k", pa.int64()), ("e", event[1]), ("n", pa.int64())])
    table = store.table("t", schema, key=["k"], event_time="e")
    table.put_batch(pa.table({"k": [1], "e": as_type([event[0]], event[1]), "n": [9]}))
    labels = pa.table({"k": [1], "at": as_type([label[0]], label[1])})
    for tolerance, expected in ((less, None), (enough, 9)):
        way = {"direction": direction, "columns": ["n"], "tolerance": tolerance}
        assert table.join(labels, "k", "at", **way).read_all()["n"].to_pylist() == [expected]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_latest_row_ends_at_a_time_of_any_form(store: kvstore.Store, unit: str) -> None:
    time = pa.timestamp(unit, "UTC")
    schema = pa.schema([("k", pa.int64()), ("e", time), ("until", time), ("n", pa.int64())])
    table = store.table("t", schema, key="k", event_time="e", valid_to="until")
    ends = moment(5)
    row = {"k": [1], "e": pa.array([moment(1)], time), "until": pa.array([ends], time), "n": [7]}
    table.put_batch(pa.table(row))
    before, then = moment(4), int(ends.timestamp()) * 10**9
    for is_past, times in (
        (False, (None, before, before.isoformat(), kvstore.Timestamp(then - 10**9))),
        (True, (ends, moment(6), ends.isoformat(), kvstore.Timestamp(then))),
    ):
        for at in times:
            assert (table.latest(1, at=at) is None) == is_past


@pytest.fixture
def store() -> Iterator[kvstore.Store]:
    with kvstore.open(None, engine="memory") as opened:
        yield opened


def test_a_table_tells_until_when_its_rows_are_valid(store: kvstore.Store) -> None:
    table = store.table("t", SCHEMA, key=["k"], event_time="e", valid_to="until")
    assert table.valid_to == "until"
    assert store.table("t").valid_to == "until"
    stored = Definition.from_bytes("t", table.codec().stored)
    assert stored.end_column is not None
    assert stored.end_column.name == "until"
    table.put({"k": "a", "e": moment(1), "n": 1, "until": moment(3)})
    labels = pa.table({"k": ["a"] * 4, "at": [moment(each) for each in range(4)]})
    found = table.join(labels, "k", "at", columns=["n"]).read_all()
    assert found["n"].to_pylist() == [None, 1, 1, None]
    with pytest.raises(UsageError, match=r"direction='nearest'.*valid until"):
        table.join(labels, "k", "at", direction="nearest")
    with pytest.raises(UsageError, match="tells until when"):
        table.alter(drop="until")
    table.alter(valid_to=False)
    assert table.valid_to is None
    found = table.join(labels, "k", "at", columns=["n"], direction="forward").read_all()
    assert found["n"].to_pylist() == [1, 1, None, None]
    table.alter(valid_to="until")
    assert table.join(labels, "k", "at", columns=["n"]).read_all()["n"].to_pylist()[3] is None
    other = SCHEMA.set(3, pa.field("until", pa.int64()))
    for schema, how in (
        (SCHEMA, {"valid_to": "until"}),
        (SCHEMA, {"event_time": "e", "valid_to": "e"}),
        (other, {"event_time": "e", "valid_to": "until"}),
    ):
        with pytest.raises(UsageError, match="valid_to"):
            store.table("wrong", schema, key=["k"], **how)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="valid_to"):
        store.table("t", SCHEMA, key=["k"], event_time="e", valid_to="n")
    forged = table.codec().stored.replace(b'"valid_to": 3', b'"valid_to": 0')
    with pytest.raises(CorruptionError, match="valid"):
        Definition.from_bytes("t", forged)


def test_ages_of_integers_and_dates(store: kvstore.Store) -> None:
    numbers = store.table("i", pa.schema([("k", pa.int64()), ("e", pa.int64())]), "k", None, "e")
    numbers.put_batch(pa.table({"k": [1, 1, 1], "e": [1, 5, 9]}))
    labels = pa.table({"k": [1] * 3, "at": [3, 7, 20]})
    how: dict[str, Any] = {"columns": ["e"], "direction": "nearest"}
    assert numbers.join(labels, "k", "at", tolerance=2, **how).read_all()["e"].to_pylist() == [
        1,
        5,
        None,
    ]
    days = store.table("d", pa.schema([("k", pa.int64()), ("e", pa.date32())]), "k", None, "e")
    days.put_batch(pa.table({"k": [1, 1], "e": [date(1815, 6, 18), date(2500, 1, 1)]}))
    labels = pa.table({"k": [1] * 2, "at": [date(1815, 6, 19), date(2499, 12, 1)]})
    found = days.join(labels, "k", "at", max_age=timedelta(days=2), **how).read_all()
    assert found["e"].to_pylist() == [date(1815, 6, 18), None]
    with pytest.raises(UsageError, match="max_age"):
        days.join(labels, "k", "at", max_age=2)
    with pytest.raises(UsageError, match="two names"):
        numbers.join(labels, "k", "at", max_age=2, tolerance=2)


def test_nulls_and_times_to_come_of_a_table(store: kvstore.Store) -> None:
    users = store.table("u", pa.schema([("k", pa.string()), ("n", pa.int64())]), key="k")
    at = int(users.put({"k": "a", "n": 1}))  # type: ignore[arg-type]
    later = at + 10**15
    labels = pa.table({"k": ["a", None, "a", "a"], "at": [at, at, None, later]})
    with pytest.raises(NotYetWrittenError):
        users.join(labels, "k", "at", on_null="null").read_all()
    with bounds(JOIN_ROWS_FIRST=2):
        found = users.join(labels, "k", "at", on_null="null", on_future="newest").read_all()
    assert found["n"].to_pylist() == [1, None, None, 1]
    told = found["as_of"].cast(pa.int64()).to_pylist()
    assert told[:3] == [at, None, None]
    assert at <= told[3] < later
    events = store.table("e", SCHEMA, key=["k"], event_time="e")
    events.put({"k": "a", "e": moment(1), "n": 1})
    asked = pa.table(
        {
            "k": ["a", "a", None, "a"],
            "when": pa.array([moment(2), None, moment(2), moment(2)], US),
            "known": pa.array([later, later, later, None], pa.int64()),
        }
    )
    on: dict[str, Any] = {"on_null": "null", "on_future": "newest", "columns": ["n"]}
    found = events.join(asked, "k", "when", known_at="known", prefix="x_", **on).read_all()
    assert found.schema.names[-1] == "x_as_of"
    assert found["x_n"].to_pylist() == [1, None, None, None]
    assert found["x_as_of"].is_valid().to_pylist() == [True, False, False, False]
