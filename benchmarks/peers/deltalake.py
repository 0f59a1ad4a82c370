"""Delta Lake through delta-rs: a table with its change data feed; updates are merges.

Nothing is synced: a commit is as durable as the file system's own write-back.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from benchmarks.subject import Subject, Work, tree_bytes

_CONFIGURATION = {"delta.enableChangeDataFeed": "true"}


class Deltalake(Subject):
    """A table of current rows; older states by time travel."""

    name = "deltalake"
    durability = "none"
    slow = frozenset({"commit"})

    @property
    def _path(self) -> str:
        return str(self.directory / "db")

    def now(self) -> int:
        return DeltaTable(self._path).version()

    def fill(self) -> Work:
        return self._loading("db")

    def bulk_load(self) -> Work:
        return self._loading("bulk")

    def _loading(self, name: str) -> Work:
        keys, values = self.data.keys, self.data.values
        target = self.fresh(name)

        def work() -> int:
            table = pa.table({"key": keys, "value": values})
            write_deltalake(str(target), table, configuration=_CONFIGURATION)
            return len(keys)

        return work

    def commit(self, rows: int, count: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def work() -> int:
            for keys, values in sets:
                (
                    DeltaTable(self._path)
                    .merge(
                        pa.table({"key": keys, "value": values}),
                        predicate="old.key = new.key",
                        source_alias="new",
                        target_alias="old",
                    )
                    .when_matched_update_all()
                    .when_not_matched_insert_all()
                    .execute()
                )
            return rows * count

        return work

    def settle(self) -> Work:
        def work() -> int:
            DeltaTable(self._path).optimize.compact()
            return 1

        return work

    def scan_arrow(self, as_of: str | None = None) -> Work:
        version = None if as_of is None else self.marks[as_of]

        def work() -> int:
            rows = DeltaTable(self._path, version=version).to_pyarrow_dataset()
            return sum(batch.num_rows for batch in rows.to_batches())

        return work

    def changes_arrow(self, since: str) -> Work:
        def work() -> int:
            feed = DeltaTable(self._path).load_cdf(starting_version=self.marks[since] + 1)
            table = pa.table(feed.read_all())
            kinds = pa.array(["insert", "update_postimage"])
            is_new = pc.is_in(table["_change_type"].cast(pa.string()), kinds)
            return int(pc.sum(is_new).as_py())

        return work

    def delete_range(self, rows: int, step: int) -> Work:
        start, end = self.data.middle(rows)
        span = f"key >= X'{start.hex()}' AND key < X'{end.hex()}'"

        def work() -> int:
            DeltaTable(self._path).delete(span)
            return 1

        return work

    def disk(self) -> Work:
        return lambda: tree_bytes(self.directory / "db")
