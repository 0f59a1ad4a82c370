"""Expiry of a collection: it gives up old history. Scrub: it looks through the blobs.

Expiry goes in an order that survives a kill at any step. The record of the collection first lists
an ended chain as `dropping`, then its data is removed, then the record forgets it. The next expiry
continues where a killed one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from backup.chains import RETENTION, Chains, CollectionRecord
from backup.shard import EMPTY, OnProgress, Shard
from backup.shard.scrub import ScrubReport
from backup.uploads import forget, pending_parts
from kvstore.arguments import require_age
from kvstore.clock import WallClock
from kvstore.errors import StatesLostError, UpperMismatchError, UsageError
from kvstore.storage.contract import Blob, sweep
from kvstore.timestamp import NS_PER_SECOND, TimeLike, to_timestamp


def ago(age: timedelta, clock: WallClock) -> int:
    """The time that long ago."""
    return clock.wall_ns() - int(age.total_seconds() * NS_PER_SECOND)


def limit_of(before: TimeLike | None, keep: timedelta | None, clock: WallClock) -> int:
    """The time below which instants are given up. `UsageError` unless one of two is given."""
    age = require_age(keep, name="keep")
    if (before is None) == (age is None):
        raise UsageError("expire takes before= or keep=", "pass one of the two")
    if age is not None:
        return ago(age, clock)
    assert before is not None
    return int(to_timestamp(before, name="before", now=clock.wall_ns))


def expire(chains: Chains, limit: int, progress: OnProgress | None) -> int:
    """Give up instants before `limit`; returns the new `since`, 0 for an empty collection."""
    record = chains.read()
    shards = chains.filled(record)
    if record is None or not shards:
        return 0
    newest = shards[-1]
    _drop_ended(chains, record, shards[:-1], limit)
    target = min(limit, newest.upper - 1)
    newest.expire_lapsed()
    if target > newest.since:
        newest.critical(RETENTION).downgrade(target)
    newest.compact(full=True, progress=progress)
    newest.gc()
    return newest.refresh().since


def _drop_ended(
    chains: Chains, record: CollectionRecord, older: Sequence[Shard], limit: int
) -> None:
    """Remove the chains that ended before `limit`."""
    ended = {shard.name for shard in older if shard.upper <= limit}
    if ended:
        record = chains.drop(record, ended)
    destroyed = {name for name in record.dropping if _is_destroyed(chains, name)}
    if destroyed:
        chains.forget(record, destroyed)


def _is_destroyed(chains: Chains, name: str) -> bool:
    """Remove the data of a dropped chain; False if that is left to the next expiry."""
    shard = chains.find(name)
    if shard is None:
        return True
    forget(shard.blob, name)
    shard.expire_lapsed()
    if shard.since != EMPTY:
        shard.critical(RETENTION).downgrade(EMPTY)
    if shard.since != EMPTY:
        return False  # a restore is reading it
    if shard.upper != EMPTY:
        with suppress(UpperMismatchError):  # another script was faster
            shard.writer().progress(EMPTY)
    if shard.refresh().upper != EMPTY:
        return False  # a backup that began before is writing to it
    shard.finalise()
    return True


def scrub(chains: Chains, blob: Blob, before_ns: int | None) -> ScrubReport:
    """Compare the names in all chains with the blobs; see `Collection.scrub`.

    Orphans made before `before_ns` are deleted, with the remains of crashed writes.
    """
    if before_ns is not None:
        sweep(blob, before_ns=before_ns)
    found = [
        shard.scrub(
            delete_orphans_before_ns=before_ns,
            pending=pending_parts(shard.blob, shard.name, shard.upper),
        )
        for shard in chains.shards()
    ]
    return ScrubReport(
        missing=(*_lost_states(chains), *(name for report in found for name in report.missing)),
        altered=tuple(name for report in found for name in report.altered),
        orphans=tuple(name for report in found for name in report.orphans),
        deleted=tuple(name for report in found for name in report.deleted),
    )


def _lost_states(chains: Chains) -> Iterator[str]:
    """The newest states that are gone, each as a text for the report."""
    record = chains.read()
    yield from _lost(lambda: chains.require_named(record))
    for shard in chains.shards(record):
        yield from _lost(shard.require_newest)


def _lost(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except StatesLostError as error:
        yield f"{error.where}: {error.problem}"
