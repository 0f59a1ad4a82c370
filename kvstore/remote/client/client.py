"""The client: the names of `Store`, on a store that another process serves."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar, overload

import pyarrow as pa

from kvstore.base.arguments import INTEGER, SECONDS, WAIT
from kvstore.base.clock import Clock
from kvstore.base.forks import not_copied, own
from kvstore.base.span import Span, one_span
from kvstore.base.timestamp import AgeLike, TimeLike, Timestamp
from kvstore.batch import Batch, trim
from kvstore.changes import Change, Order, Revisions
from kvstore.changes.batches import changes_schema
from kvstore.changes.epochs import Changeset, ChangesetId, Epoch, ambient
from kvstore.changes.events import (
    Event,
    Expand,
    ExpiringChange,
    ExpiringEvent,
    Images,
    Op,
    Operation,
)
from kvstore.changes.index import OP_DELETE, OP_DELETE_RANGE, OP_PUT
from kvstore.changes.streams import Generation, generation
from kvstore.codec.json import JsonObject
from kvstore.codec.shown import ShownRows
from kvstore.codec.tuples import desc
from kvstore.errors import Argument, ClosedError, HistoryGoneError, KVStoreError, UsageError
from kvstore.feeds import STARTS, FeedBatch, Position, Share
from kvstore.limits import (
    CLIENT_PATIENCE_S,
    CLIENT_SNAPSHOT_LEASE_S,
    CLIENT_TIMEOUT_S,
    CLIENT_TIMEOUT_S_MAX,
    CLIENT_TIMEOUT_S_MIN,
)
from kvstore.mapping import MappingCodec, StoreMapping
from kvstore.metrics import DEFINITIONS, Distribution, Metric
from kvstore.mvcc import Version, WriteSet
from kvstore.readable import Readable, ReadableAt
from kvstore.remote import verbs
from kvstore.remote.client import transport
from kvstore.remote.client.calls import (
    SentWriteSet,
    batch_request,
    bounds,
    request_by_name,
    strange,
)
from kvstore.remote.client.tables import ClientDefinitions, ClientRows, ClientTable, remote_answers
from kvstore.remote.client.transport import (
    FROM_CLIENT,
    Endpoint,
    Pool,
    ServedFrontiers,
    floors_of,
    time_left,
    values_of,
    versions_of,
)
from kvstore.remote.parameters import sent_time
from kvstore.remote.protocol import EPOCHS_SCHEMA, POSITION_NAME
from kvstore.retention.gc import GcReport
from kvstore.tables.catalogue import Catalogue, IndexColumns
from kvstore.tables.joins import Side
from kvstore.tables.table import Row, model_of
from kvstore.tasks import Modified, Task, Tasks, TaskState
from kvstore.timeline.changesets import INSIDE_CHANGESET
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires, sent_expiry
from kvstore.timeline.holds import HoldRecord, from_fields
from kvstore.transaction import UNCHECKED, ReadSet, Transaction, Unchecked, transact
from kvstore.verify import Problem, StoreReport

T = TypeVar("T")


class Client(ServedFrontiers, Readable):
    """A store behind a server; `kvstore.connect` makes one. Use it from any thread.

    It has the methods of `Store`: same arguments, same results, same errors. Besides, each call
    raises `DeterminateError` if it surely did nothing, and `IndeterminateError` if that is unknown.
    Reads and writes are sent again for `patience` seconds first; a write that is sent again is done
    once. The rows of a scan or of changes that have begun are not asked for again.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        not_copied(type(self))
        self._catalogue = Catalogue(ClientDefinitions(pool))
        self._transactions = RemoteTransactions(pool, self._catalogue)

    # -- the store --------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The directory of the store, for a client by path; None for a client of an address."""
        return self.pool.endpoint.store

    @property
    def tasks(self) -> Tasks:
        """The queue of the store's tasks, to submit tasks to. The owner's process does them."""
        return ClientTasks(self.pool)

    def stats(self) -> dict[str, Any]:
        """See `Store.stats`."""
        return {**self.pool.call(verbs.STATS)}

    def metrics(self) -> Mapping[str, Metric]:
        """See `Store.metrics`."""
        return metrics_of(self.pool.call(verbs.METRICS))

    def sync(self) -> Timestamp:
        """See `Store.sync`."""
        return self.pool.call(verbs.SYNC)

    def close(self) -> None:
        """Close the connections. The server and its store stay. Repeatable."""
        self.pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvstore.Client {self.pool.where}>"

    # -- reading ----------------------------------------------------------------------------

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None = None
    ) -> list[bytes | None]:
        """See `Store.get_many`."""
        return values_of(self.pool, keys, self.times_still(as_of))

    def floor_many(
        self,
        keys: Sequence[bytes],
        as_of: TimeLike | Sequence[TimeLike] | None = None,
        prefix: bytes | None = None,
    ) -> list[tuple[bytes, bytes] | None]:
        """See `Store.floor_many`."""
        return floors_of(self.pool, keys, self.times_still(as_of), prefix)

    def keys(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[bytes]:
        """See `Store.keys`. No value travels."""
        how: dict[str, Any] = {"as_of": as_of, "reverse": reverse, "limit": limit}
        for batch in self.pool.rows(verbs.KEYS, **bounds(Span.of(start, end, prefix)), **how):
            yield from batch.column(0).to_pylist()

    def count(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
    ) -> int:
        """See `Store.count`. The server counts."""
        within = bounds(Span.of(start, end, prefix))
        return self.pool.call(verbs.COUNT_KEYS, **within, as_of=as_of)

    def mapping(
        self,
        codec: str | MappingCodec = "bytes",
        *,
        prefix: bytes = b"",
        expires: Expires | None = None,
    ) -> StoreMapping:
        """See `Store.mapping`. Each look-up and each write is a round trip."""
        return StoreMapping(self, codec, prefix, expires)

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
        *,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """See `Store.scan_batches`. The whole stream is of one time."""
        within = bounds(Span.of(start, end, prefix))
        how: dict[str, Any] = {"reverse": reverse, "limit": limit, "batch_rows": batch_rows}
        return self.pool.rows(verbs.SCAN, **within, as_of=as_of, **how)

    def join_side(self) -> Side:
        """The side of the served store in a join of several sources: see `kvstore.join`."""
        return Side(partial(remote_answers, self.pool))

    def snapshot(self, as_of: TimeLike | None = None) -> ClientSnapshot:
        """See `Store.snapshot`. A lease keeps the time readable, and runs out by itself once this
        process has ended."""
        return ClientSnapshot(self, self.pool, as_of)

    def history(self, key: bytes) -> list[Version]:
        """See `Store.history`."""
        return versions_of(self.pool, key)

    def lease(self, name: str, at: TimeLike | None = None, *, seconds: float) -> Timestamp:
        """Keep history from `at` on readable (default: the whole kept history), for readers in many
        processes. Returns the time from which it is kept.

        The lease `name`, a random text of the caller, ends after `seconds`; the same call again
        moves it or makes it longer. Raises `HistoryGoneError` and `NotYetWrittenError` for `at`.
        """
        found: Timestamp = self.pool.call(verbs.LEASE, name=name, at=at, seconds=seconds)["at"]
        return found

    def release_lease(self, name: str) -> None:
        """End a lease before its time. Repeatable."""
        self.pool.call(verbs.RELEASE_LEASE, name=name)

    # -- writing ----------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """See `Store.put`. A timedelta counts from the time at which the server takes the write."""
        how: dict[str, Any] = {"expires": expires, "durability": durability}
        return self.pool.call(verbs.PUT, key=key, value=value, **how)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Timestamp:
        """See `Store.delete`."""
        return self.pool.call(verbs.DELETE, key=key, durability=durability)

    def delete_range(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        idempotent: bool = False,
        *,
        prefix: bytes | None = None,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """See `Store.delete_range`."""
        how: dict[str, Any] = {"idempotent": idempotent, "durability": durability}
        span = Span.to_delete(start, end, prefix)
        return self.pool.call(verbs.DELETE_RANGE, **bounds(span), **how)

    def trim(
        self,
        prefixes: bytes | Sequence[bytes],
        keep: int,
        *,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """See `Store.trim`. A round trip for each prefix, and one for the commit."""
        return trim(self, prefixes, keep, durability)

    def put_if(
        self,
        key: bytes,
        value: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """See `Store.put_if`."""
        return self.pool.call(
            verbs.PUT_IF,
            key=key,
            value=value,
            expected=expected,
            unchanged_since=unchanged_since,
            expires=expires,
            durability=durability,
        )

    def delete_if(
        self,
        key: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """See `Store.delete_if`."""
        condition = {"expected": expected, "unchanged_since": unchanged_since}
        return self.pool.call(verbs.DELETE_IF, key=key, **condition, durability=durability)

    def pop(self, key: bytes, *, durability: Durability | None = None) -> bytes | None:
        """See `Store.pop`."""
        return self.pool.call(verbs.POP, key=key, durability=durability)

    def update(
        self,
        key: bytes,
        change: Callable[[bytes | None], bytes | None],
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> bytes | None:
        """See `Store.update`. The function runs here, in a transaction: three round trips or
        more. It runs again after each conflict."""
        update = partial(Transaction.update, key=key, change=change, expires=expires)
        return self.transact(update, durability=durability)

    def increment(
        self,
        key: bytes,
        by: int = 1,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> int:
        """See `Store.increment`."""
        how: dict[str, Any] = {"expires": expires, "durability": durability}
        return self.pool.call(verbs.INCREMENT, key=key, by=by, **how)

    def ttl(self, key: bytes) -> timedelta | None:
        """See `Store.ttl`."""
        return time_left(self.pool, key)

    def persist(self, key: bytes, *, durability: Durability | None = None) -> Timestamp | None:
        """See `Store.persist`."""
        return self.pool.call(verbs.PERSIST, key=key, durability=durability)

    def put_many(
        self,
        rows: object,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """See `Store.put_many`. The rows travel together."""
        with self.batch(durability=durability) as batch:
            batch.put_many(rows, expires=expires)
        return batch.timestamp

    def revert_range(self, start: bytes, end: bytes | None, to: TimeLike) -> Timestamp | None:
        """See `Store.revert_range`. The server finds the changes and writes the new versions."""
        return self.pool.call(verbs.REVERT_RANGE, **bounds(Span(start, end)), to=to)

    def batch(self, *, durability: Durability | None = None) -> Batch:
        """See `Store.batch`. The writes travel together when the block ends."""
        rows = self.table_rows()
        commit = partial(rows.commit, durability)
        return Batch(commit, SentWriteSet, rows=lambda: rows, due=sent_expiry)

    def transaction(self, *, durability: Durability | None = None) -> Transaction:
        """See `Store.transaction`. Each read is a round trip, and so is the commit, which brings
        the reads with the writes. Raises `HistoryGoneError` once GC has removed history that the
        transaction reads: run it again."""
        return self._transactions.begin(durability)

    def transact(
        self,
        body: Callable[[Transaction], T],
        *,
        attempts: int | None = None,
        wait: Callable[[float], None] = time.sleep,
        durability: Durability | None = None,
    ) -> T:
        """See `Store.transact`."""
        begin = partial(self.transaction, durability=durability)
        return transact(begin, body, attempts=attempts, wait=wait)

    # -- tables -----------------------------------------------------------------------------

    @overload
    def table(
        self,
        name: str,
        schema: type[Row],
        key: str | desc | Sequence[str | desc],
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
    ) -> ClientTable[Row]: ...

    @overload
    def table(
        self,
        name: str,
        schema: pa.Schema | None = None,
        key: str | desc | Sequence[str | desc] | None = None,
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
        *,
        row: type[Row],
    ) -> ClientTable[Row]: ...

    @overload
    def table(
        self,
        name: str,
        schema: pa.Schema | None = None,
        key: str | desc | Sequence[str | desc] | None = None,
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
    ) -> ClientTable: ...

    def table(
        self,
        name: str,
        schema: pa.Schema | type | None = None,
        key: str | desc | Sequence[str | desc] | None = None,
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
        *,
        row: type[Any] | None = None,
    ) -> ClientTable[Any]:
        """See `Store.table`. Rows are encoded here; the server makes the entries of indexes, checks
        the unique ones, and decodes the rows of scans. A token with a prefix opens no table."""
        return self.table_rows().table(
            *(name, schema, key, indexes, event_time, expires, valid_to, row)
        )

    def tables(self) -> list[str]:
        """See `Store.tables`."""
        return self._catalogue.names()

    def table_rows(self) -> ClientRows:
        """The writer of rows of tables, for a handle that reads them elsewhere."""
        return ClientRows(self, self._catalogue)

    # -- inside -----------------------------------------------------------------------------

    def _value(self, key: bytes, as_of: TimeLike | None) -> bytes | None:
        return self.pool.call(verbs.GET, key=key, as_of=as_of)

    # -- changes ---------------------------------------------------------------------------

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        revisions: Revisions = "all",
        order: Order = "key",
        *,
        prefix: bytes | None = None,
    ) -> Iterator[Change]:
        """See `Store.changes`."""
        within = bounds(Span.of(start, end, prefix))
        choice: dict[str, Any] = {"revisions": revisions, "order": order}
        reader = self.pool.rows(verbs.VERSIONS, since=since, upto=upto, **within, **choice)
        return ShownRows("changes", Change._fields, changes_of(reader))

    def events(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
    ) -> Iterator[Event]:
        """See `Store.events`."""
        how: dict[str, Any] = {**bounds(span or Span()), "images": images, "expand": expand}
        return events_of(self.pool.rows(verbs.EVENTS, since=since, upto=upto, **how))

    def changes_batches(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
    ) -> pa.RecordBatchReader:
        """See `Store.changes_batches`."""
        how: dict[str, Any] = {**bounds(span or Span()), "images": images, "expand": expand}
        return self.pool.rows(verbs.CHANGES, since=since, upto=upto, **how)

    def versions_batches(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        revisions: Revisions = "all",
        ranges: bool = False,
    ) -> pa.RecordBatchReader:
        """The puts and deletes that `Store.changes` gives by key, as Arrow batches; with `ranges`
        the range deletes alone."""
        how: dict[str, Any] = {**bounds(span or Span()), "revisions": revisions, "ranges": ranges}
        return self.pool.rows(verbs.VERSIONS, since=since, upto=upto, **how)

    def feed(
        self,
        name: str,
        start: TimeLike | Position | None = None,
        streams: tuple[int, int] | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
        *,
        span: Span | None = None,
        prefix: bytes | None = None,
        max_age: AgeLike | None = None,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
    ) -> ClientFeed:
        """See `Store.feed`. The position is with the store, so the server may be started anew."""
        span = one_span(span, prefix)
        fields = feed_fields(name, streams, images, expand, span, batch_rows, batch_bytes)
        opened = self.pool.call(verbs.OPEN_FEED, **fields, **start_fields(start, max_age))
        return ClientFeed(self.pool, fields, opened)

    def drop_feed(self, name: str) -> None:
        """Give up a feed: its position, and its claim on history."""
        self.pool.call(verbs.DROP_FEED, name=name)

    # -- waits and groups -------------------------------------------------------------------

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """See `Store.wait_beyond`. The server waits, for ten seconds at a time at most; `stop` is
        asked before each time."""
        upper = INTEGER.check("upper", upper)
        seconds = WAIT.check("timeout", timeout)
        ends_at = None if seconds is None else time.monotonic() + seconds
        while not stop():
            most = self.pool.poll_s
            left = most if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            found = self.pool.call(verbs.WAIT_BEYOND, upper=upper, wait=min(left, most))
            if found > upper or not left:
                return

    def changeset(self) -> ClientChangeset:
        """See `Store.changeset`. The writes of this client inside the block, in this context,
        belong to it. The server ends it after five minutes without a write; the next write raises
        `ClosedError`."""
        return ClientChangeset(self.pool)

    def epochs(self, since: TimeLike = 0) -> Iterator[Epoch]:
        """See `Store.epochs`."""
        for batch in self.pool.rows(verbs.EPOCHS, since=since):
            for row in zip(*(batch.column(name).to_pylist() for name in _EPOCH), strict=True):
                found = Epoch(*row)
                yield found._replace(closed_at=Timestamp(found.closed_at))

    def generations(self) -> list[Generation]:
        """See `Store.generations`."""
        return [_generation(each) for each in self.pool.call(verbs.GENERATIONS)]

    def reshard(self, streams: int) -> Generation:
        """See `Store.reshard`. Needs the right `admin`."""
        return _generation(self.pool.call(verbs.RESHARD, streams=streams))

    def force_quiescence(
        self, after: AgeLike | None = None, *, timeout: float | None = None
    ) -> Timestamp:
        """See `Store.force_quiescence`. Needs the right `admin`."""
        if ambient(self.pool) is not None:
            raise UsageError(*INSIDE_CHANGESET)
        return self.pool.work(verbs.FORCE_QUIESCENCE, None, after=after, timeout=timeout)

    # -- upkeep ----------------------------------------------------------------------------

    def gc(
        self,
        before: TimeLike | None = None,
        keep: AgeLike | None = None,
        *,
        compact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """See `Store.gc`. An error that `progress` raises ends the run of the owner."""
        found = self.pool.work(verbs.GC, progress, before=before, keep=keep, compact=compact)
        claims = {
            name: tuple(hold_record(fields) for fields in found[name])
            for name in ("lost_holds", "held_by")
        }
        return GcReport(**{**found, **claims})

    def checkpoint(self, path: str | Path) -> Timestamp:
        """See `Store.checkpoint`. `path` is an absolute path on the machine of the server."""
        return self.pool.work(verbs.CHECKPOINT, None, path=str(path))

    def clear_range(self, start: bytes, end: bytes, *, compact: bool = True) -> Timestamp:
        """See `Store.clear_range`."""
        return self.pool.work(verbs.CLEAR_RANGE, None, **bounds(Span(start, end)), compact=compact)

    def verify(self, *, progress: Callable[[int], None] | None = None) -> StoreReport:
        """See `Store.verify`. The server walks; an error that `progress` raises ends the walk."""
        found = self.pool.work(verbs.VERIFY, progress)
        problems = tuple(Problem(*each) for each in found["problems"])
        return StoreReport(**{**found, "problems": problems})

    def revert_import(self, import_id: int) -> Timestamp:
        """See `Store.revert_import`."""
        number = INTEGER.check("import_id", import_id)
        return self.pool.call(verbs.REVERT_IMPORT, import_id=f"{number:016x}")

    def hold(
        self, name: str, at: TimeLike | None = None, max_age: AgeLike | None = None
    ) -> ClientHold:
        """See `Store.hold`."""
        found = self.pool.call(verbs.HOLD, name=name, at=at, max_age=max_age, durable=True)
        return ClientHold(self.pool, name, found["token"])

    def drop_hold(self, name: str) -> HoldRecord:
        """Remove a hold, whoever owns it: see `Holds.drop`."""
        return hold_record(self.pool.call(verbs.DROP_HOLD, name=name))

    # -- other verbs ------------------------------------------------------------------------

    def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Call a verb by its name, with arguments as JSON: for verbs that this client lacks."""
        return self.pool.send(request_by_name(verb, arguments))

    def rows(self, verb: str, **arguments: Any) -> pa.RecordBatchReader:
        """Call a verb that answers with rows, as `call`. The call is sent once."""
        return transport.rows(self.pool, request_by_name(verb, arguments))

    def work(
        self, verb: str, progress: Callable[[int], None] | None, /, **arguments: Any
    ) -> Mapping[str, Any]:
        """Call a verb of long work, and return its result. An error that `progress` raises ends
        the work at its next step."""
        return transport.outcome(self.pool, verb, self.rows(verb, **arguments), progress)


def connect(
    address: str | os.PathLike[str],
    token: str | None = None,
    *,
    ca: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    patience: float | None = None,
) -> Client:
    """A client of the store that is served at `address`: an `http` or `https` URL, the path of a
    Unix socket, or the directory of a store, whose owner listens (`kvstore.open(path,
    control=True)`).

    `token` goes with every call. `ca` is a file with the certificates of trusted issuers; by
    default these are the issuers that the machine trusts. `timeout` bounds each wait for the
    server, `patience` the time for which a call is sent again: within it, a server that is started
    anew is waited for and found, at a path as at a URL. Both are in seconds, by default
    `CLIENT_TIMEOUT_S` and `CLIENT_PATIENCE_S` of `kvstore.limits`.

    This call itself waits for a server at a path only if `patience` is given. Raises
    `NotListeningError` if the store has no owner that listens, `NotFoundError` for a path with
    neither store nor socket, `DeterminateError` if nobody serves there, `AccessDeniedError` for a
    token or a certificate that is refused. One round trip.
    """
    wait = CLIENT_TIMEOUT_S if timeout is None else SECONDS.check("timeout", timeout)
    if not wait:
        raise UsageError("timeout=0 leaves the server no time to answer", "pass seconds above 0")
    again = CLIENT_PATIENCE_S if patience is None else SECONDS.check("patience", patience)
    endpoint = Endpoint.of(address, token, ca, 0 if patience is None else again)
    wait = min(max(wait, CLIENT_TIMEOUT_S_MIN), CLIENT_TIMEOUT_S_MAX)
    pool = Pool(endpoint, timeout=wait, patience=again)
    try:
        pool.known = pool.call(verbs.TIMES)["upper"] - 1
    except BaseException:
        pool.close()
        raise
    return Client(pool)


# --------------------------------------------------------------------------------------------------
# Changes as a client receives them: rows of Arrow batches become `Event` and `Change`.

_OPS: Final[dict[int, Op]] = {
    OP_PUT: "put",
    OP_DELETE: "delete",
    OP_DELETE_RANGE: "delete_range",
}
_CHANGE: Final = ("timestamp", "op", "key", "end_key", "value", "expires")


def changes_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Change]:
    """The changes of batches, in their order."""
    for timestamp, op, key, end_key, value, due in _rows(batches, _CHANGE):
        change = Change(Timestamp(timestamp), _OPS[op], key, end_key, value)
        yield change if due is None else ExpiringChange.of(change, due)


def events_of(batches: Iterable[pa.RecordBatch], *, is_cut: bool = False) -> Iterator[Event]:
    """The events of batches, in their order; each commit's events follow each other. If `is_cut`,
    the last commit has more events than came."""
    before: tuple[Any, ...] | None = None
    for row in _rows(batches, tuple(changes_schema().names)):
        if before is not None:
            yield _event(before, is_last=before[0] != row[0])
        before = row
    if before is not None:
        yield _event(before, is_last=not is_cut)


def _rows(batches: Iterable[pa.RecordBatch], names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def _event(row: tuple[Any, ...], *, is_last: bool) -> Event:
    time, sequence, op, key, end_key, value, pre, post, changeset, stream, due = row
    domain, serial = int.from_bytes(changeset[:8], "big"), int.from_bytes(changeset[8:], "big")
    event = Event(
        Timestamp(time),
        sequence,
        Operation(op),
        key,
        end_key,
        value,
        pre,
        post,
        ChangesetId(domain, serial),
        stream,
        is_last,
    )
    return event if due is None else ExpiringEvent.of(event, due)


# --------------------------------------------------------------------------------------------------
# A hold that a client has taken: the owner's handle is here, the claim is with the store.


def hold_record(fields: Mapping[str, Any]) -> HoldRecord:
    """The record of a hold, out of an answer."""
    return from_fields(fields["name"], JsonObject(dict(fields), where="the server's answer"))


class ClientHold:
    """A client's handle on a hold; `Client.hold` takes it. See `Hold`. Needs the right `admin`.

    Leaving a `with` block releases it.
    """

    def __init__(self, pool: Pool, name: str, token: str) -> None:
        self._pool = pool
        self.name = name
        self.token = token
        own(self, repr(self), endings=("release",), remedy=FROM_CLIENT)

    @property
    def timestamp(self) -> Timestamp:
        """The time from which the hold keeps history. Raises `FencedError` if a newer owner has
        taken the hold, `HoldLostError` if it was invalidated."""
        return Timestamp(self._pool.call(verbs.HELD, name=self.name, token=self.token)["timestamp"])

    def move(self, to: TimeLike) -> None:
        """Hold `to` instead, durably. Raises as `Hold.move`."""
        self._pool.call(verbs.MOVE_HOLD, name=self.name, token=self.token, to=to, durable=True)

    def release(self) -> None:
        """Give up the hold, durably. Raises as `move`."""
        self._pool.call(verbs.RELEASE_HOLD, name=self.name, token=self.token)

    def __repr__(self) -> str:
        return f"<kvstore.ClientHold {self.name!r}>"

    def __enter__(self) -> ClientHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# --------------------------------------------------------------------------------------------------
# Changesets of a client: the block is here, and the changeset is open at the server.
#
# Invariants
# 1. A write inside the block carries the name of the innermost changeset of its context.
# 2. A changeset whose client has gone ends by itself: see `kvstore.remote.server.changesets`.


class ClientChangeset(Changeset):
    """See `Changeset`. `events` counts the changes once the block has ended. Raises `ClosedError`
    at a write if the server has ended the changeset: nothing was written for some minutes, or the
    server was started anew."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool, _begin, _end)
        self._pool = pool
        self._process = os.getpid()

    def open(self) -> None:
        """Open it at the server, inside the changeset of this context. Repeatable."""
        if not self.name:
            around = ambient(self._pool)
            outer = None if around is None else around.name
            found = self._pool.call(verbs.OPEN_CHANGESET, outer=outer)
            self.id = ChangesetId(found["domain"], found["serial"])
            self.name = found["name"]

    def end(self) -> None:
        """End the changeset at the server. Repeatable. A forked child leaves its parent's changeset
        open."""
        name, self.name = self.name, ""
        if name and self._process == os.getpid():
            with suppress(KVStoreError):  # it ends by itself
                self.counted = self._pool.call(verbs.END_CHANGESET, name=name), 0


def _begin(changeset: Changeset) -> None:
    assert isinstance(changeset, ClientChangeset)
    changeset.open()


def _end(changeset: Changeset) -> None:
    assert isinstance(changeset, ClientChangeset)
    changeset.end()


# --------------------------------------------------------------------------------------------------
# A snapshot of a served store: reads at one time, under a lease that the client renews.
#
# Invariants
# 1. A read shows the state at `as_of`, or raises `HistoryGoneError`: the time alone decides its
#    rows, and the lease keeps them.
# 2. A client that has gone leaves a lease that ends by itself.

_ATTEMPTS = 3


class ClientSnapshot(ReadableAt):
    """Reads at `as_of`, which stays readable until the snapshot is closed; see `Store.snapshot`.

    Each read renews the lease if a third of `CLIENT_SNAPSHOT_LEASE_S` has passed. After a pause
    longer than the lease a read raises `HistoryGoneError` if garbage collection has removed history
    of its time.
    """

    def __init__(self, client: Client, pool: Pool, as_of: TimeLike | None) -> None:
        """Take the lease. Raises `HistoryGoneError` and `NotYetWrittenError` for `as_of`."""
        self._client, self._pool, self._is_open = client, pool, True
        self._name = secrets.token_hex(12)
        for attempt in range(_ATTEMPTS):
            try:
                self.as_of = pool.call(verbs.RESOLVE, as_of=as_of)
                self._lease()
                own(self, repr(self), remedy=FROM_CLIENT)
                return
            except HistoryGoneError:  # noqa: PERF203  # GC has passed the newest time meanwhile
                if as_of is not None or attempt == _ATTEMPTS - 1:
                    raise

    def join_side(self) -> Side:
        """The side of this snapshot in a join of several sources: see `kvstore.join`."""
        self._open()
        return Side(partial(remote_answers, self._pool, self.as_of))

    @overload
    def table(self, name: str, *, row: type[Row]) -> ClientTable[Row]: ...

    @overload
    def table(self, name: str) -> ClientTable: ...

    def table(self, name: str, *, row: type[Any] | None = None) -> ClientTable[Any]:
        """The table `name`, with the columns and rows that it had at this snapshot's time.
        `history`, `changes`, `latest` and `join` answer for older times too. The server decodes its
        rows."""
        rows = self._client.table_rows()
        codec = ClientTable(name, rows, snapshot=self).codec()
        return ClientTable(name, rows, *model_of(name, codec, row), snapshot=self)

    def open_at(self) -> Timestamp:
        """The time of this snapshot, for reads that follow. Renews the lease in time."""
        self._open()
        return self.as_of

    def close(self) -> None:
        """End the claim on history. Repeatable."""
        if self._is_open:
            self._is_open = False
            with suppress(KVStoreError):  # it ends by itself
                self._pool.call(verbs.RELEASE_LEASE, name=self._name)

    def __repr__(self) -> str:
        return f"<kvstore.ClientSnapshot as of {self.as_of}>"

    def __enter__(self) -> ClientSnapshot:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Readable:
        if not self._is_open:
            raise ClosedError("the snapshot")
        if time.monotonic() > self._renew_at:
            self._lease()
        return self._client

    def _lease(self) -> None:
        self._renew_at = time.monotonic() + CLIENT_SNAPSHOT_LEASE_S / 3
        lease_s = CLIENT_SNAPSHOT_LEASE_S
        self._pool.call(verbs.LEASE, name=self._name, at=self.as_of, seconds=lease_s)


# --------------------------------------------------------------------------------------------------
# Transactions of a client: reads at one time of the server, and a commit that the server checks.
#
# The server knows nothing of a transaction before its commit, which brings the reads along. So a
# client that goes away leaves nothing behind.


class RemoteVersions:
    """The versions of a served store."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`."""
        return self._pool.call(verbs.GET, key=key, as_of=as_of)

    def get_many(self, keys: list[bytes], as_of: int) -> list[bytes | None]:
        """The values of `keys` at `as_of`. One round trip."""
        return values_of(self._pool, keys, as_of)

    def scan(
        self, span: Span, as_of: int, *, reverse: bool
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Live keys and values of a span at `as_of`, chunk by chunk."""
        how: dict[str, Any] = {**bounds(span), "as_of": as_of, "reverse": reverse}
        for batch in self._pool.rows(verbs.SCAN, **how):
            yield batch.column(0).to_pylist(), batch.column(1).to_pylist()


class RemoteTransactions:
    """Begins and commits the transactions of one client."""

    write_set: Final = SentWriteSet

    def __init__(self, pool: Pool, catalogue: Catalogue) -> None:
        self._pool, self.catalogue = pool, catalogue
        self.versions = RemoteVersions(pool)

    def due(self, expires: Expires) -> int:
        """See `sent_expiry`: a client does not know the time of the store."""
        return sent_expiry(expires)

    def narrow(self, span: Span) -> Span:
        """The span as it is: the server leaves tables out."""
        return span

    def begin(self, durability: Durability | None) -> Transaction:
        """A transaction at the newest complete time of the server. One round trip."""
        transaction = Transaction(self, 0, durability=durability)
        transaction.read_at = self._pool.call(verbs.RESOLVE)
        return transaction

    def commit(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        pin: int,
        *,
        durability: Durability | None,
    ) -> Timestamp:
        """See `Transactions.commit`."""
        assert isinstance(writes, SentWriteSet), "write_set says so"
        return self._pool.send(batch_request(writes, durability, reads, read_at))

    def end(self, pin: int) -> None:
        """The server has nothing to end."""

    def abandon(self, pin: int) -> None:
        """The server has nothing to end."""


# --------------------------------------------------------------------------------------------------
# A feed of a client: the consumer of changes is here, and its position is with the store.


class ClientFeed:
    """A consumer's handle on a feed of a served store; `Client.feed` makes it. See `Feed`.

    It survives restarts of the server: a call that fails is sent again, and delivers nothing twice.
    """

    def __init__(self, pool: Pool, fields: Mapping[str, Any], opened: Mapping[str, Any]) -> None:
        """`fields` are the arguments of each call, `opened` the answer to the opening."""
        self._pool = pool
        self._fields = {**fields, "token": opened["token"]}
        self.name = str(fields["name"])
        self.share = Share(fields.get("worker") or 0, fields.get("workers") or 1)
        self.position = _position(opened)
        """The position after the last delivery of this handle."""
        self._closed = False
        own(self, repr(self), remedy=FROM_CLIENT)

    def batches(
        self, *, follow: bool = False, heartbeat: float | None = None
    ) -> Iterator[FeedBatch]:
        """See `Feed.batches`. Each batch is a round trip; following waits at the server."""
        if heartbeat is not None and not SECONDS.check("heartbeat", heartbeat):
            raise UsageError(Argument("heartbeat", str(heartbeat)), "pass seconds above 0, or None")
        wait = min(heartbeat or self._pool.poll_s, self._pool.poll_s) if follow else 0.0
        while True:
            batch = self._fetch(wait)
            self.position = batch.position
            if batch.events or not follow or heartbeat is not None:
                yield batch
            if not follow and not batch.events and not batch.is_state:
                return

    def __iter__(self) -> Iterator[FeedBatch]:
        return self.batches()

    def ack(self, upto: FeedBatch | Position) -> None:
        """See `Feed.ack`."""
        position = upto.position if isinstance(upto, FeedBatch) else upto
        if position.is_beyond(self.position):
            raise UsageError(f"{position} was not delivered yet", "ack a delivered position")
        self._pool.call(verbs.ACK, **self._at(position))

    def close(self) -> None:
        """Close the handle. The position stays. Repeatable."""
        self._closed = True

    def __enter__(self) -> ClientFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvstore.ClientFeed {self.name!r}>"

    def _fetch(self, wait: float) -> FeedBatch:
        reader = self._pool.rows(verbs.FETCH, **self._at(self.position), wait=wait)
        told = (reader.schema.metadata or {}).get(POSITION_NAME)
        if told is None:
            raise strange(self._pool.where, "a batch without a position")
        position = _position(verbs.POSITION.read(json.loads(told)))
        is_state = self.position.state_from is not None
        is_cut = is_state or position.taken > 0
        return FeedBatch(list(events_of(reader, is_cut=is_cut)), position, is_state)

    def _at(self, position: Position) -> dict[str, Any]:
        if self._closed:
            raise ClosedError(f"feed {self.name!r}")
        timestamp, taken, state_from = position
        place = {"timestamp": timestamp, "taken": taken, "state_from": state_from}
        return {**self._fields, **place}


def _position(found: Mapping[str, Any]) -> Position:
    """The position in an answer of the server."""
    return Position(found["timestamp"], found["taken"], found["state_from"])


def feed_fields(
    name: str,
    streams: tuple[int, int] | None,
    images: Images,
    expand: Expand,
    span: Span | None,
    batch_rows: int | None,
    batch_bytes: int | None,
) -> dict[str, Any]:
    """The arguments of every call of a feed."""
    worker, workers = (None, None) if streams is None else Share.of(streams)
    return {
        "name": name,
        "worker": worker,
        "workers": workers,
        "images": images,
        "expand": expand,
        **bounds(Span() if span is None else span),
        "batch_rows": batch_rows,
        "batch_bytes": batch_bytes,
    }


def start_fields(start: TimeLike | Position | None, max_age: AgeLike | None) -> dict[str, Any]:
    """The arguments by which a feed begins."""
    position, since = (start, start.timestamp) if isinstance(start, Position) else (None, start)
    return {
        "since": since if since is None or since in STARTS else sent_time(since, "start"),
        "taken": None if position is None else position.taken,
        "state_from": None if position is None else position.state_from,
        "max_age": max_age,
    }


# --------------------------------------------------------------------------------------------------
# The groups of commits, as a server tells them.

_EPOCH: Final = tuple(EPOCHS_SCHEMA.names)


def _generation(found: dict[str, Any]) -> Generation:
    streams = [bytes.fromhex(stream) for stream in found["streams"]]
    made, closed_at = generation(found["opened_at"], streams), found["closed_at"]
    return made if closed_at is None else replace(made, closed_at=closed_at)


# --------------------------------------------------------------------------------------------------
# The metrics of a served store, out of the server's answer.

_DEFINED: Final = {definition.name: definition for definition in DEFINITIONS.values()}


def metrics_of(found: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics by full name. A newer server may have others, which are left out."""
    return {
        name: Metric(
            definition, {tuple(labels): _figure(value) for labels, value in found.get(name, ())}
        )
        for name, definition in _DEFINED.items()
    }


def _figure(value: Any) -> float | Distribution:
    if not isinstance(value, dict):
        figure: float = value
        return figure
    buckets = ((float("inf") if bound is None else bound, n) for bound, n in value["buckets"])
    return Distribution(tuple(buckets), value["total"])


# --------------------------------------------------------------------------------------------------
# The task queue of a store that another process owns, for programs that submit tasks to it.


class ClientTasks(Tasks):
    """Takes tasks for the queue of the owner. Workers run in the owner's process."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(TaskState(), None, Clock())
        self._pool = pool

    def insert(
        self,
        queue: str,
        value: bytes = b"",
        *,
        available_at: int | None = None,
        id: str | None = None,  # noqa: A002 - the field's word
    ) -> Task:
        """See `Tasks.insert`."""
        wanted = {"queue": queue, "value": value, "available_at": available_at, "id": id}
        return Task(**self._pool.call(verbs.SUBMIT_TASK, **wanted), value=value)

    def modify(self, **_: Any) -> Modified:
        """Refused. Raises `UsageError`."""
        raise UsageError(
            "a change of tasks by a client", "run the worker in the process that owns the store"
        )

    def claim(self, *_: Any, **__: Any) -> Task | None:
        """Refused. Raises `UsageError`."""
        raise UsageError(
            "a worker of a client", "run the worker in the process that owns the store"
        )
