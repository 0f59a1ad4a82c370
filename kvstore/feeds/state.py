"""The beginning of a feed: the state at one time, as events, before the changes after it.

A worker that shares a feed gets the rows whose later changes it gets too. So no change of a key
overtakes the row of that key, and the workers need not wait for each other.

Invariants
1. The rows come by key, and each batch ends at a key. Reading from there gives the same rows on
   every run, because the hold of the feed keeps the time readable.
2. One chunk of a scan and one batch are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.changes.changeset import ChangesetId
from kvstore.changes.event import Event, Operation
from kvstore.changes.expand import Wanted
from kvstore.changes.expiring import DueTimes
from kvstore.changes.generation import Generation
from kvstore.mvcc import Versions
from kvstore.span import Span
from kvstore.timestamp import Timestamp

_NO_CHANGESET = ChangesetId(0, 0)


@dataclass(frozen=True, slots=True)
class StateReader:
    """Reads the state of a store. `generation` gives the streams at a time."""

    versions: Versions
    generation: Callable[[int], Generation]
    dues: DueTimes

    def events(self, wanted: Wanted, at: Timestamp, first: bytes) -> Iterator[Event]:
        """The live rows of `wanted` at the time `at`, from the key `first` on."""
        span = wanted.span.intersect(first, None)
        if span is None:
            return iter(())
        return self.dues.of_events(self._events(wanted, at, span), span, as_of=at)

    def _events(self, wanted: Wanted, at: Timestamp, span: Span) -> Iterator[Event]:
        found = self.generation(at)
        mine = None if wanted.select is None else set(wanted.select(found))
        keys_only, with_post = wanted.images == "none", wanted.images.endswith("post")
        stream = found.streams[0]
        for keys, values in self.versions.scan(span, at):
            for key, value in zip(keys, values, strict=True):
                if found.is_split:
                    stream = found.stream_of(key)
                if mine is None or stream in mine:
                    yield Event(
                        at,
                        0,
                        Operation.UPDATE,
                        key,
                        None,
                        None if keys_only else value,
                        None,
                        value if with_post else None,
                        _NO_CHANGESET,
                        stream,
                        False,
                    )
