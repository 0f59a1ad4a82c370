"""Joins of a live reader: by its own keys and by the names of its tables, as the writer joins."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Join
from kvstore.errors import HistoryGoneError, NotYetWrittenError
from tests.harness.bounds import bounds
from tests.harness.seeds import seed_of

USERS = pa.schema([("user", pa.int64()), ("score", pa.float64())])
READINGS = pa.schema(
    [("device", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.float64())]
)
LABELS = pa.schema(
    [
        ("id", pa.binary()),
        ("user", pa.int64()),
        ("device", pa.string()),
        ("seen", pa.timestamp("us", "UTC")),
        ("ts", pa.int64()),
    ]
)


def moment(minute: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=minute)


def write(store: kvstore.Store, pick: random.Random, step: int) -> None:
    """One change of the store, of a table, or of a table's columns."""
    users, readings = store.table("users"), store.table("readings")
    action = pick.choice(["key", "user", "user", "reading", "reading", "gone", "alter"])
    if action == "key":
        store.put(b"%d" % pick.randrange(3), b"%d" % step)
    elif action == "user":
        users.put({"user": pick.randrange(4), "score": step / 2})
    elif action == "reading":
        row = {"device": pick.choice("ab"), "at": moment(pick.randrange(9)), "value": step / 4}
        readings.put(row)
    elif action == "gone":
        users.delete(pick.randrange(4))
    else:
        users.alter(add={f"column{step}": pa.int64()})


def answers(source: kvstore.Store, labels: pa.Table) -> list[Any]:
    """The joins of the labels to everything in a store."""
    sides: list[Any] = [source, Join(source.table("users"), prefix="user_")]
    readings = source.table("readings").join(labels, on="device", at="seen", known_at="ts")
    return [kvstore.join(labels, sides).read_all(), readings.read_all()]


def test_a_live_reader_joins_tables_as_its_writer_does(tmp_path: Path) -> None:
    pick = random.Random(seed_of("LIVE_JOIN_SEED"))
    with (
        kvstore.open(tmp_path / "store", durability="async") as store,
        kvstore.follow(tmp_path / "store") as reader,
    ):
        first = int(store.put(b"0", b"first"))
        store.table("users", USERS, key="user")
        store.table("readings", READINGS, key="device", event_time="at")
        times = [int(store.upper) - 1]
        for step in range(40):
            write(store, pick, step)
            times.append(int(store.upper) - 1)
            rows = [
                {
                    "id": b"%d" % pick.randrange(4),
                    "user": pick.randrange(5),
                    "device": pick.choice("abc"),
                    "seen": moment(pick.randrange(12)),
                    "ts": pick.choice(times),
                }
                for _ in range(8)
            ]
            labels = pa.Table.from_pylist(rows, LABELS)
            reader.refresh()
            with bounds(JOIN_VALUE_BYTES_MAX=pick.choice([3, 1 << 20])):
                assert answers(reader, labels) == answers(store, labels)
        early = labels.set_column(4, "ts", pa.array([first] * 8, pa.int64()))
        store.gc(store.upper - 1)
        reader.refresh()
        with pytest.raises(HistoryGoneError):
            answers(reader, early)
        store.put(b"0", b"new")
        late = labels.set_column(4, "ts", pa.array([int(store.upper)] * 8, pa.int64()))
        with pytest.raises(NotYetWrittenError):
            answers(reader, late)


def test_a_join_that_has_begun_stays_whole_while_its_reader_moves(tmp_path: Path) -> None:
    with (
        kvstore.open(tmp_path / "store", durability="async") as store,
        kvstore.follow(tmp_path / "store") as reader,
    ):
        users = store.table("users", USERS, key="user")
        users.put_batch(pa.table({"user": range(1000), "score": [1.0] * 1000}))
        reader.refresh()
        at = pa.array([int(store.upper) - 1] * 40_000, pa.int64())
        labels = pa.table({"user": [number % 1000 for number in range(40_000)], "ts": at})
        joined = kvstore.join(labels, [reader.table("users")])
        found = [joined.read_next_batch()]
        users.put_batch(pa.table({"user": range(1000), "score": [2.0] * 1000}))
        users.alter(drop=["score"])
        reader.refresh()
        found += joined
        assert sum(batch.num_rows for batch in found) == 40_000
        for batch in found:
            assert set(batch.column("score").to_pylist()) == {1.0}
