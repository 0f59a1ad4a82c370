"""ArcticDB over LMDB: a symbol of versions by time, appended to.

It holds no binary columns: keys and values travel as text of one character a byte.
"""

from __future__ import annotations

from pathlib import Path

import arcticdb
import pandas as pd

from benchmarks.subject import Subject, Work, tree_bytes

_SYMBOL = "versions"
_EPOCH = pd.Timestamp("2020-01-01")


class Arcticdb(Subject):
    """Versions are nanoseconds of the index, so that a window is a range of dates."""

    name = "arcticdb"
    durability = "the library's default"
    slow = frozenset({"commit"})

    def __init__(self, directory: Path, data) -> None:
        super().__init__(directory, data)
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
            library = arcticdb.Arctic(f"lmdb://{target}").get_library(
                "bench", create_if_missing=True
            )
            library.write(_SYMBOL, _frame(keys, values, 1))
            if keep:
                self.library, self.version = library, 1
            return len(keys)

        return work

    def commit(self, rows: int, count: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def work() -> int:
            for keys, values in sets:
                self.version += 1
                self.library.append(_SYMBOL, _frame(keys, values, self.version))
            return rows * count

        return work

    def scan_arrow(self, as_of: str | None = None) -> Work:
        version = self.version if as_of is None else self.marks[as_of]

        def work() -> int:
            found = self.library.read(_SYMBOL, date_range=(None, _time(version))).data
            return int(found.drop_duplicates("key", keep="last")["value"].notna().sum())

        return work

    def changes_arrow(self, since: str) -> Work:
        window = (_time(self.marks[since] + 1), None)
        return lambda: len(self.library.read(_SYMBOL, date_range=window).data)

    def disk(self) -> Work:
        return lambda: tree_bytes(self.directory / "db")


def _time(version: int) -> pd.Timestamp:
    return _EPOCH + pd.Timedelta(version, "ns")


def _frame(keys: list[bytes], values: list[bytes], version: int) -> pd.DataFrame:
    columns = {
        "key": [key.decode("latin-1") for key in keys],
        "value": [value.decode("latin-1") for value in values],
    }
    return pd.DataFrame(columns, index=pd.DatetimeIndex([_time(version)] * len(keys)))
