"""Iceberg through pyiceberg, catalog in SQLite: a table of versions, appended to.

Data files are not synced: a commit is as durable as the file system's own write-back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import And, GreaterThanOrEqual, LessThan
from pyiceberg.table import Table

from benchmarks.peers.peer import Peer
from benchmarks.subject import Work

_SCHEMA = pa.schema({"key": pa.binary(), "version": pa.int64(), "value": pa.binary()})


class Pyiceberg(Peer):
    """Versions by column, so that a window is a filter on it; newest by group."""

    name = "pyiceberg"
    durability = "none"
    slow = frozenset({"commit"})

    table: Table | None = None

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        target.mkdir()
        catalog = SqlCatalog(
            "bench", uri=f"sqlite:///{target}/catalog.db", warehouse=f"file://{target}"
        )
        catalog.create_namespace("bench")
        table = catalog.create_table("bench.versions", _SCHEMA)
        table.append(_rows(keys, values, 1))
        if keep:
            self.table = table

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        self.table.append(_rows(keys, values, version))

    def scan_arrow(self, as_of: str | None = None) -> Work:
        version = self.at(as_of)

        def work() -> int:
            found = self.table.scan(row_filter=LessThan("version", version + 1)).to_arrow()
            newest = found.group_by("key").aggregate([("version", "max")])
            rows = newest.rename_columns(["key", "version"]).join(found, ["key", "version"])
            return rows.num_rows - rows["value"].null_count

        return work

    def changes_arrow(self, since: str) -> Work:
        window = GreaterThanOrEqual("version", self.marks[since] + 1)
        return lambda: self.table.scan(row_filter=window).to_arrow().num_rows

    def delete_range(self, rows: int, step: int) -> Work:
        start, end = self.data.middle(rows)

        def work() -> int:
            self.version += 1
            inside = And(GreaterThanOrEqual("key", start), LessThan("key", end))
            keys = self.table.scan(row_filter=inside, selected_fields=("key",)).to_arrow()
            doomed = keys["key"].unique().to_pylist()
            self.table.append(_rows(doomed, [None] * len(doomed), self.version))
            return 1

        return work


def _rows(keys: list[bytes], values: list[bytes | None], version: int) -> pa.Table:
    columns = [keys, pa.array([version] * len(keys), pa.int64()), values]
    return pa.table(dict(zip(_SCHEMA.names, columns, strict=True)), schema=_SCHEMA)
