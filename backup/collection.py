"""A backup collection: the history of one store, written down window by window.

The first backup is full, `[0, t)`. Each later backup appends the window since the one before, by
compare-and-append to a shard. So windows join without gap or overlap, and two scripts cannot
interleave. The collection restores the store as of any instant in `[since, upper)`.

The source store holds its history at the collection's upper (a hold named after the collection), so
that the next window is whole however late it comes. Where that history was lost all the same, a
new full backup begins another *chain*; the old chain stays readable up to where it ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import Unpack

from kvstore.backup import retention
from kvstore.backup.chains import Chain, Chains, labels_of, time_or_label
from kvstore.backup.drill import DrillDepth, DrillReport, DrillRequest, drill
from kvstore.backup.expiries import rows_with_expiries
from kvstore.backup.following import FOLLOW_EVERY, Follower, OnWindow, Requested
from kvstore.backup.overview import CollectionInfo, listed, overview
from kvstore.backup.place import CollectionPlace, find_place
from kvstore.backup.publish import Format, PublishOptions, PublishReport, publish
from kvstore.backup.reading import CollectionReader, collection_answers, keeping, state_of
from kvstore.backup.restore import Build, Restored, RestoreRequest, restore, restore_into_store
from kvstore.backup.retention import thinning_of
from kvstore.backup.sealed import Secret
from kvstore.backup.shard import (
    Merge,
    Shard,
    ShardBatch,
    ShardPart,
    ShardSnapshot,
    Storage,
    merge_here,
)
from kvstore.backup.shard.rows.part_reader import fault_of, open_part
from kvstore.backup.shard.scrub import ScrubReport
from kvstore.backup.verify import Depth, VerifyReport, verify_collection
from kvstore.backup.window import (
    BackupInfo,
    Request,
    Upload,
    Write,
    back_up,
    require_token,
    seed_collection,
    upload_here,
)
from kvstore.base.arguments import AGE, FLAG
from kvstore.base.clock import Clock, WallClock
from kvstore.base.forks import own
from kvstore.base.meters import OnProgress, Tally
from kvstore.base.paths import require_absolute, require_path
from kvstore.base.span import Span
from kvstore.base.timestamp import AgeLike, TimeLike, Timestamp, to_timestamp
from kvstore.evidence import require_new
from kvstore.readable import Joined
from kvstore.remote.control import StoreOrClient, as_store
from kvstore.storage.address import address_text, public_address
from kvstore.storage.patience import Patience, Waiting
from kvstore.storage.wrapped import Bandwidth
from kvstore.tables.joins import Side

_LOG: Final = logging.getLogger("kvstore.backup")


class Collection(Joined):
    """Backups of one store at `url`: a path, `file://`, `s3://`, `gs://`, `az://` or `memory://`.

    Nothing is written before the first backup. A `passphrase` or a `key_file` (32 bytes, or 64 hex
    digits) encrypts everything, manifests included. `options` are passed to the object store. A
    given `storage` is used as it is, and `url` then only names it.

    A failure of the storage that may pass (a timeout, an answer of 5xx, another script that was
    faster) is retried for `patience` seconds (`RETRY_S` of `kvstore.limits` by default). Any other
    failure is raised at once. A long wait is told to `on_wait` and to the log `kvstore.backup`; an
    exception from `on_wait` ends the wait. Collections that share a `bandwidth` share its bytes a
    second.

    Every `progress` is called with the rows done so far, an int whose `total` is the rows to do, or
    None; with `is_about` the total is an estimate. An exception from it calls the work off.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        passphrase: str | None = None,
        *,
        key_file: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        clock: WallClock | None = None,
        patience: float | None = None,
        on_wait: Callable[[Waiting], None] | None = None,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.url = address_text(url)
        secret = Secret.given(passphrase, key_file)
        if storage is None:
            retries = Patience(patience, tell=on_wait)
            found = find_place(
                self.url, secret, options=options, patience=retries, bandwidth=bandwidth
            )
        else:
            found = CollectionPlace(storage, secret, self.url)
        self._found, self._place = found, found.storage
        # A place in memory ends with its process, and a given storage has no address.
        self._is_lasting = storage is None and not self.url.startswith("memory:")
        self._address = public_address(self.url)
        self._clock = clock or Clock()
        self._chains = self._chains_on(self._place)
        own(self, f"the collection at {self.url}")

    def __repr__(self) -> str:
        return f"<kvstore.backup.Collection {self._chains.where}>"

    # -- contents ---------------------------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """The oldest instant of the newest chain that can be restored; 0 for an empty one."""
        newest = self._chains.newest()
        return Timestamp(0 if newest is None else newest.since)

    @property
    def upper(self) -> Timestamp:
        """The first instant that cannot be restored yet; 0 for an empty collection."""
        newest = self._chains.newest()
        return Timestamp(0 if newest is None else newest.upper)

    @property
    def source(self) -> str | None:
        """The `store_id` of the store that is backed up here; None for an empty collection."""
        record = self._chains.read()
        return None if record is None else record.source

    def labels(self) -> dict[str, Timestamp]:
        """The labels of instants. Each can be given where an `as_of` is asked for."""
        return labels_of(self._chains.filled())

    def batches(self) -> Sequence[ShardBatch]:
        """The batches of the newest chain, oldest first, for readers of parts."""
        newest = self._chains.newest()
        return () if newest is None else newest.refresh().batches

    def chain(self, name: str | None = None, *, covering: Sequence[int] = ()) -> Chain | None:
        """The chain `name`; None if it is gone.

        Without a name, the newest chain that covers all times of `covering`, or the newest of all
        where no chain covers them.
        """
        return self._chains.chain(name, covering)

    def chains(self) -> Sequence[Sequence[ShardBatch]]:
        """The batches of all chains, oldest first."""
        return [shard.refresh().batches for shard in self._chains.shards()]

    def check_part(self, part: ShardPart) -> str | None:
        """Read a part of one of the chains; returns its fault, None if its bytes are as written."""
        return fault_of(self._place.blob, part)

    def open_part(self, part: ShardPart) -> pq.ParquetFile:
        """Open a part of one of the `batches`, to be read piece by piece, each page checked.

        Raises `MissingPartError` if compaction has replaced the part: look at the batches again.
        """
        return open_part(self._place.blob, part)

    def snapshot(
        self, as_of: TimeLike | None
    ) -> AbstractContextManager[tuple[Shard, ShardSnapshot]]:
        """A snapshot of the newest chain that covers `as_of`. Raises as `restore` does."""
        return self._chains.snapshot(None if as_of is None else self._time(as_of))

    def snapshots(self) -> AbstractContextManager[Mapping[Shard, ShardSnapshot]]:
        """All chains, oldest first, each with a snapshot at its newest instant."""
        return self._chains.snapshots()

    def list(self) -> list[BackupInfo]:
        """All backups, oldest first. Backups that were merged by compaction count as one."""
        return listed(self._chains)

    def show(self) -> CollectionInfo:
        """The chains and sizes of the collection, at a glance."""
        record = self._chains.read()
        shards = self._chains.filled(record)
        return overview(self.url, record, shards, now_ns=self._clock.wall_ns())

    def verify(
        self,
        depth: Depth = "checksums",
        store: StoreOrClient | None = None,
        *,
        progress: OnProgress | None = None,
    ) -> VerifyReport:
        """Prove that the backups are there and whole.

        `"files"`: every part exists, in its size. `"checksums"`: every part is also read and its
        bytes are compared. `"contents"`: the state at the oldest time that both cover, and every
        version after it, also equal the `store`'s, by fingerprint. Raises `CorruptionError` naming
        every missing or differing part, `StatesLostError` where the collection is an older copy of
        itself, `UsageError` if it holds no backup.
        """
        with nullcontext() if store is None else as_store(store) as source:
            return verify_collection(self._chains, depth=depth, store=source, progress=progress)

    def drill(
        self,
        at: TimeLike | Literal["random"] = "random",
        depth: DrillDepth = "open",
        store: StoreOrClient | None = None,
        *,
        scratch: str | os.PathLike[str] | None = None,
        progress: OnProgress | None = None,
        evidence: str | os.PathLike[str] | None = None,
    ) -> DrillReport:
        """Prove that an instant can be had back: restore it into scratch space, open and verify it.

        With the depth `"contents"` the restored store is also compared with `store`. The outcome is
        recorded, and told by `list`, `show` and the metrics of `store`. The restored store lies in
        the directory `scratch`, and is removed at the end. `evidence` is a file to be written for
        an auditor, or a directory in which it gets a name of its own: what was proved or disproved,
        by whom and with which versions. Costs a restore, and a pass over it.

        Raises `CorruptionError` where the instant cannot be restored or differs, `HistoryGoneError`
        where the collection or `store` has lost it, and as `restore` does.
        """
        when = None if at == "random" else self._time(at, "at")
        place = None if scratch is None else require_path(scratch, name="scratch")
        kept = None if evidence is None else require_new(evidence)
        request = DrillRequest(when, depth, place, self._address, kept)
        restoring = partial(self.restore, progress=progress)
        with nullcontext() if store is None else as_store(store) as source:
            return drill(self._chains, request, restoring, source, self._clock)

    # -- writing ----------------------------------------------------------------------------

    def backup(
        self,
        store: StoreOrClient,
        *,
        full: bool = False,
        token: str | None = None,
        max_age: AgeLike | None = None,
        progress: OnProgress | None = None,
        upload: Upload = upload_here,
        label: str | None = None,
    ) -> BackupInfo:
        """Append all commits of `store` since the last backup; the first backup is full.

        `store` may be a client by path (`kvstore.connect(path)`): this process then reads the files
        of the store beside its owner.

        The backup has everything that was committed before the call, and nothing that a crash can
        take back. A `token` names this backup: a script that repeats the call with the same token
        makes one backup, as long as no compaction has merged it with others. A `label` names the
        newest instant of this backup, as `Collection.label` does.

        Between backups the store keeps its history, unless it falls further behind than `max_age`.
        Without `max_age` it keeps the history for ever, even after the collection was removed:
        `store.drop_hold` ends that.

        A window that a killed backup has begun is finished first. `upload` writes the parts: in
        this process, or spread over others (`kvstore.spark.jobs.backup`).

        Raises `StatesLostError` if the collection is gone, or is an older copy of itself: then
        `full=True` begins anew; `UsageError` if the collection belongs to another store, if the
        store, put back from an older copy, lacks commits of the collection, if it has a commit that
        the backup of another copy (a checkpoint) has passed over, for a bad token, or if the
        directory that the collection lies in is missing;
        `HistoryGoneError` if the store no longer has the window: `full=True` begins another chain.
        """
        age = AGE.or_none.check("max_age", max_age)
        require_token(token)
        self._found.require_parent()
        if label is not None:
            retention.require_free(self._chains, label, is_repeated=token is not None)
        how = self._address, self._is_lasting, full, token, age, upload, progress
        with as_store(store) as source:
            done = back_up(self._chains, Request(source, *how))
        if label is not None:
            retention.label(self._chains, label, int(done.upper) - 1)
            done = done._replace(labels=(label,))
        self._tell("backed up", **done._asdict())
        return done

    def follow(
        self,
        store: StoreOrClient,
        every: AgeLike = FOLLOW_EVERY,
        *,
        max_age: AgeLike | None = None,
        progress: OnWindow | None = None,
    ) -> Follower:
        """Back `store` up continuously, for a `with` statement: window after window, and a pause of
        `every` after each.

        An idle store has no windows, and batches are merged beside them. A failure of the storage
        that may pass is logged and tried again; `follower.status()` tells the recovery point.
        `progress` is called with each backup. `store` and `max_age` are as in `backup`. After a
        kill the next follower continues.
        """
        age = AGE.or_none.check("max_age", max_age)
        request = Requested(self._address, self._is_lasting, age)
        place = self._place
        return Follower(self._chains_on, place, store, request, every, self._clock, progress)

    def seed(self, write: Write, *, since: TimeLike = 0) -> Timestamp:
        """Begin the collection with versions that have times of their own; returns the newest time.

        `write` gets the name of the first chain. It writes the parts, and returns the batch that
        names them (`spark_connector.seed`). The history is readable from `since` on. No store can
        append to the collection afterwards. Raises `UsageError` if it is not new.
        """
        low = int(to_timestamp(since, name="since", now=self._clock.wall_ns))
        return seed_collection(self._chains, write, since=low)

    # -- reading ----------------------------------------------------------------------------

    def restore(
        self,
        path: str | os.PathLike[str],
        as_of: TimeLike | None = None,
        prefix: bytes | None = None,
        history: bool = True,
        *,
        start: bytes | None = None,
        end: bytes | None = None,
        resume: bool = False,
        workers: int | None = None,
        progress: OnProgress | None = None,
        build: Build | None = None,
    ) -> Restored:
        """Build a new store at `path` with the original timestamps; returns its newest instant,
        which also tells its `rows` and the `since` from which it is readable.

        The store is restored as of `as_of` (default: the newest instant), whole, or only the keys
        of a span or with `prefix`. With `history=False` it has only the rows that were alive then.
        `path` must not exist; it appears when the restore is whole, so a crash leaves no half of
        a store. `workers` processes build it, each in bounded memory. The counts that `progress`
        gets have a `total`.

        With `resume=True` a restore that was killed, or has failed, is continued by the same call:
        finished pieces are kept, and no byte of a part is fetched twice from an object store. Until
        the restore is whole, its files stay in a hidden directory beside `path`: twice the bytes of
        the parts. Without `as_of` it continues with the instant that was the newest when it began.
        `build` writes the files in another way (`kvstore.spark.jobs.restore`).

        Raises `UsageError` if something is at `path`, `LockedError` while another process restores
        to it, `HistoryGoneError` or `NotYetWrittenError` for a time outside the window or before
        the first row, `CorruptionError` if a part is damaged.
        """
        at = None if as_of is None else self._time(as_of)
        span = Span.of(start, end, prefix)
        FLAG.check("history", history)
        how = (history, resume, workers, progress, build)
        place = require_absolute(path)
        return restore(self._found, self._chains_on, RestoreRequest(place, at, span, *how))

    def restore_into(
        self,
        store: StoreOrClient,
        as_of: TimeLike | None = None,
        prefix: bytes | None = None,
        *,
        start: bytes | None = None,
        end: bytes | None = None,
        progress: OnProgress | None = None,
    ) -> Timestamp:
        """Import the rows alive at `as_of` into a live store, or into the store of a client by
        path, as one import; returns its stamp.

        Keys that the backup does not have stay as they are: delete their range first to replace
        it. Rows of tables go to tables of the same definitions; `ImportRefusedError` names a
        table that differs. A key that expires brings its time along: one whose time has passed
        meanwhile is deleted right after. Other errors are as in `restore`. After an error nothing
        was added.
        """
        span = Span.of(start, end, prefix)
        with as_store(store) as into, self.snapshot(as_of) as (_, snapshot):
            expiring = rows_with_expiries(snapshot)
            return restore_into_store(into, snapshot, span, Tally(progress), expiring=expiring)

    def scan_batches(
        self, as_of: TimeLike | None = None, prefix: bytes | None = None
    ) -> pa.RecordBatchReader:
        """The rows alive at `as_of` as Arrow record batches `key`, `value`, in key order.

        Keys of tables are left out, unless the prefix is one of theirs. Nothing is restored:
        batches are merged in Arrow, in bounded memory. The call fixes the rows to be read, and
        keeps them until the reader is read to its end or dropped. Raises `HistoryGoneError` or
        `NotYetWrittenError` outside the window.
        """
        return state_of(self.snapshot(as_of), Span.of(prefix=prefix))

    def open(
        self,
        as_of: TimeLike | None = None,
        *,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> CollectionReader:
        """A reader as of any time that the collection covers, for one thread and for a `with`
        statement. It restores nothing. Reads without a time are at `as_of`, or at the newest
        instant, which `refresh` moves. At most `cache_bytes` of fetched bytes stay in the directory
        `cache`, which processes may share, or in memory. They stay encrypted if the collection is.

        Raises `UsageError` if there is no backup, `HistoryGoneError` or `NotYetWrittenError` where
        no chain covers `as_of`.
        """
        kept = keeping(cache, cache_bytes)
        chains = self._chains_on(self._found.keeping(kept))
        return CollectionReader(chains, kept, self._clock, as_of)

    def publish(
        self,
        table: str,
        url: str | os.PathLike[str],
        format: Format = "parquet",  # noqa: A002  # the word that every such call has
        as_of: TimeLike | None = None,
        **options: Unpack[PublishOptions],
    ) -> PublishReport:
        """Write a table for other systems: see `backup.publish.publish`."""
        at = None if as_of is None else Timestamp(self._time(as_of))
        return publish(self._chains, table, url, format, at, **options)

    def join_side(self) -> Side:
        """The side of this collection in a join of several sources: see `kvstore.join`.

        Nothing is restored: only parts that have keys of the labels are read. Each label may have
        any time that a chain covers; without a column `at`, all labels ask for the newest instant.
        The join fixes the backups to be read, and keeps them until the result is read to its end or
        dropped. Costs, for each million labels, a read of the row groups that they touch.
        """
        return Side(partial(collection_answers, self._chains))

    # -- upkeep -----------------------------------------------------------------------------

    def compact(self, *, progress: OnProgress | None = None, merge: Merge = merge_here) -> None:
        """Merge the batches of the newest chain into one, and free the space of the old ones.

        Every instant in `[since, upper)` stays restorable. The cost is to read and write the whole
        chain. `merge` does that: in this process, or spread over others
        (`kvstore.spark.jobs.compact`).
        """
        newest = self._chains.newest()
        if newest is not None:
            newest.compact(full=True, merge=merge, progress=progress)
            newest.gc()
            self._tell("compacted")

    def scrub(self, *, delete_orphans_older_than: AgeLike | None = None) -> ScrubReport:
        """Name the blobs that are missing, have another size, or are orphans.

        Orphans are left by backups that did not finish, and harmless. Orphans older than
        `delete_orphans_older_than` are deleted, with the remains of crashed writes: choose an age
        that leaves running backups their time.
        """
        age = AGE.or_none.check("delete_orphans_older_than", delete_orphans_older_than)
        before_ns = None if age is None else retention.ago(age, self._clock)
        return retention.scrub(self._chains, self._place.blob, before_ns)

    def expire(
        self,
        before: TimeLike | None = None,
        *,
        keep: AgeLike | None = None,
        keep_within: AgeLike | None = None,
        hourly: int = 0,
        daily: int = 0,
        weekly: int = 0,
        progress: OnProgress | None = None,
    ) -> Timestamp:
        """Give up instants before `before`, or older than `keep`; returns the new `since`.

        Moves `since`, rewrites the parts that it has passed and frees the space. Instants from
        `since` on stay restorable, and labelled ones. A chain that a restore is reading stays until
        the next expiry.

        `keep_within` thins: of older instants only the states at the last `hourly` whole hours, the
        last `daily` midnights and the last `weekly` midnights before Mondays (UTC) stay readable.
        At any other instant a read raises `HistoryGoneError`, which names the nearest kept ones.
        Raises `UsageError` unless exactly one of `before`, `keep` and `keep_within` is given.
        """
        policy = thinning_of(keep_within, hourly=hourly, daily=daily, weekly=weekly)
        limit = None if before is None else self._time(before, "before")
        request = retention.request_of(limit, keep, policy, self._clock)
        since = Timestamp(retention.expire(self._chains, request, progress))
        self._tell("expired", since=since)
        return since

    def label(self, name: str, at: TimeLike | None = None) -> Timestamp:
        """Name the instant `at` (default: the newest); returns it. `as_of=name` reads it from now
        on, and no expiry gives it up until `unlabel`. Naming it twice does nothing more.

        Raises `UsageError` if another instant has the label, or the name is a time; errors for an
        instant that no chain covers are as in `restore`.
        """
        return retention.label(self._chains, name, None if at is None else self._time(at, "at"))

    def unlabel(self, name: str) -> Timestamp:
        """Take a label away; returns its instant, which the next expiry may give up. Raises
        `UsageError` if there is no such label."""
        return retention.unlabel(self._chains, name)

    def _tell(self, event: str, **facts: object) -> None:
        """Log an event of this collection, as `kvstore.base.notices` logs the events of a store."""
        if _LOG.isEnabledFor(logging.INFO):
            told = {"collection": self._address, **facts}
            text = ", ".join(f"{name} {fact}" for name, fact in told.items())
            _LOG.info("%s: %s", event, text, extra={"event": event, "facts": told})

    def _chains_on(self, storage: Storage) -> Chains:
        return Chains(storage, self.url, self._clock)

    def _time(self, time: TimeLike, name: str = "as_of") -> int:
        """A time that a caller gave as the argument `name`, or the instant of a label."""
        return time_or_label(time, self.labels, name=name, now=self._clock.wall_ns)
