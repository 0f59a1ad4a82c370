"""The records of the keys of a part that expire: `kvstore.mvcc.expiry` has their bytes.

Records are rows of the import, in parts of their own. One part has them in the order of the keys,
and is written beside the rows. The other has them in the order of the due times, and is sorted in
bounded memory when the part of the rows is finished.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulk.sort import Sorter
from kvstore.errors import UsageError
from kvstore.limits import SCAN_CHUNK
from kvstore.mvcc.expiry import CARRIED, EXPIRY, WAITING, longest_key
from kvstore.timestamp import TIMESTAMP_MAX

P_co = TypeVar("P_co", covariant=True)


class _Rows(Protocol[P_co]):
    """Writes ascending rows as one file, as `bulk.PartWriter` does."""

    def write(self, batch: pa.RecordBatch) -> None: ...
    def finish(self) -> P_co | None: ...
    def abandon(self) -> None: ...


class ExpiryRows(Generic[P_co]):
    """Writes the records of the keys that one part has, and that expire."""

    def __init__(self, begin: Callable[[], _Rows[P_co]], staging: Path, import_id: int) -> None:
        self._begin, self._import_id = begin, import_id
        self._scratch = staging / f"sorting-{secrets.token_hex(8)}"
        self._by_key = begin()
        self._by_time: _Rows[P_co] | None = None
        self._given: tuple[list[bytes], list[int]] = ([], [])
        self._waiting = Sorter(self._scratch)

    def add_one(self, key: bytes, due: int) -> None:
        """Add the records of one key, which lies above all earlier ones."""
        require_expiring(pa.array([key], pa.binary()), np.array([due]))
        keys, dues = self._given
        keys.append(key)
        dues.append(due)
        if len(keys) >= SCAN_CHUNK:
            self._add_given()

    def add(self, keys: pa.Array, dues: npt.NDArray[np.int64], rows: pa.Array) -> None:
        """Add the records of ascending keys. `rows` has, for each index entry, the key of the row
        with which it expires, and is null or empty elsewhere. Raises as `require_expiring`."""
        require_expiring(keys, dues)
        self._add_given()
        self._add(keys, dues, rows.fill_null(b""))

    def finish(self) -> list[P_co]:
        """Write both parts to disk. Costs a sort, and two fsyncs."""
        self._add_given()
        self._by_time = self._begin()
        for batch in self._waiting.sorted():
            self._by_time.write(batch)
        parts = [self._by_key.finish(), self._by_time.finish()]
        shutil.rmtree(self._scratch, ignore_errors=True)
        return [part for part in parts if part is not None]

    def abandon(self) -> None:
        """Remove the unfinished files. Repeatable."""
        self._by_key.abandon()
        if self._by_time is not None:
            self._by_time.abandon()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _add_given(self) -> None:
        keys, dues = self._given
        if keys:
            self._given = [], []
            none = pa.array([b""] * len(keys), pa.binary())
            self._add(pa.array(keys, pa.binary()), np.array(dues, np.int64), none)

    def _add(self, keys: pa.Array, dues: npt.NDArray[np.int64], rows: pa.Array) -> None:
        found = self._encoded(dues)
        self._by_key.write(_rows(_joined(CARRIED, keys), found))
        self._waiting.add(_rows(_joined(WAITING, found, keys), rows))

    def _encoded(self, dues: npt.NDArray[np.int64]) -> pa.Array:
        """Each due time with the id of the import, as `kvstore.mvcc.expiry` has them."""
        pairs = np.empty((len(dues), 2), ">u8")
        pairs[:, 0], pairs[:, 1] = dues, self._import_id
        data = pa.py_buffer(pairs.tobytes())
        return pa.Array.from_buffers(pa.binary(16), len(dues), [None, data]).cast(pa.binary())


def require_expiring(keys: pa.Array, dues: npt.NDArray[np.int64]) -> None:
    """Raise `UsageError` for a key that cannot expire, and for a time that cannot be."""
    if not len(keys):
        return
    longest = pc.max(pc.binary_length(keys)).as_py()
    if longest > longest_key():
        raise UsageError(
            f"a key has {longest} bytes, and one that expires at most {longest_key()}",
            "use a shorter key, or delete it yourself",
        )
    if pc.any(pc.starts_with(keys, EXPIRY)).as_py():
        raise UsageError("a key that expires is itself the record of an expiry", "choose another")
    if dues.min() < 1 or dues.max() >= TIMESTAMP_MAX:
        at = dues.min() if dues.min() < 1 else dues.max()
        raise UsageError(f"expires={at} is no time", f"pass one from 1 to {TIMESTAMP_MAX - 1}")


def _joined(prefix: bytes, *columns: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(pa.scalar(prefix, pa.binary()), *columns, b"")


def _rows(keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([keys, values], names=["key", "value"])
