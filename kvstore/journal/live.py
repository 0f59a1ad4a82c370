"""The live file: begun, continued after a crash, written, sealed under its final name.

Invariants
1. A live file gets its name when its opening is durable, and the name is durable before a record
   goes in. So a live file without its opening is damaged, whatever crashes there were.
2. A file gets its final name when it is sealed and fsynced; the name is durable before the next
   live file begins. So there is one live file at most, and only its tail can be torn.
"""

from __future__ import annotations

import os

from kvstore.journal.files import Files, Output, write_all
from kvstore.journal.names import JOURNAL, FileName, list_directory
from kvstore.journal.records import KIND_JOURNAL, Opening, encode_mark, encode_opening, encode_seal
from kvstore.journal.recovery import Recovery


class LiveFile:
    """The open live file: its `size`, how many bytes of it are `synced`, and how many of them are
    `marked`, which means that the file says so itself, by its name or by a mark."""

    __slots__ = ("marked", "name", "output", "path", "put", "size", "synced")

    def __init__(
        self, name: FileName, path: str, output: Output, size: int, *, marked: int
    ) -> None:
        self.name = name
        self.path = path
        self.size = self.synced = size
        self.marked = marked
        self.attach(output)

    def attach(self, output: Output) -> None:
        """Write to `output`, the file opened to append."""
        self.output = output
        self.put = output.write

    def mark(self, incarnation: int, ordinal: int) -> bytes:
        """The mark in front of the record `ordinal`: how much of the file was synced before it."""
        self.marked = self.synced
        return encode_mark(incarnation, ordinal, synced=self.marked)

    def sync(self) -> None:
        """Sync the bytes written so far. Another thread may write meanwhile."""
        size = self.size
        self.output.sync()
        self.synced = size

    def seal(self, files: Files, directory: str, *, following: int, incarnation: int) -> None:
        """End the file, whose next record would be `following`, and give it its final name. All of
        it is durable on return."""
        records = following - self.name.number
        write_all(self.output, encode_seal(incarnation, following, records=records))
        self.output.sync()
        self.output.close()
        _finish(files, directory, self.name)

    def is_as_left(self, files: Files, directory: str) -> bool:
        """Whether the closed file is still the live one and has the size that it was closed with.
        Call this under the lock.

        Journals only grow: each append, rotation and seal changes a size or a name, and no synced
        byte is ever cut.
        """
        if list_directory(files, directory).live != self.name:
            return False
        with files.read(self.path) as file:
            return file.seek(0, os.SEEK_END) == self.size


def continue_live(
    files: Files, directory: str, recovery: Recovery, *, incarnation: int, content: str
) -> LiveFile:
    """Cut the live file that `recovery` found behind its last whole record, or begin a new one.

    From now on the records that replay found are acknowledged, though they may never have been
    synced, or an fsync of them may have failed. So all bytes that no mark or note calls synced are
    written again and fsynced.
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
    marked = 0 if live.records else live.bytes
    return LiveFile(live.name, path, files.append(path), live.bytes, marked=marked)


def create_live(
    files: Files, directory: str, first: int, *, incarnation: int, content: str
) -> LiveFile:
    """Begin the file whose first record will be `first`."""
    name = FileName(first, JOURNAL, False)
    path = name.path(directory)
    opening = encode_opening(incarnation, first, Opening(KIND_JOURNAL, content))
    output = files.create(name.unborn_path(directory))
    try:
        write_all(output, opening)
        output.sync()
        files.rename(name.unborn_path(directory), path)
        files.sync_directory(directory)
    except BaseException:
        output.close()
        raise
    return LiveFile(name, path, output, len(opening), marked=len(opening))


def _finish(files: Files, directory: str, name: FileName) -> None:
    files.rename(name.path(directory), name.finished().path(directory))
    files.sync_directory(directory)
