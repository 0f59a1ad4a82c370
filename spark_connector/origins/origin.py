"""The contract of an origin: something with history that Spark reads rows from.

A task opens the origin anew from its place. All tasks of a read see the same rows, because the read
pins its times and history never changes.

An origin yields rows with the requested columns of `backup/version_rows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import pyarrow as pa
from typing_extensions import Self

from kvstore.changes import Change
from kvstore.engine import FileSpan
from kvstore.joins import OnGone
from kvstore.span import Span
from kvstore.timestamp import TimeLike
from spark_connector.origins.place import Place


class OriginFrontiers(NamedTuple):
    """The readable times, `since <= t < upper`, of the store with this id."""

    since: int
    upper: int
    store_id: str


class HistoryEntry(NamedTuple):
    """A record of an origin's history: an import or a revert at the time `version`, or a backup
    whose last time it is."""

    version: int
    operation: Literal["import", "revert", "backup"]
    id: str | None
    rows: int
    size_bytes: int


class ChangeCount(NamedTuple):
    """A number of changes, or an estimate of it."""

    rows: int
    is_exact: bool


class JoinableRows(Protocol):
    """The rows of a table, which labels are joined to."""

    def join(
        self,
        labels: object,
        on: str | Sequence[str],
        at: str | None,
        known_at: str | TimeLike | None,
        max_age: timedelta | None,
        columns: Sequence[str] | None,
        *,
        prefix: str,
    ) -> pa.RecordBatchReader:
        """The labels with columns of rows; see `Table.join`."""
        ...


class Origin(Protocol):
    """Something with history. It is used as a context manager."""

    place: Place
    """Where the origin was found. A collection's place names the chosen chain, a server's place the
    lease."""

    def frontiers(self, reaching: int = 0) -> OriginFrontiers:
        """The readable times. For a checkpoint they never change; otherwise they are the times at
        the call. A live store that is idle completes its time up to `reaching`, if that is past."""
        ...

    def narrow(self, span: Span) -> Span:
        """The span without the keys of tables and of expiries, unless it begins among them. Call it
        before a span is cut: a part that begins among them would ask for them."""
        ...

    def keep(self, since: int) -> None:
        """Keep history from `since` on readable for the tasks of a read that is being planned.

        Take `place` for the tasks afterwards: it names the lease. Checkpoints never lose history,
        and a task that finds its collection expired fails.
        """
        ...

    def events(self) -> list[HistoryEntry]:
        """The imports of a store and their reverts, or the backups of a collection, by time. A
        server tells none. GC forgets small imports."""
        ...

    def files(self, upto: int) -> Sequence[FileSpan]:
        """Key ranges and sizes of the files that a read up to `upto` opens; hints for cutting."""
        ...

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        """The live rows of `span` at `as_of`, by key."""
        ...

    def points(
        self,
        span: Span,
        *,
        since: int,
        upto: int,
        latest: bool,
        columns: Sequence[str],
        rows: int,
        by_key: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The puts and deletes in the window `(since, upto]`. With `by_key` they come by key, those
        of one key oldest first. Memory holds a bounded number of their bytes, also where all are of
        one key."""
        ...

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        """The range deletes in the window, cut to `span`, by their start."""
        ...

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        """The latest time up to which the window holds at most a number of rows or bytes.

        The cut lies between commits, behind at least one. Bytes are an estimate.
        """
        ...

    def count(self, span: Span, *, since: int, upto: int) -> ChangeCount | None:
        """The number of changes in the window, rows of imports included. None if the caller may not
        know it.

        An inexact number may count changes of other keys, and estimates long windows. Costs a
        bounded number of entries of a store, and the times in one batch of a collection.
        """
        ...

    def join(
        self,
        labels: pa.RecordBatchReader,
        *,
        key: str,
        at: str,
        max_age: timedelta | None,
        columns: tuple[str, str],
        on_gone: OnGone,
    ) -> pa.RecordBatchReader:
        """The labels with the columns of their values; see `Store.join`."""
        ...

    def rows_of(self, table: str) -> AbstractContextManager[JoinableRows]:
        """The table `table` with its history, for the time of the block. Raises `UsageError` if
        there is none."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
