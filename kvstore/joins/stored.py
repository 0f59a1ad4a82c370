"""The side of a join that a store or a snapshot answers.

A piece of labels is looked up in one walk through the store, which seeks or merges
(`kvstore.loops.plain.timed`). A pin keeps history from the call of the join until its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import pyarrow as pa

from kvstore.errors import NotYetWrittenError
from kvstore.joins.labels import Labels, gone, require_complete, require_kept
from kvstore.joins.side import VALUE_FIELDS, Asked, Search, value_columns
from kvstore.limits import JOIN_ROWS_FIRST, JOIN_ROWS_MAX
from kvstore.mvcc.lookup import SearchBounds, TimedValues
from kvstore.parts import Parts
from kvstore.timestamp import Timestamp


class StoredSide:
    """See `kvstore.joins.side.Side`. With `newest`, which a snapshot has, no label may ask for a
    later time."""

    fields = VALUE_FIELDS

    def __init__(self, parts: Parts, newest: int | None = None) -> None:
        self._parts = parts
        self._newest = newest

    @contextmanager
    def opened(self) -> Iterator[StoredAnswers]:
        """Pin the history that is kept."""
        parts = self._parts
        parts.committer.health.require()
        pins = parts.pins  # in a forked child, which ends the pass, handles have no fields
        pin = pins.new()
        try:
            with parts.committer.lock:
                pins.keep(pin, parts.committer.since, kind="join")
            yield StoredAnswers(parts, self._newest)
        finally:
            pins.let_go(pin, None)


class StoredAnswers:
    """See `kvstore.joins.side.Answers`."""

    def __init__(self, parts: Parts, limit: int | None) -> None:
        self._parts = parts
        self._limit = limit
        self.rows_first = JOIN_ROWS_FIRST
        self.rows_max = JOIN_ROWS_MAX

    @cached_property
    def newest(self) -> int:
        """The time of the snapshot, or the newest complete time."""
        return self._parts.reads.at(None) if self._limit is None else self._limit

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The values of the labels and the timestamps of their versions."""
        asked = Labels(labels.keys.to_pylist(), labels.times, labels.first)
        if self._limit is not None:
            _require_upto(asked, self._limit)
        require_complete(self._parts, asked)
        found = self._found(asked, search)
        if found is None:
            return None
        return value_columns(pa.array(found.values, pa.binary()), found.times)

    def _found(self, labels: Labels, search: Search) -> TimedValues | None:
        parts, bounds = self._parts, SearchBounds(search.age_max, search.bytes_max)
        lost = gone(parts, labels)
        if lost is None:
            return parts.versions.get_timed(labels.keys, labels.times.data, bounds)
        if not search.is_gone_null:
            require_kept(parts, labels)
        kept = np.flatnonzero(~lost)
        keys = [labels.keys[at] for at in kept.tolist()]
        found = parts.versions.get_timed(keys, labels.times[kept].data, bounds)
        if found is None:
            return None
        values: list[bytes | None] = [None] * len(labels.keys)
        times = np.full(len(values), -1, np.int64)
        times[kept] = found.times
        for at, value in zip(kept.tolist(), found.values, strict=True):
            values[at] = value
        return TimedValues(values, times)


def _require_upto(labels: Labels, newest: int) -> None:
    late = np.flatnonzero(labels.times > newest)
    if len(late):
        first = int(late[0])
        raise NotYetWrittenError(
            as_of=Timestamp(labels.times[first]),
            upper=Timestamp(newest + 1),
            remedy=f"{labels.named(first)}, asks for it: the snapshot ends at {Timestamp(newest)}",
        )
