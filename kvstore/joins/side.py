"""The seam between labels and the sources that answer them: stores, snapshots, collections.

A join reads its labels once. Each side of the join gets the same labels, piece by piece, and gives
back columns of as many rows, in the order of the labels.

Invariants
1. While a side is open, the history that it answers from stays: GC, clears, compaction and expiry
   take none of it away.
2. A side that gives up a piece, because its values have too many bytes, has changed nothing: the
   piece comes again in halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from kvstore.joins.labels import Numbers
from kvstore.joins.sources import Piece


class Asked(NamedTuple):
    """Labels: the column of keys, as one binary array, and their times. `first` is the row of the
    first label."""

    keys: pa.Array
    times: Numbers
    first: int


class Search(NamedTuple):
    """A version older than `age_max` ns at the time of its label is no answer. A label whose
    history is gone is an error, or null. All values together have `bytes_max` bytes at most."""

    age_max: int
    is_gone_null: bool
    bytes_max: int


class Answers(Protocol):
    """A side of a join that is open: its history is held."""

    @property
    def newest(self) -> int:
        """The time of labels that have none."""
        ...

    @property
    def rows_first(self) -> int:
        """How many labels to ask at first, when the size of values is unknown."""
        ...

    @property
    def rows_max(self) -> int:
        """How many labels to ask at once, at most."""
        ...

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The columns of the answer, a row for each label, in the order of the labels. None where
        several labels have values of too many bytes together."""
        ...


class Side(Protocol):
    """A side of a join, before it is read."""

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        """The columns that an answer has. The last one is the timestamp of the version."""
        ...

    def opened(self) -> AbstractContextManager[Answers]:
        """Hold the history of this moment."""
        ...


@runtime_checkable
class KeyedSide(Side, Protocol):
    """A side whose keys are made of columns of the labels, and which has columns to choose from."""

    @property
    def name(self) -> str:
        """The name that the timestamp of its versions carries."""
        ...

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the labels that make the key, unless the caller names others."""
        ...

    def choose(self, columns: Sequence[str]) -> KeyedSide:
        """The side with these columns."""
        ...

    def keys(self, piece: Piece, names: tuple[str, ...]) -> pa.Array:
        """The keys of labels. Raises `UsageError` for values that no key has."""
        ...


class Joinable(Protocol):
    """An object that labels can be joined to."""

    def join_side(self) -> Side:
        """Its side of a join."""
        ...


@dataclass(frozen=True, slots=True)
class Join:
    """One of several sources that the same labels are joined to, for `kvstore.join`.

    `source` is a store, a snapshot, a collection, or a table without an event time. Column `key` of
    the labels has its keys; the default is the `key` of the whole join. A value older than
    `max_age` is null. `columns` names the columns that the source adds, in the place of `value` and
    `value_timestamp`; `prefix` stands before each name.

    For a table, `key` names a column of the labels for each column of its key; the default is their
    own names. `columns` chooses columns of the table, by default all beside the key. The time of
    the row's commit is `row_timestamp` behind the prefix, or behind the name of the table.
    """

    source: Joinable
    key: str | Sequence[str] | None = None
    max_age: timedelta | None = None
    columns: Sequence[str] | None = None
    prefix: str = ""


TIME_TYPE = pa.timestamp("ns", "UTC")
VALUE_FIELDS = (pa.field("value", pa.binary()), pa.field("value_timestamp", TIME_TYPE))


def value_columns(values: pa.Array, times: Numbers) -> list[pa.Array]:
    """The columns `VALUE_FIELDS`. A time of -1 is null."""
    return [values, pa.array(times, mask=times < 0).cast(TIME_TYPE)]


def placed(values: pa.Array, places: Numbers, count: int) -> pa.Array:
    """`values` at their `places` among `count` rows, null elsewhere."""
    sources = np.full(count, -1, np.int64)
    sources[places] = np.arange(len(places))
    return values.take(pa.array(sources, mask=sources < 0))


def everywhere(time: int, rows: int) -> Numbers:
    """The times of labels that have none of their own."""
    return np.full(rows, time, np.int64)
