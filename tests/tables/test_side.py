"""Several tables answer the same labels in one pass, beside stores and collections."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Join, ManualClock, backup
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from tests.harness.seeds import seed_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

USERS = pa.schema([("user", pa.int64()), ("plan", pa.string()), ("score", pa.float64())])
VISITS = pa.schema([("day", pa.int32()), ("user", pa.int64()), ("pages", pa.int32())])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, each_engine: str) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", clock=clock, durability="async") as opened:
        yield opened


def test_tables_and_a_store_stand_side_by_side(
    store: kvstore.Store, clock: ManualClock, tmp_path: Path
) -> None:
    pick = random.Random(seed_of("TABLE_SIDE_SEED"))
    users = store.table("users", USERS, key="user")
    visits = store.table("visits", VISITS, key=["day", "user"])
    times: list[int] = [int(store.now())]
    for step in range(60):
        clock.advance(10_000)
        user, day = pick.randrange(4), pick.randrange(2)
        action = pick.choice(["user", "user", "visit", "visit", "gone", "expire"])
        if action == "user":
            users.put({"user": user, "plan": pick.choice(["free", None]), "score": step / 2})
        elif action == "visit":
            visits.put({"day": day, "user": user, "pages": step})
        elif action == "gone":
            users.delete(user)
        elif action == "expire":
            store.put(b"%d" % user, b"%d" % step, expires=timedelta(microseconds=35))
        times.append(int(store.now()))
    asked = [
        {"user": pick.randrange(5), "day": pick.randrange(2), "ts": pick.choice(times)}
        for _ in range(50)
    ]
    labels = pa.table(
        {
            "user": pa.array([each["user"] for each in asked], pa.int16()).dictionary_encode(),
            "day": [each["day"] for each in asked],
            "id": [b"%d" % each["user"] for each in asked],
            "ts": [each["ts"] for each in asked],
        }
    )
    collection = backup.Collection(tmp_path / "backups")
    collection.backup(store)
    sources = [users, Join(visits, prefix="v_"), store, Join(collection, prefix="c_")]
    found = kvstore.join(labels, sources).read_all()
    assert found.column_names[4:] == [
        *("plan", "score", "users_row_timestamp", "v_pages", "v_row_timestamp"),
        *("value", "value_timestamp", "c_value", "c_value_timestamp"),
    ]
    alone = users.join(labels, on="user").read_all()
    assert found["score"].equals(alone["score"])
    assert found["users_row_timestamp"].equals(alone["row_timestamp"])
    by_day = visits.join(labels, on=["day", "user"], columns=["pages"]).read_all()
    assert found["v_pages"].equals(by_day["pages"])
    for row, label in zip(found.to_pylist(), asked, strict=True):
        known = users.get(label["user"], as_of=kvstore.Timestamp(label["ts"]))
        assert (row["plan"], row["score"]) == (known and known["plan"], known and known["score"])
        value = store.get(b"%d" % label["user"], as_of=kvstore.Timestamp(label["ts"]))
        assert row["value"] == row["c_value"] == value


def test_columns_keys_and_ages_of_a_table_are_chosen(
    store: kvstore.Store, clock: ManualClock
) -> None:
    users = store.table("users", USERS, key="user")
    at = int(users.put({"user": 1, "plan": "free", "score": 0.5}))
    clock.advance(5_000)
    now = int(store.now())
    labels = pa.table({"friend": [1, 1, 2], "ts": [at, now, now]})
    young = Join(users, key="friend", columns=["score"], max_age=timedelta(microseconds=4))
    joined = kvstore.join(labels, [young]).read_all()
    assert joined["score"].to_pylist() == [0.5, None, None]
    assert joined["users_row_timestamp"].cast(pa.int64()).to_pylist() == [at, None, None]
    newest = kvstore.join(labels.drop_columns("ts"), [Join(users, key=["friend"])], at=None)
    assert newest.read_all()["plan"].to_pylist() == ["free", "free", None]


def test_what_a_table_cannot_answer_is_refused(store: kvstore.Store) -> None:
    users = store.table("users", USERS, key="user")
    events = store.table(
        "events", pa.schema([("user", pa.int64()), ("at", pa.int64())]), key="user", event_time="at"
    )
    at = int(users.put({"user": 1, "plan": "free"}))
    labels = pa.table({"user": [1, None], "name": ["a", "b"], "ts": [at, at]})
    refused: list[tuple[list[Any], str]] = [
        ([events], "event time.*Table.join"),
        ([Join(users, key=["user", "name"])], "name the labels' columns of user"),
        ([Join(users, key="nobody")], "no column 'nobody'"),
        ([Join(users, key=[7])], "key=7; pass the name of a column"),
        ([Join(users, columns=["nothing"])], "no column 'nothing'"),
        ([users, users], "two sources add a column 'plan'"),
        ([Join(users, key="name")], "the key of column 'name' is int64, not string"),
        ([users], "column 'user' has a null in row 1"),
    ]
    for sources, problem in refused:
        with pytest.raises(UsageError, match=problem):
            kvstore.join(labels, sources).read_all()
    late = pa.table({"user": [1], "ts": [int(store.upper) + 10**18]})
    with pytest.raises(NotYetWrittenError, match="row 0"):
        kvstore.join(late, [users]).read_all()
    users.put({"user": 1, "plan": "paid"})
    store.gc(before=store.upper - 1)
    early = pa.table({"user": [1], "ts": [at]})
    with pytest.raises(HistoryGoneError, match="row 0"):
        kvstore.join(early, [users]).read_all()
    assert kvstore.join(early, [users], on_gone="null").read_all()["plan"].to_pylist() == [None]
