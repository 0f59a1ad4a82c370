"""File names of a journal, which alone tell the order and the state of its files.

    %016x-journal-new      about to become live, or left by a crash: holds no record
    %016x-journal          live: the one file that is written, with a durable opening
    %016x-journal-final    sealed and durable
    %016x-snapshot         being written, or left by a crash
    %016x-snapshot-final   complete and durable
    LOCK                   locked by the writer; holds a note (`framing`) of the synced bytes
    COMPACTING             locked by the process that writes a snapshot

A journal's number is the ordinal of its first record. A snapshot's number is the ordinal of the
last record that it covers, 0 for none. Numbers are hexadecimal and of fixed width, so that names
sort as ordinals do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import BinaryIO

from kvstore.errors import (
    CorruptionError,
    NotAStoreError,
    RetryableError,
)
from kvstore.storage.journal.framing import Note, decode_note
from kvstore.storage.os_files import Files

LOCK_NAME = "LOCK"
COMPACTING_NAME = "COMPACTING"
JOURNAL, SNAPSHOT = "journal", "snapshot"
ORDINAL_MAX = 1 << 62
"""No journal reaches this ordinal, and a sum with it does not overflow 64 bits."""

NOTE_BYTES_MAX = 128
"""Bytes of `LOCK` that are read for a note, which has 48 bytes and a few more."""

_NAME = re.compile(r"([0-9a-f]{16})-([a-z]+)(-final)?$")
_UNBORN = re.compile(r"[0-9a-f]{16}-journal-new$")


@dataclass(frozen=True, slots=True, order=True)
class FileName:
    """One parsed name; sorts by number."""

    number: int
    base: str
    final: bool

    def __str__(self) -> str:
        return f"{self.number:016x}-{self.base}{'-final' if self.final else ''}"

    def path(self, directory: str) -> str:
        """The path of the file."""
        return os.path.join(directory, str(self))

    def unborn_path(self, directory: str) -> str:
        """The path of a live file until its opening is durable."""
        return f"{self.path(directory)}-new"

    def finished(self) -> FileName:
        """The name of the file when it is complete."""
        return FileName(self.number, self.base, True)


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory's journal files, each kind in order of number."""

    journals: tuple[FileName, ...]
    live: FileName | None
    snapshots: tuple[FileName, ...]
    unfinished: tuple[FileName, ...]
    ignored: tuple[str, ...]

    @property
    def snapshot(self) -> FileName | None:
        """The newest complete snapshot."""
        return self.snapshots[-1] if self.snapshots else None

    def with_following(self) -> Iterator[tuple[FileName, int | None]]:
        """Each journal file, the live file last, and the number of the next file."""
        files = self.journals + ((self.live,) if self.live else ())
        return zip_longest(files, (file.number for file in files[1:]))

    def needed(self) -> tuple[FileName, ...]:
        """The journal files with records behind the newest snapshot, the live file last."""
        covered = self.snapshot.number if self.snapshot else 0
        return tuple(
            file
            for file, following in self.with_following()
            if following is None or following > covered + 1
        )

    def superseded(self) -> tuple[FileName, ...]:
        """Complete files that the newest snapshot makes unnecessary, oldest first.

        The newest journal file always stays: only its records tell the journal's last ordinal.
        """
        needed = set(self.needed())
        return tuple(
            sorted([file for file in self.journals if file not in needed] + [*self.snapshots[:-1]])
        )


def is_journal_file(name: str) -> bool:
    """Whether `name` is the name of a file that holds records or a snapshot."""
    match = _NAME.match(name)
    return match is not None and match[2] in (JOURNAL, SNAPSHOT)


def is_unborn(name: str) -> bool:
    """Whether `name` is the name of a live file whose creation a crash cut off."""
    return _UNBORN.match(name) is not None


def read_note(files: Files, directory: str) -> Note | None:
    """The note in `LOCK`. It stays true, so read it before the files that are compared with it."""
    try:
        with files.read(os.path.join(directory, LOCK_NAME)) as stream:
            return decode_note(stream.read(NOTE_BYTES_MAX))
    except FileNotFoundError:
        return None


def synced_bytes(note: Note | None, file: FileName) -> int:
    """How many bytes of a journal file were synced while it was live, by the note."""
    return note.bytes if note is not None and note.number == file.number else 0


def parse_directory(files: Files, directory: str) -> tuple[tuple[FileName, ...], tuple[str, ...]]:
    """A directory's journal files in order of number, and all other names.

    Raises `NotAStoreError` for a file of an unknown kind, which another release wrote.
    """
    found: list[FileName] = []
    ignored: list[str] = []
    for name in _steady_names(files, directory):
        match = _NAME.match(name)
        if match is not None:
            if match[2] not in (JOURNAL, SNAPSHOT):
                raise NotAStoreError(
                    directory,
                    f"file {name} is of an unknown kind",
                    "open it with the release that wrote it",
                )
            number = int(match[1], 16)
            if number > ORDINAL_MAX:
                raise CorruptionError(directory, f"{name} is numbered beyond the last ordinal")
            found.append(FileName(number, match[2], match[3] is not None))
        elif name not in (LOCK_NAME, COMPACTING_NAME) and not is_unborn(name):
            ignored.append(name)
    return tuple(sorted(found)), tuple(ignored)


def list_directory(files: Files, directory: str) -> Listing:
    """List the journal files in `directory`. Other names are reported as `ignored`.

    Raises `NotAStoreError` for a file of an unknown kind, which another release wrote, and
    `CorruptionError` if two files claim to be the live one.
    """
    found, ignored = parse_directory(files, directory)
    journals = [file for file in found if file.base == JOURNAL and file.final]
    live = [file for file in found if file.base == JOURNAL and not file.final]
    live = [file for file in live if file.finished() not in journals]  # renamed while we looked
    if len(live) > 1:
        named = ", ".join(map(str, live))
        raise CorruptionError(directory, f"more than one live journal file: {named}")
    if live and journals and journals[-1].number >= live[0].number:
        raise CorruptionError(directory, f"{journals[-1]} is not older than the live {live[0]}")
    return Listing(
        tuple(journals),
        live[0] if live else None,
        tuple(file for file in found if file.base == SNAPSHOT and file.final),
        tuple(file for file in found if file.base == SNAPSHOT and not file.final),
        ignored,
    )


def open_file(files: Files, directory: str, file: FileName) -> BinaryIO:
    """Open a listed file, even if it has got its final name since.

    Raises `RetryableError` if the file is gone: a snapshot covers it, so list the directory again.
    """
    try:
        return files.read(file.path(directory))
    except FileNotFoundError as error:
        if not file.final:
            return open_file(files, directory, file.finished())
        raise RetryableError(
            f"{file.path(directory)} was superseded while the journal was read", "read it again"
        ) from error


def _steady_names(files: Files, directory: str) -> list[str]:
    """The sorted names. A reader holds no lock, and a listing may miss a file that is being
    renamed. So list until two listings agree, a few times at most."""
    before = sorted(files.names(directory))
    for _ in range(10):
        after = sorted(files.names(directory))
        if after == before:
            break
        before = after
    return before
