"""Reading a journal's records without building a state: forward, in reverse, from the middle.

Readers hold no lock and may run beside the writer. They see whole records only: they stop at the
tail of the live file, which may be torn or unfinished.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import BinaryIO

from kvstore.errors import CorruptionError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.journal.files import OS_FILES, Files
from kvstore.journal.names import list_directory, open_file, read_note, synced_bytes
from kvstore.journal.raw import RawRecords
from kvstore.journal.records import TYPE_RESERVED, Record, RecordError, decode
from kvstore.journal.recovery import strict
from kvstore.journal.scan import Damage, FileScan
from kvstore.journal.stuffing import PAIR
from kvstore.limits import JOURNAL_READ_BYTES


def read(
    path: str | os.PathLike[str],
    *,
    from_ordinal: int | None = None,
    reverse: bool = False,
    files: Files = OS_FILES,
) -> Iterator[Record]:
    """Yield the records of all files in order, or the newest first if `reverse`.

    `from_ordinal` is the least wanted ordinal, None the oldest that exists. Holds one piece of a
    file at a time. Raises `JournalDamagedError` where a record cannot be read, `UsageError` if a
    snapshot has replaced records from `from_ordinal` on, and `RetryableError` if a file was
    superseded while it was read.
    """
    directory = os.fspath(path)
    with storage_errors(directory):
        yield from _read(directory, from_ordinal, reverse=reverse, files=files)


def _read(
    directory: str, from_ordinal: int | None, *, reverse: bool, files: Files
) -> Iterator[Record]:
    note = read_note(files, directory)
    listing = list_directory(files, directory)
    journals = list(listing.with_following())
    covered = listing.snapshot.number if listing.snapshot else 0
    oldest = journals[0][0].number if journals else covered + 1
    least = oldest if from_ordinal is None else from_ordinal
    if least < oldest:
        raise UsageError(
            f"{directory} begins at ordinal {oldest}, {least} is gone", f"read from {oldest} on"
        )
    for file, following in reversed(journals) if reverse else journals:
        if following is not None and following <= least:
            continue
        with closing(open_file(files, directory, file)) as stream:
            scan = FileScan(
                stream,
                path=file.path(directory),
                first=file.number,
                live=not file.final,
                synced=synced_bytes(note, file),
            )
            if reverse:
                yield from _backward(stream, scan, least)
            else:
                yield from _forward(scan, least, following)


def _forward(scan: FileScan, least: int, following: int | None) -> Iterator[Record]:
    for batch in strict(scan):
        yield from batch if batch[0].ordinal >= least else (r for r in batch if r.ordinal >= least)
    if following is not None and following != scan.expected:
        problem = "ordinals are missing"
        raise Damage(scan.path, scan.size, scan.size, scan.expected, following - 1, problem).error()


def _backward(stream: BinaryIO, scan: FileScan, least: int) -> Iterator[Record]:
    """A file's records, the newest first. A live file is read forward first, to find its end."""
    end = None
    if scan.live:
        for _ in strict(scan):
            pass
        end = scan.torn.offset if scan.torn else scan.size
    following: Record | None = None
    for offset, raw in raw_records_reversed(stream, end=end):
        try:
            record, _ = decode(raw)
        except RecordError:
            raise _name_damage(stream, scan, offset) from None
        if record.type >= TYPE_RESERVED or record == following:
            continue
        if following is not None and record.ordinal != following.ordinal - 1:
            raise _name_damage(stream, scan, offset)
        if record.ordinal < least:
            return
        following = record
        yield record


def _name_damage(stream: BinaryIO, scan: FileScan, offset: int) -> CorruptionError:
    """The damage at `offset` as a forward reader reports it, with the ordinals that are missing."""
    if not scan.live:
        stream.seek(0)
        for item in scan:
            if isinstance(item, Damage):
                return item.error()
    return CorruptionError(scan.path, f"byte {offset} read differently a second time")


def raw_records_reversed(
    stream: BinaryIO, *, end: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Cut a seekable stream at its pairs, from the end: (offset of the pair, the bytes behind it).

    `end` is the place to begin, None for the end of the stream."""
    position = stream.seek(0, os.SEEK_END) if end is None else end
    held: list[bytes] = []  # pieces behind a pair that has not been found yet
    while position > 0:
        end, position = position, (position - 1) // JOURNAL_READ_BYTES * JOURNAL_READ_BYTES
        data = _read_at(stream, position, end - position)
        if held and held[0][0] == PAIR[1] and data[-1] == PAIR[0]:
            yield position + len(data) - 1, b"".join((held[0][1:], *held[1:]))
            held, data = [], data[:-1]
        *earlier, last = data.split(PAIR)
        at = position + len(data) - len(last) - len(PAIR)
        for before in reversed(earlier):
            yield at, b"".join((last, *held))
            held, last = [], before
            at -= len(before) + len(PAIR)
        if last:
            held.insert(0, last)


def _read_at(stream: BinaryIO, position: int, size: int) -> bytes:
    stream.seek(position)
    parts: list[bytes] = []
    while size and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def read_part(
    path: str | os.PathLike[str], *, start: int, stop: int, files: Files = OS_FILES
) -> Iterator[Record]:
    """Yield the records that start at bytes `start <= offset < stop` of the file `path`.

    Parts that cover a file yield every record once, wherever they are cut: a part that starts
    inside a record begins at the next pair. So one file can be read in parallel. Raises
    `CorruptionError`. The caller checks the ordinals across the parts.
    """
    name = os.fspath(path)
    with storage_errors(name), closing(files.read(name)) as stream:
        stream.seek(start)
        for run_at, data in RawRecords(stream, start=start):
            lead, *raws = data.split(PAIR)
            offset = run_at + len(lead)
            for raw in raws:
                if offset >= stop:
                    return
                try:
                    record, _ = decode(raw)
                except RecordError as error:
                    raise CorruptionError(name, f"{error}, at byte {offset}") from error
                if record.type < TYPE_RESERVED:
                    yield record
                offset += len(PAIR) + len(raw)
