"""Telling how far long work has come, in rows, over as many passes as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa

OnProgress: TypeAlias = "Callable[[int], None]"
"""Is told the rows done so far; what it raises calls the work off."""


class Tally:
    """Counts rows and tells `progress`, if there is one."""

    def __init__(self, progress: OnProgress | None = None) -> None:
        self._progress = progress
        self.rows = 0

    def add(self, rows: int) -> None:
        """So many more rows are done."""
        self.rows += rows
        if self._progress is not None:
            self._progress(self.rows)

    def over(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """`batches`; each is done when the next one is asked for. Tells before the first, too."""
        self.add(0)
        for batch in batches:
            yield batch
            self.add(batch.num_rows)
