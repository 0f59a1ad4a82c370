"""Restoring: from batches of versions to a store.

Each batch becomes sorted files of its own, which RocksDB takes as they are: versions carry their
timestamps in their keys, so the batches need no merging, and memory is bounded by one record batch.

The store is built beside its place and appears there by a rename, whole.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

import kvstore
from backup.rows import data_entries, range_rows, row_batches
from bulk.sst import SstFile
from bulk.staging import fsync_directory
from kvstore.errors import UsageError
from kvstore.mvcc import RangeTombstone
from kvstore.opening import found

_BUILDING = ".restoring-"

ROWS_PER_FILE = 2_000_000
"""Rows of one SST: a few hundred megabytes, what RocksDB likes to open and compact."""


def restore_store(
    path: Path,
    batches: Sequence[Iterable[pa.RecordBatch]],
    *,
    since: int,
    as_of: int,
    history: bool,
) -> None:
    """Build a store at `path` from batches of versions at or below `as_of`, oldest first.

    Raises `UsageError` if something is at `path`.
    """
    if path.exists():
        raise UsageError(f"{path} exists", "restore to a path that does not")
    _remove_abandoned(path)
    building = path.with_name(f".{path.name}{_BUILDING}{secrets.token_hex(4)}")
    building.mkdir(parents=True)
    try:
        place = building / "store"
        _build(place, batches, since=since, as_of=as_of)
        if not history:
            place, whole = building / "state", place
            _build(place, [_state(whole, as_of)], since=as_of, as_of=as_of)
        os.rename(place, path)
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(
    path: Path, batches: Sequence[Iterable[pa.RecordBatch]], *, since: int, as_of: int
) -> None:
    files_at = path.with_suffix(".ingest")
    with found(path, since=since, newest=as_of) as founding:
        for number, batch in enumerate(batches):
            tombstones: list[RangeTombstone] = []
            files = list(_files(files_at, number, batch, tombstones))
            founding.add(files, tombstones)


def _state(path: Path, as_of: int) -> Iterator[pa.RecordBatch]:
    """What is alive at `as_of` in the store at `path`, each row with its own timestamp."""
    with kvstore.open(path, create=False) as store:
        yield from row_batches(store.changes(0, as_of, revisions="latest"))


def _files(
    directory: Path,
    number: int,
    batches: Iterable[pa.RecordBatch],
    tombstones: list[RangeTombstone],
) -> Iterator[Path]:
    """Write the points of one batch as SSTs; its range tombstones are collected."""
    file: SstFile | None = None
    path = directory
    rows = count = 0
    for batch in batches:
        tombstones.extend(RangeTombstone(*row) for row in range_rows(batch))
        keys, values = data_entries(batch)
        if not keys:
            continue
        if file is None:
            path = directory / f"{number:08d}-{count:06d}.sst"
            file, rows, count = SstFile(path), 0, count + 1
        file.add(keys, values)
        rows += len(keys)
        if rows >= ROWS_PER_FILE:
            file.finish()
            yield path
            file = None
    if file is not None:
        file.finish()
        yield path


def _remove_abandoned(path: Path) -> None:
    """Remove what earlier restores to this place left when they were killed."""
    for left in path.parent.glob(f".{path.name}{_BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)
