"""Windows: one backup, step by step, in an order that survives a kill at any step.

1. One fsync makes durable: a hold at the chain's upper, and everything that the store has.
2. A window that a killed backup had begun to upload is finished first.
3. The rows of the window are uploaded; nothing refers to them yet.
4. One compare-and-append puts them in place. Before it there is no backup, and after it the whole
   backup is there.
5. The hold moves on. The records of the upload, and old versions of the chain's state, are removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from backup.chains import RETENTION, Chains
from backup.drills import newest_proof
from backup.shard import Critical, OnProgress, Shard, ShardBatch, ShardPart, delete_batch
from backup.shard.state import witness
from backup.uploads import Attempt, Upload, find, forget, upload_here
from kvstore.claims import BACKUP, HoldRecord
from kvstore.control.scripts import as_store, client_of
from kvstore.errors import (
    FencedError,
    HistoryGoneError,
    KVStoreError,
    LockedError,
    OpaqueMismatchError,
    StatesLostError,
    UpperMismatchError,
    UsageError,
)
from kvstore.holds import Hold
from kvstore.limits import BACKUP_ATTEMPTS, BACKUP_TOKEN_CHARS_MAX
from kvstore.storage.contract import FAILURES
from kvstore.store import Store
from kvstore.timestamp import Timestamp


class BackupInfo(NamedTuple):
    """One backup, or several that compaction has merged: all versions in `[lower, upper)`.

    `proven_at` is the time of the newest drill that proved an instant of the window. `labels` name
    instants of the window.
    """

    lower: Timestamp
    upper: Timestamp
    rows: int
    bytes: int
    parts: int
    seconds: float
    proven_at: Timestamp | None = None
    labels: tuple[str, ...] = ()


def info(batch: ShardBatch) -> BackupInfo:
    """The facts that a batch of a chain states of itself."""
    return BackupInfo(
        Timestamp(batch.lower),
        Timestamp(batch.upper),
        batch.rows,
        batch.size,
        len(batch.parts),
        float(dict(batch.meta).get("seconds", 0.0)),
    )


class Request(NamedTuple):
    """One call of `Collection.backup`. `is_lasting`: `address` outlives this process."""

    store: Store
    address: str
    is_lasting: bool = True
    full: bool = False
    token: str | None = None
    max_age: timedelta | None = None
    upload: Upload = upload_here
    progress: OnProgress | None = None


def require_token(token: str | None) -> None:
    """Raise `UsageError` unless `token` can name a backup. The state of the collection records it,
    and must stay readable."""
    if token is None:
        return
    if not isinstance(token, str):
        raise UsageError(f"token={token!r} is no text", "pass a str, or no token")
    if not token:
        raise UsageError("the token is empty", "name the backup, or pass no token")
    if len(token) > BACKUP_TOKEN_CHARS_MAX or not token.isprintable():
        raise UsageError(
            f"token={token[:100]!r}",
            f"pass printable characters, {BACKUP_TOKEN_CHARS_MAX} at most",
        )


def back_up(chains: Chains, request: Request) -> BackupInfo:
    """Back up as `Collection.backup` says."""
    store, token, full = request.store, request.token, request.full
    begun_by = token if full else None
    record = chains.begin(store.store_id, begun_by, first=lambda: _begin_anew(request))
    shard = chains.shard(record.chains[-1])
    done = None
    if token is not None:  # looks into each chain
        appended = (_appended_before(chain, token) for chain in chains.shards(record))
        done = next(filter(None, appended), None)
    if not full:
        chains.require_reached(record, shard, store)
        shard.require_newest()
    elif done is None and not record.is_begun_by(token) and not _is_unused(shard):
        record = chains.extend(record, token)
        shard = chains.shard(record.chains[-1])
    if record.drills and (proof := newest_proof(record.drills, shard.name)) is not None:
        store.holds.note_proof(request.address, Timestamp(proof.drilled_at))
    with ExitStack() as opened:
        for _ in range(BACKUP_ATTEMPTS):
            done = done or _appended_before(shard, token)
            if done is not None:
                return info(done)
            request = _caught_up(request, shard.upper, opened)
            hold = _take_hold(request, record.hold_name, shard)
            try:
                return _append_windows(shard, request, hold, opened)
            except (UpperMismatchError, _Overtaken):  # another script was faster
                shard.refresh()
    raise LockedError(chains.where, "other scripts that back up at the same time")


def reached(store: Store, address: str) -> int:
    """The time below which the collection at `address` has every commit, as the store knows.

    0 where the store knows of no backup to `address`. After a crash the time may be earlier,
    because the newest moves of the hold may be lost.
    """
    return max((int(hold.reached or 0) for hold in _holds(store, address)), default=0)


# -- before ----------------------------------------------------------------------------------


def _holds(store: Store, address: str) -> Sequence[HoldRecord]:
    """The holds that backups to `address` have taken."""
    return [hold for hold in store.holds.all() if hold.kind == BACKUP and hold.address == address]


def _begin_anew(request: Request) -> None:
    """Check, before the first backup at an address, that the source knows of no backups there.

    Raises `StatesLostError` if it does; a full backup drops the holds of those backups instead.
    """
    if not request.is_lasting:
        return
    for hold in _holds(request.store, request.address):
        if request.full:
            request.store.drop_hold(hold.name)
        elif hold.reached is not None:
            raise StatesLostError(
                request.address,
                found=0,
                known=hold.reached,
                remedy="look whether the disk is mounted, and put the collection back; "
                "backup(store, full=True) begins it anew",
            )


def _appended_before(shard: Shard, token: str | None) -> ShardBatch | None:
    """The batch that an earlier call with this token appended."""
    if token is None:
        return None
    return next((b for b in shard.refresh().batches if ("token", token) in b.meta), None)


def _is_unused(shard: Shard) -> bool:
    """Whether nothing was ever appended to a chain."""
    return not shard.upper and not witness.seqnos(shard.blob, shard.name)


def _caught_up(request: Request, upper: int, opened: ExitStack) -> Request:
    """The request. If its handle is of an earlier moment than `upper`, which another script has
    reached, it gets a newer handle beside the owner."""
    if upper <= request.store.upper or (owner := client_of(request.store)) is None:
        return request
    return request._replace(store=opened.enter_context(as_store(owner)))


def _take_hold(request: Request, name: str, shard: Shard) -> Hold:
    """Take the collection's hold on its source, at the chain's upper. The next sync makes it
    durable.

    Raises `HistoryGoneError` if the source no longer has the history that follows the chain,
    `UsageError` if it lacks commits of the chain, or has older ones that the chain lacks.
    """
    # Check before taking the hold: moving it lets GC drop the commits that this check looks for.
    newest = next((batch.parts for batch in reversed(shard.state.batches) if batch.parts), ())
    _require_commits(request.store, newest)
    _require_copied(request.store, shard, newest)
    lower = shard.upper
    try:
        return request.store.hold(
            name,
            at=lower - 1 if lower else None,
            max_age=request.max_age,
            durable=False,
            kind=BACKUP,
            address=request.address,
        )
    except HistoryGoneError as error:
        raise _chain_broken(lower - 1, error.since) from error


def _require_commits(store: Store, parts: Sequence[ShardPart]) -> None:
    """Raise `UsageError` if the source lacks the newest commit in `parts`, which it once had."""
    last = max((part.time_max for part in parts), default=0)
    if last and store.replication.has_commit(last) is False:
        raise UsageError(
            f"{store.path} lacks the commit of {Timestamp(last)} that was backed up: it was put "
            "back from an older copy",
            "restore the collection to get the lost commits back; backup(store, full=True) begins "
            "another chain with the present ones",
        )


def _require_copied(store: Store, shard: Shard, newest: Sequence[ShardPart]) -> None:
    """Raise `UsageError` if the source has a commit below the chain's upper that the chain lacks.

    `newest` are the parts of the newest batch that has rows: no commit of the chain is newer.
    Where history was given up, the newest commits may be gone from the chain.
    """
    last = max((part.time_max for part in newest), default=0)
    if not shard.upper:
        return
    found = store.replication.first_change(max(last, shard.since), shard.upper - 1)
    if found is not None:
        raise UsageError(
            f"{store.path} has the commit of {found}, which the backups lack, although they reach "
            f"up to {Timestamp(shard.upper)}: another copy of the store was backed up here",
            "back up each copy into a collection of its own; backup(store, full=True) begins "
            "another chain with all commits of this one",
        )


# -- appending -------------------------------------------------------------------------------


class _Overtaken(Exception):  # noqa: N818  # a signal to `back_up`, which takes the hold again
    """Another script has taken the hold of this backup, or has begun the history of the chain."""


def _append_windows(shard: Shard, request: Request, hold: Hold, opened: ExitStack) -> BackupInfo:
    """Finish the window that a killed backup began, if there is one, and append the next.

    Raises `UpperMismatchError` or `_Overtaken` if another script was faster: try again.
    """
    chain, done = shard.name, None
    with _undoing(hold):
        has_records, begun = find(shard.blob, chain, shard.upper)
        if begun is not None:
            request = _caught_up(request, begun.upper, opened)
            _require_commits(request.store, begun.parts)
        upper = int(request.store.sync())
    if begun is not None and _held_at(hold) < begun.upper:
        done = _append_window(shard, request, hold, begun, token=None)
    if upper > shard.upper:
        fresh = Attempt.begin(shard.blob, chain, shard.upper, upper)
        newest = _append_window(shard, request, hold, fresh, token=request.token)
        done = newest if done is None else _together(done, newest)
        has_records = has_records or bool(fresh.recorded)
    if done is None:
        return BackupInfo(Timestamp(shard.upper), Timestamp(upper), 0, 0, 0, 0.0)
    if has_records:
        forget(shard.blob, chain, below=done.upper)
    # The backup is made. The next one collects the versions that stay after a failure.
    with suppress(*FAILURES):
        shard.collect_if_due()
    # Another script that has taken the hold meanwhile keeps for itself the history it needs.
    with suppress(FencedError):
        hold.move(done.upper - 1, durable=False, reached=done.upper)
    return done


def _append_window(
    shard: Shard, request: Request, hold: Hold, attempt: Attempt, *, token: str | None
) -> BackupInfo:
    started = time.perf_counter()
    lower, upper = attempt.lower, attempt.upper
    with _undoing(hold, attempt):
        retention = None if lower else shard.critical(RETENTION)
        try:
            whole_since, uploaded = request.upload(request.store, shard, attempt, request.progress)
        except HistoryGoneError as error:
            raise _chain_broken(lower - 1, error.since) from error
        may_append = retention is None or _begins_at(retention, min(whole_since, upper - 1))
    meta = (("seconds", f"{time.perf_counter() - started:.3f}"), ("token", token or ""))
    batch = replace(uploaded, parts=(*attempt.parts, *uploaded.parts), meta=meta)
    try:
        if not may_append:
            raise _Overtaken
        shard.writer().compare_and_append(batch, token=token)
    except (UpperMismatchError, _Overtaken):
        own = tuple(part for part in batch.parts if part.name not in attempt.recorded)
        delete_batch(shard.blob, replace(batch, parts=own))
        raise
    shard.leave_witness()
    return info(batch)


def _begins_at(retention: Critical, since: int) -> bool:
    """Have the history of a chain begin at `since`. False, with nothing done, if another script has
    done so since `retention` was read: a later `since` would take instants from its backup."""
    try:
        retention.downgrade(since, opaque=secrets.token_bytes(8))
    except OpaqueMismatchError:
        return False
    return True


def _held_at(hold: Hold) -> int:
    try:
        return int(hold.timestamp)
    except FencedError as error:
        raise _Overtaken from error


@contextmanager
def _undoing(hold: Hold, attempt: Attempt | None = None) -> Iterator[None]:
    """Release a new hold where the block fails and has recorded no part for the next backup.

    Otherwise the source would keep history for a backup that was never made.
    """
    try:
        yield
    except BaseException:
        if hold.is_new and not (attempt is not None and attempt.recorded):
            with suppress(KVStoreError):  # the first error is the one to raise
                hold.release()
        raise


def _together(first: BackupInfo, second: BackupInfo) -> BackupInfo:
    """Two windows of one call as one."""
    sums = (a + b for a, b in zip(first[2:6], second[2:6], strict=True))
    return BackupInfo(first.lower, second.upper, *sums)  # type: ignore[arg-type]


def _chain_broken(needed: int, since: int) -> HistoryGoneError:
    return HistoryGoneError(
        as_of=Timestamp(needed),
        since=Timestamp(since),
        remedy="the chain is broken: backup(store, full=True) begins another; "
        "the present chain stays restorable",
    )
