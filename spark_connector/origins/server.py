"""An origin over a live store that a server owns: rows stream from it, and no file is shared.

The planner takes a lease on the time that it reads at, so that garbage collection leaves it alone
while tasks are under way. The tasks take the lease again as they read. Spark does not tell a source
when a query is over, so a lease ends by itself, some time after the last task.

Invariants
1. A stream that breaks off, because the server was started anew or the task was slow, continues
   behind its last row. Times are pinned, so the rows are the same.
2. A lease that has ended is no wrong answer: a task takes it anew, or fails with
   `HistoryGoneError` where the history is gone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import Self

from backup.shard import OP_DELETE, OP_PUT
from kvstore.changes import Change, Revisions
from kvstore.changes.entry import OP_PUT as CHANGE_PUT
from kvstore.changes.event import Images
from kvstore.engine import FileSpan
from kvstore.errors import AccessDeniedError, IndeterminateError, NotYetWrittenError, RetryableError
from kvstore.joins import OnGone
from kvstore.limits import READER_TRIES_MAX
from kvstore.protocol import from_json, to_json
from kvstore.span import Span
from kvstore.timestamp import Timestamp
from spark_connector.origins.origin import ChangeCount, HistoryEntry, JoinableRows, OriginFrontiers
from spark_connector.origins.place import Place

_RENEWALS: Final = 3
"""Times that a task takes its lease again while the lease would last."""

_PASSING: Final = (RetryableError, IndeterminateError)

_Rows = Callable[[Span], pa.RecordBatchReader]


class ServerOrigin:
    """An origin over the store behind a server."""

    def __init__(self, place: Place) -> None:
        assert place.access is not None, "the place is a server"
        self.place = place
        self._seconds = place.access.lease_seconds
        self._client = place.access.connect()
        self._renewed_at: float | None = None

    def frontiers(self, reaching: int = 0) -> OriginFrontiers:
        found = self._client.call("times")
        if reaching >= found["upper"]:
            with suppress(NotYetWrittenError):
                self._client.call("resolve", as_of=str(Timestamp(reaching)))
                found = self._client.call("times")
        return OriginFrontiers(found["since"], found["upper"], found["store_id"])

    def events(self) -> list[HistoryEntry]:
        return []

    def files(self, upto: int) -> Sequence[FileSpan]:
        return [
            FileSpan(
                from_json(each["first"], name="first"),
                from_json(each["last"], name="last"),
                int(each["size_bytes"]),
            )
            for each in self._client.call("files")["files"]
        ]

    def narrow(self, span: Span) -> Span:
        if span.plain() == span:
            return span
        found = self._client.call("files", start=to_json(span.start), end=to_json(span.end))
        return span.plain() if found["hides_reserved"] else span

    def keep(self, since: int) -> None:
        if self.place.lease is None:
            self.place = self.place._replace(lease=secrets.token_hex(12))
        self._renew(since)

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        def scan(rest: Span) -> pa.RecordBatchReader:
            return self._client.scan_batches(
                rest.start, rest.end, as_of=Timestamp(as_of), batch_rows=rows
            )

        for batch in self._unbroken(scan, span, needed=as_of):
            yield batch.select(list(columns))

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
        def changed(rest: Span) -> pa.RecordBatchReader:
            return self._client.versions_batches(
                Timestamp(since), Timestamp(upto), span=rest, revisions=_revisions(latest)
            )

        needed = upto if latest and since == 0 else since
        for batch in self._unbroken(changed, span, needed=needed):
            coded = _with_codes_of_parts(batch)
            for start in range(0, coded.num_rows, rows):
                yield coded.slice(start, rows).select(list(columns))

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        with self._client.versions_batches(
            Timestamp(since), Timestamp(upto), span=span, revisions=_revisions(latest), ranges=True
        ) as reader:
            found = reader.read_all().to_pylist()
        return [
            Change(Timestamp(each["timestamp"]), "delete_range", each["key"], each["end_key"], None)
            for each in found
        ]

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        passed = count = current = 0
        reached = since
        images: Images = "none" if size is None else "delta"
        with self._client.changes_batches(
            Timestamp(since), Timestamp(upto), span=span, images=images
        ) as reader:
            for batch in reader:
                times = batch.column("timestamp").to_pylist()
                sizes = [0] * len(times) if size is None else _row_bytes(batch)
                for each, weight in zip(times, sizes, strict=True):
                    if each != current:
                        reached, current = current or since, each
                    count, passed = count + 1, passed + weight
                    if (rows is not None and count > rows) or (size is not None and passed > size):
                        return reached if reached > since else current
        return upto

    def count(self, span: Span, *, since: int, upto: int) -> ChangeCount | None:
        try:
            found = self._client.call(
                "count_changes", since=str(Timestamp(since)), upto=str(Timestamp(upto))
            )
        except AccessDeniedError:  # the token is for the keys of a prefix
            return None
        return ChangeCount(found["changes"], found["is_exact"] and span == Span())

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
        return self._client.join(labels, key, at, max_age, columns=columns, on_gone=on_gone)

    def rows_of(self, table: str) -> AbstractContextManager[JoinableRows]:
        return nullcontext(self._client.table(table))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    # -- inside -----------------------------------------------------------------------------

    def _unbroken(self, rows_of: _Rows, span: Span, *, needed: int) -> Iterator[pa.RecordBatch]:
        """The rows of a span by key, over streams that break. `needed` is the oldest time that is
        read."""
        last, given, tries = span.start, 0, 0  # rows of the key `last` that were given already
        while True:
            self._renew(needed)
            passed = 0
            try:
                with rows_of(Span(last, span.end)) as reader:
                    for batch in reader:
                        skipped = min(given - passed, batch.num_rows)
                        passed += skipped
                        fresh = batch.slice(skipped)
                        if not fresh.num_rows:
                            continue
                        yield fresh
                        tries = 0
                        last, given = _behind(fresh, last, given)
                        passed = given
                        self._renew_in_time(needed)
                return
            except _PASSING:
                tries += 1
                if tries > READER_TRIES_MAX:
                    raise

    def _renew(self, since: int) -> None:
        if self.place.lease is not None:
            self._client.lease(self.place.lease, Timestamp(since), seconds=self._seconds)
            self._renewed_at = time.monotonic()

    def _renew_in_time(self, since: int) -> None:
        renewed_at = self._renewed_at
        if renewed_at is not None and time.monotonic() - renewed_at > self._seconds / _RENEWALS:
            self._renew(since)


def _with_codes_of_parts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with the operations of backup/version_rows.py; the server has the change index's
    codes."""
    is_put = pc.equal(batch.column("op"), CHANGE_PUT)
    ops = pc.if_else(is_put, pa.scalar(OP_PUT, pa.uint8()), pa.scalar(OP_DELETE, pa.uint8()))
    return batch.set_column(batch.schema.get_field_index("op"), "op", ops)


def _behind(batch: pa.RecordBatch, last: bytes, given: int) -> tuple[bytes, int]:
    """The last key of a batch, and how many rows of this key there were up to its end."""
    keys = batch.column("key")
    key: bytes = keys[-1].as_py()
    if batch.num_rows == 1 or keys[-2].as_py() != key:
        same = 1
    else:
        same = pc.sum(pc.equal(keys, keys[-1])).as_py()
    return key, same + (given if key == last and same == batch.num_rows else 0)


def _row_bytes(batch: pa.RecordBatch) -> list[int]:
    keys, values = (pc.binary_length(batch.column(name)) for name in ("key", "value"))
    found: list[int] = pc.add(keys, pc.fill_null(values, 0)).to_pylist()
    return found


def _revisions(latest: bool) -> Revisions:
    return "latest" if latest else "all"
