"""Rows that expire: the row and its entries in every index are deleted at one time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import kvstore
from kvstore import unique
from kvstore.backup import Collection
from kvstore.base.span import Span
from kvstore.bulk.loading import import_files, import_rows, stored_batches
from kvstore.bulk.staging import EncodedBy
from kvstore.errors import NotUniqueError, UsageError
from kvstore.tables.definition import table_prefix

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

SCHEMA = pa.schema([("id", pa.int64()), ("mail", pa.string()), ("zone", pa.string())])
INDEXES = {"mail": unique("mail"), "zone": ["zone"]}
SECOND = 10**9


@pytest.fixture
def clock() -> kvstore.ManualClock:
    return kvstore.ManualClock(10**18)


@pytest.fixture
def store(tmp_path: Path, each_engine: str, clock: kvstore.ManualClock) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as opened:
        yield opened


@pytest.fixture
def users(store: kvstore.Store) -> kvstore.Table:
    return store.table("users", SCHEMA, "id", INDEXES)


def stored(store: kvstore.Store, as_of: int | None = None) -> list[bytes]:
    """The keys of the rows and entries of the first table."""
    span = Span.of_prefix(table_prefix(1))
    return list(store.keys(span.start, span.end, as_of=as_of))


def row(number: int, mail: str, zone: str = "a") -> dict[str, Any]:
    return {"id": number, "mail": mail, "zone": zone}


def test_a_row_and_its_entries_end_at_the_same_time(
    store: kvstore.Store, users: kvstore.Table, clock: kvstore.ManualClock
) -> None:
    due = kvstore.Timestamp(10**18 + 5 * SECOND)
    users.put(row(1, "a@x"), expires=due)
    users.put_batch([row(2, "b@x"), row(3, "c@x")], expires=due)
    users.put(row(4, "d@x"))
    begun = store.sync() - 1
    clock.set(due - 1)
    assert len(stored(store)) == 12
    clock.set(due)
    assert len(stored(store)) == 3
    assert len(stored(store, due - 1)) == 12
    assert list(users.find("zone", "a")) == [row(4, "d@x")]
    assert [each["id"] for each in users.find("zone", "a", as_of=due - 1)] == [1, 2, 3, 4]
    assert [version.timestamp for version in users.history(2)][:1] == [due]
    changes = users.changes(begun).read_all().to_pylist()
    assert [(c["_change_type"], c["id"]) for c in changes] == [
        ("delete", 1),
        ("delete", 2),
        ("delete", 3),
    ]


def test_a_value_of_a_unique_index_is_free_once_its_row_expired(
    users: kvstore.Table, clock: kvstore.ManualClock
) -> None:
    users.put(row(1, "a@x"), expires=timedelta(seconds=5))
    with pytest.raises(NotUniqueError):
        users.put(row(2, "a@x"))
    with pytest.raises(NotUniqueError, match="the key is taken"):
        users.insert(row(1, "b@x"))
    clock.advance(5 * SECOND)
    users.put(row(2, "a@x"))
    users.insert(row(1, "b@x"))
    assert users.ttl(2) is None


def test_a_later_write_cancels_and_renews(
    store: kvstore.Store, users: kvstore.Table, clock: kvstore.ManualClock
) -> None:
    for number in range(4):
        users.put(row(number, f"{number}@x"), expires=timedelta(seconds=5))
    users.put(row(0, "0@x"))
    users.update(1, zone="b")
    users.put(row(2, "2@x"), expires=timedelta(seconds=9))
    assert [users.ttl(number) for number in range(2)] == [None, None]
    clock.advance(6 * SECOND)
    assert [each["id"] for each in users.rows()] == [0, 1, 2]
    assert len(stored(store)) == 9
    clock.advance(6 * SECOND)
    assert [each["id"] for each in users.rows()] == [0, 1]
    assert len(stored(store)) == 6
    assert list(users.find("zone", "b")) == [row(1, "1@x", "b")]


def test_transactions_and_batches_have_rows_that_expire(
    store: kvstore.Store, clock: kvstore.ManualClock
) -> None:
    plain = store.table("plain", SCHEMA, "id", {"zone": ["zone"]})
    with store.transaction() as transaction:
        transaction.table("plain").put(row(1, "a@x"), expires="+3s")
        transaction.table("plain").put(row(2, "b@x"), expires="+3s")
        transaction.table("plain").put(row(2, "b@x"))
    with store.batch() as batch:
        batch.table("plain").put(row(3, "c@x"), expires="+3s")
    assert [plain.ttl(number) is None for number in (1, 2, 3)] == [False, True, False]
    clock.advance(4 * SECOND)
    assert [each["id"] for each in plain.rows()] == [2]
    assert len(stored(store)) == 2


@pytest.mark.parametrize("is_table", [False, True], ids=["dicts", "arrow"])
def test_the_last_row_of_a_key_in_a_batch_expires(
    store: kvstore.Store, clock: kvstore.ManualClock, is_table: bool
) -> None:
    plain = store.table("plain", SCHEMA, "id", {"zone": ["zone"]})
    rows = [row(1, "a@x"), row(1, "b@x", zone="b"), row(1, "c@x", zone="b")]
    plain.put_batch(pa.Table.from_pylist(rows, SCHEMA) if is_table else rows, expires="+3s")
    assert list(plain.rows()) == list(plain.find("zone")) == rows[2:]
    clock.advance(4 * SECOND)
    assert stored(store) == []


def test_a_restored_table_goes_on_to_expire(
    store: kvstore.Store, users: kvstore.Table, clock: kvstore.ManualClock, tmp_path: Path
) -> None:
    users.put(row(1, "a@x"), expires=timedelta(seconds=5))
    collection = Collection(str(tmp_path / "backups"))
    collection.backup(store)
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored", clock=clock) as restored:
        assert restored.table("users").get(1) == row(1, "a@x")
        clock.advance(6 * SECOND)
        assert restored.table("users").get(1) is None
        assert stored(restored) == []


def test_rows_that_are_restored_into_a_store_expire_with_their_entries(
    store: kvstore.Store, users: kvstore.Table, clock: kvstore.ManualClock, tmp_path: Path
) -> None:
    users.put(row(1, "a@x"), expires=timedelta(seconds=5))
    users.put(row(2, "b@x"), expires=timedelta(seconds=5))
    users.put(row(3, "c@x"))
    collection = Collection(str(tmp_path / "backups"))
    collection.backup(store)
    with kvstore.open(tmp_path / "other", clock=clock) as other:
        theirs = other.table("users", SCHEMA, "id", INDEXES)
        collection.restore_into(other)
        codec = theirs.codec()
        loaded = pa.RecordBatch.from_pylist([row(1, "a@y")], SCHEMA)
        batches = stored_batches(codec, loaded)
        manifest, _ = import_rows(
            other, batches, "overwrite", "error", tables=[EncodedBy.of(codec)]
        )
        clock.advance(6 * SECOND)
        assert [each["id"] for each in theirs.rows()] == [1, 3]
        other.revert_import(manifest.import_id)
        assert list(theirs.find("mail", "a@x")) == [row(1, "a@x")]
        assert list(theirs.find("mail", "b@x")) == []
        assert not other.verify().problems


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_of_files_expire_with_their_entries(
    store: kvstore.Store,
    users: kvstore.Table,
    clock: kvstore.ManualClock,
    tmp_path: Path,
    suffix: str,
) -> None:
    users.put(row(1, "old@x"), expires=timedelta(seconds=2))
    file = tmp_path / f"rows.{suffix}"
    dues = [clock.wall_ns() + 5 * SECOND, None, clock.wall_ns() + 9 * SECOND]
    rows = pa.Table.from_pylist([row(1, "a@x"), row(2, "b@x"), row(3, "c@x")], SCHEMA)
    rows = rows.append_column("until", pa.array(dues, pa.int64()))
    with pytest.raises(UsageError, match="until"):
        import_files(users, [_written(rows, file)], "overwrite", "error")
    with pytest.raises(UsageError, match="no column 'then'"):
        import_files(users, [file], "overwrite", "error", expires="then")
    import_files(users, [file], "overwrite", "error", expires="until")
    left = users.ttl(1)
    assert left is not None
    assert timedelta(seconds=4) < left <= timedelta(seconds=5)
    assert users.ttl(2) is None
    clock.advance(6 * SECOND)
    assert [each["id"] for each in users.rows()] == [2, 3]
    assert list(users.find("mail", "a@x")) == []
    clock.advance(6 * SECOND)
    assert list(users.rows()) == [row(2, "b@x")]
    store.gc(keep=timedelta(0))
    assert len(stored(store)) == 3
    assert not store.verify().problems


def _written(rows: pa.Table, file: Path) -> Path:
    if file.suffix == ".csv":
        pa_csv.write_csv(rows, file)
    else:
        pq.write_table(rows, file)
    return file


def test_a_row_that_is_kept_keeps_its_entries(
    store: kvstore.Store, users: kvstore.Table, clock: kvstore.ManualClock
) -> None:
    users.put_batch([row(1, "a@x"), row(2, "b@x")], expires="+5s")
    assert users.persist(1)
    assert users.ttl(1) is None
    assert users.persist(1) is None
    assert users.persist(3) is None
    clock.advance(6 * SECOND)
    assert list(users.rows()) == list(users.find("mail")) == list(users.find("zone", "a"))
    assert [each["id"] for each in users.rows()] == [1]
    assert len(stored(store)) == 3
    store.gc(before="now")
    assert not store.verify().problems


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"expires": timedelta(0)}, "does not lie ahead"),
        ({"expires": "-1h"}, "does not lie ahead"),
        ({"expires": 5}, "5"),
    ],
)
def test_a_time_that_does_not_lie_ahead_is_refused(
    store: kvstore.Store, users: kvstore.Table, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        users.put(row(1, "a@x"), **given)
    with pytest.raises(UsageError, match=says):
        users.put_batch([row(1, "a@x")], **given)
    assert stored(store) == []
