"""The side of a join that a collection answers: labels against the rows of its parts.

Each label is asked of the newest chain that covers its time. A chain finds its versions in its
parts (`backup.shard.rows.found`); nothing is restored.

Invariants
1. All chains are held at their newest instant from the call of the join until its end, so that
   compaction and expiry take no part away.
2. No label is answered outside the windows of the chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backup.chains import Chains, no_backup
from backup.instants import gone
from backup.reading.spans import RowFound, SpanLabels, first_rows
from backup.shard import Shard, ShardPart, ShardSnapshot, Window
from backup.shard.rows.part_reader import OpenedPart
from kvstore.errors import HistoryGoneError, NotYetWrittenError, printable
from kvstore.joins.labels import Numbers, reached_times
from kvstore.joins.order import in_order
from kvstore.joins.side import VALUE_FIELDS, Asked, Search, placed, value_columns
from kvstore.limits import JOIN_COLUMNS_ROWS_MAX, JOIN_VALUE_BYTES_MAX
from kvstore.mvcc import Fragments
from kvstore.span import Span
from kvstore.tables.answers import AskedSpans, RowsFound
from kvstore.timestamp import Timestamp

_DECODED = 8
"""Bytes of values that a byte of a part may stand for, in a first guess."""


class HeldChain(Protocol):
    """A chain that covers `[since, upper)`, held at its newest instant."""

    @property
    def shard(self) -> Shard: ...

    @property
    def since(self) -> int: ...

    @property
    def upper(self) -> int: ...

    @property
    def snapshot(self) -> ShardSnapshot: ...

    @property
    def kept(self) -> Mapping[int, tuple[str, ...]]: ...


class _Held(NamedTuple):
    """See `HeldChain`."""

    shard: Shard
    since: int
    upper: int
    snapshot: ShardSnapshot
    kept: Mapping[int, tuple[str, ...]]


class CollectionSide:
    """See `kvstore.joins.side.Side`."""

    fields = VALUE_FIELDS

    def __init__(self, chains: Chains) -> None:
        self._chains = chains

    @contextmanager
    def opened(self) -> Iterator[CollectionAnswers]:
        """Hold all chains. Raises `UsageError` for a collection without a backup."""
        with self._chains.snapshots() as held:
            if not held:
                raise no_backup(self._chains.where)
            # The window of a chain is read after its lease was taken, which keeps it.
            every = [
                _Held(shard, shard.since, shard.upper, found, shard.kept)
                for shard, found in held.items()
            ]
            yield CollectionAnswers(every)


class CollectionAnswers:
    """See `kvstore.joins.side.Answers`."""

    def __init__(
        self,
        held: Sequence[HeldChain],
        opened: Callable[[ShardPart], OpenedPart] | None = None,
    ) -> None:
        """`held` has the chains, oldest first. `opened` opens a part, if it is given."""
        self._held = held
        self._opened = opened
        self.rows_max = JOIN_COLUMNS_ROWS_MAX
        parts = [part for each in held for b in each.snapshot.batches for part in b.parts]
        width = _DECODED * sum(p.size for p in parts) // max(sum(p.rows for p in parts), 1)
        self.rows_first = max(JOIN_VALUE_BYTES_MAX // max(width, 1), 1)

    @cached_property
    def newest(self) -> int:
        """The newest instant. Raises `StatesLostError` if a newer one has existed."""
        self._held[-1].shard.require_newest()
        return self._held[-1].upper - 1

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The values of the labels and the timestamps of their versions."""
        labels = self._written(labels)
        values: list[pa.Array] = []
        places: list[Numbers] = []
        count = len(labels.times)
        times = np.full(count, -1, np.int64)
        covered, lost = self._covered(labels.times)
        for held, asked in covered:
            keys = labels.keys if len(asked) == count else labels.keys.take(pa.array(asked))
            ordered = in_order(keys, labels.times[asked])
            found = held.snapshot.find(
                ordered,
                age_max=search.age_max,
                bytes_max=search.bytes_max,
                opened=self._opened,
            )
            if found is None:
                return None
            values.append(found.values)
            places.append(asked[ordered.places])
            times[places[-1]] = found.times
        if lost.any() and not search.is_gone_null:
            raise self._gone(labels, int(np.argmax(lost)))
        if not values:
            return value_columns(pa.nulls(count, pa.binary()), times)
        every = placed(pa.concat_arrays(values), np.concatenate(places), count)
        return value_columns(every, times)

    def first_alive(self, labels: AskedSpans) -> RowsFound | None:
        """The first live row of each span, at the time of its label. None where several rows have
        too many bytes together. Costs as `first_rows`, for each chain."""
        asked = Asked(pa.array(labels.starts, pa.binary()), labels.times, labels.first)
        asked = self._written(asked)
        covered, lost = self._covered(asked.times)
        if lost.any():
            raise self._gone(asked, int(np.argmax(lost)))
        rows: list[RowFound | None] = [None] * len(labels.starts)
        for held, places in covered:
            ordered = sorted(places.tolist(), key=labels.starts.__getitem__)
            question = SpanLabels(
                [labels.starts[at] for at in ordered],
                [labels.ends[at] for at in ordered],
                asked.times[ordered],
            )
            window = Window(-1, int(question.times.max()))
            span = Span(question.starts[0], question.ends[-1])
            cleared = Fragments.of(
                held.snapshot.range_tombstones(window, span, opened=self._opened)
            )
            versions = partial(held.snapshot.view, window)
            found = first_rows(versions, cleared, question, bytes_max=JOIN_VALUE_BYTES_MAX)
            if found is None:
                return None
            for at, row in zip(ordered, found, strict=True):
                rows[at] = row
        keys, values = ([row and row[field] for row in rows] for field in (0, 1))
        times = np.array([-1 if row is None else row.timestamp for row in rows], np.int64)
        return RowsFound(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), times)

    def _covered(
        self, times: Numbers
    ) -> tuple[list[tuple[HeldChain, Numbers]], npt.NDArray[np.bool_]]:
        """The places of the times that each chain answers, the newest chain first, and which times
        no chain covers."""
        lost: npt.NDArray[np.bool_] = np.ones(len(times), np.bool_)
        found: list[tuple[HeldChain, Numbers]] = []
        for held in reversed(self._held):
            is_covered = times >= held.since
            if held.kept:
                is_covered |= np.isin(times, list(held.kept))
            places = np.flatnonzero(lost & is_covered & (times < held.upper))
            if len(places):
                lost[places] = False
                found.append((held, places))
        return found, lost

    def _written(self, labels: Asked) -> Asked:
        """The labels, if the newest window has all of them. Raises `NotYetWrittenError`."""
        upper, times = self._held[-1].upper, reached_times(labels.times, self._held[-1].upper - 1)
        for instant in {instant for held in self._held for instant in held.kept}:
            # Where history goes back below the instant, its microsecond is a time of its own.
            if not any(held.since <= instant < held.upper for held in self._held):
                times = reached_times(times, instant)
        labels = labels._replace(times=times)
        late = np.flatnonzero(labels.times >= upper)
        if len(late):
            at = int(late[0])
            raise NotYetWrittenError(
                as_of=Timestamp(labels.times[at]),
                upper=Timestamp(upper),
                remedy=f"{_named(labels, at)}, asks for it: give a time below {Timestamp(upper)}, "
                "or back up first",
            )
        return labels

    def _gone(self, labels: Asked, at: int) -> HistoryGoneError:
        since = Timestamp(self._held[-1].since)
        nearest = gone(self._held, int(labels.times[at])).nearest
        instants = f"one of the nearest kept instants, {' and '.join(map(str, nearest))}, "
        return HistoryGoneError(
            as_of=Timestamp(labels.times[at]),
            since=since,
            remedy=f"{_named(labels, at)}, asks for it: give a time from {since} on, "
            f"{instants if nearest else ''}or pass on_gone='null'",
            nearest=nearest,
        )


def _named(labels: Asked, at: int) -> str:
    return f"row {labels.first + at}, key {printable(labels.keys[at].as_py())}"
