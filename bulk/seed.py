"""A new store of versions that carry their own times, which appears at its path as a whole.

    read      columns are checked, and rows become stored keys and values     batch by batch
    sort      by key, and newest first: an external sort (`bulk.sort`)        runs on disk
    write     sorted files, which RocksDB takes as they are                   one at a time
    appear    the store gets its name by a rename

Invariants
1. History is never rewritten: the path of a seed does not exist before.
2. A seed that fails or is killed leaves nothing that opens as a store.
3. A key has at most one version at a time.
4. Memory is bounded by the sort.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.clock import Clock, WallClock
from kvstore.base.paths import require_absent, require_outside, require_parent, require_path
from kvstore.base.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.bulk.part import SstFile, kinds_of, version_prefixes
from kvstore.bulk.sort import Duplicates, sorted_batches
from kvstore.codec.columns import (
    decoded,
    key_column,
    require_bytes_type,
    require_time_type,
    time_column,
)
from kvstore.codec.keys import TERMINATOR, decode_suffix, unescape
from kvstore.errors import Argument, LockedError, UsageError, Words, printable, storage_errors
from kvstore.limits import ARROW_ROWS_MAX, RESTORE_FILE_BYTES, VALUE_BYTES_MAX
from kvstore.opening import building
from kvstore.storage.os_files import OS_FILES, Lock

_ENTRIES: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])
"""Versions to be sorted: the stored key without its kind, and the value, null for a delete."""

_SUFFIX: Final = 8
_OPS: Final = ("put", "delete")
_KEEP_LAST: Final = ("drop one; ", Argument.of("duplicates", "last"), " keeps the later row")


class SeedColumns(NamedTuple):
    """The names of the columns of a seed. Without `op` each row is a put."""

    key: str = "key"
    value: str = "value"
    at: str = "ts"
    op: str | None = None


def seed(
    path: str | os.PathLike[str],
    batches: Iterable[pa.RecordBatch] | object,
    *,
    key: str = "key",
    value: str = "value",
    at: str = "ts",
    op: str | None = None,
    since: TimeLike = 0,
    duplicates: Duplicates = "error",
    clock: WallClock | None = None,
) -> Timestamp:
    """Make a new store at `path` whose versions have the times given; returns the newest of them.

    `batches` are Arrow record batches, or one object that speaks the Arrow C stream, in any order.
    Column `key` has keys and `value` values, binary or text; column `at` has times, with a zone or
    as nanoseconds. Column `op`, if it is named, has `"put"` or `"delete"`; a delete has no value.
    The store can be read from `since` on: pass the time from which the rows are complete. Two rows
    of one key and time are an error; with `duplicates="last"` the later row counts.

    Raises `UsageError` that names the column and the row, for a null, a wrong type, a time below
    `since` or in the future; `UsageError` if something is at `path`: history is never rewritten;
    `LockedError` while another process seeds the same path. After an error or a crash there is no
    store. Memory is bounded. Costs an external sort of all rows, and about twice their bytes on
    disk meanwhile.
    """
    columns, clock = SeedColumns(key, value, at, op), clock or Clock()
    low = int(to_timestamp(since, name="since", now=clock.wall_ns))
    require_path(path)
    place = Path(os.path.abspath(path))  # a link is something that is there
    rows = SeedRows(columns, since=low, upto=clock.wall_ns())
    with appearing(place, task="seed") as directory:
        found = sorted_batches(rows.entries(batches), directory / "runs", duplicates=duplicates)
        first = next(found, None)  # all rows are read before the first one comes
        entries = found if first is None else chain([first], found)
        with building(directory / "store", since=low, newest=rows.newest) as builder:
            for file in seed_files(directory, entries):
                builder.add([file], [])
    return Timestamp(rows.newest)


class CheckedRows(NamedTuple):
    """Rows that can be stored. The value is null in a row that deletes."""

    keys: pa.Array
    times: npt.NDArray[np.int64]
    values: pa.Array


class SeedRows:
    """Reads rows as entries to be sorted, and notes the newest time."""

    def __init__(self, columns: SeedColumns, *, since: int, upto: int, first: int = 0) -> None:
        """Rows have times in `[since, upto]`. `first` is the number of the first one in errors."""
        self._columns = columns
        self._since, self._upto = since, upto
        self._rows = first
        self.newest = since

    def entries(self, batches: Iterable[pa.RecordBatch] | object) -> Iterator[pa.RecordBatch]:
        """The rows as batches of `_ENTRIES`. Raises `UsageError` for rows that cannot be
        stored."""
        for rows in self.checked(batches):
            columns = [version_prefixes(rows.keys, rows.times), rows.values]
            yield pa.RecordBatch.from_arrays(columns, schema=_ENTRIES)

    def checked(self, batches: Iterable[pa.RecordBatch] | object) -> Iterator[CheckedRows]:
        """The rows in small batches. Raises `UsageError` for rows that cannot be stored."""
        for batch in _batches_of(batches):
            self._require_columns(batch)
            for at in range(0, batch.num_rows, ARROW_ROWS_MAX):
                yield self._checked(batch.slice(at, ARROW_ROWS_MAX))

    def _checked(self, batch: pa.RecordBatch) -> CheckedRows:
        names, first = self._columns, self._rows
        keys = key_column(batch.column(names.key), names.key, first)
        times = time_column(batch.column(names.at), names.at, first, lambda: self._upto)
        self._require_times(times, first)
        values = _values(batch, names, first)
        self._rows += batch.num_rows
        self.newest = max(self.newest, int(times.max()))
        return CheckedRows(keys, times, values)

    def _require_columns(self, batch: pa.RecordBatch) -> None:
        if not isinstance(batch, pa.RecordBatch):
            raise UsageError(
                f"a batch must be Arrow's, not {type(batch).__name__}", "convert it to pyarrow"
            )
        for name in filter(None, self._columns):
            count = batch.schema.names.count(name)
            if count != 1:
                raise UsageError(
                    f"rows have {count or 'no'} column{'s' * (count > 1)} {name!r}",
                    f"they have {', '.join(batch.schema.names)}",
                )
        require_bytes_type(batch.schema.field(self._columns.key))
        require_bytes_type(batch.schema.field(self._columns.value), noun="values")
        require_time_type(batch.schema.field(self._columns.at))

    def _require_times(self, times: npt.NDArray[np.int64], first: int) -> None:
        wrong = np.flatnonzero((times < self._since) | (times > self._upto))
        if len(wrong):
            at = int(wrong[0])
            time, name = Timestamp(times[at]), self._columns.at
            problem = "below since" if time < self._since else "in the future"
            raise UsageError(
                f"column {name!r} has {time} in row {first + at}, {problem}",
                f"times lie from {Timestamp(self._since)} on, and not above the clock's",
            )


def seed_files(
    directory: Path, entries: Iterable[pa.RecordBatch], remedy: Words = _KEEP_LAST
) -> Iterator[Path]:
    """Write sorted entries as files of `data`, one by one. Raises `UsageError`, with `remedy`,
    where two have one key and time."""
    last: bytes | None = None
    file, path, count = None, directory, 0
    try:
        for batch in entries:
            prefixes, values = batch.column("key"), batch.column("value")
            last = _require_distinct(prefixes, last, remedy)
            if file is None:
                path, count = directory / f"{count:06d}.sst", count + 1
                file = SstFile(path)
            file.add_entries(prefixes, values, kinds_of(values.is_valid()))
            if file.size_bytes >= RESTORE_FILE_BYTES:
                file.finish()
                file = None
                yield path
        if file is not None:
            file.finish()
            yield path
    finally:
        if file is not None:
            file.abandon()


def _require_distinct(prefixes: pa.Array, last: bytes | None, remedy: Words) -> bytes:
    """Raise `UsageError` where a version has the key and time of the one before. Returns the
    last one."""
    if last is not None and prefixes[0].as_py() == last:
        raise _twice(last, remedy)
    if len(prefixes) > 1:
        same = pc.index(pc.equal(prefixes[:-1], prefixes[1:]), True).as_py()
        if same >= 0:
            raise _twice(prefixes[same].as_py(), remedy)
    found: bytes = prefixes[len(prefixes) - 1].as_py()
    return found


def _twice(prefix: bytes, remedy: Words) -> UsageError:
    key = unescape(prefix[: -_SUFFIX - len(TERMINATOR)])
    time = Timestamp(decode_suffix(prefix[-_SUFFIX:]))
    return UsageError(f"key {printable(key)} has two versions at {time}", remedy)


def _values(batch: pa.RecordBatch, names: SeedColumns, first: int) -> pa.Array:
    """The values, null in rows that delete."""
    values = decoded(batch.column(names.value)).cast(pa.binary())
    size = pc.max(pc.binary_length(values)).as_py() or 0
    if size > VALUE_BYTES_MAX:
        raise UsageError(
            f"a value has {size} bytes, at most {VALUE_BYTES_MAX} are stored",
            "split it over several keys",
        )
    if names.op is None:
        missing = values.is_null()
        remedy = "drop such rows, or name a column op that says 'delete'"
    else:
        ops = _ops(batch.column(names.op), names.op, first)
        deletes = pc.equal(ops, "delete")
        missing = pc.and_(pc.invert(deletes), values.is_null())
        values = pc.if_else(deletes, pa.scalar(None, pa.binary()), values)
        remedy = "a put needs a value"
    if missing.true_count:  # Arrow's `index` would import pandas
        row = first + missing.to_pylist().index(True)
        raise UsageError(f"column {names.value!r} has a null in row {row}", remedy)
    return values


def _ops(column: pa.Array, name: str, first: int) -> pa.Array:
    column = decoded(column)
    if column.type not in (pa.string(), pa.large_string(), pa.string_view()):
        raise UsageError(f"column {name!r} is of type {column.type}", 'pass "put" or "delete"')
    column = column.cast(pa.string())
    known = pc.is_in(column, pa.array(_OPS))
    if known.false_count:
        row = known.to_pylist().index(False)
        found = column[row].as_py()
        raise UsageError(
            f"column {name!r} has {found!r} in row {first + row}", 'pass "put" or "delete"'
        )
    return column


def _batches_of(batches: Iterable[pa.RecordBatch] | object) -> Iterator[pa.RecordBatch]:
    try:
        if hasattr(batches, "__arrow_c_stream__"):
            yield from pa.RecordBatchReader.from_stream(batches)
            return
        if hasattr(batches, "__arrow_c_array__"):
            yield pa.record_batch(batches)
            return
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"rows are no table: {error}", "pass a table with columns") from error
    if isinstance(batches, str | bytes | Mapping) or not isinstance(batches, Iterable):
        raise UsageError(
            f"rows must be Arrow data, not {type(batches).__name__}",
            "pass record batches, a table, a reader, or a frame of Polars, DuckDB or pandas",
        )
    yield from batches


# --------------------------------------------------------------------------------------------------
# The place of a new store: it is built beside its path, and appears there as a whole, by a rename.
# A file of an export appears so too.
#
# Invariants of a store's place
# 1. Nothing that is at the path is touched.
# 2. A build that was killed leaves a hidden directory, which is no store. The next call for the
#    same path removes it.
# 3. Two processes do not build at one path: the directory is locked.
# 4. Work that is continued keeps its directory when it fails, and takes up the directory that its
#    last attempt has left.

_LOCK = "LOCK"


@contextmanager
def appearing(path: Path, *, task: str, resume: bool = False) -> Iterator[Path]:
    """A directory for files, in which a store is to be built under the name `store`. It is moved to
    `path` when the block ends. `task` names the work, such as "restore". With `resume` the
    directory may have the files of an earlier attempt.

    Raises `UsageError` if something is at `path`, `LockedError` while another process builds there.
    """
    advice = f"{task} to a path that does not exist"
    try:
        require_absent(path, advice=advice)
    except UsageError:
        _sweep(path)
        raise
    require_outside(path, name="path")
    require_parent(path)
    with _scratch(path, task, resume=resume) as directory:
        yield directory
        require_absent(path, advice=advice)
        with storage_errors(str(path)):
            os.rename(directory / "store", path)
            OS_FILES.sync_directory(str(path.parent))


@contextmanager
def appearing_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A path for a file, which has the name `path` and is on disk when the block ends. After an
    error nothing is left of it. Raises `UsageError` if something is at `path`, unless `overwrite`
    is true; a directory is never replaced."""
    advice = ("name another file, or pass ", Argument.of("overwrite", True))
    if path.is_dir():
        raise UsageError(f"{path} is a directory", "name a file in it")
    require_parent(path)
    require_outside(path, name="path")
    if not overwrite:
        require_absent(path, advice=advice)
    passing = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with storage_errors(str(path)):
        try:
            yield passing
            with passing.open("rb") as file:
                os.fsync(file.fileno())
            if not overwrite:
                require_absent(path, advice=advice)
            os.replace(passing, path)
            OS_FILES.sync_directory(str(path.parent))
        finally:
            passing.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove the directories of builds that were killed behind the rename."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.building-*"):
        with suppress(LockedError), closing(OS_FILES.lock(str(left / _LOCK))):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _scratch(path: Path, task: str, *, resume: bool) -> Iterator[Path]:
    """A directory beside `path` in which the store is built; each path has one at most."""
    building = path.with_name(f".{path.name}.building-{secrets.token_hex(4)}")
    lock: Lock | None = None
    try:
        with storage_errors(str(path)):
            for left in path.parent.glob(f".{glob.escape(path.name)}.building-*"):
                # Left by a killed build, unless a process has its lock: then it is in use.
                taken = OS_FILES.lock(str(left / _LOCK))
                if resume and lock is None:
                    building, lock = left, taken
                    continue
                with closing(taken):
                    shutil.rmtree(left, ignore_errors=True)
            if lock is None:
                building.mkdir(parents=True)
                lock = OS_FILES.lock(str(building / _LOCK))
    except LockedError as error:
        if lock is not None:
            lock.close()
        raise LockedError(str(path), f"another {task} to it") from error
    with closing(lock):
        try:
            yield building
        except BaseException:
            if not resume or not any(left.name != _LOCK for left in building.iterdir()):
                shutil.rmtree(building, ignore_errors=True)
            raise
        shutil.rmtree(building, ignore_errors=True)
