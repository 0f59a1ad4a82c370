"""`Pushes` is the side of the job, and of the person who reverts a push or expires old ones."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from datetime import timedelta
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import AGE, NUMBER, SECONDS, integer, word
from kvstore.base.clock import Clock
from kvstore.base.timestamp import NS_PER_SECOND, AgeLike, TimeLike
from kvstore.bulk.bucket import BEGUN_NAME, Bucket, scratch_directory
from kvstore.bulk.building import Import
from kvstore.bulk.loading import key_text, require_expiry, stored_batches, timed_rows
from kvstore.bulk.manifest import EncodedBy, Manifest
from kvstore.bulk.part import Part, PartWriter
from kvstore.bulk.pushes.push_log import (
    ADD,
    EXPIRE,
    PLAIN,
    PUSH,
    REVERT,
    SHARDS_MAX,
    MicroBatch,
    ModeName,
    Push,
    PushEvent,
    PushLog,
    PushMode,
    Statuses,
    StoreStatus,
    back_to,
    import_path,
    last_of_feed,
    mode_of,
    mode_of_changes,
    newest_pushes,
    place_of,
    pushes_of,
    root_place,
    shard_column,
    unexpired,
)
from kvstore.bulk.sort import Duplicates, Sorter
from kvstore.bulk.staging import Staging
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import (
    Argument,
    BusyError,
    ImportRefusedError,
    KeyOrderError,
    UsageError,
    printable,
)
from kvstore.limits import KEY_BYTES_MAX, ORPHAN_S, PUSH_POLL_S
from kvstore.storage.contract import Blob
from kvstore.storage.wrapped import BlobBelow, until_stopped
from kvstore.tables import Table, TableCodec

_BEGUN: Final = re.compile(rf"imports/([0-9a-f]{{32}})/([0-9]{{4}})/{re.escape(BEGUN_NAME)}")
_LATE: Final = "look at Pushes.status, or wait longer (timeout=)"


class PushStatus(NamedTuple):
    """A push, and its state on each store."""

    push: Push
    stores: tuple[StoreStatus, ...]


class Pushes:
    """The pushes below `url`: a URL that backups take, or a path that all machines see.

    `options` and `patience` are for object stores, as in `bulk.Import.create`.

    Example:

        pushes = bulk.Pushes("pushes")
        with pushes.begin() as building:
            with building.writer() as writer:
                writer.put(b"UA/1545", b"late")
            push = building.seal()
        with bulk.pull(store, "pushes", name="eu-1") as puller:
            puller.wait(push.number)
        assert store.get(b"UA/1545") == b"late"
    """

    def __init__(
        self,
        url: Staging,
        *,
        options: Mapping[str, Any] | None = None,
        patience: float | None = None,
    ) -> None:
        self.place = root_place(url, options, patience)
        self._keep(*self.place.open())

    @classmethod
    def over(cls, blob: Blob, where: str) -> Pushes:
        """The pushes in `blob`, a storage that the caller has opened. `where` names it in errors.
        A cluster's tasks cannot reach it, and need a URL."""
        made = cls.__new__(cls)
        made._keep(blob, where)
        return made

    def _keep(self, blob: Blob, where: str) -> None:
        self._blob, self.where = blob, where
        self.log = PushLog(blob, where)
        self.statuses = Statuses(blob)

    # -- making -----------------------------------------------------------------------------

    def begin(
        self,
        shards: int = 1,
        *,
        mode: ModeName = ADD,
        prefix: bytes | None = None,
        keep_newer: bool = False,
        built_at: TimeLike | None = None,
        max_bytes: int | None = None,
        table: Table | None = None,
    ) -> BuildingPush:
        """Begin a push of `shards` imports. Its number is taken when it is sealed.

        With `table` it has rows of this table: see `BuildingPush.add`. The table may be of any
        store, snapshot or collection, because its definition alone counts. A store takes the push
        if its table of this name has the same definition, and refuses it otherwise.

        With `mode="replace"` the push is the new whole of the keys with `prefix`, or of the table.
        Each store deletes the other keys there, at the stamp at which the rows of the push appear,
        and a revert brings them back. The price is one pass over the live keys of the span.

        With `keep_newer` a key that was written after `built_at`, by anything but a push, stays as
        it is: the store leaves its row out, and does not delete it. `built_at` is the time at which
        the job read the data that it pushes, a datetime with a zone or nanoseconds. A store finds
        such keys in its change index, and refuses the push if the history since then is gone.

        Raises `UsageError`.
        """
        if table is not None and not isinstance(table, Table):
            raise UsageError(f"table={table!r:.100}", "pass store.table(name)")
        codec = None if table is None else table.codec()
        how = mode_of(mode, prefix, codec, keep_newer=keep_newer, built_at=built_at)
        return BuildingPush(self, shards, max_bytes, how, codec=codec)

    def begin_changes(
        self,
        shards: int = 1,
        *,
        cleared: Iterable[tuple[bytes, bytes]] = (),
        feed: MicroBatch | None = None,
        max_bytes: int | None = None,
    ) -> BuildingPush:
        """Begin a push of changes: rows that put and delete keys. Each store deletes the keys of
        the ranges `cleared` that the push lacks, at the stamp of its rows, for one pass over them.

        With `feed` each micro-batch is pushed once: `seal` returns the push of this batch or of a
        later one, if there is one. Raises `UsageError` for more than 1,000 ranges, and `seal` does
        so where another stream has pushed under the name of the feed.
        """
        return BuildingPush(self, shards, max_bytes, mode_of_changes(cleared), feed)

    def of_feed(self, batch: MicroBatch) -> Push | None:
        """The push of this micro-batch, or of a later one of its feed. Costs a get for each event
        since the last push of the feed. Raises `UsageError` if that push is of another stream, or
        of other rows under this number."""
        return last_of_feed(self.log.newest_first(self.log.end()), batch)

    def seal(
        self,
        job: str,
        manifests: Sequence[Manifest],
        how: PushMode = PLAIN,
        feed: MicroBatch | None = None,
        known: int = 0,
    ) -> Push:
        """Put a push of sealed imports at the end of the log. A job is put once, and so is a
        micro-batch of a feed: the push that was there is returned. `known` is a position of the log
        from before the job began."""
        imports = [
            {
                "import_id": f"{each.import_id:016x}",
                "checksum": each.checksum,
                "rows": each.rows,
                "bytes": each.size_bytes,
            }
            for each in manifests
        ]
        at = Clock().wall_ns()
        before: list[Push] = []

        def fields(newest: Iterator[PushEvent]) -> dict[str, Any] | None:
            number, found = place_of(newest, job, feed, known)
            if found is not None:
                before.append(found)
                return None
            made = {"kind": PUSH, "push": number, "job": job, "at": at, "imports": imports}
            if feed is not None:
                made["feed"] = feed.fields()
            return made if how.is_plain else {**made, **how.fields()}

        event = self.log.append(fields, known)
        push = before[0] if event is None else event.push
        assert push is not None
        return push

    # -- looking ----------------------------------------------------------------------------

    def list(self, last: int | None = None) -> list[Push]:
        """All pushes, oldest first, or the `last` ones. Costs a get for each event, or for each
        event since the oldest push of the answer."""
        if last is None:
            return pushes_of(self.log.events())
        NUMBER.check("last", last)
        return newest_pushes(self.log.newest_first(self.log.end()), last)

    def status(self, number: int) -> PushStatus:
        """The push, and its state on each store. Raises `UsageError` for a number of no push."""
        push = self._found(number)
        return PushStatus(push, tuple(self.statuses.of_push(number)))

    def wait(
        self,
        number: int,
        names: Collection[str],
        *,
        until: Literal["added", "reverted"] = "added",
        timeout: float | None = None,
    ) -> PushStatus:
        """Wait until the stores `names` have added a push, or have reverted it. Returns the
        statuses of all stores.

        Raises `ImportRefusedError` as soon as one of them has refused it, with its reason, and
        `BusyError` after `timeout` seconds. The push stays, and other stores take it.
        """
        seconds = None if timeout is None else SECONDS.check("timeout", timeout)
        if isinstance(names, str) or not isinstance(names, Collection):
            raise UsageError(Argument.of("names", names), "pass a list of names of stores")
        word("added", "reverted").check("until", until)
        began = time.monotonic()
        push = self._found(number)
        while True:
            states = {each.name: each for each in self.statuses.of_push(number, names)}
            for each in states.values():
                if each.state == "refused":
                    where = f"{self.where}, push {number}"
                    problem = f"store {each.name} has refused it: {each.error}"
                    raise ImportRefusedError(where, problem, "see to that store, and push again")
            missing = sorted(
                name
                for name in names
                if name not in states or states[name].state not in (until, "reverted")
            )
            if not missing:
                return PushStatus(push, tuple(self.statuses.of_push(number)))
            if seconds is not None and time.monotonic() - began >= seconds:
                what = f"push {number} is not {until} on {', '.join(missing)}"
                raise BusyError(what, waited_s=seconds, remedy=_LATE)
            time.sleep(PUSH_POLL_S)

    # -- taking back ------------------------------------------------------------------------

    def revert(self, number: int) -> None:
        """Take a push back on every store, in the order of the log. One small object.

        Reverting twice does nothing more. Raises `UsageError` for a number of no push.
        """
        self._append(REVERT, number)

    def expire(self, *, keep: int | AgeLike) -> Sequence[Push]:
        """Remove the files of old pushes: all but the newest `keep`, or all older than `keep`.

        Returns the pushes that were expired. Stores that have added them keep their rows. A store
        that has not added an expired push says so in its status, and takes the next push. Files of
        jobs that were killed go after a day. Pushes expire in their order. Costs a list, and a get
        for each event since the oldest push that is kept or expires now.
        """
        known = self.log.end()
        pushes = unexpired(self.log.newest_first(known))
        if isinstance(keep, timedelta | str):
            age = AGE.check("keep", keep)
            oldest = Clock().wall_ns() - int(age.total_seconds() * NS_PER_SECOND)
            old = [*takewhile(lambda push: push.at <= oldest, pushes)]
        else:
            NUMBER.check("keep", keep)
            old = pushes[: max(len(pushes) - keep, 0)]
        for push in old:
            known = self._append(EXPIRE, push.number, known)
            for shard in range(push.shards):
                self.bucket(push.job, shard).remove()
        self._remove_orphans({push.job for push in pushes[len(old) :]})
        return old

    def _remove_orphans(self, kept: Set[str]) -> None:
        """Remove the files of jobs that were killed before they sealed a push, and of pushes whose
        expiry was killed. `kept` are jobs with pushes that stay. Costs a list, and a get for each
        event where such files are a day old."""
        oldest = Clock().wall_ns() - int(ORPHAN_S * NS_PER_SECOND)
        listed = self._blob.patience.over(lambda: [*self._blob.list("imports/")])
        left = []
        for found in listed:
            named = _BEGUN.fullmatch(found.name)
            if named is not None and named[1] not in kept:
                begun = self.bucket(named[1], int(named[2])).begun_ns()
                if begun is not None and begun <= oldest:
                    left.append((named[1], int(named[2])))
        stays = {push.job for push in self.list() if push.state != "expired"} if left else set()
        for job, shard in left:
            if job not in stays:
                self.bucket(job, shard).remove()

    def bucket(self, job: str, shard: int) -> Bucket:
        """The place of a shard's import."""
        path = import_path(job, shard)
        return Bucket(BlobBelow(self._blob, path), f"{self.where}/{path}")

    def _append(self, kind: str, number: int, known: int | None = None) -> int:
        """Append an event about a push, unless the log has one. Returns its position. With `known`,
        the push lies at or before that position, and such an event can only lie behind it."""
        fields = {
            "kind": kind,
            "push": number,
            "job": secrets.token_hex(16),
            "at": Clock().wall_ns(),
        }

        def once(newest: Iterator[PushEvent]) -> dict[str, Any] | None:
            if known is None:
                events = back_to(newest, number)
            else:
                events = [*takewhile(lambda event: event.position > known, newest)]
            is_done = any(event.kind == kind and event.number == number for event in events)
            if kind == REVERT:
                fields["of"] = events[-1].position
            return None if is_done else fields

        event = self.log.append(once, known or 0)
        return (known or 0) if event is None else event.position

    def _found(self, number: int) -> Push:
        """A push with its state. Costs a get for each event since. Raises `UsageError`."""
        events = back_to(self.log.newest_first(self.log.end()), number)
        return pushes_of(reversed(events))[0]


class BuildingPush:
    """A push that is being built, for a `with` statement. `Pushes.begin` makes it."""

    def __init__(
        self,
        pushes: Pushes,
        shards: int,
        max_bytes: int | None,
        how: PushMode,
        feed: MicroBatch | None = None,
        codec: TableCodec | None = None,
    ) -> None:
        integer(1, SHARDS_MAX).check("shards", shards)
        self._how, self._feed, self._known = how, feed, pushes.log.end()
        self._tables = () if codec is None else (EncodedBy.of(codec),)
        self._rows = None if codec is None else PushedRows(codec, shards)
        self.job = secrets.token_hex(16)
        self._pushes = pushes
        self.imports = [
            Import.begin_at(
                pushes.bucket(self.job, shard), import_id_of(self.job, shard), max_bytes
            )
            for shard in range(shards)
        ]
        self._is_sealed = False

    def writer(self, shard: int = 0, *, compression: str = "lz4") -> PartWriter:
        """A writer of one more part of a shard: see `bulk.Import.writer`. The caller puts the keys
        of the shard alone, as `shard_of` tells."""
        if self._rows is not None:
            raise UsageError("a push of a table has no writers of keys", "pass its rows to add")
        return self.imports[shard].writer(compression=compression)

    def add(self, rows: object, *, expires: str | None = None) -> None:
        """Add rows of the table: Arrow data, or a frame of Polars, DuckDB or pandas, in any order.

        Each row goes to the shard of its key, with its index entries. `expires` names one more
        column, with the times at which rows are deleted, null for rows that stay. Raises
        `UsageError` that names column and row for a value that does not fit. Rows beyond the memory
        go to the local disk, and are sorted when the push is sealed.
        """
        if self._rows is None:
            raise UsageError("the push has no table", "begin it with table=")
        self._rows.add(rows, expires)

    def seal(self, parts: Sequence[Sequence[Part]] | None = None) -> Push:
        """Seal all imports, and put the push at the end of the log: stores take it from then on.

        `parts` are the parts of each shard that other processes have sent. Raises as `Import.seal`,
        and `UsageError` for rows outside of the span that the push replaces, and for a row of a
        table that came twice.
        """
        if self._rows is not None:
            self._rows.write(self.imports)
        sent = parts or [()] * len(self.imports)
        manifests = [
            each.seal(found, tables=self._tables)
            for each, found in zip(self.imports, sent, strict=True)
        ]
        self._how.require_rows(manifests)
        push = self._pushes.seal(self.job, manifests, self._how, self._feed, self._known)
        self._is_sealed = push.job == self.job
        return push

    def __enter__(self) -> BuildingPush:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()
        if not self._is_sealed:
            for shard, each in enumerate(self.imports):
                each.discard()
                self._pushes.bucket(self.job, shard).remove()


def import_id_of(job: str, shard: int) -> int:
    """The import id of a shard of a push: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{job}/{shard}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % IMPORT_ID_MAX + 1


def pushes_until(pushes: Pushes, stop: threading.Event) -> Pushes:
    """The same pushes for a worker: once `stop` is set, calls are repeated for a short while."""
    return Pushes.over(until_stopped(pushes._blob, stop), pushes.where)


# --------------------------------------------------------------------------------------------------
# Rows in a push, sorted by shard and key: rows of keys, or rows of a table with their index
# entries.
#
# Invariants
# 1. An index entry has the shard of its row, whatever the shard of its own key would be. So each
#    store has the entries of its rows, and no others.
# 2. Memory is bounded by `RUN_BYTES_MAX` and `SORT_BYTES_MAX`, and one part is open at a time,
#    whatever the number of shards.

SHARD: Final = "kvstore_shard"
"""The column of the shards of stored rows."""

_SHARD_BYTES: Final = struct.Struct(">H")


def sharded_schema(stored: pa.Schema) -> pa.Schema:
    """The columns of stored rows, and their shard."""
    return stored.append(pa.field(SHARD, pa.int32()))


def sharded_batches(stored: Iterator[pa.RecordBatch], shards: int) -> Iterator[pa.RecordBatch]:
    """Stored batches, with the shard of each row in one more column. The first one has the rows,
    and further ones their index entries: see `kvstore.bulk.loading`."""
    found: pa.Array | None = None
    for batch in stored:
        if found is None:  # the rows come first
            found = shard_column(batch.column("key"), shards)
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, found], schema=sharded_schema(batch.schema)
        )


class ShardedRows:
    """Stored rows in any order, each with its shard."""

    def __init__(self, duplicates: Duplicates = "error") -> None:
        self._duplicates = duplicates
        self._scratch = scratch_directory()
        self._sorter = Sorter(self._scratch)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch of `sharded_batches`."""
        self._sorter.add(_by_shard(batch))

    def write(self, imports: Sequence[Import]) -> None:
        """Write the rows of each shard into its import. Raises `KeyOrderError` for a key that came
        twice."""
        batches = self._sorter.sorted(self._duplicates)
        pieces = (piece for batch in batches for piece in _pieces(batch))
        for shard, found in groupby(pieces, key=itemgetter(0)):
            imports[shard].write_sorted(rows for _, rows in found)

    def close(self) -> None:
        """Remove the files of the sort. Repeatable."""
        shutil.rmtree(self._scratch, ignore_errors=True)


class PushedRows:
    """The rows of a table in a push that is being built."""

    def __init__(self, codec: TableCodec, shards: int) -> None:
        self.codec, self._shards = codec, shards
        self._rows = ShardedRows()

    def add(self, rows: object, expires: str | None) -> None:
        """Add rows; see `BuildingPush.add`."""
        require_expiry(self.codec, expires)
        for batch, dues in timed_rows(self.codec, rows, expires):
            due = pa.nulls(batch.num_rows, pa.int64()) if dues is None else dues
            stored = stored_batches(self.codec, batch, due)
            for each in sharded_batches(stored, self._shards):
                self._rows.add(each)

    def write(self, imports: Sequence[Import]) -> None:
        """Write the rows of each shard into its import. Raises `UsageError` for a row that came
        twice."""
        try:
            self._rows.write(imports)
        except KeyOrderError as error:
            what = f"the row {key_text(self.codec, error.key)} came twice"
            raise UsageError(what, "remove one of the two") from error

    def close(self) -> None:
        """Remove the files of the sort. Repeatable."""
        self._rows.close()


def _by_shard(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows whose keys begin with the bytes of their shard, for the sort."""
    shards = [_SHARD_BYTES.pack(shard) for shard in batch.column(SHARD).to_pylist()]
    keys = pc.binary_join_element_wise(pa.array(shards, pa.binary()), batch.column("key"), b"")
    stored = batch.drop_columns([SHARD])
    return pa.RecordBatch.from_arrays([keys, *stored.columns[1:]], schema=stored.schema)


def _pieces(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each shard in a sorted batch, with the keys that they had."""
    keys = batch.column("key")
    ends = pc.run_end_encode(pc.binary_slice(keys, 0, _SHARD_BYTES.size))
    # Arrow fails for slices without an end of some arrays.
    plain = pc.binary_slice(keys, _SHARD_BYTES.size, _SHARD_BYTES.size + KEY_BYTES_MAX)
    rows = pa.RecordBatch.from_arrays([plain, *batch.columns[1:]], schema=batch.schema)
    first = 0
    for shard, end in zip(ends.values.to_pylist(), ends.run_ends.to_pylist(), strict=True):
        yield _SHARD_BYTES.unpack(shard)[0], rows.slice(first, end - first)
        first = end


# --------------------------------------------------------------------------------------------------
# Rows in any order as a push: sorted, and written to the shards of their keys.


def send_rows(
    building: BuildingPush, rows: Iterable[pa.RecordBatch], duplicates: Duplicates = "error"
) -> Push:
    """Push rows: batches of binary columns `key` and `value`, and perhaps `expires`.

    Sorts in bounded memory, and on the local disk beyond it. Raises `UsageError` for a key that
    comes twice, unless `duplicates` is `"last"`, and as `BuildingPush.seal`.
    """
    with closing(ShardedRows(duplicates)) as sharded:
        for batch in rows:
            for each in sharded_batches(iter([batch]), len(building.imports)):
                sharded.add(each)
        try:
            sharded.write(building.imports)
        except KeyOrderError as error:  # the rows are sorted, so a key came twice
            what = f"key {printable(error.key)} came twice"
            raise UsageError(what, "remove one row of it, or pass --duplicates last") from error
    return building.seal()
