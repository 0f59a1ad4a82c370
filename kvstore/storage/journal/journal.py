"""The journal: an append-only log of records that survives crashes, for one writer.

    with Journal.open(path, restore=s.restore, apply=s.apply, snapshot=s.records) as journal:
        ordinal = journal.append(payload)

Invariants
1. A record survives any crash if `append` returned its ordinal under `Sync.always()`, or if its
   ordinal is at most `durable`. The surviving records are a prefix of the appended ones.
2. One writer: the kernel holds the lock on the file `LOCK` from open to close.
3. After a write or fsync failed, the contents of the file are unknown: every call raises
   `PoisonedError` until the journal is opened again, which reads the file. After an interrupt in
   the middle of a write, appends raise it until `look_again` has read the file.
4. Rotation happens before an append, under both locks, and is synced whatever the policy.
5. The next opening learns how much was synced: by a mark in front of the first record behind each
   sync, and by a note in `LOCK` when a file is begun and when the journal is closed. A mark or
   note that can be read is true; neither is synced itself.
6. Lock order: `_append_lock`, then `_sync_lock`. An fsync holds the second lock only, so appends
   continue beside it, and appends that wait for an fsync share one.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvstore.base.forks import own
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    KVStoreError,
    LockedError,
    PoisonedError,
    UsageError,
    storage_errors,
)
from kvstore.limits import (
    JOURNAL_COMPACT_BYTES,
    JOURNAL_FILE_BYTES,
    JOURNAL_FILE_RECORDS,
    JOURNAL_READ_BYTES,
    JOURNAL_RECORD_BYTES_MAX,
)
from kvstore.storage.journal.framing import (
    KIND_JOURNAL,
    KIND_SNAPSHOT,
    Note,
    Opening,
    Record,
    encode,
    encode_many,
    encode_mark,
    encode_note,
    encode_opening,
    encode_seal,
    in_pieces,
    require_payload,
    require_payloads,
)
from kvstore.storage.journal.names import (
    COMPACTING_NAME,
    JOURNAL,
    LOCK_NAME,
    SNAPSHOT,
    FileName,
    is_unborn,
    list_directory,
)
from kvstore.storage.journal.recovery import Apply, Recovery, replay
from kvstore.storage.os_files import OS_FILES, Files, Lock, Output, write_all

# --------------------------------------------------------------------------------------------------
# How a journal is written: its content, its sync policy, and the size of its files.


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """`content` names the meaning of the records. A live file ends at `file_bytes` or
    `file_records`. Raises `UsageError` for values that no journal can have."""

    content: str
    sync: Sync
    file_bytes: int
    file_records: int

    def __post_init__(self) -> None:
        if not self.content.isascii():
            raise UsageError(f"content {self.content!r} is not ASCII", "name it by ASCII letters")
        if self.file_bytes < 1 or self.file_records < 1:
            raise UsageError("file_bytes and file_records must be positive", "pass 1 or more")

    @classmethod
    def of(
        cls, content: str, sync: Sync, file_bytes: int | None, file_records: int | None
    ) -> JournalOptions:
        """Options in which None stands for the limit of `kvstore.limits`."""
        return cls(
            content,
            sync,
            JOURNAL_FILE_BYTES if file_bytes is None else file_bytes,
            JOURNAL_FILE_RECORDS if file_records is None else file_records,
        )


# --------------------------------------------------------------------------------------------------
# When a journal calls fsync: the choice between a slow append and a lost one.
#
# An appended record survives the process in any case, because the operating system has it. The
# policy decides whether it survives a crash of the machine.


@dataclass(frozen=True, slots=True)
class Sync:
    """At most `records_max` records are unsynced, or for at most `seconds_max`; 0 is no bound.

    Use the four constructors. Every policy syncs when a file is rotated and when the journal is
    closed.
    """

    records_max: int
    seconds_max: float

    def __post_init__(self) -> None:
        if self.records_max < 0 or self.seconds_max < 0:
            raise UsageError(f"{self} has a negative bound", "pass 0 or more")

    @classmethod
    def always(cls) -> Sync:
        """Sync before an append returns. Appends that wait together share one fsync."""
        return cls(1, 0)

    @classmethod
    def every(cls, records: int) -> Sync:
        """Sync in the append that makes the number of unsynced records `records`."""
        return cls(records, 0)

    @classmethod
    def interval(cls, seconds: float) -> Sync:
        """Sync at most `seconds` after an append, in a thread of the journal's own."""
        return cls(0, seconds)

    @classmethod
    def never(cls) -> Sync:
        """Leave syncing to the operating system."""
        return cls(0, 0)


class IntervalSync:
    """A thread that syncs `seconds` after it was notified, and sleeps while nothing is written."""

    def __init__(self, seconds: float, sync: Callable[[], object], *, name: str) -> None:
        self._seconds = seconds
        self._sync = sync
        self._written = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Tell the thread that a record was written."""
        self._written.set()

    def stop(self) -> None:
        """End the thread without a sync."""
        self._stopped.set()
        self._written.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._written.wait()
            if self._stopped.wait(self._seconds):
                return
            self._written.clear()
            try:
                self._sync()
            except KVStoreError:
                return  # the journal is poisoned now: its next call raises


# --------------------------------------------------------------------------------------------------
# The live file: begun, continued after a crash, written, sealed under its final name.
#
# Invariants
# 1. A live file gets its name when its opening is durable, and the name is durable before a record
#    goes in. So a live file without its opening is damaged, whatever crashes there were.
# 2. A file gets its final name when it is sealed and fsynced; the name is durable before the next
#    live file begins. So there is one live file at most, and only its tail can be torn.


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


# --------------------------------------------------------------------------------------------------
# Writing a snapshot: a state as a file of records, which gets its final name when it is complete.
#
#     snapshot file := | opening (kind 1) | records from ordinal 1 | seal |
#
# Invariants
# 1. The final name appears by rename, after the file's fsync and before the directory's.
# 2. An unfinished file after a crash is overwritten from its start, never continued.
# 3. One process at a time writes a snapshot, under the lock `COMPACTING`. The journal's writer
#    continues.


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


# --------------------------------------------------------------------------------------------------
# The journal.


Records = Iterable[tuple[int, bytes]]
_ALWAYS = Sync.always()


def _known(_: Record) -> None:
    """The owner of the journal has this record already, or asks for the last ordinal."""


OPENINGS_MAX = 0xFFFFFFFF
"""How often a journal can be opened. The lower half of an incarnation counts the openings."""

NO_ROOM = -1
"""Stands for a file's limit while appends are refused: closed, poisoned, or during a write."""


class Journal:
    """An open journal. Made by `Journal.open`; safe to use from several threads."""

    def __init__(
        self,
        files: Files,
        directory: str,
        lock: Lock,
        recovery: Recovery,
        *,
        identity: int,
        options: JournalOptions,
    ) -> None:
        self._files = files
        self._directory = directory
        self._lock = lock
        self._options = options
        self._settles = options.sync.records_max > 0
        self._bytes_max = options.file_bytes  # or NO_ROOM: `append` makes one check for all cases
        before = recovery.incarnation or identity << 32
        if before & OPENINGS_MAX == OPENINGS_MAX:
            raise CorruptionError(directory, "it was opened more often than can be counted")
        self._incarnation = before + 1
        self._next = recovery.last + 1
        self._durable = recovery.last
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._failed: str | None = None
        self._closed = False
        self.recovery = recovery
        """The findings of the opening: torn tail, records replayed, names left alone."""
        with storage_errors(directory):
            live = continue_live(
                files,
                directory,
                recovery,
                incarnation=self._incarnation,
                content=options.content,
            )
        self._use(live)
        self._note()
        self._interval: IntervalSync | None = None
        if seconds := options.sync.seconds_max:
            self._interval = IntervalSync(seconds, self.sync, name="kvstore-journal-sync")
        own(self, f"the journal in {directory}", endings=("close", "finalize"), closed="_closed")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        apply: Apply | None = None,
        restore: Apply | None = None,
        snapshot: Callable[[], Records] | None = None,
        content: str = "",
        sync: Sync = _ALWAYS,
        file_bytes: int | None = None,
        file_records: int | None = None,
        compact_bytes: int | None = None,
        files: Files = OS_FILES,
        identity: int | None = None,
    ) -> Journal:
        """Open or create the journal in the directory `path` for writing, and replay its records.

        `restore` is called with each record of the newest snapshot, then `apply` with each record
        behind it; without them the journal must be empty. `snapshot` yields the state as (type,
        payload). Its state becomes a new snapshot when the journal behind the newest snapshot has
        grown beyond `compact_bytes` and beyond that snapshot. `content` names the meaning of the
        records; it is stored and checked. A live file ends at `file_bytes` or `file_records`. The
        defaults of all limits stand in `kvstore.limits`.

        Raises `LockedError` if another writer holds the journal, `JournalDamagedError` if it is
        damaged, and `NotAStoreError`, `FormatVersionError` or `UsageError` if the directory holds
        something else. A torn tail of the live file is no damage: it is cut, see `recovery.torn`.
        """
        directory = os.path.abspath(os.fspath(path))
        options = JournalOptions.of(content, sync, file_bytes, file_records)
        with storage_errors(directory):
            files.make_directory(directory)
            lock = files.lock(os.path.join(directory, LOCK_NAME))
        try:
            with storage_errors(directory):
                recovery = replay(files, directory, restore=restore, apply=apply, content=content)
            number = secrets.randbits(32) if identity is None else identity
            journal = cls(files, directory, lock, recovery, identity=number, options=options)
        except BaseException:
            lock.close()
            raise
        try:
            journal._tidy(snapshot, compact_bytes)
        except BaseException:
            journal._release()
            raise
        return journal

    # -- writing ------------------------------------------------------------------------------

    def append(self, payload: bytes, type: int = 0, *, settle: bool = True) -> int:  # noqa: A002
        """Write one record and return its ordinal. The sync policy says when it is durable.

        With `settle=False` the call never waits for a sync: the caller can leave a lock of its own
        and call `settle`, or leave the record to a later sync. Raises `UsageError` (nothing was
        written), `StorageError` or `PoisonedError`.
        """
        if payload.__class__ is not bytes or len(payload) > JOURNAL_RECORD_BYTES_MAX or type:
            require_payload(payload, type)  # ordinary payloads save the call
        with self._append_lock:
            ordinal, live = self._next, self._live
            if live.size >= self._bytes_max or ordinal >= self._ordinal_end:
                live = self._make_room()
            data = encode(self._incarnation, ordinal, type, payload)
            if live.synced > live.marked:
                data = live.mark(self._incarnation, ordinal) + data
            self._write(live, data, ordinal + 1)
        if self._settles and settle:
            self.settle(ordinal)
        return ordinal

    def append_many(self, payloads: Iterable[bytes], type: int = 0) -> range:  # noqa: A002
        """Write records together, with one sync, and return their ordinals.

        Not atomic: a crash may keep some first records and lose the others. Data that must stay
        together belongs in one record.
        """
        checked = require_payloads(payloads, type)
        with self._append_lock:
            first = self._next
            for chunk in in_pieces(checked):
                live, ordinal = self._make_room(), self._next
                data = encode_many(self._incarnation, ordinal, type, chunk)
                if live.synced > live.marked:
                    data = live.mark(self._incarnation, ordinal) + data
                self._write(live, data, ordinal + len(chunk))
            ordinals = range(first, self._next)
        if checked:
            self.settle(ordinals[-1])
        return ordinals

    def settle(self, ordinal: int) -> None:
        """Sync the records up to `ordinal` if the policy asks for it."""
        if 0 < self._options.sync.records_max <= ordinal - self._durable:
            self.sync(ordinal)

    def sync(self, upto: int | None = None) -> int:
        """Make all records so far, or all up to ordinal `upto`, survive a crash of the machine.

        Callers that arrive during an fsync share the next one. Returns `durable`.
        """
        with self._sync_lock:
            self._require_usable()
            last = self._next - 1  # read before the size: the synced bytes may hold later records
            if self._durable < (last if upto is None else min(upto, last)):
                with self._poisoning():
                    self._live.sync()
                self._durable = last
            return self._durable

    def look_again(self) -> int:
        """Read what an interrupted append or rotation has left, and go on behind it. Returns
        `last`.

        Raises `PoisonedError` if a write or fsync has failed. Costs nothing if no call was
        interrupted, and else a pass over the newest files, which are durable on return.
        """
        with self._append_lock, self._sync_lock:
            self._require_usable()
            if self._bytes_max == NO_ROOM:
                with self._poisoning():
                    self._continue()
            return self._next - 1

    def _continue(self) -> None:
        remove_unfinished(self._files, self._directory)
        content = self._options.content
        found = replay(self._files, self._directory, restore=_known, apply=_known, content=content)
        self._live.output.close()
        live = continue_live(
            self._files, self._directory, found, incarnation=self._incarnation, content=content
        )
        self._use(live)
        self._next, self._durable = found.last + 1, found.last
        self._note()
        self._bytes_max = self._options.file_bytes

    def snapshot(self, records: Records) -> SnapshotInfo:
        """Write the state as of the last append, and remove the files that it supersedes.

        `records` must be that state as (type, payload); appends wait meanwhile. Raises
        `LockedError` while another process compacts: nothing has changed then.
        """
        with self._append_lock:
            self._require_writable()
            if self._next > self._live.name.number:
                self._rotate()
            info = write_snapshot(
                self._files,
                self._directory,
                records,
                ordinal=self._next - 1,
                incarnation=self._incarnation,
                content=self._options.content,
            )
            remove_superseded(self._files, self._directory)
            return info

    def close(self) -> None:
        """Sync, and release the lock. The next opening continues the live file."""
        if not self._closed:
            self._end(seal=False)

    def reopen(self, is_as_left: Callable[[], bool] | None = None) -> bool:
        """Open the journal again after `close` without replay or fsync, if no other writer came.

        Returns False, and stays closed, if one did, or if the journal was poisoned: call `open`
        then. Raises `LockedError` if another writer holds the journal. `is_as_left` is called under
        the lock. It can be a cheaper check than the default, which lists the directory and looks at
        the size of the file.
        """
        if not self._closed or self._failed is not None or self._interval is not None:
            return False
        with storage_errors(self._directory):
            lock = self._files.lock(os.path.join(self._directory, LOCK_NAME))
            try:
                as_left = (
                    self._live.is_as_left(self._files, self._directory)
                    if is_as_left is None
                    else is_as_left()
                )
                if as_left:
                    self._live.attach(self._files.append(self._live.path))
            except BaseException:
                lock.close()
                raise
        if not as_left:
            lock.close()
            return False
        self._lock, self._closed, self._bytes_max = lock, False, self._options.file_bytes
        return True

    def finalize(self) -> None:
        """Close, with the live file sealed under its final name."""
        if not self._closed:
            self._end(seal=True)

    # -- looking ------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The directory."""
        return self._directory

    @property
    def last(self) -> int:
        """The ordinal of the last record, 0 if there is none."""
        return self._next - 1

    @property
    def durable(self) -> int:
        """The last ordinal known to survive the machine."""
        return self._durable

    @property
    def is_interrupted(self) -> bool:
        """Whether appends wait for `look_again`, or are refused for good."""
        return self._bytes_max == NO_ROOM

    @property
    def incarnation(self) -> int:
        """The number in this writer's records: the journal's identity and its count of openings."""
        return self._incarnation

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------

    def _use(self, live: LiveFile) -> None:
        self._live = live
        self._ordinal_end = live.name.number + self._options.file_records

    def _tidy(self, snapshot: Callable[[], Records] | None, compact_bytes: int | None) -> None:
        """Remove the remains of crashes and compactions; write a snapshot if replay was long."""
        if not remove_unfinished(self._files, self._directory):
            return
        found = self.recovery
        least = JOURNAL_COMPACT_BYTES if compact_bytes is None else compact_bytes
        grown = found.journal_bytes >= max(least, found.snapshot_bytes)
        if snapshot is not None and found.records and grown:
            self.snapshot(snapshot())
        else:
            remove_superseded(self._files, self._directory)

    def _write(self, live: LiveFile, data: bytes, following: int) -> None:
        """Hand bytes to the system and count them; `following` becomes the next ordinal. Any
        exception in between leaves `NO_ROOM`, so that the next call knows of the interrupted
        write."""
        limit = self._bytes_max
        self._bytes_max = NO_ROOM
        try:
            written = live.put(data)
        except OSError:
            with self._poisoning():
                raise
        size = len(data)
        if written != size:
            with self._poisoning():
                write_all(live.output, data[written:])
        self._next = following
        live.size += size
        self._bytes_max = limit
        if self._interval is not None:
            self._interval.notify()

    def _note(self) -> None:
        """Note in `LOCK` how much was synced. A failure is ignored: acknowledged records are safe
        without the note, which only lets the next opening recognise more damage."""
        live = self._live
        note = Note(self._incarnation, self._durable, live.name.number, live.synced)
        with suppress(OSError):
            self._lock.write(encode_note(note))

    def _make_room(self) -> LiveFile:
        """The live file, rotated if it was full. Raises if the journal is closed or poisoned."""
        self._require_writable()
        full = self._live.size >= self._bytes_max or self._next >= self._ordinal_end
        if full and self._next > self._live.name.number:
            self._rotate()
            remove_superseded(self._files, self._directory)
        return self._live

    def _rotate(self) -> None:
        self._bytes_max = NO_ROOM  # an interrupt leaves it: see `look_again`
        with self._sync_lock, self._poisoning():
            self._seal()
            live = create_live(
                self._files,
                self._directory,
                self._next,
                incarnation=self._incarnation,
                content=self._options.content,
            )
            self._use(live)
            self._note()
        self._bytes_max = self._options.file_bytes

    def _seal(self) -> None:
        self._live.seal(
            self._files, self._directory, following=self._next, incarnation=self._incarnation
        )
        self._durable = self._next - 1

    def fork_let_go(self) -> None:
        """Close a forked child's copy of the live file, so that the disk gets its space back when
        the parent removes it."""
        self._live.output.close()

    def _end(self, *, seal: bool) -> None:
        if self._interval is not None:
            self._interval.stop()
        with self._append_lock:
            if self._closed:
                return
            try:
                if self._failed is None and self._bytes_max != NO_ROOM:
                    with self._sync_lock, self._poisoning():
                        if seal and self._next > self._live.name.number:
                            self._seal()
                        elif self._durable < self._next - 1:
                            self._live.sync()
                            self._durable = self._next - 1
                        self._note()
            finally:
                self._release()

    def _release(self) -> None:
        if self._interval is not None:
            self._interval.stop()
        with self._sync_lock:  # no thread is in an fsync of the file
            self._closed = True
            self._bytes_max = NO_ROOM
            with storage_errors(self._directory):
                try:
                    self._live.output.close()
                finally:
                    self._lock.close()

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """A failure in the block leaves the contents of the file unknown: refuse all calls. An
        interrupt is no failure, unless it came while one was being told."""
        try:
            with storage_errors(self._directory):
                yield
        except BaseException as error:
            if isinstance(error, Exception) or isinstance(error.__context__, OSError):
                self._fail(str(error) or type(error).__name__)
            raise

    def _fail(self, cause: str) -> None:
        self._failed = self._failed or cause
        self._bytes_max = NO_ROOM

    def _require_writable(self) -> None:
        """Raise as `_require_usable` does, and after an interrupted write."""
        self._require_usable()
        if self._bytes_max == NO_ROOM:
            raise PoisonedError(f"the journal in {self._directory}", "a write was interrupted")

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the journal in {self._directory}")
        if self._failed is not None:
            raise PoisonedError(f"the journal in {self._directory}", self._failed)
