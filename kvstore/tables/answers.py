"""The rows that labels ask a source for: by whole keys, or the first live row of a span.

A table with an event time has the newest event first. So the row that a label asks for is the first
live one from the label's time on, among the rows with the rest of its key.

Invariants
1. While answers are open, GC, clears and expiry take no history away.
2. No label is answered at a time that is not complete, or whose history is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from kvstore.joins.labels import Labels, Numbers, require_complete, require_kept
from kvstore.joins.side import Asked
from kvstore.joins.stored import StoredSide
from kvstore.limits import JOIN_ROWS_FIRST, JOIN_VALUE_BYTES_MAX
from kvstore.mvcc.lookup import SearchBounds
from kvstore.parts import Parts
from kvstore.span import Span
from kvstore.timestamp import TimeLike, Timestamp


class AskedSpans(NamedTuple):
    """Labels that ask for the first live key from `starts` on and below `ends`, each at its time.
    `first` is the row of the first label."""

    starts: Sequence[bytes]
    ends: Sequence[bytes | None]
    times: Numbers
    first: int


class RowsFound(NamedTuple):
    """Key, value and time of the row of each label. The value is null where a label has none."""

    keys: pa.Array
    values: pa.Array
    times: Numbers


class RowAnswers(Protocol):
    """The rows of a source whose history is held."""

    @property
    def newest(self) -> int:
        """The newest complete time."""
        ...

    @property
    def rows_first(self) -> int:
        """How many labels to ask at first, when the size of rows is unknown."""
        ...

    @property
    def rows_max(self) -> int:
        """How many labels to ask at once, at most."""
        ...

    def at(self, labels: Asked) -> RowsFound | None:
        """The rows of keys. None where several rows have too many bytes together."""
        ...

    def latest(self, labels: AskedSpans) -> RowsFound | None:
        """The first live rows of spans. None where several rows have too many bytes together."""
        ...


class RowSource(Protocol):
    """The rows of a store or of a collection."""

    def time(self, time: TimeLike | None, name: str) -> Timestamp:
        """A time that the caller gave, by default the newest complete one."""
        ...

    def answers(self) -> AbstractContextManager[RowAnswers]:
        """Hold the history of this moment."""
        ...


class StoredRowSource:
    """The rows of a store."""

    def __init__(self, parts: Parts, bytes_max: int | None = None) -> None:
        """An answer has at most `bytes_max` bytes of rows, by default `JOIN_VALUE_BYTES_MAX`, or
        one row."""
        self._parts = parts
        self._bytes_max = JOIN_VALUE_BYTES_MAX if bytes_max is None else bytes_max

    def time(self, time: TimeLike | None, name: str) -> Timestamp:
        """See `RowSource.time`."""
        at = None if time is None else self._parts.committer.to_time(time, name=name)
        return Timestamp(self._parts.reads.at(at))

    @contextmanager
    def answers(self) -> Iterator[StoredRowAnswers]:
        """Pin the history that is kept."""
        with StoredSide(self._parts).opened():
            yield StoredRowAnswers(self._parts, self._bytes_max)


class StoredRowAnswers:
    """See `RowAnswers`."""

    def __init__(self, parts: Parts, bytes_max: int) -> None:
        self._parts = parts
        self._bounds = SearchBounds(bytes_max=bytes_max)
        self.rows_max = JOIN_ROWS_FIRST
        # As many rows of 1 KiB as fit into half: a piece that is halved asks for each label again.
        self.rows_first = min(max(bytes_max >> 11, 1), JOIN_ROWS_FIRST)

    @property
    def newest(self) -> int:
        """The newest complete time."""
        return self._parts.reads.at(None)

    def at(self, labels: Asked) -> RowsFound | None:
        """See `RowAnswers.at`."""
        return self._at(labels.keys.to_pylist(), labels.times, labels.first)

    def latest(self, labels: AskedSpans) -> RowsFound | None:
        """See `RowAnswers.latest`. One seek for each label, and a step for each dead key before the
        row."""
        starts = Labels(labels.starts, labels.times, labels.first)
        starts = require_complete(self._parts, starts)
        require_kept(self._parts, starts)
        search: dict[tuple[bytes, int], bytes | None] = {}
        keys = []
        times = starts.times.tolist()
        for start, end, time in zip(labels.starts, labels.ends, times, strict=True):
            asked = start, time
            if asked not in search:
                search[asked] = self._first_key(Span(start, end), time)
            keys.append(search[asked])
        return self._at(keys, starts.times, labels.first)

    def _first_key(self, span: Span, as_of: int) -> bytes | None:
        chunk = next(self._parts.versions.scan(span, as_of, limit=1), None)
        return None if chunk is None else chunk[0][0]

    def _at(self, keys: Sequence[bytes | None], times: Numbers, first: int) -> RowsFound | None:
        there = [at for at, key in enumerate(keys) if key is not None]
        wanted = [key for key in keys if key is not None]
        asked = times[there] if len(there) else np.empty(0, np.int64)
        labels = require_complete(self._parts, Labels(wanted, asked, first))
        require_kept(self._parts, labels)
        times_asked = np.ascontiguousarray(labels.times).data
        answer = self._parts.versions.get_timed(wanted, times_asked, self._bounds)
        if answer is None:
            return None
        found = np.full(len(keys), -1, np.int64)
        found[there] = np.asarray(answer.times, np.int64)
        values: list[bytes | None] = [None] * len(keys)
        for at, value in zip(there, answer.values, strict=True):
            values[at] = value
        return RowsFound(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), found)
