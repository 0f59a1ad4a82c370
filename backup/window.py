"""Windows: one backup, step by step, in an order that survives a kill at any step.

1. One fsync makes durable: a hold at the chain's upper, and everything that the store has.
2. A window that a killed backup had begun to upload is finished first.
3. The rows of the window are uploaded; nothing refers to them yet.
4. One compare-and-append puts them in place. Before it there is no backup, and after it the whole
   backup is there.
5. The hold moves on. The records of the upload, and old versions of the chain's state, are
   removed.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from kvstore.backup.chains import RETENTION, Chains, newest_proof
from kvstore.backup.rows import Exported, RowPosition, exported
from kvstore.backup.shard import (
    BatchDesc,
    Blob,
    Critical,
    Shard,
    ShardBatch,
    ShardPart,
    delete_batch,
)
from kvstore.backup.shard.state import witness
from kvstore.backup.shard.state.codec import decode_part, encode_part
from kvstore.base.meters import OnProgress, Tally
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import read_object
from kvstore.errors import (
    Argument,
    CorruptionError,
    DeterminateError,
    FencedError,
    FormatVersionError,
    HistoryGoneError,
    IndeterminateError,
    KVStoreError,
    LockedError,
    OpaqueMismatchError,
    StatesLostError,
    UpperMismatchError,
    UsageError,
)
from kvstore.limits import BACKUP_ATTEMPTS, BACKUP_TOKEN_CHARS_MAX
from kvstore.remote.control import as_store, client_of
from kvstore.storage.contract import FAILURES
from kvstore.store import Store
from kvstore.timeline.holds import BACKUP, Hold, HoldRecord

# --------------------------------------------------------------------------------------------------
# Uploads: the parts of a window that a backup has written, before a batch names them.
#
# One process writes the parts, or the tasks of a cluster do, each for a stretch of the key space. A
# backup that fills more than one part writes a record after each full part, so that a crash costs
# one part at most. The next backup of the same window takes the recorded parts and continues behind
# the last row in them.
#
#     blob "progress/<chain>/<lower>-<upper>-<attempt>/<number>.json" :=
#         {"format": 1, "part": as in a shard's state, "key": hex, "timestamp", "op",
#          "crc32": of these fields as JSON, keys sorted}
#
# Invariants
# 1. The parts of an upload come in the order of their keys, and hold each row of the window once.
# 2. Nothing names the parts until the batch is appended. A failed upload leaves orphans, which
#    change no result and are found by a scrub.
# 3. A record is written after its part, under a name that is never used twice.
# 4. The name of a record fixes its window. The source's rows in that window do not change while a
#    hold below `upper` keeps them. Where the hold was lost, the records are not used.
# 5. Record n + 1 of an attempt begins where record n ends. Two scripts on one attempt cannot both
#    write it: the second script gives up recording, and continues its backup.
# 6. No backup deletes a recorded part: another backup may have taken it. A scrub finds the parts of
#    losing attempts once their window has been backed up.

RECORD_FORMAT: Final = 1

_ROOT = "progress"
_NAME = re.compile(rf"{_ROOT}/[^/]+/(?P<attempt>\d+-\d+-[0-9a-f]+)/(?P<number>\d+)\.json")


class UploadedPart(NamedTuple):
    """An uploaded part, and the last row in it."""

    part: ShardPart
    last: RowPosition


class Attempt:
    """One upload of the window `[lower, upper)`. An earlier process may have begun it."""

    def __init__(self, blob: Blob, chain: str, name: str, uploaded: list[UploadedPart]) -> None:
        self._blob = blob
        self._folder = f"{_ROOT}/{chain}/{name}"
        self._next = len(uploaded)
        self._is_recording = True
        lower, upper, _ = name.split("-")
        self.lower, self.upper = int(lower), int(upper)
        self.parts = tuple(each.part for each in uploaded)
        self.after = uploaded[-1].last if uploaded else None
        self.recorded = {part.name for part in self.parts}

    @property
    def since(self) -> int | None:
        """The start of the window `(since, upper - 1]`; None is before all time."""
        return self.lower - 1 if self.lower else None

    @classmethod
    def begin(cls, blob: Blob, chain: str, lower: int, upper: int) -> Attempt:
        """Begin a new attempt. Nothing is written until a part is full."""
        return cls(blob, chain, f"{lower}-{upper}-{secrets.token_hex(6)}", [])

    def record(self, part: ShardPart, last: pa.RecordBatch) -> bool:
        """Record that `part`, which ends with the row `last`, is uploaded.

        Returns False, and records nothing, once another script records this attempt.
        """
        if not self._is_recording:
            return False
        key, timestamp, op = (last.column(name)[0].as_py() for name in ("key", "timestamp", "op"))
        fields = {
            "format": RECORD_FORMAT,
            "part": encode_part(part),
            "key": key.hex(),
            "timestamp": timestamp,
            "op": op,
        }
        name = f"{self._folder}/{self._next:06}.json"
        # The record may exist although the call failed: then the part must not be deleted.
        self.recorded.add(part.name)
        try:
            self._blob.put(name, _json({**fields, "crc32": zlib.crc32(_json(fields))}))
        except (UsageError, DeterminateError, IndeterminateError):
            self._is_recording = False
            return True
        self._next += 1
        return True


# -- uploading -------------------------------------------------------------------------------


class Uploaded(NamedTuple):
    """A batch to append. Its history is whole from `whole_since` on."""

    whole_since: int
    batch: ShardBatch


class Upload(Protocol):
    """Writes the rows of a window that follow the parts which an attempt has already recorded."""

    def __call__(
        self, store: Store, shard: Shard, attempt: Attempt, progress: OnProgress | None
    ) -> Uploaded:
        """Upload. Raises `HistoryGoneError` if the store no longer has the window."""
        ...


def upload_here(
    store: Store, shard: Shard, attempt: Attempt, progress: OnProgress | None
) -> Uploaded:
    """Upload in this process, in bounded memory; each full part is recorded."""
    window = exported(store, since=attempt.since, upto=attempt.upper - 1, after=attempt.after)
    total = None
    if attempt.since is None and progress is not None:
        figures = store.stats()
        done = sum(part.rows for part in attempt.parts)
        total = max(figures["data_entries"] - done, 0)
    return upload_window(window, shard, attempt, progress, total)


def upload_window(
    window: Exported,
    shard: Shard,
    attempt: Attempt,
    progress: OnProgress | None,
    total: int | None = None,
) -> Uploaded:
    """Upload exported rows in this process. `total` is an estimate of their number."""
    rows = window.rows
    if progress is not None:
        rows = Tally(progress, total, is_about=True).over(rows)
    desc = BatchDesc(attempt.lower, attempt.upper)
    return Uploaded(window.whole_since, shard.write_batch(desc, rows, on_full=attempt.record))


# -- records of earlier attempts -------------------------------------------------------------


class EarlierUploads(NamedTuple):
    """The records that earlier attempts left: whether there are any, and the attempt at the
    requested window with the most parts."""

    is_any: bool
    farthest: Attempt | None


def find(blob: Blob, chain: str, lower: int) -> EarlierUploads:
    """Find earlier attempts at the window that begins at `lower`. Costs one listing, mostly of
    nothing."""
    attempts = _attempts(blob, chain)
    found = [
        Attempt(blob, chain, name, uploaded)
        for name, numbers in attempts.items()
        if int(name.split("-")[0]) == lower and (uploaded := _read_all(blob, chain, name, numbers))
    ]
    farthest = max(found, key=lambda attempt: len(attempt.parts), default=None)
    return EarlierUploads(bool(attempts), farthest)


def forget(blob: Blob, chain: str, *, below: int | None = None) -> None:
    """Delete the records of windows that begin below `below`; by default all records of the
    chain."""
    for name, numbers in _attempts(blob, chain).items():
        if below is None or int(name.split("-")[0]) < below:
            # The first record goes last: without it the others count for nothing.
            for number in sorted(numbers, reverse=True):
                # A record that stays is outdated by its window; the next call deletes it.
                with suppress(*FAILURES):
                    blob.delete(f"{_ROOT}/{chain}/{name}/{number:06}.json")


def pending_parts(blob: Blob, chain: str, lower: int) -> set[str]:
    """Names of the recorded parts that the next backup, from `lower` on, may take."""
    return {
        uploaded.part.name
        for name, numbers in _attempts(blob, chain).items()
        if int(name.split("-")[0]) == lower
        for uploaded in _read_all(blob, chain, name, numbers)
    }


def _attempts(blob: Blob, chain: str) -> dict[str, list[int]]:
    """The numbers of the records of each attempt. One listing."""
    found: dict[str, list[int]] = {}
    for info in blob.patience.over(lambda: list(blob.list(f"{_ROOT}/{chain}/"))):
        if (name := _NAME.fullmatch(info.name)) is not None:  # otherwise a foreign file
            found.setdefault(name["attempt"], []).append(int(name["number"]))
    return found


def _read_all(blob: Blob, chain: str, name: str, numbers: list[int]) -> list[UploadedPart]:
    """The records of one attempt, up to the first that is missing or whose part is missing."""
    return list(_read_until_gap(blob, f"{_ROOT}/{chain}/{name}", sorted(numbers)))


def _read_until_gap(blob: Blob, folder: str, numbers: list[int]) -> Iterator[UploadedPart]:
    for expected, number in enumerate(numbers):
        uploaded = _read(blob, f"{folder}/{number:06}.json")
        if uploaded is None or number != expected:
            return
        part = uploaded.part
        if blob.patience.over(partial(blob.size, part.name)) != part.size:
            return
        yield uploaded


def _read(blob: Blob, where: str) -> UploadedPart | None:
    """A record; None where it is gone or damaged: then its part is uploaded again."""
    try:
        data = blob.patience.over(partial(blob.get, where))
        if data is None:
            return None
        fields = read_object(data, where=where)
        if fields.pop("crc32", None) != zlib.crc32(_json(fields)):
            return None
        version = fields.integer("format")
        if version != RECORD_FORMAT:
            raise FormatVersionError(where, found=version, supported=RECORD_FORMAT)
        key, timestamp, op = fields.hexed("key"), fields.integer("timestamp"), fields.integer("op")
        return UploadedPart(decode_part(fields.inner("part")), RowPosition(key, timestamp, op))
    except CorruptionError:
        return None


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


# --------------------------------------------------------------------------------------------------
# One backup.


class BackupInfo(NamedTuple):
    """One backup, or several that compaction has merged: all versions in `[lower, upper)`.

    `proven_at` is the time of the newest drill that proved an instant of the window. `labels` name
    instants of the window.
    """

    lower: Timestamp
    upper: Timestamp
    rows: int
    bytes: int
    parts: int
    seconds: float
    proven_at: Timestamp | None = None
    labels: tuple[str, ...] = ()


def info(batch: ShardBatch) -> BackupInfo:
    """The facts that a batch of a chain states of itself."""
    return BackupInfo(
        Timestamp(batch.lower),
        Timestamp(batch.upper),
        batch.rows,
        batch.size,
        len(batch.parts),
        float(dict(batch.meta).get("seconds", 0.0)),
    )


class Request(NamedTuple):
    """One call of `Collection.backup`. `is_lasting`: `address` outlives this process."""

    store: Store
    address: str
    is_lasting: bool = True
    full: bool = False
    token: str | None = None
    max_age: timedelta | None = None
    upload: Upload = upload_here
    progress: OnProgress | None = None


def require_token(token: str | None) -> None:
    """Raise `UsageError` unless `token` can name a backup. The state of the collection records it,
    and must stay readable."""
    if token is None:
        return
    if not isinstance(token, str):
        raise UsageError((Argument.of("token", token), " is no text"), "pass a str, or no token")
    if not token:
        raise UsageError("the token is empty", "name the backup, or pass no token")
    if len(token) > BACKUP_TOKEN_CHARS_MAX or not token.isprintable():
        raise UsageError(
            f"token={token[:100]!r}",
            f"pass printable characters, {BACKUP_TOKEN_CHARS_MAX} at most",
        )


def back_up(chains: Chains, request: Request) -> BackupInfo:
    """Back up as `Collection.backup` says."""
    store, token, full = request.store, request.token, request.full
    begun_by = token if full else None
    record = chains.begin(store.store_id, begun_by, first=lambda: _begin_anew(request))
    shard = chains.shard(record.chains[-1])
    done = None
    if token is not None:  # looks into each chain
        appended = (_appended_before(chain, token) for chain in chains.shards(record))
        done = next(filter(None, appended), None)
    if not full:
        chains.require_reached(record, shard, store)
        shard.require_newest()
    elif done is None and not record.is_begun_by(token) and not _is_unused(shard):
        record = chains.extend(record, token)
        shard = chains.shard(record.chains[-1])
    if record.drills and (proof := newest_proof(record.drills, shard.name)) is not None:
        store.holds.note_proof(request.address, Timestamp(proof.drilled_at))
    with ExitStack() as opened:
        for _ in range(BACKUP_ATTEMPTS):
            done = done or _appended_before(shard, token)
            if done is not None:
                return info(done)
            request = _caught_up(request, shard.upper, opened)
            hold = _take_hold(request, record.hold_name, shard)
            try:
                return _append_windows(shard, request, hold, opened)
            except (UpperMismatchError, _Overtaken):  # another script was faster
                shard.refresh()
    raise LockedError(chains.where, "other scripts that back up at the same time")


def reached(store: Store, address: str) -> int:
    """The time below which the collection at `address` has every commit, as the store knows.

    0 where the store knows of no backup to `address`. After a crash the time may be earlier,
    because the newest moves of the hold may be lost.
    """
    return max((int(hold.reached or 0) for hold in _holds(store, address)), default=0)


# -- before ----------------------------------------------------------------------------------


def _holds(store: Store, address: str) -> Sequence[HoldRecord]:
    """The holds that backups to `address` have taken."""
    return [hold for hold in store.holds.all() if hold.kind == BACKUP and hold.address == address]


def _begin_anew(request: Request) -> None:
    """Check, before the first backup at an address, that the source knows of no backups there.

    Raises `StatesLostError` if it does; a full backup drops the holds of those backups instead.
    """
    if not request.is_lasting:
        return
    for hold in _holds(request.store, request.address):
        if request.full:
            request.store.drop_hold(hold.name)
        elif hold.reached is not None:
            raise StatesLostError(
                request.address,
                found=0,
                known=hold.reached,
                remedy="look whether the disk is mounted, and put the collection back; "
                "`kvstore backup run --full`, or full=True, begins it anew",
            )


def _appended_before(shard: Shard, token: str | None) -> ShardBatch | None:
    """The batch that an earlier call with this token appended."""
    if token is None:
        return None
    return next((b for b in shard.refresh().batches if ("token", token) in b.meta), None)


def _is_unused(shard: Shard) -> bool:
    """Whether nothing was ever appended to a chain."""
    return not shard.upper and not witness.seqnos(shard.blob, shard.name)


def _caught_up(request: Request, upper: int, opened: ExitStack) -> Request:
    """The request, with a store that shows the times up to `upper`. Where another script has backed
    up more than this script's store shows, the store is opened again beside its owner."""
    if upper <= request.store.upper or (owner := client_of(request.store)) is None:
        return request
    return request._replace(store=opened.enter_context(as_store(owner)))


def _take_hold(request: Request, name: str, shard: Shard) -> Hold:
    """Take the collection's hold on its source, at the chain's upper. The next sync makes it
    durable.

    Raises `HistoryGoneError` if the source no longer has the history that follows the chain,
    `UsageError` if it lacks commits of the chain, or has older ones that the chain lacks.
    """
    # Check before taking the hold: moving it lets GC drop the commits that this check looks for.
    newest = next((batch.parts for batch in reversed(shard.state.batches) if batch.parts), ())
    _require_commits(request.store, newest)
    _require_copied(request.store, shard, newest)
    lower = shard.upper
    try:
        return request.store.hold(
            name,
            at=lower - 1 if lower else None,
            max_age=request.max_age,
            durable=False,
            kind=BACKUP,
            address=request.address,
        )
    except HistoryGoneError as error:
        raise _chain_broken(lower - 1, error.since) from error


def _require_commits(store: Store, parts: Sequence[ShardPart]) -> None:
    """Raise `UsageError` if the source lacks the newest commit in `parts`, which it once had."""
    last = max((part.time_max for part in parts), default=0)
    if last and store.replication.has_commit(last) is False:
        raise UsageError(
            f"{store.path} lacks the commit of {Timestamp(last)} that was backed up: it was put "
            "back from an older copy",
            "restore the collection to get the lost commits back; `kvstore backup run --full`, "
            "or full=True, begins another chain with the present ones",
        )


def _require_copied(store: Store, shard: Shard, newest: Sequence[ShardPart]) -> None:
    """Raise `UsageError` if the source has a commit below the chain's upper that the chain lacks.

    `newest` are the parts of the newest batch that has rows: no commit of the chain is newer.
    Where history was given up, the newest commits may be gone from the chain.
    """
    last = max((part.time_max for part in newest), default=0)
    if not shard.upper:
        return
    found = store.replication.first_change(max(last, shard.since), shard.upper - 1)
    if found is not None:
        raise UsageError(
            f"{store.path} has the commit of {found}, which the backups lack, although they reach "
            f"up to {Timestamp(shard.upper)}: another copy of the store was backed up here",
            "back up each copy into a collection of its own; `kvstore backup run --full`, or "
            "full=True, begins another chain with all commits of this one",
        )


# -- appending -------------------------------------------------------------------------------


class _Overtaken(Exception):  # noqa: N818  # a signal to `back_up`, which takes the hold again
    """Another script has taken the hold of this backup, or has begun the history of the chain."""


def _append_windows(shard: Shard, request: Request, hold: Hold, opened: ExitStack) -> BackupInfo:
    """Finish the window that a killed backup began, if there is one, and append the next.

    Raises `UpperMismatchError` or `_Overtaken` if another script was faster: try again.
    """
    chain, done = shard.name, None
    with _undoing(hold):
        has_records, begun = find(shard.blob, chain, shard.upper)
        if begun is not None:
            request = _caught_up(request, begun.upper, opened)
            _require_commits(request.store, begun.parts)
        upper = int(request.store.sync())
    if begun is not None and _held_at(hold) < begun.upper:
        done = _append_window(shard, request, hold, begun, token=None)
    if upper > shard.upper:
        fresh = Attempt.begin(shard.blob, chain, shard.upper, upper)
        newest = _append_window(shard, request, hold, fresh, token=request.token)
        done = newest if done is None else _together(done, newest)
        has_records = has_records or bool(fresh.recorded)
    if done is None:
        return BackupInfo(Timestamp(shard.upper), Timestamp(upper), 0, 0, 0, 0.0)
    if has_records:
        forget(shard.blob, chain, below=done.upper)
    # The backup is made. The next one collects the versions that stay after a failure.
    with suppress(*FAILURES):
        shard.collect_if_due()
    # Another script that has taken the hold meanwhile keeps for itself the history it needs.
    with suppress(FencedError):
        hold.move(done.upper - 1, durable=False, reached=done.upper)
    return done


def _append_window(
    shard: Shard, request: Request, hold: Hold, attempt: Attempt, *, token: str | None
) -> BackupInfo:
    started = time.perf_counter()
    lower, upper = attempt.lower, attempt.upper
    with _undoing(hold, attempt):
        retention = None if lower else shard.critical(RETENTION)
        try:
            whole_since, uploaded = request.upload(request.store, shard, attempt, request.progress)
        except HistoryGoneError as error:
            raise _chain_broken(lower - 1, error.since) from error
        may_append = retention is None or _begins_at(retention, min(whole_since, upper - 1))
    meta = (("seconds", f"{time.perf_counter() - started:.3f}"), ("token", token or ""))
    batch = replace(uploaded, parts=(*attempt.parts, *uploaded.parts), meta=meta)
    try:
        if not may_append:
            raise _Overtaken
        shard.writer().compare_and_append(batch, token=token)
    except (UpperMismatchError, _Overtaken):
        own = tuple(part for part in batch.parts if part.name not in attempt.recorded)
        delete_batch(shard.blob, replace(batch, parts=own))
        raise
    shard.leave_witness()
    return info(batch)


def _begins_at(retention: Critical, since: int) -> bool:
    """Have the history of a chain begin at `since`. False, with nothing done, if another script has
    done so since `retention` was read: a later `since` would take instants from its backup."""
    try:
        retention.downgrade(since, opaque=secrets.token_bytes(8))
    except OpaqueMismatchError:
        return False
    return True


def _held_at(hold: Hold) -> int:
    try:
        return int(hold.timestamp)
    except FencedError as error:
        raise _Overtaken from error


@contextmanager
def _undoing(hold: Hold, attempt: Attempt | None = None) -> Iterator[None]:
    """Release a new hold where the block fails and has recorded no part for the next backup.

    Otherwise the source would keep history for a backup that was never made.
    """
    try:
        yield
    except BaseException:
        if hold.is_new and not (attempt is not None and attempt.recorded):
            with suppress(KVStoreError):  # the first error is the one to raise
                hold.release()
        raise


def _together(first: BackupInfo, second: BackupInfo) -> BackupInfo:
    """Two windows of one call as one."""
    sums = (a + b for a, b in zip(first[2:6], second[2:6], strict=True))
    return BackupInfo(first.lower, second.upper, *sums)  # type: ignore[arg-type]


def _chain_broken(needed: int, since: int) -> HistoryGoneError:
    return HistoryGoneError(
        as_of=Timestamp(needed),
        since=Timestamp(since),
        remedy="the chain is broken: `kvstore backup run --full`, or full=True, begins another; "
        "the present chain stays restorable",
    )


# --------------------------------------------------------------------------------------------------
# A new collection of versions that were given their times, and not backed up from a store.
#
#     write the parts -> append them as the first batch
#
# Invariants
# 1. A collection that has a backup is refused: history is never rewritten.
# 2. Nothing names the parts before the append. A seed that was killed leaves orphans, which a scrub
#    finds, and perhaps an empty collection, which can be seeded again.
# 3. The source of a seeded collection is no store: the first bit of its id is set, and no store has
#    such an id. So no store can append to it.

Write: TypeAlias = "Callable[[str], ShardBatch]"
"""Writes the parts of the first batch of a chain, which it is given the name of."""

_FIRST_BIT: Final = 1 << 63


def seed_collection(chains: Chains, write: Write, *, since: int) -> Timestamp:
    """Seed as `Collection.seed` says."""
    record = chains.read()
    if record is None:
        record = chains.begin(f"{secrets.randbits(63) | _FIRST_BIT:016x}")
    elif not int(record.source, 16) & _FIRST_BIT or chains.filled(record):
        raise _exists(chains)
    shard = chains.shard(record.chains[-1])
    batch = write(shard.name)
    shard.critical(RETENTION).downgrade(since)
    try:
        shard.writer().compare_and_append(batch)
    except UpperMismatchError as error:
        delete_batch(shard.blob, batch)
        raise _exists(chains) from error
    shard.leave_witness()
    return Timestamp(batch.upper - 1)


def _exists(chains: Chains) -> UsageError:
    return UsageError(
        f"{chains.where} holds a collection", "seed a new one: history is never rewritten"
    )
