"""Durability: how a commit waits for the disk, and what a failure of the disk does to the store.

`"sync"` has an fsync of its own. `"async"` does not wait. `"group"` shares an fsync: the first
commit that waits becomes the leader and syncs, outside the commit lock, for everything written by
then; the others wait for it, and one of the commits that came too late leads the next fsync.

    sound --a write or an fsync fails, or an interrupt comes between two steps--> poisoned
    sound <--a live reader cannot show a whole state, or can again--> suspended
    any --close--> finished

Invariants
1. `durable <= upper`, and everything below `durable` was written before an fsync that returned.
2. A commit that is durable returns, even if the store was poisoned or closed meanwhile.
3. A leader that was interrupted lets another thread lead. One that says nothing for
   `GROUP_COMMIT_WAIT_S_MAX` is passed over: two threads may sync at once.
4. After a failed write or fsync nobody knows which bytes are on disk, so every later call raises
   until the store is opened again. (An fsync that fails once may succeed the next time without
   having written anything: fsyncgate, 2018.)
5. The stored bytes and the state in memory change together. An exception between the two changes,
   a signal's included, poisons the store. If the commit can tell how memory is brought to the
   stored bytes (`Mend`), the store does so and goes on.
6. Later calls report the first failure, and no thread waits for a store that has ended.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Final, Literal, TypeAlias

from kvstore.base.arguments import ArgumentKind, word
from kvstore.base.meters import Meters
from kvstore.engine.api import Engine
from kvstore.errors import (
    ClosedError,
    KVStoreError,
    OutOfSpaceError,
    PoisonedError,
    StorageError,
    storage_errors,
)
from kvstore.limits import FSYNC_WARNED_S, GROUP_COMMIT_WAIT_S_MAX
from kvstore.storage.os_files import NamedDirectory, require_named
from kvstore.timeline.frontiers import Frontiers

Durability: TypeAlias = Literal["sync", "group", "async"]
DURABILITIES: Final = ("sync", "group", "async")
DURABILITY: Final[ArgumentKind[Durability]] = word(*DURABILITIES)


Mend: TypeAlias = "Callable[[], bool]"
"""Brings memory to what is stored, after an interrupt. Returns whether that was possible. It may be
interrupted too, and called again."""


class Health:
    """Whether one store may still be used. `where` names the store in errors."""

    def __init__(self, frontiers: Frontiers, where: str) -> None:
        self._frontiers = frontiers
        self._where = where
        self._is_finished = False
        self._suspended_by: KVStoreError | None = None
        self.poison = ""
        """Why the store is poisoned; empty while it is sound."""
        self._mend: Mend | None = None
        """What may end the poison."""

    def require(self) -> None:
        """Raise `PoisonedError` if an earlier write failed, `ClosedError` after `finish`, and the
        error that suspended the store."""
        if self._is_finished:
            raise ClosedError(self._where)
        if self._suspended_by is not None:
            raise copy(self._suspended_by) from self._suspended_by
        if self.poison and not self._is_mended():
            raise PoisonedError(self._where, self.poison)

    @property
    def is_lost(self) -> bool:
        """Whether the store is poisoned for good."""
        return bool(self.poison) and self._mend is None

    def _is_mended(self) -> bool:
        """Whether the state was brought in order. Any thread may do so."""
        mend = self._mend
        if mend is None:
            return not self.poison  # another thread was faster
        try:
            if not mend():
                return False
        except KVStoreError:
            self._mend = None
            return False
        return True

    def mended(self) -> None:
        """Note that memory agrees with what is stored. The caller of a `Mend` holds the lock."""
        self._mend, self.poison = None, ""
        is_sound = not (self._suspended_by or self._is_finished)
        self._frontiers.note_health(is_sound=is_sound)
        self._frontiers.wake()

    def give_up(self) -> None:
        """Note that a `Mend` is not possible: the store stays poisoned."""
        self._mend = None

    @property
    def is_torn(self) -> bool:
        """Whether a `Mend` waits for its turn."""
        return self._mend is not None

    def guarded(self, action: Callable[..., None], *arguments: object) -> None:
        """Write or sync by `action`; a failure poisons the store. Hot."""
        try:
            action(*arguments)
        except KVStoreError as error:
            self._end(error.what if isinstance(error, OutOfSpaceError) else str(error))
            raise

    @contextmanager
    def poisoning(self, mend: Mend | None = None) -> Iterator[None]:
        """An exception inside the block, also one that a signal raises, poisons the store. `mend`
        is as in `interrupted`."""
        try:
            yield
        except BaseException as error:
            self.interrupted(error, mend)
            raise

    def interrupted(self, error: BaseException, mend: Mend | None = None) -> None:
        """Poison the store after `error`. Hot paths call this instead of `poisoning`, which makes
        an object. With `mend` the store reads what is stored, and goes on: now, or at the next call
        if another interrupt comes. An error of the engine leaves nothing to be mended."""
        if self._is_finished:
            return
        if mend is not None and not self.poison:
            self._mend = mend
        self._end(self.poison or f"interrupted: {type(error).__name__}")
        if self._mend is not None:  # at once, so that few calls of other threads wait for it
            self._is_mended()

    def suspend(self, error: KVStoreError | None) -> None:
        """Have every call raise `error` from now on. None ends that."""
        self._suspended_by = error
        self._frontiers.note_health(is_sound=not (error or self.poison or self._is_finished))
        self._frontiers.wake()

    def finish(self) -> None:
        """The store was closed."""
        self._is_finished = True
        self._frontiers.note_health(is_sound=False)
        self._frontiers.wake()

    def _end(self, poison: str) -> None:
        self.poison = poison
        self._frontiers.note_health(is_sound=False)
        self._frontiers.wake()


class GroupSync:
    """The fsyncs of one store. Everything below `upper` when the store is opened is durable."""

    def __init__(
        self,
        engine: Engine,
        frontiers: Frontiers,
        health: Health,
        meters: Meters,
        *,
        mark: DurableMark | None = None,
    ) -> None:
        """`meters` count each fsync."""
        self._engine = engine
        self._frontiers = frontiers
        self._health = health
        self._meters = meters
        self.durable: int = frontiers.upper
        """Everything below it survives a crash."""
        self._mark = mark
        if mark is not None:
            mark.write(self.durable)
        self._lock = threading.RLock()  # taken by `with`, as in `Frontiers`
        self._synced = threading.Condition(self._lock)
        self.is_syncing = False

    def wait(self, upper: int) -> None:
        """Return once everything below `upper` is on disk, leading an fsync if nobody does."""
        while True:
            leads = False
            try:
                with self._lock:
                    while self.durable < upper and self.is_syncing:
                        if not self._synced.wait(GROUP_COMMIT_WAIT_S_MAX):
                            break
                    if self.durable >= upper:
                        return
                    if self._health.is_lost:
                        self._health.require()
                    leads = self.is_syncing = True
                self.sync(leading=True)
                leads = False
            except KVStoreError:
                if self.durable < upper:
                    raise
            finally:
                if leads:
                    with self._lock:
                        self.is_syncing = False
                        self._synced.notify_all()

    def sync(self, *, leading: bool = False) -> None:
        """One fsync for everything written by now. The leader\'s fsync ends its turn."""
        upper, is_synced, began = self._frontiers.upper, False, time.perf_counter()
        try:
            self._health.guarded(self._sync_engine)
            is_synced = True
            took = time.perf_counter() - began
            self._meters.fsyncs.note(took)
            if took > FSYNC_WARNED_S:
                self._meters.warn_of_fsync(took)
        finally:
            with self._lock:
                if is_synced and not self._health.is_lost:
                    self.durable = max(self.durable, upper)
                    if self._mark is not None:
                        self._mark.write(self.durable)
                if leading:
                    self.is_syncing = False
                self._synced.notify_all()

    def _sync_engine(self) -> None:
        self._engine.sync()
        if self._mark is not None:
            self._mark.require_named()


# --------------------------------------------------------------------------------------------------
# The durable mark: a file that tells other processes up to which time a store is durable.
#
#     DURABLE := | timestamp u64 | crc32 of the timestamp u32 |     big-endian
#
# A log that is written and not yet synced looks the same to a reader in another process as one that
# is synced. The writer therefore notes its durable frontier after each fsync, in place. The note
# itself is not synced: after a power cut it is as old as the file system left it, or damaged.
#
# Invariants
# 1. The time in the mark was durable before it was written there. So a reader that trusts the mark
#    never shows a commit that a power cut can take back.
# 2. A mark that cannot be written stays at an older time, which is true as well. A failure to write
#    it therefore fails no commit.

MARK_NAME: Final = "DURABLE"

_TIMESTAMP: Final = struct.Struct(">Q")
_CHECKSUM: Final = struct.Struct(">I")


class DurableMark:
    """The mark of one store, open to be written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        """Held while the descriptor is used, whose number another file could have had meanwhile."""
        with storage_errors(str(directory)):
            self._place = NamedDirectory(directory)
            self._file = os.fdopen(
                os.open(directory / MARK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644),
                "r+b",
                buffering=0,
            )

    def write(self, timestamp: int) -> None:
        """Note that everything below `timestamp` is durable. Takes 2 us."""
        stored = _TIMESTAMP.pack(timestamp)
        with self._lock, suppress(OSError):  # see invariant 2
            if not self._file.closed:  # by the thread that closed the store, after its own fsync
                os.pwrite(self._file.fileno(), stored + _CHECKSUM.pack(zlib.crc32(stored)), 0)

    def require_named(self) -> None:
        """Raise `StorageError` if the file was removed, with the directory of the store, say: an
        fsync of the logs succeeds then, and nothing is left of them. Likewise if the directory was
        moved away: the next file of RocksDB would have no place. Takes 3 us."""
        try:
            with self._lock:
                if not self._file.closed:
                    require_named(self._file.fileno(), self._directory / MARK_NAME)
        except OSError as error:
            raise StorageError(
                f"{self._directory} was removed while the store was open",
                "what was in it is lost: restore it from a backup",
            ) from error
        if not self._place.is_there():
            raise StorageError(
                f"{self._directory} was moved away while the store was open",
                "close it, and open it where its directory lies now",
            )

    def close(self) -> None:
        """Close the file. Repeatable."""
        with self._lock:
            self._file.close()


def read_durable_mark(directory: Path) -> int:
    """The time below which the store in `directory` is durable. 0 if no mark is there, or if it
    is just being written. Takes 10 us. Raises `AccessDeniedError` if it may not be read."""
    size = _TIMESTAMP.size + _CHECKSUM.size
    with storage_errors(str(directory)):
        try:
            stored = (directory / MARK_NAME).read_bytes()
        except FileNotFoundError:
            return 0
    if len(stored) != size or stored[8:] != _CHECKSUM.pack(zlib.crc32(stored[:8])):
        return 0
    return int(_TIMESTAMP.unpack(stored[:8])[0])
