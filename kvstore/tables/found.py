"""Rows that a read of a table has found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from kvstore.errors import UsageError
from kvstore.tables.codec import each_dict
from kvstore.timestamp import Timestamp


class FoundRows:
    """Rows of a table: an iterator of dicts, or Arrow data for libraries that speak Arrow."""

    def __init__(
        self,
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
        rows: Iterator[Any] | None = None,
    ) -> None:
        """`rows` are the rows of `batches`, one by one. Only one of both is read."""
        self.schema = schema
        self._batches = batches
        self._rows = chain.from_iterable(map(each_dict, batches)) if rows is None else rows
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        self._begun = True
        return self._rows

    def __next__(self) -> Any:
        self._begun = True
        return next(self._rows)

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as typed record batches. Raises `UsageError` once rows were taken one by one."""
        if self._begun:
            raise UsageError("some rows were taken one by one", "find the rows again")
        self._rows = chain.from_iterable(map(each_dict, self._batches))
        return pa.RecordBatchReader.from_batches(self.schema, self._batches)

    def read_all(self) -> pa.Table:
        """The rows as one Arrow table."""
        return self.to_reader().read_all()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)


class RowVersion(NamedTuple):
    """A row from a time on. `row` is None from its deletion on."""

    timestamp: Timestamp
    row: dict[str, Any] | None
