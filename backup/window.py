"""Windows: what one backup appends to a chain, in an order that survives a kill at any step.

1. A hold at the chain's upper, and all that the store has, are made durable by one fsync.
2. What a killed backup had uploaded of its window is finished first.
3. The rows of the window are uploaded; nothing refers to them yet.
4. One compare-and-append puts them in place: until then nothing has happened, from then on all has.
5. The hold moves on; the records of the upload, and old versions of the chain's state, are removed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from backup.chains import RETENTION
from backup.shard import Batch, OnProgress, Part, Shard, delete_batch
from backup.shard.storage.contract import FAILURES
from backup.uploads import Attempt, Upload, find, forget, upload_here
from kvstore.claims import BACKUP
from kvstore.errors import (
    FencedError,
    HistoryGoneError,
    KVStoreError,
    StatesLostError,
    UpperMismatchError,
    UsageError,
)
from kvstore.holds import Hold
from kvstore.store import Store
from kvstore.timestamp import Timestamp


class BackupInfo(NamedTuple):
    """One backup, or several that compaction has merged: all versions in `[lower, upper)`."""

    lower: Timestamp
    upper: Timestamp
    rows: int
    bytes: int
    parts: int
    seconds: float


def info(batch: Batch) -> BackupInfo:
    """The facts that a batch of a chain states of itself."""
    return BackupInfo(
        Timestamp(batch.lower),
        Timestamp(batch.upper),
        batch.rows,
        batch.size,
        len(batch.parts),
        float(dict(batch.meta).get("seconds", 0.0)),
    )


def appended_before(shard: Shard, token: str | None) -> Batch | None:
    """The batch that an earlier call with this token appended."""
    if token is None:
        return None
    return next((b for b in shard.refresh().batches if ("token", token) in b.meta), None)


def reached(store: Store, name: str) -> int:
    """The upper that the collection whose hold this is has had, as its source knows: a crash may
    take the newest ones from it."""
    found = (hold.reached for hold in store.holds() if hold.name == name)
    return int(next(found, None) or 0)


def require_no_other(store: Store, address: str) -> None:
    """Raise `StatesLostError` if the source knows of backups at `address`, where nothing is."""
    for hold in store.holds():
        if hold.kind == BACKUP and hold.address == address and hold.reached is not None:
            raise StatesLostError(
                address,
                found=0,
                known=hold.reached,
                remedy="look whether the disk is mounted, and put the collection back; "
                "backup(store, full=True) begins it anew",
            )


def drop_others(store: Store, address: str) -> None:
    """Drop the holds of collections that were at `address` before."""
    for hold in store.holds():
        if hold.kind == BACKUP and hold.address == address:
            store.drop_hold(hold.name)


def take_hold(
    store: Store, name: str, shard: Shard, max_age: timedelta | None, *, address: str
) -> Hold:
    """The hold on its source of the collection at `address`, at the chain's upper; the next sync
    makes it durable.

    Raises `HistoryGoneError` if the source no longer has what follows, `UsageError` if it lacks
    what the chain has.
    """
    # Before the hold is there: it lets history go by which an older copy is known.
    newest = next((batch.parts for batch in reversed(shard.state.batches) if batch.parts), ())
    _require_commits(store, newest)
    lower = shard.upper
    try:
        at = lower - 1 if lower else None
        return store.hold(name, at=at, max_age=max_age, durable=False, kind=BACKUP, address=address)
    except HistoryGoneError as error:
        raise _chain_broken(lower - 1, error.since) from error


class Backup(NamedTuple):
    """The means by which one call of `Collection.backup` appends."""

    store: Store
    hold: Hold
    upload: Upload = upload_here
    progress: OnProgress | None = None


class HoldTaken(Exception):  # noqa: N818  # a signal to the caller, who takes it back
    """Another script has taken the hold of this backup."""


def append_windows(shard: Shard, backup: Backup, token: str | None) -> BackupInfo:
    """Finish the window that a killed backup began, if there is one, and take the next.

    Raises `UpperMismatchError` or `HoldTaken` if another script was faster: try again.
    """
    store, chain = backup.store, shard.log.shard
    done = None
    with _undoing(backup.hold):
        upper = int(store.sync())
        has_records, begun = find(shard.blob, chain, shard.upper)
        _require_commits(store, begun.parts if begun is not None else ())
    if begun is not None and _held_at(backup.hold) < begun.upper:
        done = _append_window(shard, backup, begun, None)
    if upper > shard.upper:
        fresh = Attempt.begin(shard.blob, chain, shard.upper, upper)
        newest = _append_window(shard, backup, fresh, token)
        done = newest if done is None else _together(done, newest)
        has_records = has_records or bool(fresh.recorded)
    if done is None:
        return BackupInfo(Timestamp(shard.upper), Timestamp(upper), 0, 0, 0, 0.0)
    if has_records:
        forget(shard.blob, chain, below=done.upper)
    # The backup is made; versions that stay are collected by the next.
    with suppress(*FAILURES):
        shard.collect_if_due()
    # Another script that has taken the hold meanwhile holds what it needs itself.
    with suppress(FencedError):
        backup.hold.move(done.upper - 1, durable=False, reached=done.upper)
    return done


def _require_commits(store: Store, parts: Sequence[Part]) -> None:
    """Raises `UsageError` if the source lacks the newest commit in `parts`, which it once had."""
    last = max((part.time_max for part in parts), default=0)
    if last and store.has_commit(last) is False:
        raise UsageError(
            f"{store.path} lacks the commit of {Timestamp(last)} that was backed up: it was put "
            "back from an older copy",
            "restore the collection to have what it lacks; backup(store, full=True) begins another "
            "chain with what it has",
        )


def _held_at(hold: Hold) -> int:
    try:
        return int(hold.timestamp)
    except FencedError as error:
        raise HoldTaken from error


@contextmanager
def _undoing(hold: Hold, attempt: Attempt | None = None) -> Iterator[None]:
    """Release a hold that is new where the block fails and has recorded no part that the next
    backup could take: the source then keeps no history for a backup that never was."""
    try:
        yield
    except BaseException:
        if hold.is_new and not (attempt is not None and attempt.recorded):
            with suppress(KVStoreError):  # the first error is the one to tell
                hold.release()
        raise


def _append_window(shard: Shard, backup: Backup, attempt: Attempt, token: str | None) -> BackupInfo:
    started = time.perf_counter()
    lower, upper = attempt.lower, attempt.upper
    with _undoing(backup.hold, attempt):
        try:
            whole_since, uploaded = backup.upload(backup.store, shard, attempt, backup.progress)
        except HistoryGoneError as error:
            raise _chain_broken(lower - 1, error.since) from error
        if not lower:
            shard.critical(RETENTION).downgrade(min(whole_since, upper - 1))
    meta = (("seconds", f"{time.perf_counter() - started:.3f}"), ("token", token or ""))
    batch = replace(uploaded, parts=(*attempt.parts, *uploaded.parts), meta=meta)
    try:
        shard.writer().compare_and_append(batch, token=token)
    except UpperMismatchError:
        own = tuple(part for part in batch.parts if part.name not in attempt.recorded)
        delete_batch(shard.blob, replace(batch, parts=own))
        raise
    shard.leave_witness()
    return info(batch)


def _together(first: BackupInfo, second: BackupInfo) -> BackupInfo:
    """Two windows of one call as one."""
    sums = (a + b for a, b in zip(first[2:], second[2:], strict=True))
    return BackupInfo(first.lower, second.upper, *sums)  # type: ignore[arg-type]


def _chain_broken(needed: int, since: int) -> HistoryGoneError:
    return HistoryGoneError(
        as_of=needed,
        since=since,
        remedy="the chain is broken: backup(store, full=True) begins another; "
        "what is there stays restorable",
    )
