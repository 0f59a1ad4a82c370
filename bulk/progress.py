"""How far the reading of files is, by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from kvstore.counts import WorkCount


class Counted(Protocol):
    """Anything that has rows."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        ...


Rows = TypeVar("Rows", bound=Counted)


class Reading:
    """The share of some files that has been read. It is an estimate: text is read ahead, and rows
    of a Parquet file are taken to have the same length."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._sizes = {path: path.stat().st_size for path in paths if path.is_file()}
        self._shares: dict[Path, Callable[[], float]] = {}

    def follow(self, path: Path, share: Callable[[], float]) -> None:
        """Have `share` tell how much of a file has been read, from now on."""
        self._shares[path] = share

    def share_of(self, path: Path) -> float:
        """How much of the bytes of one file has been read, from 0 to 1."""
        return min(self._shares[path](), 1.0) if path in self._shares else 0.0

    @property
    def share(self) -> float:
        """How much of the bytes of all files has been read, from 0 to 1."""
        whole = sum(self._sizes.values())
        read = sum(size * self.share_of(path) for path, size in self._sizes.items())
        return read / whole if whole else 0.0

    def over(self, batches: Iterable[Rows], show: Callable[[int], None]) -> Iterator[Rows]:
        """Yield batches of rows of the files. `show` is called with the rows so far, and an
        estimate of all."""
        rows = 0
        for batch in batches:
            yield batch
            rows += batch.num_rows
            show(WorkCount.at(rows, self.share))
