"""The values of the metrics of one store at one moment.

Invariants
1. Every metric of `DEFINITIONS` is in a snapshot. One with labels may have no value.
2. A snapshot keeps no commit waiting. It reads no entry of the store but, for feeds that are
   behind, the headers of at most `LAG_COMMITS_MAX` commits together, and the oldest header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvstore.claims import BACKUP, FEED, HoldRecord
from kvstore.clock import Durations
from kvstore.engine.api import FAMILIES, WHOLE_FIGURES
from kvstore.limits import LAG_COMMITS_MAX
from kvstore.meters import Meters
from kvstore.metrics.definitions import DEFINITIONS, MetricDefinition
from kvstore.parts import Parts
from kvstore.timestamp import NS_PER_SECOND

if TYPE_CHECKING:
    from kvstore.tasks import QueueSize

_HOLDS_MAX: Final = 1000
"""The oldest holds alone have a value of their own, so that a scrape is bounded."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram: how many durations were at most as long as each bound, in seconds
    (the last bound is infinite), and the sum of all."""

    buckets: tuple[tuple[float, int], ...]
    total: float

    @property
    def count(self) -> int:
        """The number of durations."""
        return self.buckets[-1][1]


LabelTexts: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its values: a number, or a `Distribution`, for each combination of labels."""

    definition: MetricDefinition
    values: Mapping[LabelTexts, float | Distribution]

    @property
    def name(self) -> str:
        """The full name."""
        return self.definition.name

    @property
    def value(self) -> Any:
        """The value of a metric without labels."""
        return self.values[()]


def metrics_of(
    parts: Parts, stats: Mapping[str, Any], queues: Mapping[str, QueueSize]
) -> dict[str, Metric]:
    """The metrics of a store, by full name. `stats` are the figures of `Store.stats`, and `queues`
    the queues of tasks that are open."""
    found: dict[str, dict[LabelTexts, float | Distribution]] = {name: {} for name in DEFINITIONS}
    for name, labels, value in chain(_values(parts, stats), _tasks(queues)):
        found[name][labels] = value
    metrics = (Metric(DEFINITIONS[name], values) for name, values in found.items())
    return {metric.name: metric for metric in metrics}


_Value: TypeAlias = "tuple[str, LabelTexts, float | Distribution]"


def _values(parts: Parts, stats: Mapping[str, Any]) -> Iterator[_Value]:
    first = _first_commit(parts)
    begin = parts.committer.since or first or parts.committer.now()
    yield from _times(parts, begin)
    yield from _claims(parts, begin)
    yield from _history(parts, stats, first or parts.committer.upper)
    yield from _counted(parts.committer.meters)
    adding = stats["imports_adding"]
    yield "imports", ("adding",), adding
    yield "imports", ("added",), stats["imports"] - adding
    yield "cleared_spans", (), stats["clears"]
    yield "range_fragments", (), stats["range_fragments"]
    newest = parts.versions.newest
    yield "value_cache_bytes", (), newest.size
    yield "value_cache_hits_total", (), newest.hits
    yield "value_cache_misses_total", (), newest.misses
    for work in ("gc", "tasks"):
        yield "background_failures_total", (work,), stats[f"{work}_failures"]
    for work, failures in list(parts.committer.meters.watched.items()):
        yield "background_failures_total", (work,), failures
    for family in FAMILIES:
        yield "disk_bytes", (family,), stats[f"{family}_bytes"]
        for figure in ("memtable_bytes", "files", "entries"):
            yield figure, (family,), stats[f"{family}_{figure}"]
    for figure in WHOLE_FIGURES:
        yield figure if figure in DEFINITIONS else f"{figure}_total", (), stats[figure]


def _tasks(queues: Mapping[str, QueueSize]) -> Iterator[_Value]:
    for queue, size in queues.items():
        yield "tasks", (queue, "available"), size.available
        yield "tasks", (queue, "later"), size.total - size.available


def _first_commit(parts: Parts) -> int:
    """The time of the oldest commit whose changes are kept, 0 if there is none."""
    committer = parts.committer
    first, *_ = next(parts.index.headers(since=committer.since, upto=committer.upper - 1), (0,))
    return first


def _times(parts: Parts, begin: int) -> Iterator[_Value]:
    """The frontiers, and their ages. History begins at `begin`: a store that was never collected is
    readable from 1970 on, and has nothing below its first commit."""
    committer = parts.committer
    upper, durable = committer.upper, committer.durable
    since, now = committer.since, committer.now()
    for name, timestamp in (("since", since), ("upper", upper), ("durable", durable)):
        yield f"{name}_timestamp_seconds", (), timestamp / NS_PER_SECOND
    yield "history_seconds", (), _seconds(now - begin)
    yield "staleness_seconds", (), _seconds(now - upper)
    yield "not_durable_seconds", (), _seconds(upper - durable)
    yield "healthy", (), int(committer.frontiers.is_sound)


def _claims(parts: Parts, begin: int) -> Iterator[_Value]:
    """The claims with their ages. A claim on times below `begin` keeps what begins there."""
    now, upper = parts.committer.now(), parts.committer.upper
    holds = parts.holds.all()
    needing = parts.holds.needing()  # oldest first
    yield "lost_holds", (), sum(hold.lost for hold in holds)
    for kind, count in Counter(claim.kind for claim in needing).items():
        yield "claims", (kind,), count
    oldest: dict[str, HoldRecord] = {}
    for claim in needing:
        oldest.setdefault(claim.kind, claim)
    for kind, claim in oldest.items():
        yield "oldest_claim_seconds", (kind,), _seconds(now - max(claim.timestamp, begin))
    lags: dict[str, float] = {}
    positions: dict[str, int] = {}
    kept = sorted((hold for hold in holds if not hold.lost), key=lambda hold: hold.timestamp)
    for hold in kept[:_HOLDS_MAX]:
        yield (
            "claim_age_seconds",
            (hold.kind, hold.name),
            _seconds(now - max(hold.timestamp, begin)),
        )
        if hold.kind == FEED:  # oldest first: the slowest of several workers counts
            lags.setdefault(hold.address, _seconds(upper - 1 - max(hold.timestamp, begin)))
            positions.setdefault(hold.address, hold.timestamp)
    for feed, lag in lags.items():
        yield "feed_lag_seconds", (feed,), lag
    yield from _changes_behind(parts, positions)
    for hold in kept[:_HOLDS_MAX]:
        if hold.kind == BACKUP:
            lacking = parts.oldest_lacking(hold.timestamp, upper - 1)
            behind = 0 if lacking is None else now - hold.timestamp
            yield "backup_behind_seconds", (hold.address,), _seconds(behind)
    for address, at in list(parts.holds.proofs.items()):
        yield "backup_proof_age_seconds", (address,), _seconds(now - at)


def _changes_behind(parts: Parts, positions: Mapping[str, int]) -> Iterator[_Value]:
    """The changes that each feed has before it. One pass over the index, newest part first."""
    upto, changes, commits = parts.committer.upper - 1, 0, 0
    for feed, position in sorted(positions.items(), key=itemgetter(1), reverse=True):
        if position < upto and commits < LAG_COMMITS_MAX:
            headers = parts.index.headers(since=position, upto=upto)
            for _, events, _ in islice(headers, LAG_COMMITS_MAX - commits):
                commits, changes = commits + 1, changes + events
            upto = position
        yield "feed_lag_changes", (feed,), changes


def _history(parts: Parts, stats: Mapping[str, Any], first: int) -> Iterator[_Value]:
    """The bytes of the change index, of which a collection takes the part below all claims."""
    upper = parts.committer.upper
    oldest = min((claim.timestamp for claim in parts.holds.needing()), default=upper)
    free = min(max(oldest - first, 0) / max(upper - first, 1), 1.0)
    whole = stats["changes_bytes"] + stats["changes_memtable_bytes"]
    yield "history_bytes", ("free",), whole * free
    yield "history_bytes", ("kept",), whole * (1 - free)


def _counted(meters: Meters) -> Iterator[_Value]:
    for name in ("commits", "changes", "conflicts", "imports_added", "imports_reverted"):
        yield f"{name}_total", (), getattr(meters, name)
    yield "clears_total", (), meters.clears
    yield "requests_total", ("answered",), meters.requests
    yield "requests_total", ("failed",), meters.requests_failed
    for address, count in list(meters.pushes_pending.items()):
        yield "pushes_pending", (address,), count
    yield "collected_entries_total", (), meters.collected_entries
    yield "fsync_seconds", (), _distribution(meters.fsyncs)
    yield "collection_seconds", (), _distribution(meters.collections)


def _distribution(durations: Durations) -> Distribution:
    total, passed = durations.total, 0
    buckets = []
    for bound, count in zip((*durations.bounds, float("inf")), durations.counts, strict=True):
        passed += count
        buckets.append((bound, passed))
    return Distribution(tuple(buckets), total)


def _seconds(nanoseconds: int) -> float:
    return max(nanoseconds, 0) / NS_PER_SECOND
