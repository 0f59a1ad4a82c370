"""Rows that expire: the row and its entries in every index are deleted at one time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from operator import itemgetter
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
from kvstore.bulk.loading import import_files, import_rows, import_table, stored_batches
from kvstore.bulk.manifest import EncodedBy
from kvstore.bulk.pushes import Pushes
from kvstore.errors import NotUniqueError, UsageError
from kvstore.tables.definition import table_prefix
from tests.harness.seeds import seed_of

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


# A column that tells when rows expire: each door reads it from the rows.

CODES = pa.schema([("id", pa.int64()), ("zone", pa.string()), ("until", pa.timestamp("us", "UTC"))])
T0 = 10**18


def at(second: float | None) -> datetime | None:
    """A time of the column, in seconds from the beginning of the clock."""
    return None if second is None else MOMENT + timedelta(seconds=second)


MOMENT = datetime.fromtimestamp(T0 // SECOND, timezone.utc)


@pytest.fixture
def codes(store: kvstore.Store) -> kvstore.Table:
    return store.table("codes", CODES, "id", {"zone": ["zone"]}, expires="until")


def code(number: int, until: float | None, zone: str = "a") -> dict[str, Any]:
    return {"id": number, "zone": zone, "until": at(until)}


DOORS: dict[str, Callable[[kvstore.Store, kvstore.Table, list[dict[str, Any]]], object]] = {
    "put": lambda store, table, rows: [table.put(row) for row in rows],
    "insert": lambda store, table, rows: [table.insert(row) for row in rows],
    "dicts": lambda store, table, rows: table.put_batch(rows),
    "arrow": lambda store, table, rows: table.put_batch(pa.Table.from_pylist(rows, CODES)),
    "import": lambda store, table, rows: import_table(table, pa.Table.from_pylist(rows, CODES)),
    "transaction": lambda store, table, rows: store.transact(
        lambda txn: txn.table("codes").put_batch(rows)
    ),
    "batch": lambda store, table, rows: put_by_batch(store, rows),
}


def put_by_batch(store: kvstore.Store, rows: list[dict[str, Any]]) -> None:
    with store.batch() as batch:
        batch.table("codes").put_batch(rows)


@pytest.mark.parametrize("door", DOORS)
def test_a_column_tells_when_rows_expire_at_each_door(
    store: kvstore.Store, codes: kvstore.Table, clock: kvstore.ManualClock, door: str
) -> None:
    begun = store.sync() - 1
    forever = datetime(9999, 12, 31, tzinfo=timezone.utc)
    never = {"id": 4, "zone": "a", "until": forever}
    DOORS[door](store, codes, [code(1, 5), code(2, 7), code(3, None), never, code(5, -60)])
    clock.set(T0 + 5 * SECOND - 1)
    assert [each["id"] for each in codes.rows()] == [1, 2, 3, 4]
    clock.set(T0 + 5 * SECOND)
    assert [each["id"] for each in codes.find("zone", "a")] == [2, 3, 4]
    clock.set(T0 + 60 * SECOND)
    assert [each["id"] for each in codes.rows()] == [3, 4]
    assert len(stored(store)) == 4, "the entries went with the rows"
    gone = [
        (each["id"], each["_commit_timestamp"])
        for each in codes.changes(begun).read_all().to_pylist()
        if each["_change_type"] == "delete"
    ]
    assert [number for number, _ in gone] == [5, 1, 2]
    assert [time for _, time in gone[1:]] == [at(5), at(7)]
    assert codes.history(1)[0].row is None
    assert codes.history(1)[0].timestamp == T0 + 5 * SECOND


def test_a_later_write_follows_the_column(
    store: kvstore.Store, codes: kvstore.Table, clock: kvstore.ManualClock
) -> None:
    codes.put_batch([code(1, 5), code(2, 5), code(3, None), code(4, 5)])
    kept = store.now()
    codes.update(1, zone="b")
    codes.update(2, until=None)
    codes.update(3, until=at(6))
    codes.put(code(4, 9))
    clock.set(T0 + 5 * SECOND)
    assert [each["id"] for each in codes.rows()] == [2, 3, 4]
    codes.revert(kept)
    clock.advance(SECOND)
    assert [each["id"] for each in codes.rows()] == [3], "the time of the others has passed"
    clock.set(T0 + 10 * SECOND)
    assert [each["id"] for each in codes.rows()] == [3]
    assert len(stored(store)) == 2


def test_a_column_and_a_time_of_the_call_exclude_each_other(
    store: kvstore.Store, codes: kvstore.Table, tmp_path: Path
) -> None:
    for call in (codes.put, codes.insert, codes.put_batch):
        with pytest.raises(UsageError, match="'until' tells when its rows expire"):
            call(code(1, None), expires="+1h")
    with pytest.raises(UsageError, match=r"update the row: until=None"):
        codes.persist(1)
    more = pa.Table.from_pylist([code(1, None)], CODES).append_column("gone", pa.array([None]))
    with pytest.raises(UsageError, match="leave out expires"):
        import_table(codes, more, expires="gone")
    pushes = Pushes(str(tmp_path / "pushes"))
    with pytest.raises(UsageError, match="leave out expires"), pushes.begin(table=codes) as push:
        push.add(more, expires="gone")
    assert codes.count() == 0


def test_a_time_of_another_unit_is_refused_at_each_door(
    store: kvstore.Store, codes: kvstore.Table
) -> None:
    wrong = {"id": 2, "zone": "a", "until": datetime(1970, 1, 21, tzinfo=timezone.utc)}
    for rows in ([code(1, 5), wrong], pa.Table.from_pylist([code(1, 5), wrong], CODES)):
        with pytest.raises(UsageError, match=r"'until' has 1970-01-21.*in row 1"):
            codes.put_batch(rows)
    with pytest.raises(UsageError, match=r"'until' has 1970-01-21 [0-9:.]*Z: the row would"):
        codes.put(wrong)
    with pytest.raises(UsageError, match=r"'until' has 1970-01-21.*in row 1"):
        import_table(codes, pa.Table.from_pylist([code(1, 5), wrong], CODES))
    assert codes.count() == 0


def test_the_column_is_part_of_the_definition(
    store: kvstore.Store, clock: kvstore.ManualClock
) -> None:
    plain = store.table("codes", CODES, "id")
    with pytest.raises(UsageError, match="nothing to alter"):
        plain.alter(expires=False)
    with pytest.raises(UsageError, match="'zone', which is string"):
        plain.alter(expires="zone")
    old = datetime(1960, 1, 1, tzinfo=timezone.utc)
    plain.put_batch([code(1, 5), {"id": 2, "zone": "a", "until": old}])
    kept = store.now()
    plain.alter(expires="until")
    assert plain.expires == "until"
    assert store.table("codes", CODES, "id", expires="until").expires == "until"
    with pytest.raises(UsageError, match="end that too"):
        plain.alter(drop="until")
    plain.put(code(3, 5))
    clock.set(T0 + 6 * SECOND)
    assert [each["id"] for each in plain.rows()] == [1, 2], "rows that were there stay"
    plain.delete_many([1, 2])
    plain.revert(kept)
    clock.advance(SECOND)
    assert [each["id"] for each in plain.rows()] == [], "what comes back follows the column"
    plain.alter(expires=False)
    with pytest.raises(UsageError, match="expires=None"):
        store.table("codes", CODES, "id", expires="until")
    plain.alter(drop="until")
    assert (plain.expires, plain.schema.names) == (None, ["id", "zone"])


@pytest.mark.parametrize("number", range(3))
def test_random_histories_of_a_table_whose_rows_expire(
    tmp_path: Path, store: kvstore.Store, clock: kvstore.ManualClock, number: int
) -> None:
    """A row that is written at one time shows from then on, up to the time in its column."""
    seed = seed_of("EXPIRING_SEED", number)
    draw = random.Random(seed)
    codes = store.table("codes", CODES, "id", {"zone": ["zone"]}, expires="until")
    shown: dict[int, list[tuple[int, int, dict[str, Any] | None]]] = {}
    times = [store.sync() - 1]

    def made(count: int) -> list[dict[str, Any]]:
        now = (store.now() - T0) / SECOND
        lives = [None, -1, 0.5, 1, 2, 7]
        return [
            code(key, None if life is None else now + life, draw.choice("ab"))
            for key in draw.sample(range(6), count)
            for life in [draw.choice(lives)]
        ]

    for _ in range(25):
        rows: list[dict[str, Any]] = []
        step = draw.choice([*DOORS, "delete", "delete", "update", "clock", "clock"])
        if step == "clock":
            clock.advance(draw.choice([1, SECOND // 2, SECOND, 3 * SECOND]))
        elif step == "delete":
            gone = draw.sample(range(6), 2)
            at_ = codes.delete_many(gone)
            for key in gone:
                shown.setdefault(key, []).append((at_ or 0, NEVER, None))
        elif step == "update":
            alive = list(codes.rows())
            if alive:
                row = draw.choice(alive)
                rows = [{**row, "zone": draw.choice("ab")}]
                codes.update(row["id"], zone=rows[0]["zone"])
        elif step == "insert":
            rows = [row for row in made(1) if codes.get(row["id"]) is None]
            DOORS[step](store, codes, rows)
        else:
            rows = made(draw.randrange(1, 4))
            DOORS[step](store, codes, rows)
        for row in rows:
            written = next(version for version in codes.history(row["id"]) if version.row == row)
            until = row["until"]
            due = NEVER if until is None else (until - MOMENT) // timedelta(microseconds=1) * 1000
            last = NEVER if until is None else max(T0 + due, written.timestamp + 1)
            shown.setdefault(row["id"], []).append((written.timestamp, last, row))
        clock.advance(1)
        times += [store.now(), store.sync() - 1]

    def expected(at_: int) -> list[dict[str, Any]]:
        found = []
        for key in sorted(shown):
            passed = [each for each in shown[key] if each[0] <= at_]
            if passed and passed[-1][2] is not None and at_ < passed[-1][1]:
                found.append(passed[-1][2])
        return found

    collection = Collection(str(tmp_path / "collection"))
    store.sync()
    collection.backup(store)
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored", clock=kvstore.ManualClock(store.now())) as restored:
        for at_ in times:
            if at_ <= restored.upper - 1:
                for place in (store, restored):
                    table = place.table("codes")
                    assert list(table.rows(as_of=at_)) == expected(at_), seed
                    zones = [row for zone in "ab" for row in table.find("zone", zone, as_of=at_)]
                    assert sorted(zones, key=itemgetter("id")) == expected(at_), seed


NEVER = 1 << 62
