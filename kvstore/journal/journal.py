"""The journal: an append-only log of records that survives crashes, for one writer.

    with Journal.open(path, restore=state.restore, apply=state.apply, snapshot=state.records) as j:
        ordinal = j.append(payload)

Invariants
1. An ordinal that was returned under `Sync.always()`, or lies at or below `durable`, is there
   after any crash; what is there is a prefix of what was appended.
2. One writer: the file `LOCK` is held from open to close, by the kernel.
3. After a write or fsync failed, what the file holds is not known: every call raises
   `PoisonedError` until the journal is opened again, which looks.
4. Rotation happens before an append, under both locks, and is synced whatever the policy.
5. The next opening learns how much was synced: by a mark in front of the first record behind each
   sync, and by a note in `LOCK` when a file is begun and when the journal is closed. Both are true
   whenever they are there, and are not synced themselves.
6. Lock order: `_append_lock`, then `_sync_lock`. An fsync holds the second only, so appends go on
   beside it, and those that wait for one share it.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from kvstore.errors import (
    ClosedError,
    CorruptionError,
    PoisonedError,
    UsageError,
)
from kvstore.forks import own
from kvstore.journal.files import OS_FILES, Files, Lock, storage_errors, write_all
from kvstore.journal.live import (
    LiveFile,
    continue_live,
    create_live,
    is_live_as_left,
    seal_live,
)
from kvstore.journal.names import LOCK_NAME, FileName
from kvstore.journal.records import (
    Note,
    encode,
    encode_many,
    encode_mark,
    encode_note,
    in_pieces,
    require_payload,
    require_payloads,
)
from kvstore.journal.recovery import Apply, Recovery, replay
from kvstore.journal.snapshot import (
    SnapshotInfo,
    remove_superseded,
    remove_unfinished,
    write_snapshot,
)
from kvstore.journal.sync import IntervalSync, Sync
from kvstore.limits import (
    JOURNAL_COMPACT_BYTES,
    JOURNAL_FILE_BYTES,
    JOURNAL_FILE_RECORDS,
    JOURNAL_RECORD_BYTES_MAX,
)

Records = Iterable[tuple[int, bytes]]
_ALWAYS = Sync.always()
OPENINGS_MAX = 0xFFFFFFFF
"""How often a journal can be opened: the lower half of an incarnation."""

NO_ROOM = -1
"""In place of a file's limit while it must not be appended to: closed, poisoned, in a write."""


class Journal:
    """An open journal. Made by `Journal.open`; safe to use from several threads."""

    def __init__(
        self,
        files: Files,
        directory: str,
        lock: Lock,
        *,
        recovery: Recovery,
        identity: int,
        content: str,
        sync: Sync,
        file_bytes: int,
        file_records: int,
    ) -> None:
        self._files = files
        self._directory = directory
        self._lock = lock
        self._content = content
        self._policy = sync
        self._settles = sync.records_max > 0
        self._file_bytes = file_bytes
        self._bytes_max = file_bytes  # or NO_ROOM: one check in `append` finds all that is rare
        self._records_max = file_records
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
            self._use(
                continue_live(
                    files, directory, recovery, incarnation=self._incarnation, content=content
                )
            )
        self._note()
        self._interval = (
            IntervalSync(sync.seconds_max, self.sync, name="kvstore-journal-sync")
            if sync.seconds_max
            else None
        )
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
        """Open or create the journal in the directory `path` for writing, replaying what it holds.

        `restore` is called with each record of the newest snapshot, then `apply` with each record
        behind it; without them the journal must hold none. If `snapshot` is given and the
        journal behind the newest snapshot has grown beyond `compact_bytes` and beyond the
        snapshot itself, the state it yields as (type, payload) becomes a new snapshot.
        `content` names what the records mean; it is written down and checked. A live file is
        closed at `file_bytes` or `file_records`. Their defaults stand in `kvstore.limits`.

        Raises `LockedError` if another writer has it, `JournalDamagedError` if it is damaged (a
        torn tail of the live file is no damage: it is cut, see `recovery.torn`), and
        `NotAStoreError`, `FormatVersionError` or `UsageError` if it is not what was asked for.
        """
        directory = os.path.abspath(os.fspath(path))
        file_bytes = JOURNAL_FILE_BYTES if file_bytes is None else file_bytes
        file_records = JOURNAL_FILE_RECORDS if file_records is None else file_records
        _check_options(content, file_bytes, file_records)
        with storage_errors(directory):
            files.make_directory(directory)
            lock = files.lock(os.path.join(directory, LOCK_NAME))
        try:
            with storage_errors(directory):
                recovery = replay(files, directory, restore=restore, apply=apply, content=content)
            journal = cls(
                files,
                directory,
                lock,
                recovery=recovery,
                identity=secrets.randbits(32) if identity is None else identity,
                content=content,
                sync=sync,
                file_bytes=file_bytes,
                file_records=file_records,
            )
        except BaseException:
            lock.close()
            raise
        try:
            least = JOURNAL_COMPACT_BYTES if compact_bytes is None else compact_bytes
            journal._tidy(snapshot, least)
        except BaseException:
            journal._release()
            raise
        return journal

    # -- writing ------------------------------------------------------------------------------

    def append(self, payload: bytes, type: int = 0, *, settle: bool = True) -> int:  # noqa: A002
        """Write one record and return its ordinal; durable as the sync policy says.

        With `settle=False` it returns at once, so that the caller can leave a lock of its own
        before it calls `settle`, or leave the record to a later sync. Raises `UsageError`
        (nothing was written), `StorageError` or `PoisonedError`.
        """
        if payload.__class__ is not bytes or len(payload) > JOURNAL_RECORD_BYTES_MAX or type:
            require_payload(payload, type)  # what is left to check is rare: skip the call
        with self._append_lock:
            ordinal = self._next
            if self._live_bytes >= self._bytes_max or ordinal >= self._ordinal_end:
                self._make_room()
            data = encode(self._incarnation, ordinal, type, payload)
            self._write(data if self._synced <= self._marked else self._mark() + data, ordinal + 1)
        if self._settles and settle:
            self.settle(ordinal)
        return ordinal

    def append_many(self, payloads: Iterable[bytes], type: int = 0) -> range:  # noqa: A002
        """Write records together, with one sync, and return their ordinals.

        Not atomic: a crash may keep the first of them. What must stay together is one record.
        """
        checked = require_payloads(payloads, type)
        with self._append_lock:
            first = self._next
            for chunk in in_pieces(checked):
                self._make_room()
                ordinal = self._next
                data = encode_many(self._incarnation, ordinal, type, chunk)
                if self._synced > self._marked:
                    data = self._mark() + data
                self._write(data, ordinal + len(chunk))
            ordinals = range(first, self._next)
        if checked:
            self.settle(ordinals[-1])
        return ordinals

    def settle(self, ordinal: int) -> None:
        """Sync the records up to `ordinal` if the policy asks for it."""
        if 0 < self._policy.records_max <= ordinal - self._durable:
            self.sync(ordinal)

    def sync(self, upto: int | None = None) -> int:
        """Return once everything appended so far, or up to ordinal `upto`, survives the machine.

        Callers that come while an fsync runs share the next one. Returns `durable`.
        """
        with self._sync_lock:
            self._require_usable()
            last, size = self._next - 1, self._live_bytes  # `size` may hold records behind `last`
            if self._durable < (last if upto is None else min(upto, last)):
                with self._poisoning():
                    self._output.sync()
                self._durable, self._synced = last, size
            return self._durable

    def snapshot(self, records: Records) -> SnapshotInfo:
        """Write the state as of the last append, and drop the files it makes unnecessary.

        `records` must be that state as (type, payload); appends wait meanwhile. Raises
        `LockedError` while another process compacts: nothing has changed then.
        """
        with self._append_lock:
            self._require_writable()
            if self._next > self._live.number:
                self._rotate()
            info = write_snapshot(
                self._files,
                self._directory,
                records,
                ordinal=self._next - 1,
                incarnation=self._incarnation,
                content=self._content,
            )
            remove_superseded(self._files, self._directory)
            return info

    def close(self) -> None:
        """Sync and let go of the journal. The live file goes on at the next open."""
        if not self._closed:
            self._end(seal=False)

    def reopen(self, is_as_left: Callable[[], bool] | None = None) -> bool:
        """Open it again after `close`, where nobody has written since: no replay and no fsync.

        False where somebody has, or it was poisoned: it stays closed, and `open` replays what is
        there. Raises `LockedError` if another writer has it. `is_as_left`, asked under the lock, is
        a cheaper check than the default, which lists the directory and looks into the file.
        """
        if not self._closed or self._failed is not None or self._interval is not None:
            return False
        with storage_errors(self._directory):
            lock = self._files.lock(os.path.join(self._directory, LOCK_NAME))
            try:
                as_left = (
                    is_live_as_left(self._files, self._directory, self._live, size=self._live_bytes)
                    if is_as_left is None
                    else is_as_left()
                )
                if as_left:
                    output = self._files.append(self._live.path(self._directory))
                    self._use(LiveFile(self._live, output, self._live_bytes, self._marked))
            except BaseException:
                lock.close()
                raise
        if not as_left:
            lock.close()
            return False
        self._lock, self._closed, self._bytes_max = lock, False, self._file_bytes
        return True

    def finalize(self) -> None:
        """Close, with the live file sealed under its final name: nothing is left half open."""
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
    def incarnation(self) -> int:
        """The number in this writer's records: the journal's identity and its count of openings."""
        return self._incarnation

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- opening ------------------------------------------------------------------------------

    def _use(self, live: LiveFile) -> None:
        self._live: FileName
        self._live, self._output, self._live_bytes, self._marked = live
        self._synced = self._live_bytes
        self._put = self._output.write
        self._ordinal_end = self._live.number + self._records_max

    def _tidy(self, snapshot: Callable[[], Records] | None, compact_bytes: int) -> None:
        """Drop what crashes and compactions left over; write a snapshot if replay was long."""
        if not remove_unfinished(self._files, self._directory):
            return
        found = self.recovery
        grown = found.journal_bytes >= max(compact_bytes, found.snapshot_bytes)
        if snapshot is not None and found.records and grown:
            self.snapshot(snapshot())
        else:
            remove_superseded(self._files, self._directory)

    # -- acting -------------------------------------------------------------------------------

    def _write(self, data: bytes, following: int) -> None:
        """Hand bytes to the system and count them; `following` is the next ordinal then. An
        exception in between, whatever it is, leaves no room, and the next call finds that a write
        was interrupted."""
        limit = self._bytes_max
        self._bytes_max = NO_ROOM
        try:
            written = self._put(data)
        except OSError:
            with self._poisoning():
                raise
        size = len(data)
        if written != size:
            with self._poisoning():
                write_all(self._output, data[written:])
        self._next = following
        self._live_bytes += size
        self._bytes_max = limit
        if self._interval is not None:
            self._interval.notify()

    def _mark(self) -> bytes:
        """The mark in front of the next record: how much of the file was synced before it."""
        self._marked = self._synced
        return encode_mark(self._incarnation, self._next, synced=self._marked)

    def _note(self) -> None:
        """Note in `LOCK` what was synced. A note that fails is not worth a failure: all that was
        acknowledged is safe, and damage to it is told less often."""
        live = Note(self._incarnation, self._durable, self._live.number, self._synced)
        with suppress(OSError):
            self._lock.write(encode_note(live))

    def _make_room(self) -> None:
        """Rotate if the live file is full; raise if the journal is closed or poisoned."""
        self._require_writable()
        full = self._live_bytes >= self._bytes_max or self._next >= self._ordinal_end
        if full and self._next > self._live.number:
            self._rotate()
            remove_superseded(self._files, self._directory)

    def _rotate(self) -> None:
        with self._sync_lock, self._poisoning():
            self._seal()
            self._use(
                create_live(
                    self._files,
                    self._directory,
                    self._next,
                    incarnation=self._incarnation,
                    content=self._content,
                )
            )
            self._note()

    def _seal(self) -> None:
        seal_live(
            self._files,
            self._directory,
            self._live,
            self._output,
            following=self._next,
            incarnation=self._incarnation,
        )
        self._durable = self._next - 1

    def fork_let_go(self) -> None:
        """Close a forked child's copy of the live file, so that its space comes back to the disk
        when the parent removes it."""
        self._output.close()

    def _end(self, *, seal: bool) -> None:
        if self._interval is not None:
            self._interval.stop()
        with self._append_lock:
            if self._closed:
                return
            try:
                if self._failed is None and self._bytes_max != NO_ROOM:
                    with self._sync_lock, self._poisoning():
                        if seal and self._next > self._live.number:
                            self._seal()
                        elif self._durable < self._next - 1:
                            self._output.sync()
                            self._durable = self._next - 1
                            self._synced = self._live_bytes
                        self._note()
            finally:
                self._release()

    def _release(self) -> None:
        if self._interval is not None:
            self._interval.stop()
        with self._sync_lock:  # nobody is in an fsync of the file
            self._closed = True
            self._bytes_max = NO_ROOM
            with storage_errors(self._directory):
                try:
                    self._output.close()
                finally:
                    self._lock.close()

    # -- failing ------------------------------------------------------------------------------

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """After any failure in here the file's contents are unknown: refuse everything."""
        try:
            with storage_errors(self._directory):
                yield
        except BaseException as error:
            self._fail(str(error) or type(error).__name__)
            raise

    def _fail(self, cause: str) -> None:
        self._failed = self._failed or cause
        self._bytes_max = NO_ROOM

    def _require_writable(self) -> None:
        """Under the append lock: what `_require_usable` refuses, and an interrupted write."""
        self._require_usable()
        if self._bytes_max == NO_ROOM:
            self._fail("a write was interrupted")
            self._require_usable()

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the journal in {self._directory}")
        if self._failed is not None:
            raise PoisonedError(f"the journal in {self._directory}", self._failed)


def _check_options(content: str, file_bytes: int, file_records: int) -> None:
    if not content.isascii():
        raise UsageError(f"content {content!r} is not ASCII")
    if file_bytes < 1 or file_records < 1:
        raise UsageError("file_bytes and file_records must be positive")
