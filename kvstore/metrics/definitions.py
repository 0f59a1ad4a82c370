"""The metrics of a store: name, kind, unit and meaning of each. The reference lists the same table.

Names follow Prometheus: `kvstore_`, the thing, its unit; counters end in `_total`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric. Each value of it has a text for each of `labels`."""

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
    ("claims", "", "The holds and pins that keep history.", ("kind",)),
    ("lost_holds", "", "The holds that garbage collection has passed.", ()),
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
        "",
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
    ("imports", "", "The imports that have rows of their own.", ("state",)),
    (
        "pushes_pending",
        "",
        "The events of a log of pushes that the store has not taken, as its worker last saw.",
        ("pushes",),
    ),
    (
        "tasks",
        "",
        "The tasks of an open queue: available now, or later because they wait or are claimed.",
        ("queue", "state"),
    ),
    ("cleared_spans", "", "The spans that were destroyed since the last collection.", ()),
    ("range_fragments", "", "The pieces of range tombstones in memory.", ()),
    ("disk_bytes", "bytes", "The bytes in sorted files.", ("family",)),
    ("memtable_bytes", "bytes", "The bytes that are not flushed.", ("family",)),
    ("files", "", "The sorted files.", ("family",)),
    ("entries", "", "The entries, estimated.", ("family",)),
    ("cache_bytes", "bytes", "The bytes in the block cache.", ()),
    ("value_cache_bytes", "bytes", "The bytes in the cache of newest values.", ()),
    ("pending_compaction_bytes", "bytes", "The bytes that compaction has yet to rewrite.", ()),
    ("compactions_running", "", "The compactions under way.", ()),
    ("flushes_running", "", "The flushes under way.", ()),
    ("writes_stopped", "", "1 while writes wait for a compaction or a flush.", ()),
)

_COUNTERS: Final = (
    ("commits_total", "", "Commits.", ()),
    ("changes_total", "", "Changes of keys and spans in commits.", ()),
    ("conflicts_total", "", "Transactions that another commit called off.", ()),
    ("imports_added_total", "", "Imports that became visible.", ()),
    ("imports_reverted_total", "", "Imports that were reverted.", ()),
    ("clears_total", "", "Spans that were destroyed.", ()),
    ("collected_entries_total", "", "Entries that garbage collection removed.", ()),
    ("write_stops_total", "", "Stops of writes until a compaction or a flush ends.", ()),
    ("value_cache_hits_total", "", "Reads of one key that the cache answered.", ()),
    ("value_cache_misses_total", "", "Reads of one key that the cache did not answer.", ()),
    ("requests_total", "", "Requests of clients to servers in this process.", ("result",)),
    ("background_failures_total", "", "Failures of work in the background.", ("work",)),
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
