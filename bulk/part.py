"""Parts: the sorted files of an import, built without contact to a store.

A part is one or several of RocksDB's sorted files. Its rows have the id of the import where other
rows have a timestamp, and its keys that expire have records beside them.

    entry := | framed user key | import id u64 | kind u8 | -> value     (kvstore/codec/keys.py)

Building takes 0.15 us per row; Spark's range partition and sort before it take 1.5 us.

Invariants
1. The keys of a part ascend strictly.
2. Names are unique per attempt, so retries and speculative attempts never write to one file.
3. The records of keys that expire have parts of their own, which belong to the part of the keys.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import require_value, word
from kvstore.base.clock import Clock
from kvstore.base.digest import RunningDigest, file_digest
from kvstore.base.forks import own
from kvstore.base.span import require_key
from kvstore.base.timestamp import TIMESTAMP_MAX, TimeLike, is_no_due_time, to_instant
from kvstore.bulk.sort import Sorter
from kvstore.codec.columns import expiry_column
from kvstore.codec.keys import (
    TERMINATOR,
    TOMBSTONE,
    U64_MAX,
    VALUE,
    encode_reference,
    frame,
)
from kvstore.engine.sorted_file import CODECS, ending, seal
from kvstore.errors import (
    ClosedError,
    KeyOrderError,
    UsageError,
    storage_errors,
)
from kvstore.limits import (
    BLOCK_BYTES,
    KEY_BYTES_MAX,
    PACKED_STRETCH_BYTES,
    PACKING_THREADS_MAX,
    SCAN_CHUNK,
    VALUE_BYTES_MAX,
)
from kvstore.loops.packing import Packer, Stretch
from kvstore.loops.shapes import Column, FileRows, OutOfOrder
from kvstore.mvcc.expiry_records import CARRIED, EXPIRY, WAITING, longest_key

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
        self._require_usable()
        if not len(keys):
            return
        self._begin(keys[0].as_py())
        try:
            _add_pieces(add_rows, keys, values, self._reference, kinds)
        except OutOfOrder as error:
            self._broken = error.index > 0
            previous = keys[error.index - 1].as_py() if error.index else self._largest
            key = keys[error.index].as_py()
            raise KeyOrderError(str(self._staging), previous=previous, key=key) from None
        self._added(keys[0].as_py(), keys[-1].as_py(), len(keys))
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

    def __repr__(self) -> str:
        state = ", ended" if self._closed else ""
        return f"<kvstore.bulk.PartWriter {self._name}, {self._rows:,} rows{state}>"

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
        add = self._file.add_one  # raises in a forked child and changes nothing
        self._require_usable()
        self._begin(key)
        try:
            add(frame(key) + self._reference + kind, value)
        except OutOfOrder:
            self._broken = False
            raise KeyOrderError(str(self._staging), previous=self._largest, key=key) from None
        self._added(key, key, 1)

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError("the part writer")
        if self._broken:
            raise self._refusal()

    def _begin(self, key: bytes) -> None:
        """Begin to add rows, of which `key` is the first. The part is broken until `_added`."""
        if self._rows and key == self._largest:
            raise KeyOrderError(str(self._staging), previous=key, key=key)
        self._broken = True

    def _added(self, first: bytes, last: bytes, rows: int) -> None:
        if not self._rows:
            self._smallest = first
        self._largest = last
        self._rows += rows
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
    largest = pc.max(pc.binary_length(values)).as_py() or 0
    if largest > VALUE_BYTES_MAX:
        raise UsageError(
            f"a value has {largest} bytes, at most {VALUE_BYTES_MAX} are stored",
            "split it over several keys",
        )
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


# --------------------------------------------------------------------------------------------------
# Entries of `data` in columns: keys, suffixes and kinds, encoded at once.
#
#     entry := | framed user key | complemented timestamp u64 | kind u8 | -> value
#
# `kvstore/codec/keys.py` defines the bytes.


def suffixes_of(times: npt.NDArray[np.int64]) -> bytes:
    """The suffixes of versions at these times, one after the other."""
    return (U64_MAX - times.astype("uint64")).astype(">u8").tobytes()


def kinds_of(is_put: pa.Array) -> bytes:
    """The kinds of versions, each a put or a delete."""
    puts = is_put.to_numpy(zero_copy_only=False)
    return np.where(puts, VALUE[0], TOMBSTONE[0]).astype(np.uint8).tobytes()


def version_prefixes(keys: pa.Array, times: npt.NDArray[np.int64]) -> pa.Array:
    """The stored keys of versions without their kinds. They sort by key, and then newest first."""
    data = pa.py_buffer(suffixes_of(times))
    suffixes = pa.Array.from_buffers(pa.binary(8), len(times), [None, data]).cast(pa.binary())
    escaped = pc.replace_substring(keys, b"\x00", b"\x00\xff")
    terminator = pa.scalar(TERMINATOR, pa.binary())
    return pc.binary_join_element_wise(escaped, terminator, suffixes, b"")


# --------------------------------------------------------------------------------------------------
# The records of the keys of a part that expire: `kvstore.mvcc.expiry_records` has their bytes.
#
# Records are rows of the import, in parts of their own. One part has them in the order of the keys,
# and is written beside the rows. The other has them in the order of the due times, and is sorted in
# bounded memory when the part of the rows is finished.

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
        """Each due time with the id of the import, as `kvstore.mvcc.expiry_records` has them."""
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


# --------------------------------------------------------------------------------------------------
# SST files: RocksDB's sorted tables, written without a database, and without RocksDB.
#
# Writing costs some 0.3 us per row of a batch. The loops hold no
# interpreter lock, so several files are written by several threads.
#
# Invariants
# 1. Keys ascend strictly.
# 2. A file gets its name when it is whole and on disk (temporary name, fsync, rename).
# 3. The directory is never created here. A directory that is gone was discarded, and a task that
#    still runs must not bring it back.

UNFINISHED_SUFFIX: Final = ".tmp"

COMPRESSION: Final = word(*CODECS)
"""The compression of the files of an import."""


class Written(NamedTuple):
    """A finished file: its size, its digest, and what identifies it to the file system."""

    size_bytes: int
    digest: str
    mtime_ns: int
    inode: int


class SstFile:
    """Writes one SST. The first row opens the file, because RocksDB refuses an empty one.

    The caller's thread makes entries of rows and writes blocks; a file of more than a stretch has
    threads that pack the blocks meanwhile. The bytes depend on the rows alone. Memory holds a few
    stretches, and a row.
    """

    def __init__(self, path: Path, *, compression: str = "lz4") -> None:
        COMPRESSION.check("compression", compression)
        self._path, self._compression = path, compression
        self._unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        self._packer = Packer(BLOCK_BYTES, PACKED_STRETCH_BYTES)
        self._file: FileIO | None = None
        self._digest = RunningDigest()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead = deque[tuple[Stretch, Future[None]]]()
        self._spare: list[Stretch] = []
        own(self, str(path), endings=("abandon",))

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Add encoded rows. Raises `OutOfOrder` at a key that is not above its predecessor."""
        left = iter(keys)
        try:
            for key, value in zip(left, values, strict=True):
                self.add_one(key, value)
        except OutOfOrder:
            raise OutOfOrder(len(keys) - length_hint(left) - 1) from None

    def add_one(self, key: bytes, value: bytes) -> None:
        """Add an encoded row. Raises as `add`."""
        if self._file is None:
            self._open()
        while not self._packer.add_one(key, value):
            self._pass_on()

    def add_rows(
        self, keys: pa.Array, values: pa.Array, suffixes: bytes, kinds: bytes | None
    ) -> None:
        """Add versions of binary columns: the user keys, and the suffix of all versions, or one for
        each. `kinds` has the kind of each, None where all have values; a delete and a null have an
        empty value. Raises as `add`."""
        self._add((len(keys), _buffers(keys), _buffers(values), suffixes, kinds, True))

    def add_entries(self, keys: pa.Array, values: pa.Array, kinds: bytes | None = None) -> None:
        """Add encoded rows of binary columns: the stored keys, without their kinds if `kinds` has
        them. Raises as `add`."""
        self._add((len(keys), _buffers(keys), _buffers(values), b"", kinds, False))

    def finish(self) -> Written | None:
        """Write the file to disk under its name. None if it has no rows. Costs one fsync."""
        if self._file is None:
            return None
        if not self._packer.entries:  # the first row was refused
            self.abandon()
            return None
        last = self._packer.next_stretch(Stretch())
        while self._ahead:
            self._write_earliest()
        seal(last, self._compression)
        self._take(last)
        self._write(ending(self._packer, self._compression))
        self._end_threads()
        with storage_errors(str(self._unfinished)):
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            os.replace(self._unfinished, self._path)
            found = self._path.stat()
        return Written(found.st_size, self._digest.text(), found.st_mtime_ns, found.st_ino)

    def abandon(self) -> None:
        """Remove the unfinished file. Repeatable."""
        self._end_threads()
        with storage_errors(str(self._unfinished)):
            if self._file is not None:
                self._file.close()
                self._file = None
            self._unfinished.unlink(missing_ok=True)

    @property
    def size_bytes(self) -> int:
        """Bytes written so far, 0 before the first block."""
        return self._packer.size

    def _add(self, rows: FileRows) -> None:
        count, at = rows[0], 0
        if count and self._file is None:
            self._open()
        while (at := self._packer.add(rows, at, count)) < count:
            self._pass_on()

    def _pass_on(self) -> None:
        """Have the stretch that is full packed by a thread, and write one that was packed."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_threads(), "kvstore-packing")
        following = self._spare.pop() if self._spare else Stretch()
        full = self._packer.next_stretch(following)
        self._ahead.append((full, self._pool.submit(seal, full, self._compression)))
        is_large = full.size > 4 * PACKED_STRETCH_BYTES
        while self._ahead and (is_large or len(self._ahead) > _threads()):
            self._write_earliest()

    def _write_earliest(self) -> None:
        stretch, packed = self._ahead.popleft()
        if packed.cancel():  # all threads are busy
            seal(stretch, self._compression)
        else:
            packed.result()
        self._take(stretch)
        if stretch.size <= 4 * PACKED_STRETCH_BYTES:
            self._spare.append(stretch)

    def _take(self, stretch: Stretch) -> None:
        self._packer.take(stretch)
        with memoryview(stretch) as data:
            self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        self._digest.update(data)
        with storage_errors(str(self._unfinished)):
            done = self._file.write(data)
            while done < len(data):
                done += self._file.write(data[done:])

    def _open(self) -> None:
        with storage_errors(str(self._unfinished)):
            self._file = self._unfinished.open("xb", buffering=0)

    def _end_threads(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._ahead.clear()
        self._spare.clear()


def _threads() -> int:
    """How many threads pack beside the caller's, which packs too where they have not begun."""
    processors = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    return max(min(processors - 1, PACKING_THREADS_MAX), 1)


def prefetch(file: int) -> None:
    """Have the system read a file into memory, and do not wait for it: the first gets from a cold
    file are 15 times as slow. Costs 2.5 us for each MB that is there already."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # failing advice does no harm
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)


def fsync_and_digest(file: BinaryIO) -> str:
    """The digest of a whole file. The file is on disk then."""
    found = file_digest(file)
    os.fsync(file.fileno())
    return found


def _buffers(column: pa.Array) -> Column:
    """A binary column as the loops take it."""
    valid, offsets, data = column.buffers()
    return 0, valid if column.null_count else None, column.offset, data, offsets
