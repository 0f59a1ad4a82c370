"""DuckDB: a table of versions, appended to through Arrow; a commit syncs its log."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa

from benchmarks.subject import Subject, Work, tree_bytes

_SCHEMA = "CREATE TABLE versions (key BLOB, version BIGINT, value BLOB)"
_NEWEST = "SELECT value FROM versions WHERE key = ? AND version <= ? ORDER BY version DESC LIMIT 1"
_ALL = """
    SELECT key, value FROM
        (SELECT key, arg_max_null(value, version) AS value FROM versions
         WHERE version <= ? GROUP BY key)
    WHERE value IS NOT NULL
"""


class Duckdb(Subject):
    """One connection; rows go in and come out as Arrow."""

    name = "duckdb"
    slow = frozenset({"get"})  # each is a query over the table: some milliseconds

    def __init__(self, directory: Path, data) -> None:
        super().__init__(directory, data)
        self.db: duckdb.DuckDBPyConnection | None = None
        self.version = 0

    def now(self) -> int:
        return self.version

    def fill(self) -> Work:
        return self._loading("db", keep=True)

    def bulk_load(self) -> Work:
        return self._loading("bulk", keep=False)

    def _loading(self, name: str, *, keep: bool) -> Work:
        keys, values = self.data.keys, self.data.values
        target = self.fresh(name)

        def work() -> int:
            target.mkdir()
            db = duckdb.connect(str(target / "versions.duckdb"))
            db.execute(_SCHEMA)
            self._insert(db, keys, values, 1)
            db.execute("CHECKPOINT")
            if keep:
                self.db, self.version = db, 1
            else:
                db.close()
            return len(keys)

        return work

    @staticmethod
    def _insert(
        db: duckdb.DuckDBPyConnection, keys: list[bytes], values: list[bytes], version: int
    ) -> None:
        rows = pa.table({"key": keys, "value": values})
        db.register("arriving", rows)
        db.execute(f"INSERT INTO versions SELECT key, {version}, value FROM arriving")
        db.unregister("arriving")

    def commit(self, rows: int, count: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def work() -> int:
            for keys, values in sets:
                self.version += 1
                self._insert(self.db, keys, values, self.version)
            return rows * count

        return work

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        version = self.version if as_of is None else self.marks[as_of]

        def work() -> int:
            with self.db.cursor() as cursor:  # a connection with a result left open takes no other
                for key in wanted:
                    assert cursor.execute(_NEWEST, (key, version)).fetchone()
            return len(wanted)

        return work

    def scan_arrow(self, as_of: str | None = None) -> Work:
        version = self.version if as_of is None else self.marks[as_of]
        return lambda: self._rows(_ALL, version)

    def changes_arrow(self, since: str) -> Work:
        query = "SELECT version, key, value FROM versions WHERE version > ? ORDER BY version"
        return lambda: self._rows(query, self.marks[since])

    def _rows(self, query: str, version: int) -> int:
        with self.db.cursor() as cursor:  # as in `get`
            found = cursor.sql(query, params=(version,)).to_arrow_reader()
            return sum(batch.num_rows for batch in found)

    def delete_range(self, rows: int, step: int) -> Work:
        start, end = self.data.middle(rows)

        def work() -> int:
            self.version += 1
            self.db.execute(
                "INSERT INTO versions SELECT key, ?, NULL FROM versions"
                " WHERE key >= ? AND key < ? GROUP BY key",
                (self.version, start, end),
            )
            return 1

        return work

    def disk(self) -> Work:
        def work() -> int:
            self.db.execute("CHECKPOINT")
            return tree_bytes(self.directory / "db")

        return work

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
