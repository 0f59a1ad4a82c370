"""Random histories of a table on both engines: every read at every time equals the model."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import bulk
import kvstore
from bulk.definitions import EncodedBy
from kvstore.span import Span
from kvstore.tables.space import definition_key, is_entry, table_prefix
from kvstore.testing.seeds import seed_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

SCHEMA = pa.schema([("id", pa.int64()), ("zone", pa.string()), ("n", pa.int32())])
STEPS = 60
SECOND = 10**9


class Model:
    """Versions of rows, by key, and the columns of each time."""

    def __init__(self, at: int) -> None:
        self.versions: dict[int, list[tuple[int, dict[str, Any] | None, int]]] = {}
        self.reverted: dict[int, int] = {}
        self.columns: list[tuple[int, dict[str, tuple[str, Any]]]] = [
            (at, {name: (name, None) for name in SCHEMA.names})
        ]
        self.made = 0
        self.dues: dict[int, int] = {}
        """When rows expire, by key. Each later write cancels it."""

    def columns_at(self, at: int) -> dict[str, tuple[str, Any]]:
        return next(columns for time, columns in reversed(self.columns) if time <= at)

    def put(self, at: int, row: dict[str, Any], import_id: int = 0) -> None:
        columns = self.columns_at(at)
        stored = {columns[name][0]: value for name, value in row.items()}
        self.dues.pop(row["id"], None)
        self.versions.setdefault(row["id"], []).append((at, stored, import_id))

    def expire(self, now: int) -> list[int]:
        """Delete the rows that are due at `now`; returns the times."""
        due = sorted((at, key) for key, at in self.dues.items() if at <= now)
        for at, key in due:
            self.delete(at, key)
        return [at for at, _ in due]

    def delete(self, at: int, key: int) -> None:
        self.dues.pop(key, None)
        self.versions.setdefault(key, []).append((at, None, 0))

    def rows(self, at: int) -> list[dict[str, Any]]:
        found = []
        for _, versions in sorted(self.versions.items()):
            shown = [
                row
                for time, row, import_id in versions
                if time <= at and not self.reverted.get(import_id, at + 1) <= at
            ]
            if shown and shown[-1] is not None:
                columns = self.columns_at(at)
                row = shown[-1]
                found.append({n: row.get(uid, default) for n, (uid, default) in columns.items()})
        return found


class History:
    """A store with a table, driven by a seed, beside its model."""

    def __init__(
        self, store: kvstore.Store, root: Path, rng: random.Random, clock: kvstore.ManualClock
    ) -> None:
        self.store, self.root, self.rng, self.clock = store, root, rng, clock
        self.table = store.table("t", SCHEMA, key="id", indexes={"by_zone": ["zone", "n"]})
        self.times = [int(store.sync() - 1)]
        self.model = Model(self.times[0])
        self.imports: list[int] = []
        self.numbered = 0

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
        )
        self.clock.advance(self.rng.randrange(3 * SECOND))
        self.times += self.model.expire(self.clock.wall_ns())
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
        codec = self.table.codec()
        batch = pa.RecordBatch.from_pylist([*rows.values()], codec.definition.schema)
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
        for row in rows.values():
            self.model.put(int(at), row, imported.import_id)
        return at

    def revert(self) -> Any:
        if not self.imports:
            return None
        import_id = self.imports.pop()
        at = self.store.revert_import(import_id)
        self.model.reverted[import_id] = int(at)
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
        for at in self.rng.sample(self.times, min(3, len(self.times))) + self.times[-1:]:
            expected = self.model.rows(at)
            assert list(self.table.rows(as_of=at)) == expected
            zone = self.rng.choice(["a", "b", "c", "d", None])
            found = list(self.table.find("by_zone", zone, as_of=at))
            wanted = [row for row in expected if row["zone"] == zone]
            assert found == sorted(wanted, key=lambda row: (row["n"], row["id"]))


def test_every_read_of_a_random_history_equals_the_model(tmp_path: Path, each_engine: str) -> None:
    rng = random.Random(seed_of("TABLE_HISTORY_SEED"))
    clock = kvstore.ManualClock(10**18)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        history = History(store, tmp_path, rng, clock)
        for _ in range(STEPS):
            history.step()
            history.check()
        assert history.table.tidy() >= 0
        history.check()


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
