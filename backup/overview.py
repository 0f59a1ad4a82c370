"""A collection at a glance: its chains, their sizes, and how much a disaster now would lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backup.chains import CollectionRecord
from backup.shard import Shard, ShardBatch
from kvstore.span import Span
from kvstore.timestamp import NS_PER_SECOND, Timestamp


class CollectionInfo(NamedTuple):
    """A collection at a glance.

    `spans` has one span for each chain with keys. All keys of the chain lie in it; its ends are
    rounded outwards where keys are long. `recovery_point_age_seconds` is the age of the newest
    instant that can be restored: a disaster now would lose all later commits.
    """

    url: str
    source: str | None
    since: Timestamp
    upper: Timestamp
    chains: int
    batches: int
    rows: int
    bytes: int
    recovery_point_age_seconds: float
    spans: Sequence[Span]


def overview(
    url: str, record: CollectionRecord | None, shards: Sequence[Shard], *, now_ns: int
) -> CollectionInfo:
    """Sum up the chains of a collection."""
    batches = [batch for shard in shards for batch in shard.refresh().batches]
    upper = shards[-1].upper if shards else 0
    return CollectionInfo(
        url=url,
        source=None if record is None else record.source,
        since=Timestamp(min((shard.since for shard in shards), default=0)),
        upper=Timestamp(upper),
        chains=len(shards),
        batches=len(batches),
        rows=sum(batch.rows for batch in batches),
        bytes=sum(batch.size for batch in batches),
        recovery_point_age_seconds=max(now_ns - upper, 0) / NS_PER_SECOND,
        spans=[span for shard in shards for span in _span(shard.state.batches)],
    )


def _span(batches: Sequence[ShardBatch]) -> Sequence[Span]:
    """One span that holds all keys of `batches`; none where they have no keys."""
    parts = [part for batch in batches for part in batch.parts]
    if not parts:
        return []
    ends = [part.key_max for part in parts if part.key_max is not None]
    end = max(ends) + b"\0" if len(ends) == len(parts) else None
    return [Span(min(part.key_min for part in parts), end)]
