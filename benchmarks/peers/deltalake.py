"""Delta Lake through delta-rs: a table with its change data feed; updates are merges.

Nothing is synced: a commit is as durable as the file system's own write-back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from benchmarks.peers.peer import Peer
from benchmarks.subject import Work

_CONFIGURATION = {"delta.enableChangeDataFeed": "true"}


class Deltalake(Peer):
    """A table of current rows; older states by time travel."""

    name = "deltalake"
    durability = "none"
    slow = frozenset({"commit"})

    @property
    def _path(self) -> str:
        return str(self.directory / "db")

    def now(self) -> int:
        return DeltaTable(self._path).version()

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        table = pa.table({"key": keys, "value": values})
        write_deltalake(str(target), table, configuration=_CONFIGURATION)

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
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
