"""An origin over the directory of a store: a checkpoint, or a store that no process has open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import pyarrow as pa
from typing_extensions import Self

from backup.version_rows import batches_in_order
from kvstore.changes import Change
from kvstore.engine import FileSpan
from kvstore.joins import OnGone
from kvstore.opening import open_read_only
from kvstore.span import Span
from kvstore.timestamp import Timestamp
from spark_connector.origins.origin import ChangeCount, HistoryEntry, JoinableRows, OriginFrontiers
from spark_connector.origins.place import Place


class CheckpointOrigin:
    """An origin over a store opened read-only, whose frontiers never move."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store = open_read_only(place.path)

    def frontiers(self, reaching: int = 0) -> OriginFrontiers:
        return OriginFrontiers(self._store.since, self._store.upper, self._store.store_id)

    def keep(self, since: int) -> None:
        pass

    def events(self) -> list[HistoryEntry]:
        found = []
        for record in self._store.imports.all():
            facts = (str(record.import_id), record.rows, record.size_bytes)
            if record.added is not None:
                found.append(HistoryEntry(record.added, "import", *facts))
            if record.reverted is not None:
                found.append(HistoryEntry(record.reverted, "revert", *facts))
        return sorted(found)

    def files(self, upto: int) -> Sequence[FileSpan]:
        return self._store.layout.files()

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        found = self._store.scan_batches(span.start, span.end, as_of=as_of, batch_rows=rows)
        for batch in found:
            yield batch.select(list(columns))

    def narrow(self, span: Span) -> Span:
        return self._store.requests.narrow(span)

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
        changes = self._store.changes(
            since, upto, span.start, span.end, revisions="latest" if latest else "all"
        )
        for batch in batches_in_order(each for each in changes if each.op != "delete_range"):
            yield batch.select(list(columns))

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        return self._store.replication.range_deletes(
            since, upto, span, "latest" if latest else "all"
        )

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        passed = current = 0
        reached = since
        changes = self._store.changes(since, upto, span.start, span.end, order="time")
        for count, change in enumerate(changes, start=1):
            if change.timestamp != current:
                reached, current = current or since, change.timestamp
            passed += len(change.key) + len(change.value or b"")
            if (rows is not None and count > rows) or (size is not None and passed > size):
                return reached if reached > since else current
        return upto

    def count(self, span: Span, *, since: int, upto: int) -> ChangeCount:
        found = self._store.browsing.count_changes(Timestamp(since), Timestamp(upto))
        return ChangeCount(found.changes, found.is_exact and span == Span())

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
        return self._store.join(labels, key, at, max_age, columns=columns, on_gone=on_gone)

    def rows_of(self, table: str) -> AbstractContextManager[JoinableRows]:
        return nullcontext(self._store.table(table))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()
