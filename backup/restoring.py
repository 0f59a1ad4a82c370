"""One restore of a collection into a new store, from its plan to the store at its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from backup.chains import Chains, no_backup
from backup.expiring import expiries_outside, with_expiries
from backup.pieces import (
    FETCHED,
    PieceSource,
    RestorePlan,
    add_pieces,
    begin,
    build_pieces,
    read_plan,
)
from backup.place import CollectionPlace
from backup.restore import Build, restore_store
from backup.shard import AsOf, OnProgress, Shard, ShardSnapshot, Storage, Tally, View, Window
from backup.shard.rows.part_reader import touches
from backup.sharing import require_workers
from bulk.places import appearing
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.opening import building
from kvstore.span import Span
from kvstore.timestamp import Timestamp


class Restored(Timestamp):
    """The newest instant of a restored store. The store is readable from `since` on, and has
    `rows` versions and range deletes."""

    since: Timestamp
    rows: int

    @classmethod
    def of(cls, newest: int, since: int, rows: int) -> Restored:
        """The report of a restore."""
        made = cls(newest)
        made.since, made.rows = Timestamp(since), rows
        return made


class RestoreRequest(NamedTuple):
    """One call of `Collection.restore`. `build` is None where the pieces are built here."""

    path: Path
    as_of: int | None
    span: Span
    history: bool
    resume: bool
    workers: int | None
    progress: OnProgress | None
    build: Build | None


def restore(
    found: CollectionPlace, chains_of: Callable[[Storage], Chains], request: RestoreRequest
) -> Restored:
    """Restore as `Collection.restore` says. `chains_of` opens the chains on a storage."""
    workers = require_workers(request.workers)
    if workers > 1 and found.address is None:
        raise UsageError(
            f"workers={workers}: other processes cannot open the collection",
            "leave workers out, or open the collection by a path or URL of a lasting storage",
        )
    if request.build is not None:
        if request.resume or workers > 1:
            raise UsageError("build= takes no resume= and no workers=", "leave them out")
        return _restore_by(request.build, chains_of(found.storage), request)
    with appearing(request.path, task="restore", resume=request.resume) as directory:
        return _restore_in(directory, found, chains_of, request, workers)


def _restore_by(build: Build, chains: Chains, request: RestoreRequest) -> Restored:
    with chains.snapshot(request.as_of) as (shard, snapshot):
        view, since = _view(shard, snapshot, request)
        tally = Tally(request.progress)
        files = with_expiries(build, snapshot, view, request.span, tally)
        restore_store(request.path, files, since=since, as_of=snapshot.as_of)
    return Restored.of(snapshot.as_of, since, tally.rows)


def _restore_in(
    directory: Path,
    found: CollectionPlace,
    chains_of: Callable[[Storage], Chains],
    request: RestoreRequest,
    workers: int,
) -> Restored:
    storage, address = found.storage, found.address
    if request.resume and not found.is_local:
        storage = found.fetching(directory / FETCHED)
        address = None if address is None else address.fetching(directory / FETCHED)
    chains = chains_of(storage)
    span, history, at = request.span, request.history, request.as_of
    record, old = chains.read(), read_plan(directory)
    if record is None:
        raise no_backup(chains.where)
    wanted = RestorePlan.of(record.collection_id, "", at or 0, history, span)
    if at is None and old is not None and old.is_of(wanted.at(old.as_of, old.chain)):
        at = old.as_of  # the newest instant when the restore began
    with chains.snapshot(at) as (shard, snapshot):
        view, since = _view(shard, snapshot, request)
        wanted = wanted.at(snapshot.as_of, shard.name)
        tally = Tally(request.progress, _rows_at_most(snapshot, span))
        tally.add(0)
        is_begun = old is not None and old.is_of(wanted)
        plan = old if old and is_begun else begin(directory, wanted, snapshot, workers)
        how = PieceSource(storage.blob, address, workers, tally)
        pieces = build_pieces(directory, plan, snapshot, view, since, how)
        for left in ("store", "expiries"):
            shutil.rmtree(directory / left, ignore_errors=True)
        since = max(piece.since for piece in pieces)
        with building(directory / "store", since=since, newest=snapshot.as_of) as builder:
            add_pieces(directory, builder, pieces)
            for built in expiries_outside(snapshot, view, span, directory, tally):
                builder.add(built.files, built.tombstones)
    return Restored.of(snapshot.as_of, since, sum(piece.rows for piece in pieces))


def _rows_at_most(snapshot: ShardSnapshot, span: Span) -> int:
    parts = (part for batch in snapshot.batches for part in batch.parts)
    return sum(part.rows for part in parts if touches(part, span))


def _view(shard: Shard, snapshot: ShardSnapshot, request: RestoreRequest) -> tuple[View, int]:
    """The rows to restore, and the time from which they are whole. Raises `HistoryGoneError` for a
    time before the first row: an empty store would hide the mistake."""
    at = snapshot.as_of
    parts = [part for batch in shard.state.batches for part in batch.parts]
    first = min((part.time_min for part in parts), default=0)
    if at < first:
        raise HistoryGoneError(
            as_of=Timestamp(at),
            since=Timestamp(first),
            remedy=f"the first row of the collection is of {Timestamp(first)}: restore as of that "
            "time or later",
        )
    # Below `since` there are states at kept instants, and no history between them.
    if request.history and at >= shard.since:
        return Window(-1, at), shard.since
    return AsOf(at), at
