"""Random histories of a table on both engines: every read at every time equals the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.base.span import Span
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import HistoryHeldError, NotUniqueError
from kvstore.tables.definition import definition_key, is_entry, table_prefix
from tests.harness.seeds import seed_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

SCHEMA = pa.schema([("id", pa.int64()), ("zone", pa.string()), ("n", pa.int32())])
READINGS = pa.schema([("id", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("value", pa.int64())])
MINUTES = [datetime(2026, 1, 1, 0, minute, tzinfo=timezone.utc) for minute in range(5)]
STEPS = 80
SECOND = 10**9

Row = dict[str, Any]


class Model:
    """Versions of rows, by key, and the columns of each time. `key_of` makes a key that sorts as
    the rows of the table do."""

    def __init__(self, at: int, schema: pa.Schema, key_of: Callable[[Row], Any]) -> None:
        self.key_of = key_of
        self.versions: dict[Any, list[tuple[int, Row | None, int]]] = {}
        self.reverted: dict[int, int] = {}
        self.columns: list[tuple[int, dict[str, tuple[str, Any]]]] = [
            (at, {name: (name, None) for name in schema.names})
        ]
        self.made = 0
        self.dues: dict[Any, int] = {}
        """When rows expire, by key. Each later write cancels it."""

    def columns_at(self, at: int) -> dict[str, tuple[str, Any]]:
        return next(columns for time, columns in reversed(self.columns) if time <= at)

    def put(self, at: int, row: Row, import_id: int = 0) -> None:
        columns = self.columns_at(at)
        stored = {columns[name][0]: value for name, value in row.items()}
        key = self.key_of(row)
        self.dues.pop(key, None)
        self.versions.setdefault(key, []).append((at, stored, import_id))

    def expire(self, now: int) -> list[int]:
        """Delete the rows that are due at `now`; returns the times."""
        due = sorted((at, key) for key, at in self.dues.items() if at <= now)
        for at, key in due:
            self.delete(at, key)
        return [at for at, _ in due]

    def delete(self, at: int, key: Any) -> None:
        self.dues.pop(key, None)
        self.versions.setdefault(key, []).append((at, None, 0))

    def shown(self, key: Any, at: int) -> Row | None:
        """The stored row of a key at a time."""
        shown = [
            row
            for time, row, import_id in self.versions.get(key, [])
            if time <= at and not self.reverted.get(import_id, at + 1) <= at
        ]
        return shown[-1] if shown else None

    def rows(self, at: int) -> list[dict[str, Any]]:
        found, columns = [], self.columns_at(at)
        for key in sorted(self.versions):
            row = self.shown(key, at)
            if row is not None:
                found.append({n: row.get(uid, default) for n, (uid, default) in columns.items()})
        return found


class History:
    """A store with two tables, driven by a seed, beside their models. One has an index and is
    altered, the other one has an event time."""

    def __init__(
        self, store: kvstore.Store, root: Path, rng: random.Random, clock: kvstore.ManualClock
    ) -> None:
        self.store, self.root, self.rng, self.clock = store, root, rng, clock
        self.table = store.table("t", SCHEMA, key="id", indexes={"by_zone": ["zone", "n"]})
        self.times = [int(store.sync() - 1)]
        self.model = Model(self.times[0], SCHEMA, itemgetter("id"))
        self.readings = store.table("readings", READINGS, key="id", event_time="ts")
        self.known = Model(
            self.times[0], READINGS, lambda row: (row["id"], MINUTES[-1] - row["ts"])
        )
        self.collection = Collection(root / "collection")
        self.imports: list[int] = []
        self.numbered = 0
        self.made_at = 0
        """The time at which the table was made in the place of another one."""

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(self.table.schema.names)
        row["id"] = self.rng.randrange(8)
        row["zone"] = self.rng.choice(["a", "b", "c", None])
        row["n"] = self.rng.randrange(3)
        return row

    def step(self) -> None:
        name = self.rng.choice(
            ["put"] * 4
            + ["expiring"] * 2
            + ["update", "delete", "batch", "txn", "load", "revert", "alter", "gc"]
            + ["insert", "delete_many", "delete_range", "put_back", "drop", "clear"]
            + ["reading"] * 3
            + ["unread", "unread_range", "load_readings", "put_back_readings"]
        )
        self.clock.advance(self.rng.randrange(3 * SECOND))
        for model in (self.model, self.known):
            self.times += model.expire(self.clock.wall_ns())
        at = getattr(self, name)()
        self.times.append(int(at or self.store.sync() - 1))

    def put(self) -> Any:
        row = self.row()
        at = self.table.put(row)
        self.model.put(int(at or 0), row)
        return at

    def expiring(self) -> Any:
        rows = {row["id"]: row for row in (self.row() for _ in range(self.rng.randrange(1, 3)))}
        ahead = timedelta(seconds=self.rng.randrange(1, 9))
        due = kvstore.Timestamp(self.clock.wall_ns() + int(ahead.total_seconds()) * SECOND)
        if len(rows) == 1:
            at = self.table.put(*rows.values(), expires=due)
        else:
            at = self.table.put_batch([*rows.values()], expires=due)
        for key, row in rows.items():
            self.model.put(int(at or 0), row)
            left = self.table.ttl(key)
            assert left is not None
            assert timedelta(0) < left <= ahead
            self.model.dues[key] = int(due)
        return at

    def update(self) -> Any:
        key = self.rng.randrange(8)
        old = self.table.get(key)
        if old is None:
            return None
        at = self.table.update(key, zone="d")
        self.model.put(int(at or 0), old | {"zone": "d"})
        return at

    def delete(self) -> Any:
        key = self.rng.randrange(8)
        at = self.table.delete(key)
        self.model.delete(int(at or 0), key)
        return at

    def insert(self) -> Any:
        row = self.row()
        if self.table.get(row["id"]) is not None:
            with pytest.raises(NotUniqueError):
                self.table.insert(row)
            return None
        at = self.table.insert(row)
        self.model.put(int(at or 0), row)
        return at

    def delete_many(self) -> Any:
        keys = [self.rng.randrange(8) for _ in range(3)]
        at = self.table.delete_many(keys)
        for key in keys:
            self.model.delete(int(at or 0), key)
        return at

    def delete_range(self) -> Any:
        """By itself, and among the writes of a transaction or of a batch: rows that were put before
        go, rows that are put later stay."""
        start, end = sorted(self.rng.sample(range(9), 2))
        first, last = (self.row() for _ in range(2))
        how = self.rng.choice(["", "transaction", "batch"])
        if not how:
            at = self.table.delete_range(start, end)
        else:
            with getattr(self.store, how)() as writes:
                table = writes.table("t")
                table.put(first)
                table.delete_range(start, end)
                table.put(last)
            at = writes.timestamp
            self.model.put(int(at or 0), first)
        for key in range(start, end):
            self.model.delete(int(at or 0), key)
        if how:
            self.model.put(int(at or 0), last)
        return at

    def put_back(self) -> Any:
        start, end = sorted(self.rng.sample(range(9), 2))
        return self.reverted(self.table, self.model, lambda key: start <= key < end, start, end)

    def put_back_readings(self) -> Any:
        return self.reverted(self.readings, self.known, lambda key: key[0] == 1, 1)

    def reverted(
        self, table: kvstore.Table, model: Model, is_in: Callable[[Any], bool], *span: int
    ) -> Any:
        to = self.rng.choice(self.times[-6:])
        if to < max(self.made_at, self.store.whole_since):
            return None
        bounds = ("start", "end") if len(span) == 2 else ("prefix",)
        how: dict[str, Any] = dict(zip(bounds, span, strict=True))
        column, least = ("n", 1) if table is self.table else ("value", 50)
        if self.rng.random() < 0.5:
            least = -1  # all rows pass
        else:
            how["where"] = pc.field(column) >= least
        at = table.revert(kvstore.Timestamp(to), **how)
        names = {uid for _, columns in model.columns for uid, _ in [columns[column]]}
        for key in filter(is_in, model.versions):
            before, now = model.shown(key, to), model.shown(key, self.times[-1])
            values = [row[uid] for row in (before, now) if row for uid in names & row.keys()]
            if all(value < least for value in values):
                continue
            if before != now and before is None:
                model.delete(int(at or 0), key)
            elif before != now:
                model.versions[key].append((int(at or 0), before, 0))
                model.dues.pop(key, None)
        return at

    def drop(self) -> Any:
        """The table is dropped, and another one is made in its place."""
        gone = int(self.table.drop())
        assert "t" not in self.store.tables()
        for key in self.model.versions:
            self.model.delete(gone, key)
        self.times.append(gone)
        self.table = self.store.table("t", SCHEMA, key="id", indexes={"by_zone": ["zone", "n"]})
        self.made_at = int(self.store.sync() - 1)
        self.model.made += 1
        names = {name: (f"{name}{self.model.made}", None) for name in SCHEMA.names}
        self.model.columns.append((gone, names))
        self.imports = []
        return None

    def clear(self) -> Any:
        """Rows are destroyed: all, a span, or those that pass. A hold keeps them."""
        if self.store.holds.all():
            with pytest.raises(HistoryHeldError):
                self.table.clear()
            return None
        start, end = sorted(self.rng.sample(range(9), 2))
        compact, how = self.rng.random() < 0.5, self.rng.choice(["all", "span", "where"])
        if how == "all":
            start, end = 0, 8
            at = self.table.clear(compact=compact)
            assert entries(self.store) == []
        elif how == "span":
            at = self.table.clear(start, end, compact=compact)
        else:
            chosen = (pc.field("id") >= start) & (pc.field("id") < end)
            at = self.table.clear(where=chosen, compact=compact)
        for key in range(start, end):
            left = self.table.history(key)
            if how == "where" and left:  # of a row that GC took, which cannot pass, its deletions
                assert {version.row for version in left} == {None}
                last = self.model.versions[key][-1][2]
                deleted = [int(version.timestamp) for version in reversed(left)]
                self.model.versions[key] = [(at_, None, last) for at_ in deleted]
                continue
            assert left == []
            self.model.versions.pop(key, None)
            self.model.dues.pop(key, None)
        self.times, self.imports = [int(at)], []
        return at

    def batch(self) -> Any:
        rows = {row["id"]: row for row in (self.row() for _ in range(4))}
        at = self.table.put_batch(pa.Table.from_pylist([*rows.values()], self.table.schema))
        for row in rows.values():
            self.model.put(int(at or 0), row)
        return at

    def txn(self) -> Any:
        rows = {row["id"]: row for row in (self.row() for _ in range(3))}
        with self.store.transaction() as txn:
            table = txn.table("t")
            for row in rows.values():
                table.put(self.row() | {"id": row["id"]})
                table.put(row)
        for row in rows.values():
            self.model.put(int(txn.timestamp or 0), row)
        return txn.timestamp

    def load(self) -> Any:
        rows = {row["id"]: row for row in (self.row() for _ in range(4))}
        return self.imported(self.table, [*rows.values()], self.model)

    def imported(self, table: kvstore.Table, rows: list[Row], model: Model) -> Any:
        codec = table.codec()
        batch = pa.RecordBatch.from_pylist(rows, codec.definition.schema)
        keys, values = codec.encode(batch)
        pairs = dict(zip(keys.to_pylist(), values.to_pylist(), strict=True))
        for index in codec.definition.indexes:
            pairs |= dict.fromkeys(codec.entries(index, batch).to_pylist(), b"")
        self.numbered += 1
        imported = bulk.Import.create(self.root / f"import-{self.numbered}")
        with imported.writer() as writer:
            for key in sorted(pairs):
                writer.put(key, pairs[key])
        imported.seal(tables=[EncodedBy.of(codec)])
        at = bulk.ingest(self.store, self.root / f"import-{self.numbered}")
        self.imports.append(imported.import_id)
        for row in rows:
            model.put(int(at), row, imported.import_id)
        return at

    # -- rows with an event time ------------------------------------------------------------

    def new_reading(self) -> Row:
        pick = self.rng
        return {"id": pick.randrange(2), "ts": pick.choice(MINUTES), "value": pick.randrange(99)}

    def reading(self) -> Any:
        """A row that comes late, or restates an earlier one."""
        row, due = self.new_reading(), kvstore.Timestamp(self.clock.wall_ns() + 4 * SECOND)
        is_brief = self.rng.random() < 0.3
        at = self.readings.put(row, expires=due if is_brief else None)
        self.known.put(int(at or 0), row)
        assert (self.readings.ttl(row["id"], row["ts"]) is not None) == is_brief
        if is_brief:
            self.known.dues[self.known.key_of(row)] = int(due)
        return at

    def unread_range(self) -> Any:
        number = self.rng.randrange(2)
        at = self.readings.delete_range(prefix=number)
        for key in self.known.versions:
            if key[0] == number:
                self.known.delete(int(at or 0), key)
        return at

    def unread(self) -> Any:
        row = self.new_reading()
        at = self.readings.delete(row["id"], row["ts"])
        self.known.delete(int(at or 0), self.known.key_of(row))
        return at

    def load_readings(self) -> Any:
        rows = {self.known.key_of(row): row for row in (self.new_reading() for _ in range(3))}
        return self.imported(self.readings, [*rows.values()], self.known)

    def revert(self) -> Any:
        if not self.imports:
            return None
        import_id = self.imports.pop()
        at = self.store.revert_import(import_id)
        self.model.reverted[import_id] = self.known.reverted[import_id] = int(at)
        return at

    def alter(self) -> Any:
        columns = dict(self.model.columns[-1][1])
        if "x" in columns:
            self.table.alter(drop=["x"])
            del columns["x"]
        else:
            self.model.made += 1
            default = self.rng.choice([None, "old"])
            added = pa.string() if default is None else (pa.string(), default)
            self.table.alter(add={"x": added})
            columns["x"] = (f"x{self.model.made}", default)
        at = self.store.history(definition_key("t"))[0].timestamp
        self.model.columns.append((int(at), columns))
        return at

    def gc(self) -> Any:
        before = self.rng.choice(self.times[-6:])
        self.store.gc(before=before)
        self.times = [time for time in self.times if time >= self.store.since]
        self.imports = []
        return None

    def check(self) -> None:
        times = self.rng.sample(self.times, min(3, len(self.times))) + self.times[-1:]
        self.check_at(times, self.table, self.readings)
        if self.rng.random() < 0.1:
            with self.store.snapshot() as then:
                self.check_joins(self.table, self.readings)
                self.check_joins(then.table("t"), then.table("readings"))

    def check_joins(self, table: kvstore.Table, readings: kvstore.Table) -> None:
        """Labels at any kept time get the rows of the model, on one axis and on two."""
        since = max(self.store.since, self.made_at)  # a join asks the table of now
        pick, times = self.rng, [at for at in self.times if at >= since]
        asked = [(pick.randrange(9), pick.choice(MINUTES), pick.choice(times)) for _ in range(9)]
        numbers, minutes, known = (list(column) for column in zip(*asked, strict=True))
        labels = pa.table({"id": numbers, "at": minutes, "known": known})
        found = table.join(labels, "id", at="known", columns=["zone", "n"]).read_all()
        latest = readings.join(labels, "id", "at", "known", columns=["ts", "value"]).read_all()
        rows = zip(asked, found.to_pylist(), latest.to_pylist(), strict=True)
        for (number, minute, at), row, reading in rows:
            expected = [each for each in self.model.rows(at) if each["id"] == number]
            assert _part(row, "zone", "n") == _part(next(iter(expected), {}), "zone", "n")
            fitting = [
                each
                for each in self.known.rows(at)
                if each["id"] == number and each["ts"] <= minute
            ]
            newest = next(iter(fitting), {})
            assert _part(reading, "ts", "value") == _part(newest, "ts", "value")

    def check_at(self, times: list[int], table: kvstore.Table, readings: kvstore.Table) -> None:
        for at in times:
            expected = self.model.rows(at)
            assert list(table.rows(as_of=at)) == expected
            zone = self.rng.choice(["a", "b", "c", "d", None])
            found = list(table.find("by_zone", zone, as_of=at))
            wanted = [row for row in expected if row["zone"] == zone]
            assert found == sorted(wanted, key=lambda row: (row["n"], row["id"]))
            known = self.known.rows(at)
            assert list(readings.rows(as_of=at)) == known
            number, upto = self.rng.randrange(2), self.rng.choice(MINUTES)
            fitting = [row for row in known if row["id"] == number and row["ts"] <= upto]
            newest = readings.latest(number, at=upto, known_at=kvstore.Timestamp(at))
            assert newest == (fitting[0] if fitting else None)

    def restore(self) -> None:
        """A backup, and a restore of the whole collection."""
        self.collection.backup(self.store)
        self.numbered += 1
        place = self.root / f"restored-{self.numbered}"
        self.collection.restore(place)
        with kvstore.open(place, clock=self.clock) as restored:
            kept = [time for time in self.times if restored.since <= time < restored.upper]
            tables = restored.table("t"), restored.table("readings")
            self.check_at(self.rng.sample(kept, min(6, len(kept))), *tables)
            self.times, times = kept, self.times
            self.check_joins(*tables)
            self.times = times


def _part(row: Row, *names: str) -> list[Any]:
    return [row.get(name) for name in names]


def test_every_read_of_a_random_history_equals_the_model(tmp_path: Path, each_engine: str) -> None:
    rng = random.Random(seed_of("TABLE_HISTORY_SEED"))
    clock = kvstore.ManualClock(10**18)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        history = History(store, tmp_path, rng, clock)
        for number in range(STEPS):
            history.step()
            history.check()
            if number == STEPS // 2:
                history.restore()
        assert history.table.tidy() >= 0
        history.check()
        history.restore()


@pytest.mark.parametrize("reverted", ["before", "after"])
def test_a_row_that_a_revert_brings_back_is_found(
    tmp_path: Path, each_engine: str, reverted: str
) -> None:
    """An import covers a row that expires, and not its entries. The revert of the import shows the
    row again, and it stays: so its entries have to stay too, on both sides of the due time."""
    clock = kvstore.ManualClock(10**18)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        history = History(store, tmp_path, random.Random(0), clock)
        row = dict.fromkeys(history.table.schema.names) | {"id": 1, "zone": "a", "n": 0}
        history.table.put(row, expires="+5s")
        history.row = lambda: row | {"zone": "b"}  # type: ignore[method-assign]
        history.load()
        if reverted == "after":
            clock.advance(6 * SECOND)
            store.sync()
        history.revert()
        clock.advance(6 * SECOND)
        assert list(history.table.rows()) == [row]
        assert list(history.table.find("by_zone", "a")) == [row]


def test_an_entry_that_outlives_its_row_is_collected(tmp_path: Path, each_engine: str) -> None:
    clock = kvstore.ManualClock(10**18)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        history = History(store, tmp_path, random.Random(0), clock)
        row = dict.fromkeys(history.table.schema.names) | {"id": 1, "zone": "a", "n": 0}
        history.table.put(row, expires="+5s")
        history.row = lambda: row | {"zone": "b"}  # type: ignore[method-assign]
        history.load()
        clock.advance(6 * SECOND)
        assert list(history.table.find("by_zone", "a")) == []
        assert len(entries(store)) == 2
        store.gc(before="now")
        assert len(entries(store)) == 1


def entries(store: kvstore.Store) -> list[bytes]:
    span = Span.of_prefix(table_prefix(1))
    return [key for key in store.keys(span.start, span.end) if is_entry(key)]
