"""Parts: the sorted files of an import, built without contact to a store.

    entry := | framed user key | import id u64 | kind u8 | -> value     (kvstore/codec/keys.py)

Building takes 0.3 us per row; Spark's range partition and sort before it take 1.5 us.

Invariants
1. The keys of a part ascend strictly.
2. Names are unique per attempt, so retries and speculative attempts never write to one file.
3. The records of keys that expire have parts of their own, which belong to the part of the keys.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulk.entries import kinds_of
from bulk.expiring import ExpiryRows, require_expiring
from bulk.sst import OutOfOrder, SstFile
from kvstore.arguments import require_value
from kvstore.clock import Clock
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference
from kvstore.codec.ordered import frame
from kvstore.columns import expiry_column
from kvstore.errors import ClosedError, KeyOrderError, UsageError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.span import require_key
from kvstore.timestamp import TimeLike, is_no_due_time, to_instant

PART_PREFIX: Final = "part-"
PART_NAME: Final = re.compile(rf"{PART_PREFIX}[0-9a-f]{{32}}\.sst", re.ASCII)
"""The form of the names that part writers give to files."""


_now: Final = Clock().wall_ns
"""Tells the unit of a number that is given as a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """One finished file of an import. Small and picklable: a worker sends it to the driver."""

    name: str
    smallest: bytes
    largest: bytes
    rows: int
    size_bytes: int
    digest: str
    mtime_ns: int
    inode: int
    expiries: tuple[Part, ...] = ()
    """Parts with the records of the keys that expire. A manifest lists them beside this one."""


class PartWriter:
    """Writes one part. The file appears when `finish` returns. A part without rows has no file."""

    def __init__(self, staging: Path, import_id: int, *, compression: str = "lz4") -> None:
        self._staging = staging
        self._import_id, self._compression = import_id, compression
        self._expiring: ExpiryRows[Part] | None = None
        self._name = f"{PART_PREFIX}{uuid.uuid4().hex}.sst"
        self._reference = encode_reference(import_id)
        self._file = SstFile(staging / self._name, compression=compression)
        self._smallest = b""
        self._largest = b""
        self._rows = 0
        self._closed = False
        self._broken = False

    def put(self, key: bytes, value: bytes, *, expires: TimeLike | None = None) -> None:
        """Add one row. Raises `KeyOrderError` unless `key` is above all earlier keys.

        With `expires` the key is deleted at that time, as `Store.put` tells; a time that has passed
        when the import is added deletes it right after. Nobody knows yet when that will be, so
        `expires` is no timedelta.
        """
        key, value = require_key(key), require_value(value)
        due = None if expires is None else to_instant(expires, name="expires", now=_now)
        if due is not None and is_no_due_time(due, _now()):
            raise UsageError(
                f"expires={expires!r} is {due} in nanoseconds, before 1979: it counts another unit",
                "pass an aware datetime, or nanoseconds",
            )
        self._add_one(key, VALUE, value)
        if due is not None:
            self._expiries().add_one(key, due)

    def delete(self, key: bytes) -> None:
        """Add a tombstone, by which the import deletes `key`. Raises as `put` does."""
        key = require_key(key)
        self._add_one(key, TOMBSTONE, b"")

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch: columns `key` and `value`, binary, ascending by key.

        An optional column `op` holds `"put"` or `"delete"`. An optional column `expires` has the
        times at which keys expire, with a zone or as nanoseconds, null for keys that stay: see
        `put`. Index entries that expire have the keys of their rows in a column `expires_with`,
        null elsewhere. Raises `UsageError` on other types and on nulls, `KeyOrderError` where the
        order is broken. Earlier rows of the batch may have been added then, so the part can only be
        abandoned.
        """
        keys, values, kinds = _columns(batch)
        expiring = self._expiring_rows(batch, keys)
        if kinds is not None:
            self._require_once(keys)
        add_rows = self._file.add_rows  # raises in a forked child and changes nothing
        self._add(keys, partial(_add_pieces, add_rows, keys, values, self._reference, kinds))
        if expiring is not None:
            self._broken = True  # until the records are added
            self._expiries().add(*expiring)
            self._broken = False

    def finish(self) -> Part | None:
        """Write the part to disk under its name. None if it has no rows. Costs one fsync, and three
        if keys expire."""
        if self._broken:
            self.abandon()
            raise self._refusal()
        finish = self._file.finish  # raises in a forked child and changes nothing
        self._closed = True
        written = finish()
        if written is None:
            return None
        expiries = () if self._expiring is None else tuple(self._expiring.finish())
        return Part(self._name, self._smallest, self._largest, self._rows, *written, expiries)

    @property
    def size_bytes(self) -> int:
        """About how many bytes were written so far."""
        return self._file.size_bytes

    @property
    def is_closed(self) -> bool:
        """Whether the part was finished or abandoned."""
        return self._closed

    def abandon(self) -> None:
        """Remove the unfinished file. Repeatable."""
        self._closed = True
        self._file.abandon()
        if self._expiring is not None:
            self._expiring.abandon()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()
        elif not self._closed:
            self.finish()

    def _add_one(self, key: bytes, kind: bytes, value: bytes) -> None:
        stored = frame(key) + self._reference + kind
        self._add([key], partial(self._file.add, [stored], [value]))

    def _add(self, keys: list[bytes] | pa.Array, add: Callable[[], None]) -> None:
        """Add the rows of `keys` by `add`."""
        if self._closed:
            raise ClosedError("the part writer")
        if self._broken:
            raise self._refusal()
        if not len(keys):
            return
        if self._rows and _at(keys, 0) == self._largest:
            raise KeyOrderError(str(self._staging), previous=self._largest, key=self._largest)
        self._broken = True  # until all rows of the call are added
        try:
            add()
        except OutOfOrder as error:
            self._broken = error.index > 0
            previous = _at(keys, error.index - 1) if error.index else self._largest
            key = _at(keys, error.index)
            raise KeyOrderError(str(self._staging), previous=previous, key=key) from None
        if not self._rows:
            self._smallest = _at(keys, 0)
        self._largest = _at(keys, len(keys) - 1)
        self._rows += len(keys)
        self._broken = False

    def _expiries(self) -> ExpiryRows[Part]:
        if self._expiring is None:
            begin = partial(
                PartWriter, self._staging, self._import_id, compression=self._compression
            )
            self._expiring = ExpiryRows(begin, self._staging, self._import_id)
        return self._expiring

    def _expiring_rows(
        self, batch: pa.RecordBatch, keys: pa.Array
    ) -> tuple[pa.Array, npt.NDArray[np.int64], pa.Array] | None:
        """The keys of a batch that expire, with their times and the rows with which they do. Raises
        `UsageError`."""
        if "expires" not in batch.schema.names:
            return None
        is_set, dues = expiry_column(batch.column("expires"), "expires", self._rows, _now)
        if "op" in batch.schema.names:
            deletes = pc.equal(_text(batch, "op"), "delete")
            if pc.any(pc.and_(deletes, is_set)).as_py():
                raise UsageError("column expires has a time in a row that deletes", "pass a null")
        expiring = keys.filter(is_set)
        require_expiring(expiring, dues)
        rows = pa.nulls(len(expiring), pa.binary())
        if "expires_with" in batch.schema.names:
            rows = _binary(batch, "expires_with").filter(is_set)
        return (expiring, dues, rows) if len(expiring) else None

    def _require_once(self, keys: pa.Array) -> None:
        """Raise `KeyOrderError` if two neighbours of `keys` are equal. RocksDB refuses two puts or
        two deletes of a key, but the entries of a delete and a put of one key ascend."""
        same = pc.index(pc.equal(keys[:-1], keys[1:]), True).as_py() if len(keys) > 1 else -1
        if same >= 0:
            key = keys[same].as_py()
            raise KeyOrderError(str(self._staging), previous=key, key=key)

    def _refusal(self) -> UsageError:
        return UsageError(
            f"a part of {self._staging} holds half of a write that failed",
            "abandon it, and write the part again",
        )


_OPTIONAL: Final = {"op", "expires", "expires_with"}


def _columns(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array, bytes | None]:
    """The keys and the values of a batch, and the kinds of its rows, None where all have values."""
    if not isinstance(batch, pa.RecordBatch | pa.Table):
        raise UsageError(f"a batch must be Arrow's, not {type(batch).__name__}", "convert it first")
    names = sorted(batch.schema.names)
    if sorted({*names} - _OPTIONAL) != ["key", "value"] or len({*names}) < len(names):
        raise UsageError(
            f"columns {names} cannot be imported", "pass key, value and, if need be, op and expires"
        )
    keys, values = _binary(batch, "key"), _binary(batch, "value")
    if keys.null_count:
        raise UsageError("column key has nulls", "every row needs a key")
    longest = pc.max(pc.binary_length(keys)).as_py() or 0
    if longest > KEY_BYTES_MAX:
        raise UsageError(
            f"a key has {longest} bytes, at most {KEY_BYTES_MAX} are allowed", "shorten it"
        )
    _require_value_bytes(pc.max(pc.binary_length(values)).as_py() or 0)
    if "op" not in names:
        if values.null_count:
            raise UsageError("column value has nulls", "to delete, pass a column op")
        return keys, values, None
    ops = _text(batch, "op")
    others = [each for each in pc.unique(ops).to_pylist() if each not in ("put", "delete")]
    if others:
        raise UsageError(f"column op holds something else: {others[0]!r}", 'pass "put" or "delete"')
    deletes = pc.equal(ops, "delete")
    if pc.any(pc.and_(pc.invert(deletes), pc.is_null(values)), min_count=0).as_py():
        raise UsageError("column value has nulls in rows that put", "pass a value")
    return keys, values, kinds_of(pc.invert(deletes))


def _add_pieces(
    add_rows: Callable[[pa.Array, pa.Array, bytes, bytes | None], None],
    keys: pa.Array,
    values: pa.Array,
    reference: bytes,
    kinds: bytes | None,
) -> None:
    """Add columns of one piece, as a batch has them, or of several, as a table may have them."""
    done = 0
    for piece in pa.Table.from_arrays([keys, values], ["key", "value"]).to_batches():
        last = done + piece.num_rows
        mine = None if kinds is None else kinds[done:last]
        try:
            add_rows(piece.column(0), piece.column(1), reference, mine)
        except OutOfOrder as error:
            raise OutOfOrder(done + error.index) from error
        done = last


def _binary(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    if pa.types.is_large_binary(column.type) or pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    if not pa.types.is_binary(column.type):
        raise UsageError(f"column {name} is {column.type}, not binary", "encode it first")
    return column


def _text(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    try:
        column = column.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(f"column {name} is {column.type}, not text", "convert it first") from error
    return column


def _require_value_bytes(size: int) -> None:
    if size > VALUE_BYTES_MAX:
        raise UsageError(
            f"a value has {size} bytes, at most {VALUE_BYTES_MAX} are stored",
            "split it over several keys",
        )


def _at(keys: list[bytes] | pa.Array, index: int) -> bytes:
    found = keys[index]
    return found if isinstance(found, bytes) else found.as_py()
