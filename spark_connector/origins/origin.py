"""The contract of an origin: something with history that Spark reads rows from.

A task opens the origin anew from its place. All tasks of a read see the same rows, because the read
pins its times and history never changes.

An origin yields rows in the columns of `backup/version_rows.py`, and of these only the requested
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa
from typing_extensions import Self

from kvstore.changes import Change
from kvstore.engine import FileSpan
from kvstore.span import Span
from spark_connector.origins.place import Place


class Frontiers(NamedTuple):
    """What can be read: `since <= t < upper`, of the store of that id."""

    since: int
    upper: int
    store_id: str


class Origin(Protocol):
    """Something with history. Used with `with`."""

    place: Place
    """Where it was found; of a collection, the chain that was chosen."""

    def frontiers(self) -> Frontiers:
        """What can be read here. A store that never moves on, a collection as of now."""
        ...

    def files(self, upto: int) -> Sequence[FileSpan]:
        """Hints for cutting the key space: user keys and bytes of what a read up to then opens."""
        ...

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        """What is alive in `span` at `as_of`, by key."""
        ...

    def points(
        self, span: Span, *, since: int, upto: int, latest: bool, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        """The puts and deletes in the window `(since, upto]`."""
        ...

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        """The range deletes in the window, cut to `span`, by their start."""
        ...

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        """The latest time up to which the window holds at most so many rows or bytes.

        Cut between commits, behind at least one; bytes are a guess.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
