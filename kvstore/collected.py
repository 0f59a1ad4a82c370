"""The runs of garbage collection that removed something: when, and how much.

    meta record `collections` := {"runs": [{"at", "since", "versions"}, ...]}      oldest first

Invariants
1. The record has `COLLECTIONS_TOLD` runs at most.
2. A run is noted in the engine batch that ends its work, so a run that a crash cut is not there.
   The run that continues it notes its own removals.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvstore.engine.api import WriteBatch
from kvstore.limits import COLLECTIONS_TOLD
from kvstore.meta import Meta, timestamp_of
from kvstore.timestamp import Timestamp

COLLECTIONS: Final = "collections"


class CollectionRun(NamedTuple):
    """A run of GC began at `at`, gave up history below `since`, and removed this many versions."""

    at: Timestamp
    since: Timestamp
    versions: int


def collections(meta: Meta) -> list[CollectionRun]:
    """The newest runs, oldest first. Raises `CorruptionError`."""
    record = meta.read(COLLECTIONS)
    if record is None:
        return []
    return [
        CollectionRun(timestamp_of(run, "at"), timestamp_of(run, "since"), run.integer("versions"))
        for run in record.objects("runs")
    ]


def stage_collection(meta: Meta, batch: WriteBatch, run: CollectionRun) -> None:
    """Add a run to the record, in an engine batch."""
    kept = [*collections(meta), run][-COLLECTIONS_TOLD:]
    meta.stage(batch, COLLECTIONS, {"runs": [each._asdict() for each in kept]})
