"""Writing a snapshot: a state as a file of records, which gets its final name when it is complete.

    snapshot file := | opening (kind 1) | records from ordinal 1 | seal |

Invariants
1. The final name appears by rename, after the file's fsync and before the directory's.
2. An unfinished file after a crash is overwritten from its start, never continued.
3. One process at a time writes a snapshot, under the lock `COMPACTING`. The journal's writer
   continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.errors import LockedError
from kvstore.errors.system import storage_errors
from kvstore.journal.files import Files, Output, write_all
from kvstore.journal.names import COMPACTING_NAME, SNAPSHOT, FileName, is_unborn, list_directory
from kvstore.journal.records import (
    KIND_SNAPSHOT,
    Opening,
    encode,
    encode_opening,
    encode_seal,
    require_payload,
)
from kvstore.limits import JOURNAL_READ_BYTES


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A written snapshot. `ordinal` is the last ordinal that it covers."""

    path: str
    ordinal: int
    records: int
    bytes: int


def write_snapshot(
    files: Files,
    directory: str,
    records: Iterable[tuple[int, bytes]],
    *,
    ordinal: int,
    incarnation: int,
    content: str,
) -> SnapshotInfo:
    """Write the state up to `ordinal` as (type, payload) records. The file is durable on return.

    Raises `LockedError` while another process writes a snapshot.
    """
    with storage_errors(directory):
        lock = files.lock(os.path.join(directory, COMPACTING_NAME))
    try:
        unfinished = FileName(ordinal, SNAPSHOT, False)
        path = unfinished.path(directory)
        final_path = unfinished.finished().path(directory)
        with storage_errors(path):
            output = files.create(path)
            try:
                count, size = _write(output, records, incarnation=incarnation, content=content)
                output.sync()
            finally:
                output.close()
            files.rename(path, final_path)
            files.sync_directory(directory)
        return SnapshotInfo(final_path, ordinal, count, size)
    finally:
        lock.close()


def remove_superseded(files: Files, directory: str) -> tuple[str, ...]:
    """Remove the files that the newest snapshot covers, and return their names.

    For the holder of the writer's lock. Readers hold no lock, and raise when a file has gone. A
    crash in between leaves files that every reader ignores.
    """
    with storage_errors(directory):
        superseded = list_directory(files, directory).superseded()
        if superseded:
            files.sync_directory(directory)  # the snapshot's writer may have died before it did
        for file in superseded:
            files.remove(file.path(directory))
        if superseded:
            files.sync_directory(directory)
    return tuple(map(str, superseded))


def remove_unfinished(files: Files, directory: str) -> bool:
    """Remove unfinished live files and snapshots of a crash. False while a compaction runs, which
    owns the unfinished snapshot.

    For the holder of the writer's lock.
    """
    with storage_errors(directory):
        for name in filter(is_unborn, files.names(directory)):
            files.remove(os.path.join(directory, name))
        try:
            compacting = files.lock(os.path.join(directory, COMPACTING_NAME))
        except LockedError:
            return False
        try:
            for file in list_directory(files, directory).unfinished:
                files.remove(file.path(directory))
        finally:
            compacting.close()
    return True


def _write(
    output: Output, records: Iterable[tuple[int, bytes]], *, incarnation: int, content: str
) -> tuple[int, int]:
    pieces = [encode_opening(incarnation, 1, Opening(KIND_SNAPSHOT, content))]
    size = pending = len(pieces[0])
    ordinal = 0
    for ordinal, (kind, payload) in enumerate(records, 1):
        pieces.append(encode(incarnation, ordinal, kind, require_payload(payload, kind)))
        size += len(pieces[-1])
        pending += len(pieces[-1])
        if pending >= JOURNAL_READ_BYTES:
            write_all(output, b"".join(pieces))
            pieces, pending = [], 0
    pieces.append(encode_seal(incarnation, ordinal + 1, records=ordinal))
    write_all(output, b"".join(pieces))
    return ordinal, size + len(pieces[-1])
