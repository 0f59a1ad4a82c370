"""Restoring: from sorted versions to a store, in bounded memory.

Versions carry their timestamps in their keys, and rows are sorted as the keys of `data` are. So
rows are written to SSTs in the order in which they come, and RocksDB takes the files as they are.

A new store is built beside its place and appears there as a whole, by a rename. Rows for a live
store are staged as an import, which gets its timestamp when it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

import bulk
from backup.shard import ShardSnapshot, Tally, View
from backup.version_rows import points_of, range_rows
from bulk.definitions import EncodedBy, require_definitions
from bulk.ingest import staging_beside
from bulk.places import appearing
from bulk.sst import SstFile, Written
from kvstore.limits import RESTORE_FILE_BYTES
from kvstore.mvcc import RangeTombstone
from kvstore.opening import building
from kvstore.replica import FirstCopy
from kvstore.reserve import CATALOGUE, FIRST_ROW
from kvstore.span import RESERVED, Span
from kvstore.store import Store
from kvstore.tables.space import name_of
from kvstore.timestamp import Timestamp


class Built(NamedTuple):
    """Range tombstones, and SSTs of point versions that overlap no other SST of the restore, with
    the sizes and digests of these files."""

    files: Sequence[Path]
    tombstones: Sequence[RangeTombstone]
    written: Sequence[Written] = ()


class Build(Protocol):
    """Writes the rows of a view of a snapshot as files in `directory`; the caller moves them."""

    def __call__(
        self, snapshot: ShardSnapshot, view: View, span: Span, directory: Path, tally: Tally
    ) -> Iterable[Built]:
        """Build the files; `tally` counts the written rows. Raises `CorruptionError` if a part is
        damaged."""
        ...


def built_from(batches: Iterable[pa.RecordBatch], directory: Path) -> Iterator[Built]:
    """Write sorted rows as SSTs, one at a time."""
    tombstones: list[RangeTombstone] = []
    for file, written in version_files(directory, batches, tombstones):
        yield Built([file], tombstones.copy(), [written])
        tombstones.clear()
    yield Built([], tombstones)


def restore_store(
    path: Path,
    build: Callable[[Path], Iterable[Built]],
    *,
    since: int,
    as_of: int,
    replica_of: FirstCopy | None = None,
) -> None:
    """Build a store at `path` of versions at or below `as_of`, whole from `since` on.

    `build` writes the files into the directory that it is given. With `replica_of` the new store is
    a replica.

    Raises `UsageError` if something is at `path`, `LockedError` while another process restores
    to it.
    """
    with appearing(path, task="restore") as directory:
        place = directory / "store"
        with building(place, since=since, newest=as_of, replica_of=replica_of) as builder:
            for built in build(directory):
                builder.add(built.files, built.tombstones)


class Rows(Protocol):
    """Reads the live rows of a snapshot in a span, with the times at which they expire in a column
    `expires`, as `bulk.PartWriter` takes it. It may write to `scratch`, which the caller
    removes."""

    def __call__(self, span: Span, scratch: Path) -> Iterator[pa.RecordBatch]: ...


def restore_into_store(
    store: Store, snapshot: ShardSnapshot, span: Span, tally: Tally, *, expiring: Rows | None
) -> Timestamp:
    """Add the live rows of a snapshot to a store as one import; returns its stamp.

    `expiring` reads them if the snapshot has keys that expire. Rows of tables are added to tables
    with the same definitions. Raises `ImportRefusedError` where the store has others, before any
    row is read.
    """
    tables = tables_in(snapshot, span)
    require_definitions(store, tables, "the backup")
    # Definitions stay behind, and the import makes records of expiries of its own. So the rows of
    # tables begin files of their own.
    first = FIRST_ROW if tables or expiring is not None else RESERVED
    wanted = [span.intersect(b"", RESERVED), span.intersect(first, None)]
    with staging_beside(store) as directory:
        staged = bulk.Import.create(directory)
        for part in wanted:
            if part is not None:
                rows = snapshot.read(part)
                if expiring is not None:
                    rows = expiring(part, directory / "sorting")
                _write(staged, tally.over(rows))
        staged.seal(tables=tables)
        return bulk.ingest(store, directory, move=True)


def tables_in(snapshot: ShardSnapshot, span: Span) -> list[EncodedBy]:
    """The tables of a snapshot, if `span` may have rows of them."""
    if span.intersect(FIRST_ROW, None) is None:
        return []
    return [
        EncodedBy.of_stored(name_of(key), value)
        for batch in snapshot.read(Span.of_prefix(CATALOGUE))
        for key, value in zip(*(batch.column(n).to_pylist() for n in ("key", "value")), strict=True)
    ]


def _write(staged: bulk.Import, batches: Iterable[pa.RecordBatch]) -> None:
    writer = staged.writer()
    for batch in batches:
        names = {"key", "value", "expires", "expires_with"} & {*batch.schema.names}
        writer.write(batch.select(sorted(names)))
        if writer.size_bytes >= RESTORE_FILE_BYTES:
            writer.finish()
            writer = staged.writer()
    writer.finish()


def version_files(
    directory: Path, batches: Iterable[pa.RecordBatch], tombstones: list[RangeTombstone]
) -> Iterator[tuple[Path, Written]]:
    """Write the point versions as SSTs, one by one; range tombstones are added to `tombstones`."""
    file: SstFile | None = None
    path = directory
    count = 0
    try:
        for batch in batches:
            tombstones.extend(RangeTombstone(*row) for row in range_rows(batch))
            points = points_of(batch)
            if len(points.keys):
                if file is None:
                    path, count = directory / f"{count:06d}.sst", count + 1
                    file = SstFile(path)
                file.add_rows(*points)
            if file is not None and file.size_bytes >= RESTORE_FILE_BYTES:
                yield path, _finished(file)
                file = None
        if file is not None:
            yield path, _finished(file)
    finally:
        if file is not None:
            file.abandon()


def _finished(file: SstFile) -> Written:
    written = file.finish()
    assert written is not None, "a file is begun with its first row"
    return written
