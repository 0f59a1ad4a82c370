"""The metrics of a store: name, kind, unit and meaning of each, and their values at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from kvstore.base.clock import Durations
from kvstore.base.meters import Meters
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.engine.api import FAMILIES, WHOLE_FIGURES
from kvstore.limits import LAG_COMMITS_MAX
from kvstore.timeline.holds import BACKUP, FEED, HoldRecord
from kvstore.timeline.parts import Parts

if TYPE_CHECKING:
    from kvstore.tasks import QueueSize


# --------------------------------------------------------------------------------------------------
# The metrics of a store: name, kind, unit and meaning of each. The reference lists the same table.
#
# Names follow Prometheus: `kvstore_`, the thing, its unit; counters end in `_total`.

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric. Each value of it has a text for each of `labels`. Its unit is `seconds`, `bytes`,
    or what it counts; a metric that is 1 or 0 has none."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()


_GAUGES: Final = (
    ("since_timestamp_seconds", "seconds", "The oldest readable time, since the epoch.", ()),
    ("upper_timestamp_seconds", "seconds", "The first time that is not complete.", ()),
    ("durable_timestamp_seconds", "seconds", "All changes below this time survive a crash.", ()),
    ("history_seconds", "seconds", "The age of the oldest readable time.", ()),
    ("staleness_seconds", "seconds", "The age of the newest complete time.", ()),
    ("not_durable_seconds", "seconds", "The time that is complete and not durable.", ()),
    ("healthy", "", "1 while the store takes calls, 0 after a failed write.", ()),
    ("owned", "", "1 where this process takes the commits, 0 where it only reads.", ()),
    ("guests", "guest", "The handles that are guests of the shared store.", ()),
    ("owner_age_seconds", "seconds", "The time since the shared store has its owner.", ()),
    ("claims", "claim", "The holds and pins that keep history.", ("kind",)),
    ("lost_holds", "hold", "The holds that garbage collection has passed.", ()),
    ("claim_age_seconds", "seconds", "The age of the time that a hold keeps.", ("kind", "name")),
    ("oldest_claim_seconds", "seconds", "The age of the oldest time that is kept.", ("kind",)),
    (
        "feed_lag_seconds",
        "seconds",
        "The time between a feed's position and `upper`.",
        ("feed",),
    ),
    (
        "feed_lag_changes",
        "change",
        "The changes after a feed's position, counted in the newest 1,000 commits at most.",
        ("feed",),
    ),
    (
        "history_bytes",
        "bytes",
        "The bytes of the change index, estimated by time: free, or kept by a claim.",
        ("state",),
    ),
    (
        "backup_behind_seconds",
        "seconds",
        "The age of the newest instant in a backup that lacks commits, 0 for one that has all.",
        ("backup",),
    ),
    (
        "backup_proof_age_seconds",
        "seconds",
        "The time since a drill last restored a backup, as this process knows.",
        ("backup",),
    ),
    ("imports", "import", "The imports that have rows of their own.", ("state",)),
    (
        "pushes_pending",
        "push",
        "The events of a log of pushes that the store has not taken, as its worker last saw.",
        ("pushes",),
    ),
    (
        "tasks",
        "task",
        "The tasks of an open queue: available now, or later because they wait or are claimed.",
        ("queue", "state"),
    ),
    ("cleared_spans", "span", "The spans that were destroyed since the last collection.", ()),
    ("range_fragments", "fragment", "The pieces of range tombstones in memory.", ()),
    ("disk_bytes", "bytes", "The bytes in sorted files.", ("family",)),
    ("memtable_bytes", "bytes", "The bytes that are not flushed.", ("family",)),
    ("files", "file", "The sorted files.", ("family",)),
    ("entries", "entry", "The entries, estimated.", ("family",)),
    ("cache_bytes", "bytes", "The bytes in the block cache.", ()),
    ("value_cache_bytes", "bytes", "The bytes in the cache of newest values.", ()),
    ("pending_compaction_bytes", "bytes", "The bytes that compaction has yet to rewrite.", ()),
    ("compactions_running", "compaction", "The compactions under way.", ()),
    ("flushes_running", "flush", "The flushes under way.", ()),
    ("writes_stopped", "", "1 while writes wait for a compaction or a flush.", ()),
)

_COUNTERS: Final = (
    ("commits_total", "commit", "Commits.", ()),
    ("changes_total", "change", "Changes of keys and spans in commits.", ()),
    ("conflicts_total", "conflict", "Transactions that another commit called off.", ()),
    ("imports_added_total", "import", "Imports that became visible.", ()),
    ("imports_reverted_total", "import", "Imports that were reverted.", ()),
    (
        "takeovers_total",
        "takeover",
        "How often another process became the owner of the shared store.",
        (),
    ),
    ("clears_total", "span", "Spans that were destroyed.", ()),
    ("collected_entries_total", "entry", "Entries that garbage collection removed.", ()),
    ("write_stops_total", "stop", "Stops of writes until a compaction or a flush ends.", ()),
    ("passes_total", "pass", "Long passes over rows, by the way that they were read.", ("way",)),
    ("value_cache_hits_total", "read", "Reads of one key that the cache answered.", ()),
    ("value_cache_misses_total", "read", "Reads of one key that the cache did not answer.", ()),
    ("requests_total", "request", "Requests of clients to servers in this process.", ("result",)),
    ("background_failures_total", "failure", "Failures of work in the background.", ("work",)),
)

_HISTOGRAMS: Final = (
    ("fsync_seconds", "seconds", "The durations of fsyncs.", ()),
    ("collection_seconds", "seconds", "The durations of garbage collections.", ()),
)


def _defined() -> dict[str, MetricDefinition]:
    kinds: tuple[tuple[MetricKind, tuple[tuple[str, str, str, tuple[str, ...]], ...]], ...] = (
        ("counter", _COUNTERS),
        ("gauge", _GAUGES),
        ("histogram", _HISTOGRAMS),
    )
    return {
        name: MetricDefinition(f"kvstore_{name}", kind, unit, text, labels)
        for kind, group in kinds
        for name, unit, text, labels in group
    }


DEFINITIONS: Final = _defined()
"""The metrics, by name without the prefix."""


# --------------------------------------------------------------------------------------------------
# The values of the metrics of one store at one moment.
#
# Invariants
# 1. Every metric of `DEFINITIONS` is in a snapshot. One with labels may have no value.
# 2. A snapshot keeps no commit waiting. It reads no entry of the store but, for feeds that are
#    behind, the headers of at most `LAG_COMMITS_MAX` commits together, and the oldest header.

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
    yield "owned", (), int(parts.committer.policy.records is None)
    yield "guests", (), stats.get("guests", 0)
    yield "owner_age_seconds", (), stats.get("role_age_s") or 0.0
    yield "takeovers_total", (), stats.get("takeovers", 0)
    adding = stats["imports_adding"]
    yield "imports", ("adding",), adding
    yield "imports", ("added",), stats["imports"] - adding
    yield "cleared_spans", (), stats["clears"]
    yield "range_fragments", (), stats["range_fragments"]
    for way, count in parts.versions.passes.items():
        yield "passes_total", (way,), count
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
