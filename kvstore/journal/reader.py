"""Reading a journal's records where no state is wanted: forward, in reverse, from the middle.

Readers hold no lock and may run beside the writer. They see whole records only: the tail of the
live file, torn or being written, is where they stop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import BinaryIO

from kvstore.errors import CorruptionError, UsageError
from kvstore.journal.files import OS_FILES, Files
from kvstore.journal.names import FileName, list_directory, open_file
from kvstore.journal.raw import RawRecords
from kvstore.journal.records import TYPE_RESERVED, Record, RecordError, decode
from kvstore.journal.recovery import strict
from kvstore.journal.scan import Damage, FileScan
from kvstore.journal.stuffing import PAIR
from kvstore.journal.tail import torn_at
from kvstore.limits import JOURNAL_READ_BYTES


def read(
    path: str | os.PathLike[str],
    *,
    from_ordinal: int | None = None,
    reverse: bool = False,
    files: Files = OS_FILES,
) -> Iterator[Record]:
    """Yield the journal's records in order, over all its files, or the newest first.

    `from_ordinal` is the least one wanted; None is the oldest there is. Holds one piece of a
    file at a time. Raises `JournalDamagedError` where a record cannot be read, `UsageError` if
    records from `from_ordinal` on are gone (a snapshot has taken their place), and
    `RetryableError` if a file was superseded while it was read.
    """
    directory = os.fspath(path)
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
            path_read = file.path(directory)
            yield from (
                _backward(stream, file, path_read, least)
                if reverse
                else _forward(stream, file, path_read, least, following)
            )


def _forward(
    stream: BinaryIO, file: FileName, path: str, least: int, following: int | None
) -> Iterator[Record]:
    scan = FileScan(stream, path=path, first=file.number, live=not file.final)
    for batch in strict(scan):
        yield from batch if batch[0].ordinal >= least else (r for r in batch if r.ordinal >= least)
    if following is not None and following != scan.expected:
        raise Damage(
            path, scan.size, scan.size, scan.expected, following - 1, "ordinals are missing"
        ).error()


def _backward(stream: BinaryIO, file: FileName, path: str, least: int) -> Iterator[Record]:
    following: Record | None = None
    for offset, raw in raw_records_reversed(stream):
        try:
            record, _ = decode(raw)
        except RecordError:
            cut = None if file.final or following else torn_at(raw)
            if not cut and cut is not None:
                continue
            if cut is None:
                raise _name_damage(stream, file, path, offset) from None
            record, _ = decode(raw[:cut])
        if record.type >= TYPE_RESERVED or record == following:
            continue
        if following is not None and record.ordinal != following.ordinal - 1:
            raise _name_damage(stream, file, path, offset)
        if record.ordinal < least:
            return
        following = record
        yield record


def _name_damage(stream: BinaryIO, file: FileName, path: str, offset: int) -> CorruptionError:
    """What a forward reader says of the damage a backward one ran into: it knows the ordinals."""
    stream.seek(0)
    for item in FileScan(stream, path=path, first=file.number, live=not file.final):
        if isinstance(item, Damage):
            return item.error()
    return CorruptionError(path, f"byte {offset} read differently a second time")


def raw_records_reversed(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Cut a seekable stream at its pairs from the end: (offset of the pair, what follows it)."""
    position = stream.seek(0, os.SEEK_END)
    held: list[bytes] = []  # what follows a pair that has not been found yet, in pieces
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

    Parts that cover a file give every record once, wherever they are cut, so that one file can be
    read in parallel: whoever starts in the middle skips to the next pair. Raises
    `CorruptionError`; ordinals across the parts are the caller's to check.
    """
    name = os.fspath(path)
    with closing(files.read(name)) as stream:
        stream.seek(start)
        for run_at, data in RawRecords(stream, start=start):
            offset = run_at
            for raw in data.split(PAIR)[1:]:
                if offset >= stop:
                    return
                try:
                    record, _ = decode(raw)
                except RecordError as error:
                    raise CorruptionError(name, f"{error}, at byte {offset}") from error
                if record.type < TYPE_RESERVED:
                    yield record
                offset += len(PAIR) + len(raw)
