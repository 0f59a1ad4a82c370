"""SQLite: a table of versions clustered by key, an index by version; WAL, synchronous=FULL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.peer import Peer
from benchmarks.subject import Work, tree_bytes

_SCHEMA = """
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = FULL;
    PRAGMA cache_size = -524288;
    PRAGMA mmap_size = 4294967296;
    CREATE TABLE versions (
        key BLOB, version INTEGER, value BLOB, PRIMARY KEY (key, version DESC)
    ) WITHOUT ROWID;
"""
_NEWEST = "SELECT value FROM versions WHERE key = ? AND version <= ? ORDER BY version DESC LIMIT 1"
# SQLite promises that bare columns of a MAX() group come from the row with the maximum.
_ALL = """
    SELECT key, value FROM
        (SELECT key, value, MAX(version) FROM versions WHERE version <= ? GROUP BY key)
    WHERE value IS NOT NULL
"""


class Sqlite(Peer):
    """One connection, transactions by hand."""

    name = "sqlite3"

    db: sqlite3.Connection | None = None

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        target.mkdir()
        db = sqlite3.connect(target / "versions.db", isolation_level=None)
        db.executescript(_SCHEMA)
        self._insert(db, ((k, 1, v) for k, v in zip(keys, values, strict=True)))
        if keep:
            db.execute("CREATE INDEX by_version ON versions (version)")
            self.db = db
        else:
            db.close()

    @staticmethod
    def _insert(db: sqlite3.Connection, rows: Iterable[tuple[bytes, int, bytes | None]]) -> None:
        db.execute("BEGIN")
        db.executemany("INSERT INTO versions VALUES (?, ?, ?)", rows)
        db.execute("COMMIT")

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        self._insert(self.db, ((k, version, v) for k, v in zip(keys, values, strict=True)))

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        version = self.at(as_of)

        def work() -> int:
            execute = self.db.cursor().execute
            found = 0
            for key in wanted:
                row = execute(_NEWEST, (key, version)).fetchone()
                if row is not None and row[0] is not None:
                    found += 1
            return found

        return work

    def scan(self, as_of: str | None = None) -> Work:
        version = self.at(as_of)
        return lambda: sum(1 for _ in self.db.execute(_ALL, (version,)))

    def changes(self, since: str) -> Work:
        query = "SELECT version, key, value FROM versions WHERE version > ? ORDER BY version"
        return lambda: len(self.db.execute(query, (self.marks[since],)).fetchall())

    def delete_range(self, rows: int, step: int) -> Work:
        start, end = self.data.middle(rows)

        def work() -> int:
            self.version += 1
            self.db.execute("BEGIN")
            self.db.execute(
                "INSERT INTO versions SELECT key, ?, NULL FROM versions"
                " WHERE key >= ? AND key < ? GROUP BY key",
                (self.version, start, end),
            )
            self.db.execute("COMMIT")
            return 1

        return work

    def disk(self) -> Work:
        def work() -> int:
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return tree_bytes(self.directory / "db")

        return work

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
