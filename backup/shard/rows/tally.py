"""Progress of long work, in rows, summed over all its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa

from kvstore.base.meters import WorkCount

OnProgress: TypeAlias = "Callable[[int], None]"
"""Called with the number of rows done so far; an exception from it calls the work off."""


class Tally:
    """Counts rows and calls `progress`, if there is one, with a `WorkCount`."""

    def __init__(
        self,
        progress: OnProgress | None = None,
        total: int | None = None,
        *,
        is_about: bool = False,
    ) -> None:
        self._progress = progress
        self._total, self._is_about = total, is_about
        self.rows = 0

    def add(self, rows: int) -> None:
        """Count more rows as done."""
        self.rows += rows
        if self._progress is not None:
            self._progress(WorkCount.of(self.rows, self._total, is_about=self._is_about))

    def over(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield `batches`; a batch counts as done when the next one is asked for.

        `progress` is also called before the first.
        """
        self.add(0)
        for batch in batches:
            yield batch
            self.add(batch.num_rows)
