"""Progress of long work, in rows, summed over all its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa

OnProgress: TypeAlias = "Callable[[int], None]"
"""Called with the number of rows done so far; an exception from it calls the work off."""


class RowCount(int):
    """The rows done so far, of `total` at most; None where the total is not known."""

    total: int | None

    @classmethod
    def of(cls, rows: int, total: int | None) -> RowCount:
        """A count."""
        made = cls(rows)
        made.total = total
        return made


class Tally:
    """Counts rows and calls `progress`, if there is one, with a `RowCount`."""

    def __init__(self, progress: OnProgress | None = None, total: int | None = None) -> None:
        self._progress = progress
        self._total = total
        self.rows = 0

    def add(self, rows: int) -> None:
        """Count more rows as done."""
        self.rows += rows
        if self._progress is not None:
            self._progress(RowCount.of(self.rows, self._total))

    def over(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield `batches`; a batch counts as done when the next one is asked for.

        `progress` is also called before the first.
        """
        self.add(0)
        for batch in batches:
            yield batch
            self.add(batch.num_rows)
