"""Lance: a versioned columnar dataset with stable row ids; updates are merge-inserts.

Nothing is synced: a commit is as durable as the file system's own write-back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lance
import pyarrow as pa

from benchmarks.peers.peer import Peer
from benchmarks.subject import Work


class Pylance(Peer):
    """A dataset of current rows; older states by version."""

    name = "pylance"
    durability = "none"
    slow = frozenset({"commit"})

    def now(self) -> int:
        return self._dataset().version

    def _dataset(self, version: int | None = None) -> lance.LanceDataset:
        return lance.dataset(str(self.directory / "db"), version=version)

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        table = pa.table({"key": keys, "value": values})
        lance.write_dataset(table, str(target), enable_stable_row_ids=True)

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        (
            self._dataset()
            .merge_insert("key")
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute(pa.table({"key": keys, "value": values}))
        )

    def scan_arrow(self, as_of: str | None = None) -> Work:
        version = None if as_of is None else self.marks[as_of]
        return lambda: sum(b.num_rows for b in self._dataset(version).to_batches())

    def changes_arrow(self, since: str) -> Work:
        changed = f"_row_last_updated_at_version > {self.marks[since]}"
        return lambda: self._dataset().to_table(filter=changed).num_rows

    def delete_range(self, rows: int, step: int) -> Work:
        start, end = self.data.middle(rows)
        span = f"key >= X'{start.hex()}' AND key < X'{end.hex()}'"

        def work() -> int:
            self._dataset().delete(span)
            return 1

        return work
