"""The common part of the peers: loading, committing, and versions that count from 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.subject import Subject, Work, tree_bytes


class Peer(Subject):
    """A peer's store, in `db` below its directory. Each commit makes the next `version`."""

    version = 0

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        """Make a store of these rows at `target`, as version 1; `keep` it open."""
        raise NotImplementedError

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        """Commit these rows, durably, as `version`."""
        raise NotImplementedError

    def now(self) -> int:
        return self.version

    def at(self, as_of: str | None) -> int:
        """The version of a mark; the newest for None."""
        return self.version if as_of is None else self.marks[as_of]

    def fill(self) -> Work:
        return self._loading("db", keep=True)

    def bulk_load(self) -> Work:
        return self._loading("bulk", keep=False)

    def _loading(self, name: str, *, keep: bool) -> Work:
        keys, values = self.data.keys, self.data.values
        target = self.fresh(name)

        def work() -> int:
            self.load(target, keys, values, keep=keep)
            if keep:
                self.version = 1
            return len(keys)

        return work

    def commit(self, rows: int, count: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def work() -> int:
            for keys, values in sets:
                self.write_next(keys, values)
            return rows * count

        return work

    def write_next(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Commit these rows as the next version."""
        self.write(keys, values, self.version + 1)
        self.version += 1

    def disk(self) -> Work:
        return lambda: tree_bytes(self.directory / "db")
