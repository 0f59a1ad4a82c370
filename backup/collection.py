"""A backup collection: the history of one store, written down window by window.

The first backup is full, `[0, t)`; each later one is the window since the one before. Windows join
without gap or overlap, so the collection restores the store as of any instant it covers.

The source store holds its history at the collection's upper (a hold named after the collection), so
that the next window is whole however late it comes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from backup.chain import Chain, LocalChain, PartFile, StoredBatch
from backup.restore import restore_store
from backup.rows import row_batches, within
from kvstore.commit import require_readable
from kvstore.errors import CorruptionError, HistoryGoneError, UsageError
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp


class BackupInfo(NamedTuple):
    """One backup: all versions with `lower <= timestamp < upper`."""

    lower: Timestamp
    upper: Timestamp
    rows: int
    bytes: int
    parts: int
    seconds: float


class Window(NamedTuple):
    """All versions with `lower <= timestamp < upper`, in sorted parts (see backup/rows.py)."""

    lower: int
    upper: int
    parts: tuple[PartFile, ...]


class VerifyReport(NamedTuple):
    """What a verification read."""

    backups: int
    parts: int
    bytes: int


class Collection:
    """Backups of one store at `url`: a path or a `file://` URL. Made by the first backup."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        self._root = _local_path(self.url)
        self._chain: Chain = LocalChain(self._root)

    # -- what is there ----------------------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """The oldest instant that can be restored."""
        return _since(self._chain.batches())

    @property
    def upper(self) -> Timestamp:
        """The first instant that cannot be restored yet; 0 for an empty collection."""
        return _upper(self._chain.batches())

    @property
    def source(self) -> str | None:
        """The `store_id` of the store that is backed up here; None for an empty collection."""
        batches = self._chain.batches()
        return batches[-1].source if batches else None

    def windows(self) -> Sequence[Window]:
        """What each backup holds, oldest first, for those who read parts themselves."""
        batches = self._chain.batches()
        return [Window(batch.lower, batch.upper, batch.parts) for batch in batches]

    def open_part(self, part: PartFile) -> pq.ParquetFile:
        """A part of a window, to be read in pieces. Raises `CorruptionError` if it is not whole."""
        return self._chain.open(part)

    def list(self) -> list[BackupInfo]:
        """All backups, oldest first."""
        return [_info(batch) for batch in self._chain.batches()]

    def verify(self) -> VerifyReport:
        """Read every part and compare its checksum.

        Raises `CorruptionError` naming every part that is missing or damaged.
        """
        batches = self._chain.batches()
        parts = [part for batch in batches for part in batch.parts]
        found = [(part.name, self._chain.check(part)) for part in parts]
        damaged = [f"{name}: {problem}" for name, problem in found if problem is not None]
        if damaged:
            raise CorruptionError(
                self.url, "; ".join(damaged), "restore instants before it, and make a new full"
            )
        return VerifyReport(len(batches), len(parts), sum(part.size_bytes for part in parts))

    # -- writing ----------------------------------------------------------------------------

    def backup(self, store: Store, *, max_age: timedelta | None = None) -> BackupInfo:
        """Append what `store` has committed since the last backup; the first one is full.

        Everything committed before the call is in it, and nothing that a crash can take back.
        Between backups the store keeps its history, unless it falls further behind than
        `max_age`.

        Raises `LockedError` while another backup writes here, `UsageError` if the collection is
        another store's, `HistoryGoneError` if the store no longer has the window.
        """
        with self._chain.writing():
            batches = self._chain.batches()
            if batches and batches[-1].source != store.store_id:
                raise UsageError(
                    f"{self.url} holds the backups of store {batches[-1].source}",
                    "back this store up into a collection of its own",
                )
            lower = _upper(batches)
            upper = store.sync()
            try:
                hold = store.hold(
                    self._hold_name, at=lower - 1 if batches else None, max_age=max_age
                )
            except HistoryGoneError as error:
                raise HistoryGoneError(
                    as_of=lower - 1,
                    since=store.since,
                    remedy="the chain is broken: begin a new collection; this one stays restorable",
                ) from error
            since = max(_since(batches), 0) if batches else store.since
            batch = self._chain.append(
                _window(store, since=lower - 1 if batches else None, upto=upper - 1),
                lower=lower,
                upper=upper,
                since=since,
                source=store.store_id,
            )
            hold.move(upper - 1)
        return _info(batch)

    # -- reading ----------------------------------------------------------------------------

    def restore(
        self,
        path: str | os.PathLike[str],
        as_of: TimeLike | None = None,
        prefix: bytes | None = None,
        history: bool = True,
    ) -> Timestamp:
        """Build a new store at `path` with the original timestamps; returns its newest instant.

        As of `as_of` (default: the newest), whole or the keys with `prefix`; with
        `history=False` only what was alive then. `path` must not exist; it appears when the
        restore is whole, so a crash leaves no half of one.

        Raises `HistoryGoneError` or `NotYetWrittenError` outside the window, `CorruptionError`
        if a part is damaged. Costs O(bytes of the batches up to `as_of`).
        """
        batches = self._chain.batches()
        instant = self._instant(batches, as_of)
        span = Span.of(prefix=prefix)
        restore_store(
            Path(path),
            [self._rows(batch, span, instant) for batch in batches if batch.lower <= instant],
            since=_since(batches),
            as_of=instant,
            history=history,
        )
        return instant

    def _rows(self, batch: StoredBatch, span: Span, upto: int) -> Iterator[pa.RecordBatch]:
        for part in batch.parts:
            for rows in self._chain.read(part):
                yield within(rows, span, upto)

    def _instant(self, batches: Sequence[StoredBatch], as_of: TimeLike | None) -> Timestamp:
        if not batches:
            raise UsageError(f"{self.url} holds no backup", "run a backup first")
        upper = _upper(batches)
        instant = Timestamp(upper - 1) if as_of is None else to_timestamp(as_of, name="as_of")
        require_readable(instant, since=_since(batches), upper=upper)
        return instant

    @property
    def _hold_name(self) -> str:
        place = hashlib.sha256(str(self._root.resolve()).encode()).hexdigest()[:12]
        return f"backup-{place}"


def _window(store: Store, *, since: int | None, upto: int) -> Iterator[pa.RecordBatch]:
    return row_batches(store.versions(since=since, upto=upto))


def _since(batches: Sequence[StoredBatch]) -> Timestamp:
    return Timestamp(batches[-1].since if batches else 0)


def _upper(batches: Sequence[StoredBatch]) -> Timestamp:
    return Timestamp(batches[-1].upper if batches else 0)


def _info(batch: StoredBatch) -> BackupInfo:
    return BackupInfo(
        Timestamp(batch.lower),
        Timestamp(batch.upper),
        sum(part.rows for part in batch.parts),
        sum(part.size_bytes for part in batch.parts),
        len(batch.parts),
        batch.seconds,
    )


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if "://" in url:
        raise UsageError(f"{url}: collections live on local files", "pass a path or file://")
    return Path(url)
