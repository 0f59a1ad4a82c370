"""A store as the storage of ZODB: persistent objects with undo, history, pack, and the past.

    db = ZODB.DB(ZODBStorage("objects.db"))

`loadBefore` is a read as of a time, `undo` writes what was before, as `revert_range` does, and
`pack` is `gc`. One process has the storage, as with a FileStorage; ZEO serves it to more.

    o | oid     the record of an object:  | tid | origin | data |
    t | tid     a transaction:  | length of user | of description | user | description | extension |
    p           the last pack:  | tid | highest oid | time of the commit of tid u64 |

Both ids are of eight bytes, and order as numbers. `origin` is the transaction from which an undo
took the data, or 0. Without data, the record tells that the creation of the object was undone.

Invariants
1. A transaction of ZODB is one commit: its records and its row, whose version tells the time of
   the commit. The ids of transactions rise with the times of their commits. So the state before an
   id is the state as of the time of the newest transaction before it.
2. A commit without a row is a pack: it removes objects that nothing can reach, and rows of
   transactions without records.
3. Nothing is read as of a time before that of the last pack, or before `since`: an id from before
   it has the records of that state which are older than the id.
4. Who reads waits for a transaction that finishes, under the lock of the storage: its invalidations
   come first.
5. A storage that only reads shows the transactions that were there when it was opened.

Blobs are left out: a value of up to 1 GiB is an object's data, and nothing is a file beside it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

from persistent.TimeStamp import TimeStamp
from ZODB import interfaces
from ZODB.BaseStorage import BaseStorage, DataRecord, TransactionRecord
from ZODB.ConflictResolution import ConflictResolvingStorage
from ZODB.POSException import (
    ConflictError,
    MultipleUndoErrors,
    POSKeyError,
    ReadOnlyError,
    StorageTransactionError,
    UndoError,
)
from ZODB.utils import load_current, maxtid, p64, u64, z64
from zope.interface import implementer

import kvstore
from kvstore.base.timestamp import Timestamp
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.remote.live import LiveReader
from kvstore.store import Store
from kvstore.timeline.durability import Durability

_OBJECT, _TRANSACTION, _PACK = b"o", b"t", b"p"
_RECORD: Final = Struct(">8s8s")
_ROW: Final = Struct(">II")
_PACKED: Final = Struct(">8s8sQ")
_DELETES_AT_ONCE: Final = 1000
"""Keys of one commit of a pack."""


class _Record(NamedTuple):
    tid: bytes
    origin: bytes
    data: bytes

    def encoded(self) -> bytes:
        return _RECORD.pack(self.tid, self.origin) + self.data


def _decoded(value: bytes) -> _Record:
    tid, origin = _RECORD.unpack_from(value)
    return _Record(tid, origin, value[_RECORD.size :])


@implementer(
    interfaces.IStorageUndoable,
    interfaces.IStorageIteration,
    interfaces.IStorageRestoreable,
)
class ZODBStorage(ConflictResolvingStorage, BaseStorage):
    """A storage of ZODB. `where` is the directory of a store, or an open store of this process,
    which has no other user: a pack collects the history of all of it. A store that was passed stays
    open. With `read_only` another process may write; see invariant 5. Each transaction is durable
    as `durability` says, by default as the store says. Raises as `kvstore.open` does, `LockedError`
    if another process has the store."""

    load = load_current

    def __init__(
        self,
        where: Store | str | os.PathLike[str],
        *,
        prefix: bytes = b"zodb/",
        read_only: bool = False,
        durability: Durability | None = None,
    ) -> None:
        self._reader: Store | LiveReader
        if isinstance(where, Store):
            self._reader, self._owned = where, False
        elif isinstance(where, str | os.PathLike):
            self._reader = kvstore.follow(where) if read_only else kvstore.open(where)
            self._owned = True
        else:
            raise UsageError(
                f"{type(where).__name__} is no store of this process",
                "pass a directory, or what kvstore.open returned",
            )
        self._prefix, self._durability = prefix, durability
        super().__init__(f"kvstore {self._reader.path or id(self._reader)}")
        self._is_read_only = read_only
        self._pending: dict[bytes, _Record] = {}
        self._ltid = next(self._rows(z64, maxtid, reverse=True), (z64, b""))[0]
        if self._ltid != z64:
            self._ts: TimeStamp = self._ts.laterThan(TimeStamp(self._ltid))
        pack = self._reader.get(self._key(_PACK))
        packed = _PACKED.unpack(pack) if pack else (z64, z64, 0)
        self._packed, highest, self._packed_at = packed
        objects = self._reader.keys(prefix=self._key(_OBJECT), reverse=True, limit=1)
        self._oid = max([highest, *(key[-8:] for key in objects)])

    def close(self) -> None:
        """Close the store, unless it was passed. Repeatable."""
        if self._owned:
            self._reader.close()

    def cleanup(self) -> None:
        """Nothing: ZODB's tests ask for it."""

    # -- reading ----------------------------------------------------------------------------

    def loadBefore(self, oid: bytes, tid: bytes) -> tuple[bytes, bytes, bytes | None] | None:
        """See `IStorage.loadBefore`. Two reads for an object that has changed since, else one."""
        with self._lock:
            if self._is_read_only:
                tid = min(tid, p64(u64(self._ltid) + 1))
            found = self._newest(oid)
            if found is None:
                raise POSKeyError(oid)
            end = None
            if found.tid >= tid:
                at = self._time_before(tid)
                found = self._record_at(oid, at)
                if found is None or found.tid >= tid:
                    return None
                try:
                    end = self._next_id(oid, at)
                except HistoryGoneError:  # a pack has just ended
                    return None
            if not found.data:
                raise POSKeyError(oid)
            return found.data, found.tid, end

    def loadSerial(self, oid: bytes, serial: bytes) -> bytes:
        """See `IStorage.loadSerial`."""
        with self._lock:
            found = self._newest(oid)
            if found is not None and found.tid != serial:
                at = self._time_of(serial)
                found = None if at is None else self._record_at(oid, max(at, self._oldest))
            if found is None or found.tid != serial or not found.data:
                raise POSKeyError(oid, serial)
            return found.data

    def history(self, oid: bytes, size: int = 1) -> list[dict[str, Any]]:
        """See `IStorage.history`. Reads all versions of the object."""
        with self._lock:
            versions = self._reader.history(self._key(_OBJECT, oid))
            if not versions or versions[0].value is None:
                raise POSKeyError(oid)
            records = [_decoded(version.value) for version in versions if version.value is not None]
            found = []
            for record in records[:size]:
                about = self._described(record.tid)
                about |= {"tid": record.tid, "serial": record.tid, "size": len(record.data)}
                found.append(about)
            return found

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        """See `IStorageIteration`. Records that a pack has left come from a pass over all objects,
        whose ids are kept in memory."""
        with self._lock:
            return self._transactions(start or z64, min(stop or maxtid, self._ltid))

    def __len__(self) -> int:
        """The number of objects, by a pass over their keys."""
        return self._reader.count(prefix=self._key(_OBJECT))

    def getSize(self) -> int:
        """The bytes of the newest records and their history, on disk and in memory."""
        stats = self._reader.stats()
        return int(stats["data_bytes"] + stats["data_memtable_bytes"])

    # -- writing ----------------------------------------------------------------------------

    def store(self, oid: bytes, serial: bytes | None, data: bytes, version: str, txn: Any) -> None:
        """See `IStorage.store`. A conflict is resolved by the object's class, where it can."""
        self._require_begun(txn)
        with self._lock:
            newest = self._newest(oid)
            if newest is not None and newest.tid != (serial or z64):
                data = self.tryToResolveConflict(oid, newest.tid, serial, data)
                self._resolved.append(oid)
            self._pending[oid] = _Record(self._tid, z64, data)
            self.set_max_oid(oid)

    def restore(
        self, oid: bytes, serial: bytes, data: bytes | None, version: str, prev: Any, txn: Any
    ) -> None:
        """See `IStorageRestoreable`: a record of another storage, as it was there."""
        self._require_begun(txn)
        with self._lock:
            self._pending[oid] = _Record(self._tid, prev or z64, data or b"")
            self.set_max_oid(oid)

    def _require_begun(self, txn: Any) -> None:
        if self._is_read_only:
            raise ReadOnlyError
        if txn is not self._transaction:
            raise StorageTransactionError(self, txn)

    def _clear_temp(self) -> None:
        self._pending = {}

    def _vote(self) -> list[bytes]:
        if self._tid <= self._ltid:
            raise StorageTransactionError(self, "the id of the transaction is not the newest")
        resolved: list[bytes] = self._resolved
        return resolved

    def _finish(
        self, tid: bytes, user: bytes | str, description: bytes | str, extension: bytes
    ) -> None:
        users, described = _bytes(user), _bytes(description)
        row = _ROW.pack(len(users), len(described)) + users + described + extension
        with self._writer.batch(durability=self._durability) as batch:
            for oid, record in self._pending.items():
                batch.put(self._key(_OBJECT, oid), record.encoded())
            batch.put(self._key(_TRANSACTION, tid), row)
        self._ltid = tid

    # -- undoing ----------------------------------------------------------------------------

    def supportsUndo(self) -> bool:
        """Yes."""
        return True

    def undoLog(
        self,
        first: int = 0,
        last: int = -20,
        filter: Callable[[dict[str, Any]], object] | None = None,
    ) -> list[dict[str, Any]]:
        """See `IStorageUndoable`: the transactions behind the last pack, newest first."""
        end = first - last if last < 0 else last
        found: list[dict[str, Any]] = []
        with self._lock:
            for tid, _ in self._rows(self._packed, self._ltid, reverse=True):
                if len(found) == end or (self._time_of(tid) or 0) <= self._oldest:
                    break
                about = {**self._described(tid), "id": tid}
                if filter is None or filter(about):
                    found.append(about)
        return found[first:]

    def undo(self, transaction_id: bytes, transaction: Any) -> tuple[bytes, list[bytes]]:
        """See `IStorageUndoable`: write what was before, where nothing has changed since, or what
        the object's class makes of both. Raises `UndoError`."""
        self._require_begun(transaction)
        with self._lock:
            at = self._time_of(transaction_id)
            if at is None or at <= self._oldest:
                raise UndoError(f"transaction {transaction_id.hex()} is packed, or unknown")
            undone: dict[bytes, _Record] = {}
            failures = []
            for oid, record in self._records(at):
                try:
                    undone[oid] = self._undone(oid, record, at)
                except UndoError as error:  # noqa: PERF203  # ZODB asks for all of them
                    failures.append((oid, error))
            if failures:
                raise MultipleUndoErrors(failures)
            self._pending |= undone
            return self._tid, [*undone]

    def _undone(self, oid: bytes, record: _Record, at: Timestamp) -> _Record:
        """What an object is without the transaction that wrote `record` at a time."""
        before = self._record_at(oid, Timestamp(at - 1))
        now = self._pending.get(oid) or self._newest(oid)
        if now is None:
            raise UndoError("the object was packed", oid)
        if now.tid == record.tid or now.data == record.data:
            if before is None or not before.data:
                return _Record(self._tid, z64, b"")
            origin = before.tid if before.origin == z64 else before.origin
            return _Record(self._tid, origin, before.data)
        if before is None or not before.data or not now.data:
            raise UndoError("other transactions have changed the object since", oid)
        try:
            data = self.tryToResolveConflict(oid, now.tid, record.tid, before.data, now.data)
        except ConflictError as error:
            raise UndoError("other transactions have changed the object since", oid) from error
        return _Record(self._tid, z64, data)

    # -- packing ----------------------------------------------------------------------------

    def pack(
        self, t: float, referencesf: Callable[[bytes], Iterable[bytes]], gc: bool = True
    ) -> None:
        """See `IStorage.pack`. The state at `t` (seconds since 1970) and all after it stay. Objects
        that could not be reached then, and that no later transaction has written or mentions, go.

        Costs a pass over all objects, and memory for their ids; commits wait for the end of that,
        and not for `gc`. The space comes back as `Store.gc` says. Where transactions came after
        `t`, that of unreachable objects comes back by the next pack. Claims on the history, as of
        backups, keep it.
        """
        if self._is_read_only:
            raise ReadOnlyError
        stop = TimeStamp(*time.gmtime(t)[:5], t % 60).raw()
        with self._commit_lock:
            newest = next(self._rows(self._packed, stop, reverse=True), None)
            if newest is None or newest[0] == self._packed:
                return
            tid = newest[0]
            at = self._time_of(tid)
            assert at is not None
            reached = self._reached(at, referencesf) if gc else None
            self._remove(tid, at, reached)
            with self._lock:
                self._writer.put(self._key(_PACK), _PACKED.pack(tid, self._oid, at))
                self._packed, self._packed_at = tid, at
            before = at if tid < self._ltid else self._reader.upper - 1
        self._writer.gc(before=before)

    def _reached(self, at: Timestamp, references: Callable[[bytes], Iterable[bytes]]) -> set[bytes]:
        """The objects that are reached from the root at a time, or from what was written since."""
        todo, reached = [z64], {z64}

        def reach(found: Iterable[bytes]) -> None:
            new = {oid for oid in found if oid not in reached}
            reached.update(new)
            todo.extend(new)

        for change in self._reader.changes(at, prefix=self._key(_OBJECT)):
            if change.value is not None:
                data = _decoded(change.value).data
                reach([change.key[-8:], *(references(data) if data else ())])
        while todo:
            record = self._record_at(todo.pop(), at)
            if record is not None and record.data:
                reach(references(record.data))
        return reached

    def _remove(self, upto: bytes, at: Timestamp, reached: set[bytes] | None) -> None:
        """Remove the objects that were not reached at a time, and those whose creation was undone
        for good, and the rows of transactions that have no record left."""
        alive: set[bytes] = set()
        garbage = []
        for key, value in self._reader.scan(prefix=self._key(_OBJECT), as_of=at):
            oid, record = key[-8:], _decoded(value)
            is_undone = not record.data and self._newest(oid) == record
            if is_undone or (reached is not None and oid not in reached):
                garbage.append(key)
            else:
                alive.add(record.tid)
        rows = [tid for tid, _ in self._rows(z64, upto) if tid not in alive]
        self._delete([*garbage, *(self._key(_TRANSACTION, tid) for tid in rows)])

    def _delete(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), _DELETES_AT_ONCE):
            with self._writer.batch(durability=self._durability) as batch:
                for key in keys[start : start + _DELETES_AT_ONCE]:
                    batch.delete(key)

    # -- inside -----------------------------------------------------------------------------

    @property
    def _writer(self) -> Store:
        assert isinstance(self._reader, Store)
        return self._reader

    def _key(self, kind: bytes, number: bytes = b"") -> bytes:
        return self._prefix + kind + number

    def _newest(self, oid: bytes) -> _Record | None:
        value = self._reader.get(self._key(_OBJECT, oid))
        return None if value is None else _decoded(value)

    def _record_at(self, oid: bytes, at: Timestamp) -> _Record | None:
        """The record of an object at a time; None also where that history has just gone."""
        try:
            value = self._reader.get(self._key(_OBJECT, oid), at)
        except HistoryGoneError:
            return None
        return None if value is None else _decoded(value)

    def _next_id(self, oid: bytes, at: Timestamp) -> bytes:
        """The transaction that changed an object next, after a time. There is one."""
        key = self._key(_OBJECT, oid)
        change = next(self._reader.changes(at, None, key, key + b"\0"))
        assert change.value is not None
        return _decoded(change.value).tid

    def _rows(
        self, first: bytes, last: bytes, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """The rows of transactions, by id; both ends included."""
        start, end = self._key(_TRANSACTION, first), self._key(_TRANSACTION, last) + b"\0"
        if start < end:
            for key, row in self._reader.scan(start, end, reverse=reverse):
                yield key[-8:], row

    def _time_of(self, tid: bytes) -> Timestamp | None:
        """The time of the commit of a transaction."""
        versions = self._reader.history(self._key(_TRANSACTION, tid))
        return versions[0].timestamp if versions and versions[0].value is not None else None

    @property
    def _oldest(self) -> Timestamp:
        """The oldest time that is read; see invariant 3."""
        return Timestamp(max(self._packed_at, self._reader.since))

    def _time_before(self, tid: bytes) -> Timestamp:
        """The time whose state is that before a transaction id, or the oldest one."""
        last = self._key(_TRANSACTION, p64(max(u64(tid), 1) - 1))
        found = self._reader.floor(last, prefix=self._key(_TRANSACTION))
        at = None if found is None else self._time_of(found[0][-8:])
        return Timestamp(max(at or 0, self._oldest))

    def _described(self, tid: bytes) -> dict[str, Any]:
        """What a transaction says of itself, in the words of `history` and `undoLog`."""
        about = _transaction(tid, self._reader.get(self._key(_TRANSACTION, tid)))
        return {
            **about.extension,
            "time": TimeStamp(tid).timeTime(),
            "user_name": about.user,
            "description": about.description,
        }

    def _records(self, at: Timestamp) -> Iterator[tuple[bytes, _Record]]:
        """The records of the transaction that was committed at a time."""
        for change in self._reader.changes(at - 1, at, prefix=self._key(_OBJECT)):
            if change.value is not None:
                yield change.key[-8:], _decoded(change.value)

    def _transactions(self, first: bytes, last: bytes) -> Iterator[Any]:
        oldest = self._oldest
        left: dict[bytes, list[bytes]] | None = None
        for tid, row in self._rows(first, last):
            at = self._time_of(tid)
            if at is None:
                continue
            about = _transaction(tid, row)
            if at > oldest:
                about.records = list(self._records(at))
            else:
                if left is None:
                    left = self._left(oldest)
                found = ((oid, self._record_at(oid, oldest)) for oid in left.get(tid, ()))
                about.records = [(oid, record) for oid, record in found if record is not None]
                if not about.records:
                    continue
            yield about

    def _left(self, oldest: Timestamp) -> dict[bytes, list[bytes]]:
        """The objects in the oldest state, by the transactions of their records."""
        found = defaultdict(list)
        for key, value in self._reader.scan(prefix=self._key(_OBJECT), as_of=oldest):
            found[_decoded(value).tid].append(key[-8:])
        return found


class _Transaction(TransactionRecord):
    """One of an iterator, which gives its records as often as it is asked."""

    records: list[tuple[bytes, _Record]]

    def __iter__(self) -> Iterator[DataRecord]:
        for oid, (_, origin, data) in self.records:
            yield DataRecord(oid, self.tid, data or None, None if origin == z64 else origin)


def _transaction(tid: bytes, row: bytes | None) -> _Transaction:
    users, described = _ROW.unpack_from(row) if row else (0, 0)
    rest = row[_ROW.size :] if row else b""
    split = users + described
    return _Transaction(tid, " ", rest[:users], rest[users:split], rest[split:])


def _bytes(text: bytes | str) -> bytes:
    """What tells of a transaction is bytes, and some callers have texts."""
    return text.encode() if isinstance(text, str) else text
