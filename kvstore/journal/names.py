"""File names of a journal: what a directory's names alone say about its order and state.

    %016x-journal-new      about to become live, or left behind by a crash: nothing is in it
    %016x-journal          live: the one file that is written, with a durable opening
    %016x-journal-final    sealed and durable
    %016x-snapshot         being written, or left behind by a crash
    %016x-snapshot-final   complete and durable
    LOCK, COMPACTING       held by the writer, and by whoever writes a snapshot; LOCK holds a note
                           (`records`) of what was synced

A journal's number is the ordinal of its first record, a snapshot's that of the last record it
covers (0: before any). Hex of fixed width, so that the order of names is the order of ordinals.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import BinaryIO

from kvstore.errors import CorruptionError, NotAStoreError, RetryableError
from kvstore.journal.files import Files
from kvstore.journal.records import Note, decode_note

LOCK_NAME = "LOCK"
COMPACTING_NAME = "COMPACTING"
JOURNAL, SNAPSHOT = "journal", "snapshot"
ORDINAL_MAX = 1 << 62
"""No journal comes so far, and counting on from there cannot run over."""

NOTE_BYTES_MAX = 128
"""Bytes of `LOCK` that may be a note, which is 48 bytes long and a few more."""

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
        """Where the file is."""
        return os.path.join(directory, str(self))

    def unborn_path(self, directory: str) -> str:
        """Where a live file is until its opening is durable."""
        return f"{self.path(directory)}-new"

    def finished(self) -> FileName:
        """The name it gets when it is complete."""
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
        """Each journal file, live one last, and the number of the one behind it."""
        files = self.journals + ((self.live,) if self.live else ())
        return zip_longest(files, (file.number for file in files[1:]))

    def needed(self) -> tuple[FileName, ...]:
        """The journal files, live one last, that hold records behind the newest snapshot."""
        covered = self.snapshot.number if self.snapshot else 0
        return tuple(
            file
            for file, following in self.with_following()
            if following is None or following > covered + 1
        )

    def superseded(self) -> tuple[FileName, ...]:
        """Complete files that the newest snapshot makes unnecessary, oldest first.

        The newest journal file always stays: only its records tell where it ends.
        """
        needed = set(self.needed())
        return tuple(
            sorted([file for file in self.journals if file not in needed] + [*self.snapshots[:-1]])
        )


def is_journal_file(name: str) -> bool:
    """Whether `name` is one that only a journal with something in it gives."""
    match = _NAME.match(name)
    return match is not None and match[2] in (JOURNAL, SNAPSHOT)


def is_unborn(name: str) -> bool:
    """Whether `name` is that of a live file whose creation a crash cut off."""
    return _UNBORN.match(name) is not None


def read_note(files: Files, directory: str) -> Note | None:
    """The note in `LOCK`. It stays true: read it before the files that it is to be held against."""
    try:
        with files.read(os.path.join(directory, LOCK_NAME)) as stream:
            return decode_note(stream.read(NOTE_BYTES_MAX))
    except FileNotFoundError:
        return None


def synced_bytes(note: Note | None, file: FileName) -> int:
    """How many bytes of a journal file were synced when it was live, as far as the note knows."""
    return note.bytes if note is not None and note.number == file.number else 0


def parse_directory(files: Files, directory: str) -> tuple[tuple[FileName, ...], tuple[str, ...]]:
    """A directory's journal files in order of number, and names that are none.

    Raises `NotAStoreError` on a file of an unknown kind: another release's.
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
    """Read what is in `directory`. Names of another shape are left alone, and reported.

    Raises `NotAStoreError` on a file of an unknown kind (another release's), and
    `CorruptionError` where two files claim to be the live one.
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
    """Open a listed file, also if it got its final name since.

    Raises `RetryableError` if it is gone: a snapshot covers it now, so list again.
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
    """The sorted names. Readers hold no lock, and a listing may miss a file renamed under it:
    so take one that the next one repeats, or the last of a few."""
    before = sorted(files.names(directory))
    for _ in range(10):
        after = sorted(files.names(directory))
        if after == before:
            break
        before = after
    return before
