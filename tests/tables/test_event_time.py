"""Two time axes: the time in the row, and the time at which the row was known."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from tests.harness.bounds import bounds
from tests.harness.seeds import seed_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

SCHEMA = pa.schema(
    [("device", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("value", pa.float64())]
)


def moment(minute: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=minute)


@pytest.fixture
def store(tmp_path: Path, each_engine: str) -> Any:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def readings(store: kvstore.Store) -> kvstore.Table:
    return store.table("readings", SCHEMA, key=["device"], event_time="ts")


def test_the_latest_row_on_both_axes(readings: kvstore.Table) -> None:
    assert readings.key == ["device", kvstore.desc("ts")]
    assert readings.event_time == "ts"
    first = readings.put({"device": "a", "ts": moment(10), "value": 1.0})
    readings.put({"device": "a", "ts": moment(20), "value": 2.0})
    restated = readings.put({"device": "a", "ts": moment(10), "value": 1.5})
    late = readings.put({"device": "a", "ts": moment(15), "value": 3.0})
    readings.put({"device": "b", "ts": moment(5), "value": 9.0})

    def value(at: Any = None, known_at: Any = None) -> Any:
        row = readings.latest("a", at=at, known_at=known_at)
        return row and row["value"]

    assert value() == 2.0
    assert value(moment(9)) is None
    assert value(moment(10)) == 1.5
    assert value(moment(10), first) == 1.0
    assert value(moment(17)) == 3.0
    assert value(moment(17), restated) == 1.5
    assert value(moment(30), first) == 1.0
    assert value("2026-01-01T00:15:00Z", late) == 3.0
    assert readings.latest("c") is None
    assert readings.latest("a", columns=["ts"]) == {"ts": moment(20)}
    assert [row["value"] for row in readings.rows("a")] == [2.0, 3.0, 1.5]
    with pytest.raises(UsageError, match="2 values for the key device"):
        readings.latest("a", moment(10))


def test_a_join_on_two_axes_equals_asking_row_by_row(
    store: kvstore.Store, readings: kvstore.Table
) -> None:
    rng = random.Random(seed_of("TABLE_JOIN_SEED"))
    begun = store.sync() - 1
    times = [begun]
    for _ in range(40):
        row = {"device": rng.choice("abc"), "ts": moment(rng.randrange(30)), "value": rng.random()}
        if rng.random() < 0.2:
            times.append(readings.delete(row["device"], row["ts"]))  # type: ignore[arg-type]
        else:
            times.append(readings.put(row))  # type: ignore[arg-type]
    rows = [
        {"device": rng.choice("abcd"), "at": moment(rng.randrange(35)), "known": rng.choice(times)}
        for _ in range(60)
    ]
    labels = pa.table(
        {
            "device": pa.array([row["device"] for row in rows]).dictionary_encode(),
            "at": [row["at"] for row in rows],
            "known": pa.array([int(row["known"]) for row in rows], pa.int64()),
        }
    )
    found = readings.join(labels, on="device", at="at", known_at="known").read_all()
    assert found.schema.names == ["device", "at", "known", "ts", "value", "row_timestamp"]
    for label, row in zip(rows, found.to_pylist(), strict=True):
        expected = readings.latest(label["device"], at=label["at"], known_at=label["known"])
        assert row["value"] == (expected and expected["value"]), label
        assert row["ts"] == (expected and expected["ts"])
    newest = readings.join(
        labels, on=["device"], at="at", columns=["value"], max_age=timedelta.max
    ).read_all()
    aged = readings.join(
        labels, on=["device"], at="at", columns=["value"], max_age=timedelta(minutes=3), prefix="f_"
    ).read_all()
    for label, row, young in zip(rows, newest.to_pylist(), aged.to_pylist(), strict=True):
        expected = readings.latest(label["device"], at=label["at"])
        assert row["value"] == (expected and expected["value"])
        is_young = expected is not None and label["at"] - expected["ts"] <= timedelta(minutes=3)
        assert young["f_value"] == (expected["value"] if expected and is_young else None)


@pytest.mark.parametrize("event_time", [None, "ts"])
def test_large_rows_come_in_pieces_of_bounded_bytes(
    store: kvstore.Store, event_time: str | None
) -> None:
    schema = pa.schema(
        [("id", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("note", pa.string())]
    )
    notes = store.table("notes", schema, key=["id"], event_time=event_time)
    notes.put({"id": 1, "ts": moment(0), "note": "n" * 1000})
    labels = pa.table({"id": [1, 2] * 200, "at": pa.array([store.now()] * 400, pa.int64())})
    with bounds(JOIN_VALUE_BYTES_MAX=10_000, JOIN_ROWS_FIRST=400):
        batches = list(notes.join(labels, on="id", at="at", columns=["note"]))
    assert all(batch.column("note").nbytes < 12_000 for batch in batches)
    found = pa.Table.from_batches(batches)
    assert found["id"].to_pylist() == [1, 2] * 200
    assert found["note"].to_pylist() == ["n" * 1000, None] * 200


@pytest.mark.parametrize(
    ("column", "name"),
    [
        (pa.array([0], pa.timestamp("us")), "at"),
        (pa.array([0], pa.timestamp("us")), "known"),
        (pa.array(["2026-01-01"]), "at"),
        (pa.array(["2026-01-01"]), "known"),
        (pa.array([0], pa.date32()), "at"),
        (pa.array([None]), "at"),
    ],
    ids=str,
)
def test_times_of_labels_have_a_zone_and_no_null(
    store: kvstore.Store, readings: kvstore.Table, column: pa.Array, name: str
) -> None:
    labels = pa.table({"device": ["a"], "at": [moment(1)], "known": [moment(1)]})
    labels = labels.set_column(labels.schema.get_field_index(name), name, column)
    with pytest.raises(UsageError, match=f"column '{name}' has"):
        readings.join(labels, on="device", at="at", known_at="known").read_all()
    users = store.table("users", pa.schema([("device", pa.string())]), key="device")
    with pytest.raises(UsageError, match=f"column '{name}' has"):
        users.join(labels, on="device", at=name).read_all()


def test_labels_without_a_zone_ask_for_event_times_without_one(store: kvstore.Store) -> None:
    schema = pa.schema([("id", pa.int64()), ("ts", pa.timestamp("us"))])
    local = store.table("local", schema, key=["id"], event_time="ts")
    noon = datetime(2026, 1, 1, 12)  # noqa: DTZ001  # as the table has it
    local.put({"id": 1, "ts": noon})
    labels = pa.table({"id": [1, 1], "at": [noon, noon - timedelta(hours=1)]})
    assert local.join(labels, on="id", at="at").read_all()["ts"].to_pylist() == [noon, None]
    with pytest.raises(UsageError, match="the key of column 'id' is int64, not string"):
        local.join(labels.set_column(0, "id", pa.array(["1", "1"])), on="id", at="at").read_all()


def test_a_join_of_rows_keeps_its_history_from_the_call_on(
    store: kvstore.Store, readings: kvstore.Table
) -> None:
    first = readings.put({"device": "a", "ts": moment(0), "value": 1.0})
    readings.put({"device": "a", "ts": moment(0), "value": 2.0})
    labels = pa.table({"device": ["a"], "at": [moment(1)]})
    joined = readings.join(labels, on="device", at="at", known_at=first)
    store.gc(before=store.sync())
    assert joined.read_all()["value"].to_pylist() == [1.0]


def test_a_table_without_event_time_joins_what_was_known(store: kvstore.Store) -> None:
    users = store.table("users", pa.schema([("id", pa.int64()), ("plan", pa.string())]), key="id")
    first = users.put({"id": 1, "plan": "free"})
    second = users.put({"id": 1, "plan": "paid"})
    third = users.delete(1)
    labels = pa.table(
        {"id": [1, 1, 2, 1], "ts": [int(first), int(second), int(second), int(third)]}
    )
    found = users.join(labels, on="id").read_all()
    assert found.column("plan").to_pylist() == ["free", "paid", None, None]
    stamps = found.column("row_timestamp").cast(pa.int64()).to_pylist()
    assert stamps == [first, second, None, None]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown column": ({"on": "id"}, "labels have no column 'id'; they have device, at"),
    "too many columns": ({"on": ["device", "at"]}, "for a key of 1"),
    "a key that is no name": ({"on": 7}, "on=7; pass the name of a column"),
    "a time that is no name": ({"at": 7}, "at=7; pass the name of a column"),
    "a prefix that is no text": ({"prefix": 5}, "prefix=5; pass text"),
    "a text for columns": ({"columns": "value"}, "columns='value'; pass a list of names"),
    "no times": ({"at": None}, "name the labels' column: at="),
    "a column that is there": ({"columns": ["device"]}, "labels have a column 'device' already"),
    "an unknown column of the table": ({"columns": ["zone"]}, "has no column 'zone'"),
    "a key of another type": (
        {"labels": pa.table({"device": [1], "at": [moment(1)]})},
        "column 'device' is string, not int64",
    ),
    "a null": (
        {"labels": pa.table({"device": ["a", None], "at": [moment(1)] * 2})},
        "column 'device' has a null in row 1",
    ),
}


@pytest.mark.parametrize(("options", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_labels_are_told(readings: kvstore.Table, options: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"on": "device", "at": "at", **options}
    labels = given.pop("labels", pa.table({"device": ["a"], "at": [moment(1)]}))
    with pytest.raises(UsageError) as caught:
        readings.join(labels, **given).read_all()
    assert says in str(caught.value)


def test_labels_of_other_times_than_are_kept_are_told(
    store: kvstore.Store, readings: kvstore.Table
) -> None:
    first = readings.put({"device": "a", "ts": moment(1), "value": 1.0})
    readings.put({"device": "a", "ts": moment(1), "value": 2.0})
    labels = pa.table({"device": ["a"], "at": [moment(1)], "known": [int(first)]})
    ahead = labels.set_column(2, "known", [[int(store.upper) + 10**12]])
    with pytest.raises(NotYetWrittenError, match="row 0"):
        readings.join(ahead, "device", "at", "known").read_all()
    store.gc(keep=timedelta(0))
    with pytest.raises(HistoryGoneError, match="row 0"):
        readings.join(labels, "device", "at", "known").read_all()


def test_changes_have_the_names_of_delta(store: kvstore.Store, readings: kvstore.Table) -> None:
    begun = store.sync() - 1
    row = {"device": "a", "ts": moment(1), "value": 1.0}
    first = readings.put(row)
    second = readings.put(row | {"value": 2.0})
    third = readings.delete("a", moment(1))
    readings.delete("b", moment(1))
    found = readings.changes(begun).read_all()
    assert found.schema.names[-3:] == ["_change_type", "_commit_version", "_commit_timestamp"]
    columns = ("_change_type", "_commit_version", "value")
    assert list(zip(*(found.column(name).to_pylist() for name in columns), strict=True)) == [
        ("insert", first, 1.0),
        ("update_preimage", second, 1.0),
        ("update_postimage", second, 2.0),
        ("delete", third, 2.0),
    ]
    kinds = readings.changes(begun, second, images="post", columns=["value"]).read_all()
    assert kinds.column("_change_type").to_pylist() == ["insert", "update_postimage"]
    with pytest.raises(UsageError, match="images='all'"):
        readings.changes(begun, images="all")  # type: ignore[arg-type]


def test_latest_rounds_down_as_a_join_does(store: kvstore.Store) -> None:
    schema = pa.schema([("k", pa.int64()), ("e", pa.timestamp("s", "UTC"))])
    table = store.table("t", schema, key=["k"], event_time="e")
    table.put({"k": 1, "e": moment(1)})
    assert table.latest(1, at=moment(1) + timedelta(milliseconds=1500)) == table.get(1, moment(1))
    days = store.table("d", schema.set(1, pa.field("e", pa.date32())), key=["k"], event_time="e")
    days.put({"k": 1, "e": moment(0).date()})
    assert days.latest(1, at=moment(3)) == days.latest(1, at=moment(0).date())
    assert days.latest(1, at=moment(-3)) is None
