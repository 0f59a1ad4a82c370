"""A consumer that keeps a copy of the state, as a downstream system would."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvstore import Store, Timestamp, bulk
from kvstore.changes.events import Event, Operation
from kvstore.feeds.feed import FeedBatch, Position


class Replica:
    """The state that a feed's events add up to, and the position stored with it."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.position: Position | None = None
        self.seen: list[tuple[int, int]] = []

    def take(self, batch: FeedBatch) -> None:
        """Apply a batch and keep its position, in one step as a transaction would."""
        for event in batch.events:
            self.apply(event)
        self.position = batch.position

    def apply(self, event: Event) -> None:
        self.seen.append((event.timestamp, event.sequence))
        if event.op is Operation.PUT:
            assert event.value is not None
            self.rows[event.key] = event.value
        elif event.op is Operation.DELETE:
            self.rows.pop(event.key, None)
        else:
            assert event.op is Operation.DELETE_RANGE
            assert event.end_key is not None
            for key in [key for key in self.rows if event.key <= key < event.end_key]:
                del self.rows[key]

    def check(self, store: Store) -> None:
        """Assert that this is the state at the position, if the position lies between commits."""
        if self.position is not None and not self.position.taken:
            assert self.rows == dict(store.scan(as_of=self.position.timestamp))


def replay(batches: Iterable[FeedBatch], store: Store, replica: Replica) -> Replica:
    """Take all batches, checking the state after each."""
    for batch in batches:
        replica.take(batch)
        replica.check(store)
    return replica


def add_import(store: Store, staging: Path, rows: dict[bytes, bytes]) -> tuple[int, Timestamp]:
    """Load rows in bulk; returns the import's id and its stamp."""
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        for key in sorted(rows):
            writer.put(key, rows[key])
    staged.seal()
    return staged.import_id, bulk.ingest(store, staging)
