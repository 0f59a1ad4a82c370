"""The live file: begun, continued after a crash, sealed under its final name.

Invariants
1. A live file is durable, with its opening and its name, before a record goes in.
2. A file gets its final name when it is sealed and fsynced; the name is durable before the next
   live file begins. So there is one live file at most, and only its tail can be torn.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.journal.files import Files, Output, write_all
from kvstore.journal.names import JOURNAL, FileName
from kvstore.journal.records import KIND_JOURNAL, Opening, encode_opening, encode_seal
from kvstore.journal.recovery import Recovery


class LiveFile(NamedTuple):
    """An open live file and how many bytes it has."""

    name: FileName
    output: Output
    size: int


def continue_live(
    files: Files, directory: str, recovery: Recovery, *, incarnation: int, content: str
) -> LiveFile:
    """Make the live file that was found end with its last whole record, or begin a new one."""
    live, following = recovery.live, recovery.last + 1
    if live is None or not live.opened:
        if live is not None and live.name.number != following:
            files.remove(live.name.path(directory))
        return create_live(files, directory, following, incarnation=incarnation, content=content)
    path = live.name.path(directory)
    if recovery.torn is not None:
        files.truncate(path, live.bytes)
    output = files.append(path)
    output.sync()  # what replay found may never have been synced, and counts from now on
    if live.sealed:
        output.close()
        _finish(files, directory, live.name)
        return create_live(files, directory, following, incarnation=incarnation, content=content)
    return LiveFile(live.name, output, live.bytes)


def create_live(
    files: Files, directory: str, first: int, *, incarnation: int, content: str
) -> LiveFile:
    """Begin the file whose first record will be `first`."""
    name = FileName(first, JOURNAL, False)
    opening = encode_opening(incarnation, first, Opening(KIND_JOURNAL, content))
    output = files.create(name.path(directory))
    write_all(output, opening)
    output.sync()
    files.sync_directory(directory)
    return LiveFile(name, output, len(opening))


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


def _finish(files: Files, directory: str, name: FileName) -> None:
    files.rename(name.path(directory), name.finished().path(directory))
    files.sync_directory(directory)
