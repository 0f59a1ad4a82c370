"""DuckDB: a table of versions, appended to through Arrow; a commit syncs its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from benchmarks.peers.peer import Peer
from benchmarks.subject import Work, tree_bytes

_SCHEMA = "CREATE TABLE versions (key BLOB, version BIGINT, value BLOB)"
_NEWEST = "SELECT value FROM versions WHERE key = ? AND version <= ? ORDER BY version DESC LIMIT 1"
_ALL = """
    SELECT key, value FROM
        (SELECT key, arg_max_null(value, version) AS value FROM versions
         WHERE version <= ? GROUP BY key)
    WHERE value IS NOT NULL
"""


class Duckdb(Peer):
    """One connection; rows go in and come out as Arrow."""

    name = "duckdb"
    slow = frozenset({"get"})  # each is a query over the table: some milliseconds

    db: duckdb.DuckDBPyConnection | None = None

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        target.mkdir()
        db = duckdb.connect(str(target / "versions.duckdb"))
        db.execute(_SCHEMA)
        self._insert(db, keys, values, 1)
        db.execute("CHECKPOINT")
        if keep:
            self.db = db
        else:
            db.close()

    @staticmethod
    def _insert(
        db: duckdb.DuckDBPyConnection, keys: list[bytes], values: list[bytes], version: int
    ) -> None:
        rows = pa.table({"key": keys, "value": values})
        db.register("arriving", rows)
        db.execute(f"INSERT INTO versions SELECT key, {version}, value FROM arriving")
        db.unregister("arriving")

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        self._insert(self.db, keys, values, version)

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        version = self.at(as_of)

        def work() -> int:
            with self.db.cursor() as cursor:  # a connection has one open result at most
                for key in wanted:
                    assert cursor.execute(_NEWEST, (key, version)).fetchone()
            return len(wanted)

        return work

    def scan_arrow(self, as_of: str | None = None) -> Work:
        version = self.at(as_of)
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
