"""A collection at a glance: its chains, their sizes, and how much a disaster now would lose."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvstore.backup.chains import Chains, CollectionRecord, labels_of, newest_proof
from kvstore.backup.shard import Shard, ShardBatch
from kvstore.backup.window import BackupInfo, info
from kvstore.base.span import Span
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp


class ChainProof(NamedTuple):
    """The newest proof of a chain, which covers `[since, upper)`: a drill at `proven_at` has
    restored it as of `proven`. Both are None, and the age infinite, where no drill has.

    `problem` is the problem that the newest drill has met, "" if it met none.
    """

    chain: str
    since: Timestamp
    upper: Timestamp
    proven: Timestamp | None
    proven_at: Timestamp | None
    age_seconds: float
    problem: str


class CollectionInfo(NamedTuple):
    """A collection at a glance.

    `spans` has one span for each chain with keys. All keys of the chain lie in it; its ends are
    rounded outwards where keys are long. `recovery_point_age_seconds` is the age of the newest
    instant that can be restored: a disaster now would lose all later commits. `kept` has the
    instants below the `since` of their chain that can be read, `labels` the named instants.
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
    labels: Mapping[str, Timestamp] = MappingProxyType({})
    kept: Sequence[Timestamp] = ()
    proofs: Sequence[ChainProof] = ()

    @property
    def proof_age_seconds(self) -> float:
        """The age of the newest proof of the newest chain; infinite where it has none."""
        return self.proofs[-1].age_seconds if self.proofs else math.inf


def listed(chains: Chains) -> list[BackupInfo]:
    """All backups, oldest first. The first one of a chain begins at the chain's `since`."""
    record = chains.read()
    found: list[BackupInfo] = []
    for shard in chains.shards(record):
        state = shard.refresh()
        drills = () if record is None else record.drills
        kept = sorted(state.kept)
        for batch in state.batches:
            high = batch.upper
            low = min(max(batch.lower, state.since), high)  # an expiry that was killed merges later
            proof = newest_proof(drills, shard.name, lower=low, upper=high)
            at = None if proof is None else Timestamp(proof.drilled_at)
            named = kept[bisect_left(kept, batch.lower) : bisect_left(kept, high)]
            names = tuple(label for time in named for label in state.kept[time])
            found.append(info(batch)._replace(lower=Timestamp(low), proven_at=at, labels=names))
    return found


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
        labels=labels_of(shards),
        kept=[Timestamp(t) for shard in shards for t in shard.state.kept_below(shard.since)],
        spans=[span for shard in shards for span in _span(shard.state.batches)],
        proofs=[] if record is None else [_proof(record, shard, now_ns) for shard in shards],
    )


def _proof(record: CollectionRecord, shard: Shard, now_ns: int) -> ChainProof:
    proof = newest_proof(record.drills, shard.name)
    drills = [drill for drill in record.drills if drill.chain == shard.name]
    return ChainProof(
        shard.name,
        Timestamp(shard.since),
        Timestamp(shard.upper),
        None if proof is None else Timestamp(proof.at),
        None if proof is None else Timestamp(proof.drilled_at),
        math.inf if proof is None else max(now_ns - proof.drilled_at, 0) / NS_PER_SECOND,
        drills[-1].problem if drills else "",
    )


def _span(batches: Sequence[ShardBatch]) -> Sequence[Span]:
    """One span that holds all keys of `batches`; none where they have no keys."""
    parts = [part for batch in batches for part in batch.parts]
    if not parts:
        return []
    ends = [part.key_max for part in parts if part.key_max is not None]
    end = max(ends) + b"\0" if len(ends) == len(parts) else None
    return [Span(min(part.key_min for part in parts), end)]
