"""Typed rows of eight columns with two indexes: in a table, as bytes, in SQLite and in DuckDB.

All subjects get the same rows from one seed, and load them from a Parquet file that each of them
writes for itself before. A read reports how many rows it found, and the sum of a column is compared
with the rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import kvstore
from benchmarks.data import Data
from benchmarks.subject import Subject, Work
from kvstore.bulk.gate import Gate
from kvstore.bulk.loading import import_files, import_rows
from kvstore.mvcc.arrow import rows_schema
from kvstore.tables import TableCodec

FOUND: Final = 100
"""Rows that one look-up by an index finds."""

SCHEMA: Final = pa.schema(
    [
        ("vendor", pa.string()),
        ("trip_id", pa.int64()),
        ("zone", pa.int64()),
        ("pickup", pa.timestamp("us", "UTC")),
        ("seats", pa.int32()),
        ("fare", pa.float64()),
        ("tip", pa.float64()),
        ("note", pa.string()),
    ]
)
KEY: Final = ["vendor", "trip_id"]
INDEXES: Final = {"by_zone": ["zone"], "by_pickup": ["pickup"]}
_SEED: Final = 20_263
_FIRST_US: Final = 1_767_225_600_000_000


class Rows(Subject):
    """A subject that keeps typed rows."""

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        self.count = data.rows

    @cached_property
    def table(self) -> pa.Table:
        """The rows, in the order of their keys. `FOUND` of them are in each zone."""
        pick = np.random.default_rng(_SEED)
        count = self.count
        ids = np.arange(count)
        columns = [
            pa.array(np.array(["A", "B", "C", "D"])[ids * 4 // count]),
            pa.array(ids),
            pa.array(pick.permutation(count) // FOUND),
            pa.array(_FIRST_US + pick.integers(0, 10**12, count)).cast(SCHEMA.field(3).type),
            pa.array(pick.integers(1, 6, count).astype(np.int32)),
            pa.array(pick.integers(0, 10_000, count) / 100),
            pa.array(pick.integers(0, 1_000, count) / 100),
            pa.array([f"trip {number % 1000} of the day" for number in ids.tolist()]),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    def wanted(self, count: int, step: int) -> list[tuple[str, int]]:
        """Keys of rows, in no order."""
        ids = np.random.default_rng((_SEED, step)).integers(0, self.count, count).tolist()
        return [("ABCD"[number * 4 // self.count], number) for number in ids]

    def written(self) -> Work:
        """Write the rows as Parquet."""

        def work() -> int:
            pq.write_table(self.table, self.directory / "rows.parquet", compression="lz4")
            return self.count

        return work

    @property
    def fares(self) -> float:
        """The sum of a column, in cents."""
        return round(100 * float(self.table["fare"].to_numpy().sum()))

    def agreed(self, found: pa.Table) -> int:
        """The rows of a scan. Raises `AssertionError` if a sum differs."""
        assert round(100 * float(found["fare"].to_numpy().sum())) == self.fares, "a sum differs"
        return int(found.num_rows)


class TableRows(Rows):
    """A table of a store."""

    _store: kvstore.Store | None = None

    def rows_load(self, *, gate: Gate | None = None) -> Work:
        """Load all rows from Parquet, with the entries of both indexes."""
        self.close()
        self._store = kvstore.open(self.fresh("store"))
        trips = self._trips = self._store.table("trips", SCHEMA, KEY, INDEXES)
        path = self.directory / "rows.parquet"

        def work() -> int:
            import_files(trips, [path], "overwrite", "error", gate=gate)
            return self.count

        return work

    def rows_load_gated(self) -> Work:
        """The same behind a gate of five checks."""
        gate = Gate(
            rows={"least": self.count},
            no_nulls=["fare"],
            ranges={"seats": [1, 6]},
            distribution={"tip": {"nulls": 0.1, "distinct": 0.1, "quantiles": 0.1}},
            functions={"fares": lambda staged, _: self.agreed(staged.read_all()) == self.count},
        )
        return self.rows_load(gate=gate)

    def rows_get(self, count: int, step: int) -> Work:
        """Point gets of whole rows."""
        wanted, get = self.wanted(count, step), self._trips.get
        return lambda: sum(get(*key)["trip_id"] == key[1] for key in wanted)

    def rows_scan(self) -> Work:
        """All rows as Arrow batches."""
        return lambda: self.agreed(self._trips.scan().read_all())

    def rows_find(self, count: int, step: int) -> Work:
        """Look-ups of `FOUND` rows each, by an index."""
        zones = np.random.default_rng((_SEED, step)).integers(0, self.count // FOUND, count)
        find = self._trips.find
        return lambda: sum(len(list(find("by_zone", zone))) for zone in zones.tolist())

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class ByteRows(Rows):
    """The same rows as keys and values, without an index."""

    _store: kvstore.Store | None = None

    def written(self) -> Work:
        def work() -> int:
            with kvstore.open(self.fresh("codec")) as store:
                codec = store.table("trips", SCHEMA, KEY).codec()
            with pq.ParquetWriter(self.directory / "rows.parquet", rows_schema()) as writer:
                for batch in self.table.to_batches():
                    writer.write_batch(self._plain(codec, batch))
            return self.count

        return work

    @staticmethod
    def _plain(codec: TableCodec, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys, values = codec.encode(batch)
        skip = len(codec.key.prefix)
        plain = pa.array([key[skip:] for key in keys.to_pylist()], pa.binary())
        return pa.RecordBatch.from_arrays([plain, values], schema=rows_schema())

    def rows_load(self) -> Work:
        """Load all keys and values from Parquet."""
        self.close()
        store = self._store = kvstore.open(self.fresh("store"))

        def batches() -> Iterator[pa.RecordBatch]:
            yield from pq.ParquetFile(self.directory / "rows.parquet").iter_batches()

        def work() -> int:
            import_rows(store, batches(), "overwrite", "error")
            return self.count

        return work

    def rows_get(self, count: int, step: int) -> Work:
        """Point gets of values."""
        assert self._store is not None
        with kvstore.open(self.fresh("codec")) as store:
            codec = store.table("trips", SCHEMA, KEY).codec()
        skip = len(codec.key.prefix)
        wanted = [codec.key.key(key)[skip:] for key in self.wanted(count, step)]
        get = self._store.get
        return lambda: sum(get(key) is not None for key in wanted)

    def rows_scan(self) -> Work:
        """All keys and values as Arrow batches."""
        assert self._store is not None
        scan = self._store.scan_batches
        return lambda: int(scan().read_all().num_rows)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class SqliteRows(Rows):
    """A table of SQLite, clustered by the key, with an index."""

    _db: Any = None

    def rows_load(self) -> Work:
        """Insert all rows."""
        self.close()
        with suppress(FileNotFoundError):
            (self.directory / "rows.db").unlink()
        db = self._db = sqlite3.connect(self.directory / "rows.db", isolation_level=None)
        db.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -524288;"
            "PRAGMA mmap_size = 4294967296;"
            "CREATE TABLE trips (vendor TEXT, trip_id INTEGER, zone INTEGER, pickup INTEGER,"
            " seats INTEGER, fare REAL, tip REAL, note TEXT, PRIMARY KEY (vendor, trip_id))"
            " WITHOUT ROWID;"
            "CREATE INDEX by_zone ON trips (zone); CREATE INDEX by_pickup ON trips (pickup);"
        )
        path = self.directory / "rows.parquet"

        def work() -> int:
            found = pq.read_table(path)
            at = found.schema.get_field_index("pickup")
            found = found.set_column(at, "pickup", found["pickup"].cast(pa.int64()))
            columns = [column.to_pylist() for column in found.columns]
            db.execute("BEGIN")
            db.executemany("INSERT INTO trips VALUES (?,?,?,?,?,?,?,?)", zip(*columns, strict=True))
            db.execute("COMMIT")
            return self.count

        return work

    def rows_get(self, count: int, step: int) -> Work:
        """Point gets of whole rows, as dicts."""
        wanted, names = self.wanted(count, step), SCHEMA.names
        execute = self._db.execute
        query = "SELECT * FROM trips WHERE vendor = ? AND trip_id = ?"

        def work() -> int:
            return sum(
                dict(zip(names, execute(query, key).fetchone(), strict=True))["trip_id"] == key[1]
                for key in wanted
            )

        return work

    def rows_scan(self) -> Work:
        """All rows as an Arrow table."""

        def work() -> int:
            rows = self._db.execute("SELECT * FROM trips").fetchall()
            columns = [list(column) for column in zip(*rows, strict=True)]
            arrays = [
                pa.array(column, pa.int64()).cast(field.type)
                if pa.types.is_timestamp(field.type)
                else pa.array(column, field.type)
                for column, field in zip(columns, SCHEMA, strict=True)
            ]
            return self.agreed(pa.Table.from_arrays(arrays, schema=SCHEMA))

        return work

    def rows_find(self, count: int, step: int) -> Work:
        """Look-ups of `FOUND` rows each, as dicts."""
        zones = np.random.default_rng((_SEED, step)).integers(0, self.count // FOUND, count)
        names, execute = SCHEMA.names, self._db.execute
        query = "SELECT * FROM trips WHERE zone = ?"

        def work() -> int:
            return sum(
                len([dict(zip(names, row, strict=True)) for row in execute(query, (zone,))])
                for zone in zones.tolist()
            )

        return work

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


class DuckdbRows(Rows):
    """A table of DuckDB."""

    _db: Any = None

    def rows_load(self) -> Work:
        """Insert all rows from Parquet."""
        import duckdb

        self.close()
        with suppress(FileNotFoundError):
            (self.directory / "rows.duckdb").unlink()
        db = self._db = duckdb.connect(str(self.directory / "rows.duckdb"))
        path = self.directory / "rows.parquet"

        def work() -> int:
            db.execute(f"CREATE TABLE trips AS SELECT * FROM '{path}'")
            return self.count

        return work

    def rows_scan(self) -> Work:
        """All rows as an Arrow table."""
        return lambda: self.agreed(self._db.sql("SELECT * FROM trips").to_arrow_table())

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
