"""ArcticDB over LMDB: a symbol of versions by time, appended to.

It holds no binary columns: keys and values travel as text of one character a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import arcticdb
import pandas as pd

from benchmarks.peers.peer import Peer
from benchmarks.subject import Work

_SYMBOL = "versions"
_EPOCH = pd.Timestamp("2020-01-01")


class Arcticdb(Peer):
    """Versions are nanoseconds of the index, so that a window is a range of dates."""

    name = "arcticdb"
    durability = "the library's default"
    slow = frozenset({"commit"})

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        target.mkdir()
        library = arcticdb.Arctic(f"lmdb://{target}").get_library("bench", create_if_missing=True)
        library.write(_SYMBOL, _frame(keys, values, 1))
        if keep:
            self.library = library

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        self.library.append(_SYMBOL, _frame(keys, values, version))

    def scan_arrow(self, as_of: str | None = None) -> Work:
        version = self.at(as_of)

        def work() -> int:
            found = self.library.read(_SYMBOL, date_range=(None, _time(version))).data
            return int(found.drop_duplicates("key", keep="last")["value"].notna().sum())

        return work

    def changes_arrow(self, since: str) -> Work:
        window = (_time(self.marks[since] + 1), None)
        return lambda: len(self.library.read(_SYMBOL, date_range=window).data)


def _time(version: int) -> pd.Timestamp:
    return _EPOCH + pd.Timedelta(version, "ns")


def _frame(keys: list[bytes], values: list[bytes], version: int) -> pd.DataFrame:
    columns = {
        "key": [key.decode("latin-1") for key in keys],
        "value": [value.decode("latin-1") for value in values],
    }
    return pd.DataFrame(columns, index=pd.DatetimeIndex([_time(version)] * len(keys)))
