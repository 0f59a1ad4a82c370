"""Expiry of a collection: it gives up old history. Scrub: it looks through the blobs.

Labelled instants, and the instants that a thinning policy chooses, stay readable below `since`.

Expiry goes in an order that survives a kill at any step. The record of the collection first lists
an ended chain as `dropping`, then its data is removed, then the record forgets it. The next expiry
continues where a killed one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

from kvstore.backup.chains import LABEL, RETENTION, Chains, CollectionRecord, gone, labels_of
from kvstore.backup.shard import EMPTY, Shard
from kvstore.backup.shard.scrub import ScrubReport
from kvstore.backup.window import forget, pending_parts
from kvstore.base.arguments import AGE, integer
from kvstore.base.clock import WallClock
from kvstore.base.meters import OnProgress
from kvstore.base.timestamp import NS_PER_SECOND, AgeLike, Timestamp
from kvstore.errors import Argument, StatesLostError, UpperMismatchError, UsageError
from kvstore.limits import KEPT_INSTANTS_MAX
from kvstore.storage.contract import Blob, sweep


def ago(age: timedelta, clock: WallClock) -> int:
    """The time that long ago."""
    return clock.wall_ns() - int(age.total_seconds() * NS_PER_SECOND)


class ExpiryRequest(NamedTuple):
    """The instants to give up: those below `limit`, but `kept` ones and labelled ones."""

    limit: int
    kept: frozenset[int] = frozenset()


def request_of(
    before: int | None, keep: AgeLike | None, policy: Thinning | None, clock: WallClock
) -> ExpiryRequest:
    """The request of a call. Raises `UsageError` unless one of three arguments is given."""
    age = AGE.or_none.check("keep", keep)
    if sum(given is not None for given in (before, age, policy)) != 1:
        raise UsageError(
            (
                "expire takes ",
                Argument("before"),
                ", ",
                Argument("keep"),
                " or ",
                Argument("keep_within"),
            ),
            "pass one of the three",
        )
    if policy is not None:
        now_ns = clock.wall_ns()
        return ExpiryRequest(policy.since(now_ns), frozenset(policy.instants(now_ns)))
    if age is not None:
        return ExpiryRequest(ago(age, clock))
    assert before is not None
    return ExpiryRequest(before)


def expire(chains: Chains, request: ExpiryRequest, progress: OnProgress | None) -> int:
    """Give instants up; returns the new `since`, 0 for an empty collection.

    The kept instants are recorded first. So a kill leaves too much history at most, and the next
    expiry continues.
    """
    record = chains.read()
    shards = chains.filled(record)
    if record is None or not shards:
        return 0
    newest = shards[-1]
    for shard in shards:
        first = min((p.time_min for b in shard.state.batches for p in b.parts), default=0)
        shard.keep_instants(time for time in request.kept if time >= first)
    _drop_ended(chains, record, shards[:-1], request.limit)
    for shard in shards:
        if shard is newest or shard.kept or shard.state.slots:
            _give_up(shard, min(request.limit, shard.upper - 1), progress)
    return newest.refresh().since


def _give_up(shard: Shard, target: int, progress: OnProgress | None) -> None:
    """Move the `since` of a chain, and free the space of the history below it."""
    shard.expire_lapsed()
    if target > shard.since:
        shard.critical(RETENTION).downgrade(target)
    shard.compact(full=True, progress=progress)
    shard.gc()


def _drop_ended(
    chains: Chains, record: CollectionRecord, older: Sequence[Shard], limit: int
) -> None:
    """Remove the chains that ended before `limit` and keep no instant."""
    ended = {shard.name for shard in older if shard.upper <= limit and not shard.kept}
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


def require_free(chains: Chains, name: str, *, is_repeated: bool) -> None:
    """Raise `UsageError` if no new instant can get a label. A repeated backup may have given it."""
    LABEL.check("label", name)
    other = labels_of(chains.filled()).get(name)
    if other is not None and not is_repeated:
        raise _taken(chains, name, other)


def _taken(chains: Chains, name: str, other: int) -> UsageError:
    return UsageError(
        f"{chains.where} has the label {name!r} at {other}",
        "drop it first (`kvstore backup label COLLECTION NAME --drop`), or take another name",
    )


def label(chains: Chains, name: str, at: int | None) -> Timestamp:
    """See `Collection.label`."""
    LABEL.check("name", name)
    known = labels_of(chains.filled())
    with chains.snapshot(at) as (shard, snapshot):
        instant = Timestamp(snapshot.as_of)
        if known.get(name, instant) == instant and (found := shard.label(name, instant)).done:
            return instant
        other = known.get(name, instant)
    if other == instant and found.instant is None:
        raise gone(chains.filled(), instant)
    raise _taken(chains, name, other)


def unlabel(chains: Chains, name: str) -> Timestamp:
    """See `Collection.unlabel`."""
    for shard in chains.filled():
        found = shard.drop_label(name)
        if found.done and found.instant is not None:
            return Timestamp(found.instant)
    known = ", ".join(sorted(labels_of(chains.filled())))
    raise UsageError(
        f"{chains.where} has no label {name!r}",
        f"its labels are {known}" if known else "it has no labels",
    )


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


# --------------------------------------------------------------------------------------------------
# Thinning: which instants of old history stay readable, beyond the time for which all do.
#
#     keep_within   every instant of this long is readable
#     hourly=n      and the states at the last n whole hours
#     daily=n       and at the last n midnights
#     weekly=n      and at the last n midnights before a Monday, all of them UTC
#
# The state at a whole hour has the commits up to it. So it is the last state of the hour before. An
# instant that one run has kept is found again by the next run, until it is too old.

_HOUR: Final = 3600 * NS_PER_SECOND
_DAY: Final = 24 * _HOUR
_WEEK: Final = 7 * _DAY
_FIRST_MONDAY: Final = 4 * _DAY
"""1970-01-05: the first day of 1970 was a Thursday."""


class Thinning(NamedTuple):
    """A policy. See the module."""

    keep_within: timedelta
    hourly: int = 0
    daily: int = 0
    weekly: int = 0

    def since(self, now_ns: int) -> int:
        """The time from which every instant stays readable."""
        return max(now_ns - int(self.keep_within.total_seconds() * NS_PER_SECOND), 0)

    def instants(self, now_ns: int) -> set[int]:
        """The instants to keep."""
        return {
            *_last(now_ns, self.hourly, _HOUR, 0),
            *_last(now_ns, self.daily, _DAY, 0),
            *_last(now_ns, self.weekly, _WEEK, _FIRST_MONDAY),
        }


def thinning_of(
    keep_within: AgeLike | None, *, hourly: int, daily: int, weekly: int
) -> Thinning | None:
    """The policy that a caller gave, if any. Raises `UsageError` for another argument."""
    counts = {"hourly": hourly, "daily": daily, "weekly": weekly}
    for name, count in counts.items():
        integer(0, KEPT_INSTANTS_MAX).check(name, count)
    age = AGE.or_none.check("keep_within", keep_within)
    if age is not None:
        return Thinning(age, **counts)
    if any(counts.values()):
        raise UsageError(
            ("hourly, daily and weekly need ", Argument("keep_within")),
            "pass it, or leave them out",
        )
    return None


def _last(now_ns: int, count: int, step: int, first: int) -> Iterator[int]:
    newest = (now_ns - first) // step * step + first
    return (time for n in range(count) if (time := newest - n * step) > 0)
