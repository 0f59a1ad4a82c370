"""The live file: begun, continued after a crash, sealed under its final name.

Invariants
1. A live file gets its name when its opening is durable, and the name is durable before a record
   goes in. So a live file without its opening is damaged, whatever crashes there were.
2. A file gets its final name when it is sealed and fsynced; the name is durable before the next
   live file begins. So there is one live file at most, and only its tail can be torn.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from kvstore.journal.files import Files, Output, write_all
from kvstore.journal.names import JOURNAL, FileName, list_directory
from kvstore.journal.records import KIND_JOURNAL, Opening, encode_opening, encode_seal
from kvstore.journal.recovery import Recovery


class LiveFile(NamedTuple):
    """An open live file, how many bytes it has, all of them synced, and how many of them the file
    itself says were synced, by its name or by a mark."""

    name: FileName
    output: Output
    size: int
    marked: int


def continue_live(
    files: Files, directory: str, recovery: Recovery, *, incarnation: int, content: str
) -> LiveFile:
    """Make the live file that was found end with its last whole record, or begin a new one.

    What replay found counts from now on, though it may never have been synced, or an fsync of it
    may have failed: all that nothing says was synced is written again, and fsynced.
    """
    live, following = recovery.live, recovery.last + 1
    if live is None:
        if recovery.last:
            files.sync_directory(directory)  # the last file's writer may have died before it did
        return create_live(files, directory, following, incarnation=incarnation, content=content)
    path = live.name.path(directory)
    if recovery.torn is not None or live.synced < live.bytes:
        files.harden(path, size=live.bytes, start=min(live.synced, live.bytes))
    if not live.synced:
        files.sync_directory(directory)  # its creator may have died before it did
    if live.sealed:
        _finish(files, directory, live.name)
        return create_live(files, directory, following, incarnation=incarnation, content=content)
    return LiveFile(live.name, files.append(path), live.bytes, 0 if live.records else live.bytes)


def create_live(
    files: Files, directory: str, first: int, *, incarnation: int, content: str
) -> LiveFile:
    """Begin the file whose first record will be `first`."""
    name = FileName(first, JOURNAL, False)
    opening = encode_opening(incarnation, first, Opening(KIND_JOURNAL, content))
    output = files.create(name.unborn_path(directory))
    try:
        write_all(output, opening)
        output.sync()
        files.rename(name.unborn_path(directory), name.path(directory))
        files.sync_directory(directory)
    except BaseException:
        output.close()
        raise
    return LiveFile(name, output, len(opening), len(opening))


def seal_live(
    files: Files,
    directory: str,
    name: FileName,
    output: Output,
    *,
    following: int,
    incarnation: int,
) -> None:
    """Seal a live file whose next record would be `following`; it is durable on return."""
    write_all(output, encode_seal(incarnation, following, records=following - name.number))
    output.sync()
    output.close()
    _finish(files, directory, name)


def is_live_as_left(files: Files, directory: str, live: FileName, *, size: int) -> bool:
    """Under the lock: whether the live file is still `live`, at the `size` it was closed with.

    Journals only grow: each append, rotation and seal changes a size or a name, and nothing that
    was synced is ever cut.
    """
    if list_directory(files, directory).live != live:
        return False
    with files.read(live.path(directory)) as file:
        return file.seek(0, os.SEEK_END) == size


def _finish(files: Files, directory: str, name: FileName) -> None:
    files.rename(name.path(directory), name.finished().path(directory))
    files.sync_directory(directory)
