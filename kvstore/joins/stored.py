"""The side of a join that a store or a snapshot answers.

A piece of labels is looked up in one walk through the store, which seeks or merges
(`kvstore.loops.lookup`). A pin keeps history from the call of the join until its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from kvstore.arrow import buffers_of
from kvstore.errors import NotYetWrittenError
from kvstore.joins.labels import Labels, gone, reached_times, require_complete, require_kept
from kvstore.joins.order import in_order
from kvstore.joins.side import VALUE_FIELDS, Asked, Search, placed, value_columns
from kvstore.limits import JOIN_ROWS_FIRST, JOIN_ROWS_MAX
from kvstore.mvcc.lookup import LabelColumns, SearchBounds
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
        parts, asked = self._parts, Labels(_Keys(labels.keys), labels.times, labels.first)
        if self._limit is not None:
            asked = _require_upto(asked, self._limit)
        floor = parts.committer.frontiers.floor
        asked = require_complete(parts, asked)
        lost = gone(parts, asked)
        if lost is not None and not search.is_gone_null:
            require_kept(parts, asked)
        places = np.arange(len(asked.times)) if lost is None else np.flatnonzero(~lost)
        keys = labels.keys if lost is None else labels.keys.take(pa.array(places))
        ordered = in_order(keys, asked.times[places])
        bounds = SearchBounds(search.age_max, search.bytes_max)
        columns = LabelColumns(buffers_of(ordered.keys), ordered.starts.data, ordered.times.data)
        found = parts.versions.get_columns(columns, bounds)
        if parts.committer.frontiers.floor != floor:
            # GC of another process (`kvstore.live`) may have taken some of `found` meanwhile.
            return self.answer(labels, search)
        if found is None:
            return None
        places = places[ordered.places]
        times = np.full(len(asked.times), -1, np.int64)
        times[places] = found.times
        return value_columns(placed(found.values, places, len(times)), times)


class _Keys(Sequence[bytes]):
    """An Arrow array of keys, of which an error names one."""

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: Any) -> Any:
        return self._keys[at].as_py()


def _require_upto(labels: Labels, newest: int) -> Labels:
    labels = labels._replace(times=reached_times(labels.times, newest))
    late = np.flatnonzero(labels.times > newest)
    if len(late):
        first = int(late[0])
        raise NotYetWrittenError(
            as_of=Timestamp(labels.times[first]),
            upper=Timestamp(newest + 1),
            remedy=f"{labels.named(first)}, asks for it: the snapshot ends at {Timestamp(newest)}",
        )
    return labels
