"""A backup collection: the history of one store, written down window by window.

The first backup is full, `[0, t)`; each later one appends the window since the one before, by
compare-and-append to a shard, so windows join without gap or overlap and two scripts cannot
interleave. The collection restores the store as of any instant in `[since, upper)`.

The source store holds its history at the collection's upper (a hold named after the collection), so
that the next window is whole however late it comes. Where that history was lost all the same, a
new full backup begins another chain; the old one stays readable up to where it ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from backup.chains import RETENTION, Chains, CollectionRecord, no_backup
from backup.place import find_place, sealed
from backup.restore import Build, build_here, restore_into_store, restore_store
from backup.sealed import Secret
from backup.shard import (
    EMPTY,
    VERSIONS,
    AsOf,
    Batch,
    Merge,
    OnProgress,
    Part,
    Shard,
    ShardSnapshot,
    Storage,
    Tally,
    Window,
    merge_here,
)
from backup.shard.rows.part_reader import open_part, require_part
from backup.shard.scrub import ScrubReport
from backup.shard.state import witness
from backup.shard.storage.address import public_address
from backup.shard.storage.contract import sweep
from backup.shard.storage.patience import Patience, Waiting
from backup.uploads import Upload, forget, pending_parts, upload_here
from backup.verify import Depth, VerifyReport, verify_chains
from backup.window import (
    Backup,
    BackupInfo,
    HoldTaken,
    append_windows,
    appended_before,
    drop_others,
    info,
    reached,
    require_no_other,
    take_hold,
)
from kvstore.arguments import require_age
from kvstore.arrow import ROWS_SCHEMA
from kvstore.clock import Clock, WallClock
from kvstore.errors import (
    CorruptionError,
    HistoryGoneError,
    LockedError,
    NotYetWrittenError,
    StatesLostError,
    UpperMismatchError,
    UsageError,
)
from kvstore.forks import own
from kvstore.limits import BACKUP_ATTEMPTS, RETRY_S
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import NS_PER_SECOND, TimeLike, Timestamp, to_timestamp


class Chain(NamedTuple):
    """Windows that join, oldest first: all that was written in `[since, upper)`."""

    name: str
    since: Timestamp
    upper: Timestamp
    batches: Sequence[Batch]


class CollectionInfo(NamedTuple):
    """A collection at a glance. `spans`: for each chain that has keys, what they lie in, wider
    where they are long. `recovery_point_age_seconds`: what a disaster now would lose."""

    url: str
    source: str | None
    since: Timestamp
    upper: Timestamp
    chains: int
    batches: int
    rows: int
    bytes: int
    recovery_point_age_seconds: float
    spans: Sequence[Span]


class Collection:
    """Backups of one store at `url`: a path, `file://`, `s3://`, `gs://`, `az://` or `memory://`.

    Nothing is written before the first backup. With a `passphrase` or a `key_file` (32 bytes, or
    64 hex digits) all of it is encrypted, manifests included. `options` go to the object store.
    `storage` is taken where it is given, and `url` then only names it.

    A failure of the storage that may pass (a timeout, an answer of 5xx, another script that is
    faster) is met with another attempt for `patience` seconds; any other is raised at once.
    `on_wait`, and the log `kvstore.backup`, hear of such a wait when it is long; what `on_wait`
    raises ends it.
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
        patience: float = RETRY_S,
        on_wait: Callable[[Waiting], None] | None = None,
    ) -> None:
        self.url = os.fspath(url)
        secret = None
        if passphrase is not None or key_file is not None:
            key_path = None if key_file is None else Path(key_file)
            secret = Secret(passphrase=passphrase, key_file=key_path)
        if storage is None:
            retries = Patience(patience, tell=on_wait)
            self._place = find_place(self.url, secret, options=options, patience=retries)
        else:
            self._place = sealed(storage, secret, self.url)
        # A place in memory ends with its process, and one that was handed over has no address.
        self._is_lasting = storage is None and not self.url.startswith("memory:")
        self._clock = clock or Clock()
        self._chains = Chains(self._place, self.url, self._clock)
        own(self, f"the collection at {self.url}")

    # -- what is there ----------------------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """The oldest instant of the newest chain that can be restored; 0 for an empty one."""
        newest = self._newest()
        return Timestamp(0 if newest is None else newest.since)

    @property
    def upper(self) -> Timestamp:
        """The first instant that cannot be restored yet; 0 for an empty collection."""
        newest = self._newest()
        return Timestamp(0 if newest is None else newest.upper)

    @property
    def source(self) -> str | None:
        """The `store_id` of the store that is backed up here; None for an empty collection."""
        record = self._chains.read()
        return None if record is None else record.source

    def batches(self) -> Sequence[Batch]:
        """The batches of the newest chain, oldest first, for readers of parts."""
        newest = self._newest()
        return () if newest is None else newest.refresh().batches

    def chain(self, name: str | None = None, *, covering: Sequence[int] = ()) -> Chain | None:
        """The chain of that name; without one the newest that covers all times of `covering`, or
        the newest of all where none does. None if it is not there."""
        record = self._chains.read()
        if record is None or (name is not None and name not in record.chains):
            return None
        names = record.chains if name is None else (name,)
        found = [_chain(shard) for shard in map(self._chains.find, names) if shard and shard.upper]
        whole = [c for c in found if all(c.since <= time < c.upper for time in covering)]
        return next(reversed(whole or found), None)

    def chains(self) -> Sequence[Sequence[Batch]]:
        """The batches of all chains, oldest first."""
        return [shard.refresh().batches for shard in self._shards()]

    def check_part(self, part: Part) -> str | None:
        """The fault of a part of one of the chains; None if its bytes are as written."""
        try:
            require_part(self._place.blob, part, VERSIONS)
        except CorruptionError as error:
            return f"{error.where}: {error.problem}"
        return None

    def open_part(self, part: Part) -> pq.ParquetFile:
        """A part of one of the `batches`, to be read in pieces, each page checked.

        Raises `MissingPartError` if compaction has replaced it: look at the batches again.
        """
        return open_part(self._place.blob, part, VERSIONS)

    def list(self) -> list[BackupInfo]:
        """All backups, oldest first; those that were compacted count as one."""
        return [info(batch) for shard in self._shards() for batch in shard.refresh().batches]

    def show(self) -> CollectionInfo:
        """The chains and sizes of the collection, at a glance."""
        record = self._chains.read()
        shards = self._filled(record)
        batches = [batch for shard in shards for batch in shard.refresh().batches]
        upper = shards[-1].upper if shards else 0
        return CollectionInfo(
            url=self.url,
            source=None if record is None else record.source,
            since=Timestamp(min((shard.since for shard in shards), default=0)),
            upper=Timestamp(upper),
            chains=len(shards),
            batches=len(batches),
            rows=sum(batch.rows for batch in batches),
            bytes=sum(batch.size for batch in batches),
            recovery_point_age_seconds=max(self._clock.wall_ns() - upper, 0) / NS_PER_SECOND,
            spans=[span for shard in shards for span in _span(shard.state.batches)],
        )

    def verify(
        self,
        depth: Depth = "checksums",
        store: Store | None = None,
        *,
        progress: OnProgress | None = None,
    ) -> VerifyReport:
        """Prove that what was written is there.

        `"files"`: every part exists, in its size. `"checksums"`: every part is read and its bytes
        compared. `"contents"`: and the state at the oldest time that both cover, and every version
        after it, equal the `store`'s, by fingerprint. `progress` is called with the rows of the
        parts read so far, contents being a second time. Raises `CorruptionError` naming all that is
        missing or differs, `StatesLostError` where what is there is older than it has been,
        `UsageError` if there is no backup to prove anything of.
        """
        record = self._chains.read()
        self._chains.require_named(record)
        for shard in self._shards(record):
            shard.require_newest()
        shards = self._filled(record)
        if not shards:
            raise no_backup(self.url)
        return verify_chains(shards, self.url, depth=depth, store=store, progress=progress)

    # -- writing ----------------------------------------------------------------------------

    def backup(
        self,
        store: Store,
        *,
        full: bool = False,
        token: str | None = None,
        max_age: timedelta | None = None,
        progress: OnProgress | None = None,
        upload: Upload = upload_here,
    ) -> BackupInfo:
        """Append what `store` has committed since the last backup; the first one is full.

        Everything committed before the call is in it, and nothing that a crash can take back. Of
        two scripts at once each takes a window of its own. A `token` names this backup: made
        again after a crash, it is done once, as long as no compaction has merged it with others.
        Between backups the store keeps its history, unless it falls further behind than `max_age`;
        without it for ever, also where the collection was removed: `store.drop_hold` ends that.
        What a backup that was killed had uploaded of its window is taken: then that window is
        finished first, and the rest is another. `progress` is called with the rows written so far;
        what it raises calls the backup off. `upload` writes the parts: in this process, or spread
        over others (`spark_connector.jobs.backup`).

        Raises `StatesLostError` where the collection, or all that the source knows to be at its
        place, is gone or an older copy: then `full=True` begins anew. Raises
        `UsageError` if the collection is another store's, if the store was put back from an
        older copy and lacks what is here, or if the token is empty; `HistoryGoneError` if the store
        no longer has the window: then `full=True` begins another chain beside the present one.
        """
        if token is not None and not token:
            raise UsageError("the token is empty", "name the backup, or pass no token")
        address = public_address(self.url)
        record = self._chains.begin(
            store.store_id,
            token if full else None,
            first=lambda: self._begin_anew(store, address, full=full),
        )
        shard = self._chains.shard(record.chains[-1])
        name = f"backup-{record.collection_id}"
        done = None
        if token is not None:  # looks into each chain
            appended = (appended_before(chain, token) for chain in self._shards(record))
            done = next(filter(None, appended), None)
        if not full:
            self._require_reached(store, name, record, shard)
            shard.require_newest()
        elif done is None and not record.is_begun_by(token) and not _is_unused(shard):
            record = self._chains.extend(record, token)
            shard = self._chains.shard(record.chains[-1])
        for _ in range(BACKUP_ATTEMPTS):
            done = done or appended_before(shard, token)
            if done is not None:
                return info(done)
            hold = take_hold(store, name, shard, max_age, address=address)
            try:
                return append_windows(shard, Backup(store, hold, upload, progress), token)
            except (UpperMismatchError, HoldTaken):  # another took the window, or our hold
                shard.refresh()
        raise LockedError(self.url, "other scripts that back up at the same time")

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
        progress: OnProgress | None = None,
        build: Build = build_here,
    ) -> Timestamp:
        """Build a new store at `path` with the original timestamps; returns its newest instant.

        As of `as_of` (default: the newest), whole, or the keys of a span or with `prefix`; with
        `history=False` only what was alive then. `path` must not exist; it appears when the
        restore is whole, so a crash leaves no half of one. Memory is bounded. `progress` is called
        with the rows written so far; what it raises calls the restore off. `build` writes the
        files: in this process, or spread over others (`spark_connector.jobs.restore`).

        Raises `HistoryGoneError` or `NotYetWrittenError` outside the window, `CorruptionError`
        if a part is damaged.
        """
        span = Span.of(start, end, prefix)
        with self.snapshot(as_of) as (shard, snapshot):
            at = snapshot.as_of
            view = Window(-1, at) if history else AsOf(at)
            files = partial(build, snapshot, view, span, tally=Tally(progress))
            restore_store(Path(path), files, since=shard.since if history else at, as_of=at)
        return Timestamp(at)

    def restore_into(
        self,
        store: Store,
        as_of: TimeLike | None = None,
        prefix: bytes | None = None,
        *,
        start: bytes | None = None,
        end: bytes | None = None,
        progress: OnProgress | None = None,
    ) -> Timestamp:
        """Import what was alive at `as_of` into a live store, stamped when added, as one import.

        Keys that the backup does not have stay as they are: delete their range first to replace
        it. Returns the stamp. `progress` and errors are as in `restore`: after one, nothing was
        added.
        """
        span = Span.of(start, end, prefix)
        with self.snapshot(as_of) as (_, snapshot):
            rows = Tally(progress).over(snapshot.read(span))
            return restore_into_store(store, rows)

    def scan_batches(
        self, as_of: TimeLike | None = None, prefix: bytes | None = None
    ) -> pa.RecordBatchReader:
        """The rows alive at `as_of` as Arrow record batches `key`, `value`, in key order.

        Read without restoring: batches are merged in Arrow, in bounded memory. What is read is
        fixed by this call, and kept until the reader is read to its end or dropped. Raises
        `HistoryGoneError` or `NotYetWrittenError` outside the window.
        """
        span = Span.of(prefix=prefix)

        def rows() -> Iterator[pa.RecordBatch]:
            with self.snapshot(as_of) as (_, snapshot):
                yield pa.RecordBatch.from_pylist(
                    [], schema=ROWS_SCHEMA
                )  # begun: held by the call, let go by the last
                for batch in snapshot.read(span):
                    columns = [batch.column("key"), batch.column("value")]
                    yield pa.RecordBatch.from_arrays(columns, schema=ROWS_SCHEMA)

        batches = rows()
        next(batches)
        return pa.RecordBatchReader.from_batches(ROWS_SCHEMA, batches)

    # -- upkeep -----------------------------------------------------------------------------

    def compact(self, *, progress: OnProgress | None = None, merge: Merge = merge_here) -> None:
        """Merge the batches of the newest chain into one, and free what is no longer needed.

        Every instant in `[since, upper)` stays restorable. Costs reading and writing the chain,
        which `merge` does: in this process, or spread over others (`spark_connector.jobs.compact`).
        `progress` is called with the rows written so far; what it raises calls it off.
        """
        newest = self._newest()
        if newest is not None:
            newest.compact(full=True, merge=merge, progress=progress)
            newest.gc()

    def scrub(self, *, delete_orphans_older_than: timedelta | None = None) -> ScrubReport:
        """Name the blobs that nothing needs (left by backups that did not finish), and those
        that are missing or have another size. Orphans older than given are deleted, and what was
        left of writing them; leave time for running backups."""
        before_ns = None
        age = require_age(delete_orphans_older_than, name="delete_orphans_older_than")
        if age is not None:
            before_ns = self._clock.wall_ns() - _ns(age)
            sweep(self._place.blob, before_ns=before_ns)
        found = [
            shard.scrub(
                delete_orphans_before_ns=before_ns,
                pending=pending_parts(shard.blob, shard.log.shard, shard.upper),
            )
            for shard in self._shards()
        ]
        lost = self._lost_states()
        return ScrubReport(
            missing=(*lost, *(name for report in found for name in report.missing)),
            altered=tuple(name for report in found for name in report.altered),
            orphans=tuple(name for report in found for name in report.orphans),
            deleted=tuple(name for report in found for name in report.deleted),
        )

    def _lost_states(self) -> Iterator[str]:
        """The newest states that are gone, in words."""
        record = self._chains.read()
        yield from _lost(lambda: self._chains.require_named(record))
        for shard in self._shards(record):
            yield from _lost(shard.require_newest)

    def expire(
        self,
        before: TimeLike | None = None,
        *,
        keep: timedelta | None = None,
        progress: OnProgress | None = None,
    ) -> Timestamp:
        """Give up instants before `before`, or older than `keep`; returns the new `since`.

        Moves `since`, rewrites what it has passed and frees the space. Instants from `since` on
        stay restorable. What a restore is reading stays until the next expiry. `progress` is called
        with the rows rewritten so far. Raises `UsageError` unless exactly one of the two is given.
        """
        if (before is None) == (keep is None):
            raise UsageError("expire takes before= or keep=", "pass one of the two")
        require_age(keep, name="keep")
        record = self._chains.read()
        if record is None:
            return Timestamp(0)
        shards = self._filled(record)
        if not shards:
            return Timestamp(0)
        newest = shards[-1]
        if keep is not None:
            limit = self._clock.wall_ns() - _ns(keep)
        else:
            assert before is not None
            limit = int(to_timestamp(before, name="before"))
        self._drop_ended(record, shards[:-1], limit)
        target = min(limit, newest.upper - 1)
        newest.expire_lapsed()
        if target > newest.since:
            newest.critical(RETENTION).downgrade(target)
        newest.compact(full=True, progress=progress)
        newest.gc()
        return Timestamp(newest.refresh().since)

    def _drop_ended(self, record: CollectionRecord, older: Sequence[Shard], limit: int) -> None:
        """Remove chains that ended before `limit`."""
        ended = {shard.log.shard for shard in older if shard.upper <= limit}
        if ended:
            record = self._chains.drop(record, ended)
        destroyed = {name for name in record.dropping if self._destroy(name)}
        if destroyed:
            self._chains.forget(record, destroyed)

    def _destroy(self, name: str) -> bool:
        """Remove the data of a chain that was dropped; False if that is left to the next expiry.
        Goes on where one that was killed ended."""
        shard = self._chains.find(name)
        if shard is None:
            return True
        forget(shard.blob, name)
        shard.expire_lapsed()
        if shard.since != EMPTY:
            shard.critical(RETENTION).downgrade(EMPTY)
        if shard.since != EMPTY:
            return False  # a restore is reading it
        if shard.upper != EMPTY:
            with suppress(UpperMismatchError):  # somebody was faster
                shard.writer().progress(EMPTY)
        if shard.refresh().upper != EMPTY:
            return False  # a backup that began before is writing to it
        shard.finalise()
        return True

    # -- inside -----------------------------------------------------------------------------

    def _begin_anew(self, store: Store, address: str, *, full: bool) -> None:
        """Before the first backup here. Raises `StatesLostError` where the source knows of others
        at this place, unless the caller says with `full` that they may be forgotten."""
        if not self._is_lasting:
            return
        if full:
            drop_others(store, address)
        else:
            require_no_other(store, address)

    def _require_reached(
        self, store: Store, name: str, record: CollectionRecord, newest: Shard
    ) -> None:
        """Raise `StatesLostError` if the source knows of more that was appended than is here."""
        known = reached(store, name)
        if newest.upper >= known:
            return
        found = max(shard.refresh().upper for shard in (newest, *self._shards(record)))
        if found < known:
            remedy = "put the newest copy of all of it back; backup(store, full=True) begins anew"
            raise StatesLostError(self.url, found=found, known=known, remedy=remedy)

    def _shards(self, record: CollectionRecord | None = None) -> Sequence[Shard]:
        record = record or self._chains.read()
        found = map(self._chains.find, () if record is None else record.chains)
        # Another script may have just begun to destroy one.
        return [shard for shard in found if shard is not None and shard.since != EMPTY]

    def _newest(self) -> Shard | None:
        shards = self._filled()
        return shards[-1] if shards else None

    def _filled(self, record: CollectionRecord | None = None) -> Sequence[Shard]:
        """The chains that have a backup: of the newest, the first may not have ended yet."""
        return [shard for shard in self._shards(record) if shard.upper]

    @contextmanager
    def snapshot(self, as_of: TimeLike | None) -> Iterator[tuple[Shard, ShardSnapshot]]:
        """The newest chain that covers `as_of`, held still at it."""
        shards = self._filled()
        if not shards:
            raise no_backup(self.url)
        newest = shards[-1]
        if as_of is None:
            newest.require_newest()
        at = newest.upper - 1 if as_of is None else int(to_timestamp(as_of, name="as_of"))
        if at >= newest.upper:
            raise NotYetWrittenError(as_of=Timestamp(at), upper=Timestamp(newest.upper))
        covering = [shard for shard in shards if shard.since <= at < shard.upper]
        if not covering:
            raise HistoryGoneError(as_of=Timestamp(at), since=Timestamp(newest.since))
        with covering[-1].snapshot(at) as snapshot:
            yield covering[-1], snapshot

    @contextmanager
    def snapshots(self) -> Iterator[Mapping[Shard, ShardSnapshot]]:
        """All chains, oldest first, each held still at its newest instant."""
        with ExitStack() as held:
            yield {
                shard: held.enter_context(shard.snapshot(shard.upper - 1))
                for shard in self._filled()
            }


def _lost(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except StatesLostError as error:
        yield f"{error.where}: {error.problem}"


def _is_unused(shard: Shard) -> bool:
    """Whether nothing was ever appended to a chain."""
    return not shard.upper and not witness.seqnos(shard.blob, shard.log.shard)


def _chain(shard: Shard) -> Chain:
    state = shard.refresh()
    return Chain(shard.log.shard, Timestamp(state.since), Timestamp(state.upper), state.batches)


def _span(batches: Sequence[Batch]) -> Sequence[Span]:
    """One span that all keys of `batches` lie in; none where they have no keys."""
    parts = [part for batch in batches for part in batch.parts]
    if not parts:
        return []
    ends = [part.key_max for part in parts if part.key_max is not None]
    end = max(ends) + b"\0" if len(ends) == len(parts) else None
    return [Span(min(part.key_min for part in parts), end)]


def _ns(duration: timedelta) -> int:
    return int(duration.total_seconds() * NS_PER_SECOND)
