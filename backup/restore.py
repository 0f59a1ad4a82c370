"""Restoring: from the parts of a collection to a store at its place, in pieces and bounded memory;
and drills that prove it."""

from __future__ import annotations

import json
import os
import queue
import random
import secrets
import shutil
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import groupby
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore import bulk
from kvstore.backup.chains import (
    RETENTION,
    Chains,
    CollectionPlace,
    CollectionRecord,
    Drill,
    PlaceAddress,
    covers,
    gone,
    instant_of,
    no_backup,
)
from kvstore.backup.rows import points_of, range_rows, row_batches
from kvstore.backup.shard import Blob, Shard, ShardBatch, Split, Storage, delete_batch
from kvstore.backup.shard.rows.part_reader import touches
from kvstore.backup.shard.rows.rules import OP_PUT, AsOf, View, Window
from kvstore.backup.shard.snapshot import ShardSnapshot
from kvstore.backup.verify import Compared, fingerprint, require_comparison, require_equal
from kvstore.base.arguments import integer, word
from kvstore.base.clock import WallClock
from kvstore.base.meters import OnProgress, Tally
from kvstore.base.span import RESERVED, Span
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp
from kvstore.base.worker_process import WorkerProcess
from kvstore.bulk.ingest import staging_beside
from kvstore.bulk.part import SstFile, Written, fsync_and_digest
from kvstore.bulk.seed import appearing
from kvstore.bulk.sort import sorted_batches
from kvstore.bulk.staging import EncodedBy, require_definitions
from kvstore.changes import Change
from kvstore.changes.events import ExpiringChange
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    HistoryGoneError,
    NotYetWrittenError,
    UpperMismatchError,
    UsageError,
    storage_errors,
)
from kvstore.feeds.replica import FirstCopy
from kvstore.limits import (
    DRILL_PROBLEM_CHARS_MAX,
    RESTORE_FILE_BYTES,
    RESTORE_PIECE_BYTES,
    RESTORE_PIECES_MAX,
    RESTORE_RECORD_BYTES_MAX,
    WORKERS_MAX,
)
from kvstore.mvcc import RangeTombstone
from kvstore.mvcc.expiry_records import EXPIRY, carried_of, decode_waiting, waiting_from
from kvstore.opening import StoreBuilder, building
from kvstore.opening import open as open_store
from kvstore.storage.journal import OS_FILES
from kvstore.store import Store
from kvstore.tables.definition import name_of
from kvstore.timeline.reserved import CATALOGUE, FIRST_ROW


class Restored(Timestamp):
    """The newest instant of a restored store. The store is readable from `since` on, and has
    `rows` versions and range deletes."""

    since: Timestamp
    rows: int

    @classmethod
    def of(cls, newest: int, since: int, rows: int) -> Restored:
        """The report of a restore."""
        made = cls(newest)
        made.since, made.rows = Timestamp(since), rows
        return made


class RestoreRequest(NamedTuple):
    """One call of `Collection.restore`. `build` is None where the pieces are built here."""

    path: Path
    as_of: int | None
    span: Span
    history: bool
    resume: bool
    workers: int | None
    progress: OnProgress | None
    build: Build | None


def restore(
    found: CollectionPlace, chains_of: Callable[[Storage], Chains], request: RestoreRequest
) -> Restored:
    """Restore as `Collection.restore` says. `chains_of` opens the chains on a storage."""
    workers = integer(1, WORKERS_MAX).or_none.check("workers", request.workers) or 1
    if workers > 1 and found.address is None:
        raise UsageError(
            f"workers={workers}: other processes cannot open the collection",
            "leave workers out, or open the collection by a path or URL of a lasting storage",
        )
    if request.build is not None:
        if request.resume or workers > 1:
            raise UsageError("build= takes no resume= and no workers=", "leave them out")
        return _restore_by(request.build, chains_of(found.storage), request)
    with appearing(request.path, task="restore", resume=request.resume) as directory:
        return _restore_in(directory, found, chains_of, request, workers)


def _restore_by(build: Build, chains: Chains, request: RestoreRequest) -> Restored:
    with chains.snapshot(request.as_of) as (shard, snapshot):
        view, since = _view(shard, snapshot, request)
        tally = Tally(request.progress)
        files = with_expiries(build, snapshot, view, request.span, tally)
        restore_store(request.path, files, since=since, as_of=snapshot.as_of)
    return Restored.of(snapshot.as_of, since, tally.rows)


def _restore_in(
    directory: Path,
    found: CollectionPlace,
    chains_of: Callable[[Storage], Chains],
    request: RestoreRequest,
    workers: int,
) -> Restored:
    storage, address = found.storage, found.address
    if request.resume and not found.is_local:
        storage = found.fetching(directory / FETCHED)
        address = None if address is None else address.fetching(directory / FETCHED)
    chains = chains_of(storage)
    span, history, at = request.span, request.history, request.as_of
    record, old = chains.read(), read_plan(directory)
    if record is None:
        raise no_backup(chains.where)
    wanted = RestorePlan.of(record.collection_id, "", at or 0, history, span)
    if at is None and old is not None and old.is_of(wanted.at(old.as_of, old.chain)):
        at = old.as_of  # the newest instant when the restore began
    with chains.snapshot(at) as (shard, snapshot):
        view, since = _view(shard, snapshot, request)
        wanted = wanted.at(snapshot.as_of, shard.name)
        tally = Tally(request.progress, _rows_at_most(snapshot, span))
        tally.add(0)
        is_begun = old is not None and old.is_of(wanted)
        plan = old if old and is_begun else begin(directory, wanted, snapshot, workers)
        how = PieceSource(storage.blob, address, workers, tally)
        pieces = build_pieces(directory, plan, snapshot, view, since, how)
        for left in ("store", "expiries"):
            shutil.rmtree(directory / left, ignore_errors=True)
        since = max(piece.since for piece in pieces)
        with building(directory / "store", since=since, newest=snapshot.as_of) as builder:
            add_pieces(directory, builder, pieces)
            for built in expiries_outside(snapshot, view, span, directory, tally):
                builder.add(built.files, built.tombstones)
    return Restored.of(snapshot.as_of, since, sum(piece.rows for piece in pieces))


def _rows_at_most(snapshot: ShardSnapshot, span: Span) -> int:
    parts = (part for batch in snapshot.batches for part in batch.parts)
    return sum(part.rows for part in parts if touches(part, span))


def _view(shard: Shard, snapshot: ShardSnapshot, request: RestoreRequest) -> tuple[View, int]:
    """The rows to restore, and the time from which they are whole. Raises `HistoryGoneError` for a
    time before the first row: an empty store would hide the mistake."""
    at = snapshot.as_of
    parts = [part for batch in shard.state.batches for part in batch.parts]
    first = min((part.time_min for part in parts), default=0)
    if at < first:
        raise HistoryGoneError(
            as_of=Timestamp(at),
            since=Timestamp(first),
            remedy=f"the first row of the collection is of {Timestamp(first)}: restore as of that "
            "time or later",
        )
    # Below `since` there are states at kept instants, and no history between them.
    if request.history and at >= shard.since:
        return Window(-1, at), shard.since
    return AsOf(at), at


# --------------------------------------------------------------------------------------------------
# Restoring: from sorted versions to a store, in bounded memory.
#
# Versions carry their timestamps in their keys, and rows are sorted as the keys of `data` are. So
# rows are written to SSTs in the order in which they come, and RocksDB takes the files as they are.
#
# A new store is built beside its place and appears there as a whole, by a rename. Rows for a live
# store are staged as an import, which gets its timestamp when it is added.


class Built(NamedTuple):
    """Range tombstones, and SSTs of point versions that overlap no other SST of the restore, with
    the sizes and digests of these files."""

    files: Sequence[Path]
    tombstones: Sequence[RangeTombstone]
    written: Sequence[Written] = ()


class Build(Protocol):
    """Writes the rows of a view of a snapshot as files in `directory`; the caller moves them."""

    def __call__(
        self, snapshot: ShardSnapshot, view: View, span: Span, directory: Path, tally: Tally
    ) -> Iterable[Built]:
        """Build the files; `tally` counts the written rows. Raises `CorruptionError` if a part is
        damaged."""
        ...


def built_from(batches: Iterable[pa.RecordBatch], directory: Path) -> Iterator[Built]:
    """Write sorted rows as SSTs, one at a time."""
    tombstones: list[RangeTombstone] = []
    for file, written in version_files(directory, batches, tombstones):
        yield Built([file], tombstones.copy(), [written])
        tombstones.clear()
    yield Built([], tombstones)


def restore_store(
    path: Path,
    build: Callable[[Path], Iterable[Built]],
    *,
    since: int,
    as_of: int,
    replica_of: FirstCopy | None = None,
) -> None:
    """Build a store at `path` of versions at or below `as_of`, whole from `since` on.

    `build` writes the files into the directory that it is given. With `replica_of` the new store is
    a replica.

    Raises `UsageError` if something is at `path`, `LockedError` while another process restores
    to it.
    """
    with appearing(path, task="restore") as directory:
        place = directory / "store"
        with building(place, since=since, newest=as_of, replica_of=replica_of) as builder:
            for built in build(directory):
                builder.add(built.files, built.tombstones)


class Rows(Protocol):
    """Reads the live rows of a snapshot in a span, with the times at which they expire in a column
    `expires`, as `bulk.PartWriter` takes it. It may write to `scratch`, which the caller
    removes."""

    def __call__(self, span: Span, scratch: Path) -> Iterator[pa.RecordBatch]: ...


def restore_into_store(
    store: Store, snapshot: ShardSnapshot, span: Span, tally: Tally, *, expiring: Rows | None
) -> Timestamp:
    """Add the live rows of a snapshot to a store as one import; returns its stamp.

    `expiring` reads them if the snapshot has keys that expire. Rows of tables are added to tables
    with the same definitions. Raises `ImportRefusedError` where the store has others, before any
    row is read.
    """
    tables = tables_in(snapshot, span)
    require_definitions(store, tables, "the backup")
    # Definitions stay behind, and the import makes records of expiries of its own. So the rows of
    # tables begin files of their own.
    first = FIRST_ROW if tables or expiring is not None else RESERVED
    wanted = [span.intersect(b"", RESERVED), span.intersect(first, None)]
    with staging_beside(store) as directory:
        staged = bulk.Import.create(directory)
        for part in wanted:
            if part is not None:
                rows = snapshot.read(part)
                if expiring is not None:
                    rows = expiring(part, directory / "sorting")
                _write_entries(staged, tally.over(rows))
        staged.seal(tables=tables)
        return bulk.ingest(store, directory, move=True)


def tables_in(snapshot: ShardSnapshot, span: Span) -> list[EncodedBy]:
    """The tables of a snapshot, if `span` may have rows of them."""
    if span.intersect(FIRST_ROW, None) is None:
        return []
    return [
        EncodedBy.of_stored(name_of(key), value)
        for batch in snapshot.read(Span.of_prefix(CATALOGUE))
        for key, value in zip(*(batch.column(n).to_pylist() for n in ("key", "value")), strict=True)
    ]


def _write_entries(staged: bulk.Import, batches: Iterable[pa.RecordBatch]) -> None:
    writer = staged.writer()
    for batch in batches:
        names = {"key", "value", "expires", "expires_with"} & {*batch.schema.names}
        writer.write(batch.select(sorted(names)))
        if writer.size_bytes >= RESTORE_FILE_BYTES:
            writer.finish()
            writer = staged.writer()
    writer.finish()


def version_files(
    directory: Path, batches: Iterable[pa.RecordBatch], tombstones: list[RangeTombstone]
) -> Iterator[tuple[Path, Written]]:
    """Write the point versions as SSTs, one by one; range tombstones are added to `tombstones`."""
    file: SstFile | None = None
    path = directory
    count = 0
    try:
        for batch in batches:
            tombstones.extend(RangeTombstone(*row) for row in range_rows(batch))
            points = points_of(batch)
            if len(points.keys):
                if file is None:
                    path, count = directory / f"{count:06d}.sst", count + 1
                    file = SstFile(path)
                file.add_rows(*points)
            if file is not None and file.size_bytes >= RESTORE_FILE_BYTES:
                yield path, _finished(file)
                file = None
        if file is not None:
            yield path, _finished(file)
    finally:
        if file is not None:
            file.abandon()


def _finished(file: SstFile) -> Written:
    written = file.finish()
    assert written is not None, "a file is begun with its first row"
    return written


# --------------------------------------------------------------------------------------------------
# A restore in pieces, by several processes, and continued after a kill.
#
#     <scratch>/plan.json            the rows to restore, and the spans of the pieces
#     <scratch>/<piece>-<token>/     the sorted files of a piece
#     <scratch>/<piece>.json         the record of a whole piece: its files, their digests, its rows
#     <scratch>/fetched/             the bytes of parts, for the next attempt (`resume=True`)
#     <scratch>/store/               the store that is put together
#
# `kvstore.bulk.seed` makes the scratch directory, locks it, and moves the store to its place.
#
# Invariants
# 1. A record is written after its files are on disk. A piece without a sound record is built again.
# 2. The files of a piece are linked into the store, which each attempt puts together anew. So a
#    kill loses no piece, until the store is at its place.
# 3. Compaction and expiry may come between two attempts: rows at and above `since` stay the same.
#    The store is readable from the newest `since` that one of its pieces was built at.
# 4. A plan is continued only by a restore of the same rows.

RECORD_FORMAT: Final = 1
_PLAN: Final = "plan.json"
FETCHED: Final = "fetched"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The rows to restore: the rows of `span` in a chain of a collection, as of a time. Its pieces
    cover the span in order."""

    collection: str
    chain: str
    as_of: int
    history: bool
    start: str
    end: str | None
    cuts: tuple[str, ...] = ()

    @classmethod
    def of(cls, collection: str, chain: str, as_of: int, history: bool, span: Span) -> RestorePlan:
        """A plan that is not cut into pieces yet."""
        end = None if span.end is None else span.end.hex()
        return cls(collection, chain, int(as_of), history, span.start.hex(), end)

    def at(self, as_of: int, chain: str) -> RestorePlan:
        """The plan of the same rows at another time."""
        return replace(self, as_of=int(as_of), chain=chain)

    @property
    def span(self) -> Span:
        """The keys that are restored."""
        return Span(
            bytes.fromhex(self.start), None if self.end is None else bytes.fromhex(self.end)
        )

    def spans(self) -> list[Span]:
        """The keys of each piece."""
        cuts = list(map(bytes.fromhex, self.cuts))
        lows, highs = [self.span.start, *cuts], [*cuts, self.span.end]
        return [Span(low, high) for low, high in zip(lows, highs, strict=True)]

    def is_of(self, other: RestorePlan) -> bool:
        """Whether both restore the same rows. Their pieces may differ."""
        return replace(self, cuts=()) == replace(other, cuts=())


class PieceFile(NamedTuple):
    """A sorted file of a piece, by its path in the scratch directory."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class RestoredPiece:
    """A whole piece. Its rows are whole from `since` on."""

    since: int
    rows: int
    files: tuple[PieceFile, ...]
    tombstones: tuple[RangeTombstone, ...]


@dataclass(frozen=True, slots=True)
class PieceTask:
    """A piece to build: the rows of `split` in a view, with range tombstones cut to `whole`."""

    number: int
    place: PlaceAddress | None
    split: Split
    view: View
    since: int
    whole: Span
    directory: str


class PieceSource(NamedTuple):
    """The blob that this process reads, the place that its workers open, the number of processes,
    and the count of rows."""

    blob: Blob
    place: PlaceAddress | None
    workers: int
    tally: Tally


# -- plans -------------------------------------------------------------------------------------


def read_plan(directory: Path) -> RestorePlan | None:
    """The plan in a scratch directory; None where there is none, or no sound one."""
    fields = _read(directory / _PLAN)
    if fields is None:
        return None
    try:
        ends = fields.get("end")
        found = RestorePlan(
            fields.text("collection"),
            fields.text("chain"),
            fields.integer("as_of"),
            fields.field("history", bool),
            fields.hexed("start").hex(),
            None if ends is None else fields.hexed("end").hex(),
            tuple(fields.unhexed(each, name="cuts").hex() for each in fields.field("cuts", list)),
        )
        found.spans()
    except (CorruptionError, UsageError):
        return None
    return found


def begin(directory: Path, plan: RestorePlan, snapshot: ShardSnapshot, workers: int) -> RestorePlan:
    """Cut the rows into pieces, and write the plan. Pieces of another plan are removed."""
    size = sum(part.size for batch in snapshot.batches for part in batch.parts)
    count = max(-(-size // RESTORE_PIECE_BYTES), 1 if workers == 1 else 3 * workers)
    splits = snapshot.splits(min(count, RESTORE_PIECES_MAX), plan.span)
    plan = replace(plan, cuts=tuple(split.span.start.hex() for split in splits[1:]))
    with storage_errors(str(directory)):
        for left in directory.glob("*.json"):
            left.unlink()
        for left in directory.glob("*-*"):
            shutil.rmtree(left, ignore_errors=True)
    _write(directory / _PLAN, asdict(plan))
    return plan


# -- pieces ------------------------------------------------------------------------------------


def build_pieces(
    directory: Path,
    plan: RestorePlan,
    snapshot: ShardSnapshot,
    view: View,
    since: int,
    source: PieceSource,
) -> list[RestoredPiece]:
    """All pieces of a plan, in order. The pieces that an earlier attempt has finished are taken
    as they are."""
    tally = source.tally
    spans = plan.spans()
    known = [read_piece(directory, number) for number in range(len(spans))]
    tally.add(sum(piece.rows for piece in known if piece is not None))
    tasks = [
        PieceTask(
            number,
            source.place,
            Split(snapshot.as_of, span, snapshot.batches),
            view,
            since,
            plan.span,
            str(directory),
        )
        for number, span in enumerate(spans)
        if known[number] is None
    ]

    def tell(rows: int) -> None:
        tally.add(rows)
        snapshot.renew()

    here = partial(build_piece, source.blob)
    _remove_unfinished(directory, [piece for piece in known if piece is not None])
    found: list[RestoredPiece | None] = known
    with snapshot.explaining():
        for at, piece in shared(
            build_elsewhere, tasks, workers=source.workers, tell=tell, here=here
        ):
            found[tasks[at].number] = piece
    return [piece for piece in found if piece is not None]


def _remove_unfinished(directory: Path, known: Sequence[RestoredPiece]) -> None:
    """Remove the folders of attempts at pieces that were killed."""
    kept = {file.path.partition("/")[0] for piece in known for file in piece.files}
    for left in directory.glob("*-*"):
        if left.is_dir() and left.name not in kept:
            shutil.rmtree(left, ignore_errors=True)


def build_elsewhere(task: PieceTask, tell: TellRows) -> RestoredPiece:
    """Build a piece in another process, which opens the storage by its address."""
    assert task.place is not None, "only one process may build"
    return build_piece(_opened(task.place), task, tell)


@cache
def _opened(place: PlaceAddress) -> Blob:
    return place.open().blob


def build_piece(blob: Blob, task: PieceTask, tell: TellRows) -> RestoredPiece:
    """Build the files of a piece, and write its record."""
    directory = Path(task.directory)
    folder = directory / f"{task.number}-{secrets.token_hex(4)}"
    with storage_errors(str(folder)):
        folder.mkdir()
    tally = Tally()
    rows = _told(task.split.read(blob, task.view, whole=task.whole), tally, tell)
    files: list[PieceFile] = []
    tombstones: list[RangeTombstone] = []
    for built in built_from(rows, folder):
        for path, written in zip(built.files, built.written, strict=True):
            name = f"{folder.name}/{path.name}"
            files.append(PieceFile(name, written.size_bytes, written.digest))
        tombstones += built.tombstones
    piece = RestoredPiece(task.since, tally.rows, tuple(files), tuple(tombstones))
    with storage_errors(str(folder)):
        OS_FILES.sync_directory(str(folder))
    ranges = [[each.start.hex(), each.end.hex(), int(each.timestamp)] for each in tombstones]
    fields = {"since": piece.since, "rows": piece.rows, "files": files, "tombstones": ranges}
    _write(directory / f"{task.number}.json", fields)
    return piece


def _told(rows: Any, tally: Tally, tell: TellRows) -> Any:
    for batch in rows:
        yield batch
        tally.add(batch.num_rows)
        tell(batch.num_rows)


def read_piece(directory: Path, number: int) -> RestoredPiece | None:
    """The piece that an earlier attempt has finished; None where a byte of it is missing or
    wrong. Reads its files."""
    fields = _read(directory / f"{number}.json")
    if fields is None:
        return None
    try:
        files = tuple(_file_of(fields, item) for item in fields.field("files", list))
        ranges = tuple(_range_of(fields, item) for item in fields.field("tombstones", list))
        piece = RestoredPiece(fields.integer("since"), fields.integer("rows"), files, ranges)
    except (CorruptionError, ValueError, TypeError):
        return None
    return piece if all(_is_whole(directory, file) for file in files) else None


def _file_of(fields: JsonObject, item: Any) -> PieceFile:
    path, size, digest = item
    folder, _, name = path.partition("/")
    if not (folder and name) or "/" in name or folder.startswith(".") or name.startswith("."):
        raise fields.damaged(f"it names the file {path!r:.80}")
    return PieceFile(path, int(size), str(digest))


def _range_of(fields: JsonObject, item: Any) -> RangeTombstone:
    start, end, timestamp = item
    low, high = fields.unhexed(start, name="start"), fields.unhexed(end, name="end")
    return RangeTombstone(low, high, int(timestamp))


def _is_whole(directory: Path, known: PieceFile) -> bool:
    path = directory / known.path
    try:
        if path.stat().st_size != known.size:
            return False
        with path.open("rb") as file:
            return fsync_and_digest(file) == known.digest
    except OSError:
        return False


def add_pieces(directory: Path, builder: StoreBuilder, pieces: Sequence[RestoredPiece]) -> None:
    """Link the files of all pieces into a store that is being built."""
    linked = directory / f"linked-{secrets.token_hex(4)}"
    with storage_errors(str(linked)):
        linked.mkdir()
    for piece in pieces:
        files = []
        for file in piece.files:
            target = linked / file.path.replace("/", "-")
            with storage_errors(str(target)):
                os.link(directory / file.path, target)
            files.append(target)
        builder.add(files, piece.tombstones)


# -- records -----------------------------------------------------------------------------------


def _read(path: Path) -> JsonObject | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        fields = read_object(data, where=str(path), bytes_max=RESTORE_RECORD_BYTES_MAX)
        crc32 = fields.pop("crc32", None)
        if crc32 != zlib.crc32(_json(fields)) or fields.integer("format") != RECORD_FORMAT:
            return None
    except CorruptionError:
        return None
    return fields


def _write(path: Path, fields: dict[str, Any]) -> None:
    """Write a record, whole and durable under its name."""
    fields = json.loads(_json({**fields, "format": RECORD_FORMAT}))
    data = _json({**fields, "crc32": zlib.crc32(_json(fields))})
    unfinished = path.with_name(f"{path.name}-{secrets.token_hex(4)}.tmp")
    with storage_errors(str(path)):
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        OS_FILES.sync_directory(str(path.parent))


def _json(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


# --------------------------------------------------------------------------------------------------
# Work in pieces, done by this process and by others beside it.
#
#     for number, found in shared(work, pieces, workers=2, tell=tally.add): ...
#
# Pieces, results and the work itself are sent through pipes, so they are small and can be pickled.
#
# Invariants
# 1. Each piece is done once. This process does pieces too, and gives one to every idle worker.
# 2. When the iteration ends, by an error or an interrupt too, no worker is left. A worker ends at
#    once when this process dies.

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")
_HUNG_UP: Final = (EOFError, BrokenPipeError, ConnectionResetError)

TellRows: TypeAlias = "Callable[[int], None]"
"""Called with the rows that were done since the last call."""


class _Done(NamedTuple):
    """The result of a piece, on its way to the process that shares the work."""

    result: Any


def shared(
    work: Callable[[_Piece, TellRows], _Result],
    pieces: Sequence[_Piece],
    *,
    workers: int,
    tell: TellRows,
    here: Callable[[_Piece, TellRows], _Result] | None = None,
) -> Iterator[tuple[int, _Result]]:
    """Do `work` for each piece in `workers` processes; yields the numbers and results as they come.

    This process does `here` for its pieces, or `work`. The first error of any piece is raised.
    """
    crew = _Crew(work, pieces, tell)
    mine = here or work
    try:
        crew.start(min(workers, len(pieces)) - 1)
        while True:
            crew.listen()
            while crew.done:
                yield crew.done.popleft()
            if crew.left:
                number, piece = crew.left.popleft()
                yield number, mine(piece, crew.told)
            elif crew.busy:
                crew.listen(until_done=True)
            elif not crew.done:
                return
    finally:
        crew.kill()


class _Crew:
    """The workers, and the pieces that they do."""

    def __init__(self, work: object, pieces: Sequence[Any], tell: TellRows) -> None:
        self._work, self._tell = work, tell
        self._workers: list[WorkerProcess] = []
        self.left = deque(enumerate(pieces))
        self.busy: dict[WorkerProcess, int] = {}
        self.done: deque[tuple[int, Any]] = deque()

    def start(self, count: int) -> None:
        """Start workers, and give each a piece."""
        for _ in range(count):
            worker = WorkerProcess(
                "kvstore.backup.restore", what="a shared job", remedy="repeat the call"
            )
            self._workers.append(worker)
            self._give(worker)

    def told(self, rows: int) -> None:
        """Count rows of this process's own piece, and look after the workers."""
        self._tell(rows)
        self.listen()

    def listen(self, *, until_done: bool = False) -> None:
        """Take the messages of the workers; with `until_done` wait until a piece is done."""
        while self.busy:
            pipes = {worker.pipe: worker for worker in self.busy}
            ready = wait(list(pipes), None if until_done and not self.done else 0)
            for pipe in ready:
                self._heard(pipes[pipe])  # type: ignore[index]  # one of the pipes given
            if not ready or (until_done and self.done):
                return

    def kill(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()

    def _heard(self, worker: WorkerProcess) -> None:
        message = worker.hear()
        if isinstance(message, _Done):
            self.done.append((self.busy.pop(worker), message.result))
            self._give(worker)
        else:
            self._tell(message)

    def _give(self, worker: WorkerProcess) -> None:
        if self.left:
            number, piece = self.left.popleft()
            worker.tell((self._work, piece))
            self.busy[worker] = number


def serve(descriptor: int) -> None:
    """Do pieces until the other end of the pipe is closed: the loop of a worker."""
    with Connection(descriptor) as pipe, suppress(*_HUNG_UP):
        todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(pipe, todo), daemon=True).start()
        while True:
            work, piece = todo.get()
            answer: object
            try:
                answer = _Done(work(piece, pipe.send))
            except _HUNG_UP:
                raise
            except Exception as error:  # noqa: BLE001  # raised again at the other end
                answer = error
            pipe.send(answer)


def _listen(pipe: Connection, todo: queue.SimpleQueue[Any]) -> None:
    """Pass messages on. In a thread of its own: it ends a piece that nobody waits for any more."""
    with suppress(EOFError, OSError):
        while True:
            todo.put(pipe.recv())
    os._exit(1)


# --------------------------------------------------------------------------------------------------
# The records of expiries in a backup: `kvstore.mvcc.expiry_records` has their keys.
#
# They are ordinary rows of a collection. A read of changes meets the records of the window by key,
# beside the changes. A restore of a few keys reads the records of these keys from
# where they lie, beside the rows. A restore into a live store reads the time of each key from the
# records, because the import that it makes has records of its own.

_RECORDS = Span.of_prefix(EXPIRY)


def has_expiries(snapshot: ShardSnapshot, span: Span | None = None) -> bool:
    """Whether `span`, if it holds the records of expiries, has any in a snapshot, alive or not."""
    span = span or Span()
    found = span.intersect(_RECORDS.start, _RECORDS.end)
    return found is not None and _any(snapshot.view(Window(-1, snapshot.as_of), found))


def some_expire(snapshot: ShardSnapshot, span: Span) -> bool:
    """Whether keys in `span` may expire, as of the time of a snapshot."""
    return _any(snapshot.view(AsOf(snapshot.as_of), carried_of(span)))


def with_expiries(
    build: Build, snapshot: ShardSnapshot, view: View, span: Span, tally: Tally
) -> Callable[[Path], Iterator[Built]]:
    """Builds the files of a restore: the rows of `span`, and the records of expiries."""

    def files(directory: Path) -> Iterator[Built]:
        yield from build(snapshot, view, span, directory, tally)
        yield from expiries_outside(snapshot, view, span, directory, tally)

    return files


def expiries_outside(
    snapshot: ShardSnapshot, view: View, span: Span, directory: Path, tally: Tally
) -> Iterator[Built]:
    """Build the files of the records of the keys in `span`, if they lie outside of it."""
    if span.intersect(_RECORDS.start, _RECORDS.end) is not None:
        return
    place = directory / "expiries"
    place.mkdir()
    yield from built_from(tally.over(_records(snapshot, view, span)), place)


def rows_with_expiries(snapshot: ShardSnapshot) -> Rows | None:
    """A reader of the live rows of a snapshot with the times at which they expire. None if the
    snapshot has no records of expiries."""
    return partial(_with_expiries, snapshot) if has_expiries(snapshot) else None


def _with_expiries(snapshot: ShardSnapshot, span: Span, scratch: Path) -> Iterator[pa.RecordBatch]:
    """The live rows in `span` by key, each with its time in a column `expires` and the row with
    which it expires in `expires_with`, null where it has none. The records are sorted in bounded
    memory, on disk if they are many: in `scratch`."""
    records = sorted_batches(_dues(snapshot, AsOf(snapshot.as_of), span), scratch)
    ahead = pa.Table.from_batches([], _DUES)
    for batch in snapshot.read(span):
        if not batch.num_rows:
            continue
        last = batch.column("key")[-1].as_py()
        while not ahead.num_rows or ahead.column("key")[-1].as_py() <= last:
            more = next(records, None)
            if more is None:
                break
            ahead = pa.concat_tables([ahead, pa.Table.from_batches([more.select(_DUES.names)])])
        for name, column in _expires(batch, ahead).items():
            batch = batch.append_column(name, column)
        yield batch
        ahead = ahead.filter(pc.greater(ahead.column("key"), pa.scalar(last, pa.binary())))


_DUES: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("timestamp", pa.int64()),
        ("due", pa.int64()),
        ("row", pa.binary()),
    ]
)
"""The `waiting` records of keys: the key, the time of the record, the due time, and the row with
which an index entry expires."""


def _dues(snapshot: ShardSnapshot, view: View, span: Span) -> Iterator[pa.RecordBatch]:
    for batch in snapshot.view(view, waiting_from(0)):
        put = batch.filter(pc.equal(batch.column("op"), OP_PUT))
        keys, times, values = (
            put.column(name).to_pylist() for name in ("key", "timestamp", "value")
        )
        found = map(decode_waiting, keys, values)
        rows = [
            (row.key, at, row.due.time, row.row)
            for row, at in zip(found, times, strict=True)
            if row.key in span
        ]
        if rows:
            columns = [
                pa.array(column, field.type)
                for column, field in zip(zip(*rows, strict=True), _DUES, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=_DUES)


def with_dues(
    snapshot: ShardSnapshot, changes: Iterator[Change], view: View, span: Span
) -> Iterator[Change]:
    """`changes` of keys in `span`, in their order, with the due times that the records of `view`
    have. The records are sorted in bounded memory, on disk if they are many."""
    with TemporaryDirectory(prefix="kvstore-dues-") as scratch:
        sorted_dues = sorted_batches(_dues(snapshot, view, span), Path(scratch))
        records = _by_key(sorted_dues)
        key, dues = next(records, _NO_DUES)
        for change in changes:
            while key is not None and key < change.key:
                key, dues = next(records, _NO_DUES)
            due = dues.get(change.timestamp) if key == change.key and change.op == "put" else None
            yield change if due is None else ExpiringChange.of(change, due)


_NO_DUES: Final[tuple[bytes | None, dict[int, int]]] = (None, {})


def _by_key(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes | None, dict[int, int]]]:
    """Each key of sorted records, with the due times of its versions by their timestamps."""
    rows = (
        row
        for batch in batches
        for row in zip(*(batch.column(name).to_pylist() for name in _DUES.names[:3]), strict=True)
    )
    for key, found in groupby(rows, key=itemgetter(0)):
        yield key, {timestamp: due for _, timestamp, due in found}


def _expires(rows: pa.RecordBatch, records: pa.Table) -> dict[str, pa.Array]:
    """The columns about the expiry of each of `rows`, from the record with its key and its
    timestamp."""
    found = pc.index_in(_versions(rows), value_set=_versions(records))
    return {
        "expires": records.column("due").combine_chunks().take(found),
        "expires_with": records.column("row").combine_chunks().take(found),
    }


def _versions(rows: pa.RecordBatch | pa.Table) -> pa.Array:
    """The keys of rows, each with its timestamp behind it."""
    times = np.asarray(rows.column("timestamp")).astype(">u8")
    data = pa.py_buffer(times.tobytes())
    suffixes = pa.Array.from_buffers(pa.binary(8), len(times), [None, data]).cast(pa.binary())
    keys = rows.column("key")
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    return pc.binary_join_element_wise(keys, suffixes, b"")


def _records(snapshot: ShardSnapshot, view: View, span: Span) -> Iterator[pa.RecordBatch]:
    yield from snapshot.view(view, carried_of(span))
    for batch in snapshot.view(view, waiting_from(0)):
        keys = batch.column("key").to_pylist()
        wanted = pa.array([decode_waiting(key).key in span for key in keys], pa.bool_())
        yield batch.filter(wanted)


def _any(batches: Iterable[pa.RecordBatch]) -> bool:
    return any(batch.num_rows for batch in batches)


# --------------------------------------------------------------------------------------------------
# Drills: a restore for real, into scratch space, which proves that an instant can be had back.
#
#     restore -> open -> verify -> compare with the source -> record the outcome
#
# A drill takes the same way as a person after a disaster. So its proof covers the storage, the key
# of an encrypted collection, the parts, the code and the space on this machine.
#
# Invariants
# 1. A drill that returns has proved its instant. A drill that disproves it raises the error.
# 2. Both outcomes are recorded, in the record of the collection. A drill that could not be done,
#    for want of space or of the storage, is neither.
# 3. Nothing of the scratch space stays, unless the process is killed.

DrillDepth: TypeAlias = Literal["open", "contents"]
_PICK: Final = random.SystemRandom()
_Range: TypeAlias = tuple[int, int, int]
"""The instants from the first to below the second number, and a weight."""
DRILL_DEPTHS: Final[tuple[DrillDepth, ...]] = ("open", "contents")
_DRILL_DEPTH: Final = word(*DRILL_DEPTHS)


class DrillReport(NamedTuple):
    """A proof: the instant `at` of the chain was restored, opened and verified at `drilled_at`.

    `rows` are the versions of the restored store, `compared` the rows that were compared with the
    source (0 unless the depth is `"contents"`). `recorded` is False where the storage refuses
    writes.
    """

    at: Timestamp
    depth: str
    chain: str
    rows: int
    compared: int
    bytes: int
    seconds: float
    drilled_at: Timestamp
    recorded: bool


class DrillRequest(NamedTuple):
    """One call of `Collection.drill`. `at` is None for a random instant; `address` names the
    collection in the metrics of its source."""

    at: int | None
    depth: DrillDepth
    scratch: Path | None
    address: str


def drill(
    chains: Chains,
    request: DrillRequest,
    restore: Callable[[Path, int], object],
    store: Store | None,
    clock: WallClock,
) -> DrillReport:
    """Drill as `Collection.drill` says. `restore` builds a store at a path, as of a time."""
    record, shards = _drillable(chains, request, store)
    chosen, at = _instant(shards, request, store)
    began = clock.wall_ns()

    def outcome(problem: str = "") -> Drill:
        text = problem.partition("\n")[0][:DRILL_PROBLEM_CHARS_MAX]
        text = text.encode(errors="replace").decode()  # a path may have bytes that are no text
        return Drill(chosen.name, at, clock.wall_ns(), request.depth, text)

    try:
        chains.require_named(record)
        chosen.require_newest()
        rows, compared, size = _proved(chains.where, at, request, restore, store)
    except CorruptionError as error:
        _record(chains, outcome(str(error)))
        raise
    proof = outcome()
    recorded = _record(chains, proof)
    drilled_at = Timestamp(proof.drilled_at)
    if store is not None:
        store.holds.note_proof(request.address, drilled_at)
    seconds = max(drilled_at - began, 0) / NS_PER_SECOND
    figures = rows, compared, size, seconds, drilled_at, recorded
    return DrillReport(Timestamp(at), request.depth, chosen.name, *figures)


def _drillable(
    chains: Chains, request: DrillRequest, store: Store | None
) -> tuple[CollectionRecord, Sequence[Shard]]:
    """The record, and the chains with a backup. Raises `UsageError` for a call that cannot be."""
    _DRILL_DEPTH.check("depth", request.depth)
    require_comparison(request.depth, given=store is not None)
    record = chains.read()
    shards = chains.filled(record)
    if record is None or not shards:
        raise no_backup(chains.where)
    if store is not None and store.store_id != record.source:
        raise UsageError(
            f"{chains.where} holds the backups of store {record.source}, not {store.store_id}",
            "pass the store that is backed up there",
        )
    return record, shards


def _record(chains: Chains, outcome: Drill) -> bool:
    """Record an outcome; returns False where the storage refuses writes."""
    try:
        chains.note_drill(outcome)
    except AccessDeniedError:
        return False
    return True


def _instant(
    shards: Sequence[Shard], request: DrillRequest, store: Store | None
) -> tuple[Shard, int]:
    """The instant to be restored, and the newest chain that covers it.

    Raises `HistoryGoneError` where no chain covers the time, or the store to compare with has lost
    it, and `NotYetWrittenError`.
    """
    least = 0 if store is None else int(store.since)
    asked = request.at
    at = _random_instant(shards, least) if asked is None else instant_of(shards, asked)
    if at >= shards[-1].upper:
        raise NotYetWrittenError(as_of=Timestamp(at), upper=Timestamp(shards[-1].upper))
    covering = [shard for shard in shards if covers(shard, at)]
    if not covering and at >= least:
        raise gone(shards, at)
    if at < least:
        since = max(shards[-1].since, least)
        raise HistoryGoneError(as_of=Timestamp(at), since=Timestamp(since))
    return covering[-1], at


def _random_instant(shards: Sequence[Shard], least: int) -> int:
    """An instant at or above `least` that a random chain covers: a kept one, or one where rows lie.
    Of a store that is mostly idle, most other instants would prove the same."""
    chains = [found for shard in shards if (found := _provable(shard, least))]
    if not chains:
        return shards[-1].upper - 1
    ranges = _PICK.choice(_PICK.choice(chains))
    low, high, _ = _PICK.choices(ranges, [weight for *_, weight in ranges])[0]
    return _PICK.randrange(low, high)


def _provable(shard: Shard, least: int) -> list[list[_Range]]:
    """The kept instants of a chain, and the times of its rows: both as ranges with weights. The
    newest instant where there are neither."""
    low = max(shard.since, least)
    kept: list[_Range]
    kept = [(at, at + 1, 1) for at in shard.kept if at >= least and covers(shard, at)]
    rows = [
        (max(part.time_min, low), part.time_max + 1, part.rows)
        for batch in shard.state.batches
        for part in batch.parts
        if part.time_max >= low
    ]
    found = [ranges for ranges in (kept, rows) if ranges]
    return found or [[(at, at + 1, 1)] for at in (shard.upper - 1,) if at >= low]


def _proved(
    where: str,
    at: int,
    request: DrillRequest,
    restore: Callable[[Path, int], object],
    store: Store | None,
) -> tuple[int, int, int]:
    """Restore, open, verify and compare; returns the versions, the compared rows and the bytes."""
    with storage_errors(f"the scratch space {request.scratch or tempfile.gettempdir()}"):
        if request.scratch is not None:
            request.scratch.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="kvstore-drill-", dir=request.scratch))
    try:
        place = scratch / "restored"
        restore(place, at)
        with open_store(place, create=False) as restored:
            if restored.upper - 1 < at:
                problem = f"the store that was restored ends at {restored.upper}, before {at}"
                raise CorruptionError(where, problem, _REMEDY)
            found = restored.verify()
            if not found.ok:
                problem = f"restored as of {Timestamp(at)}, {found.problems[0]}"
                raise CorruptionError(where, problem, _REMEDY)
            compared = 0 if store is None else _compared(where, restored, store, at)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        return found.versions, compared, size
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


_REMEDY: Final = (
    "restore another instant to see which is whole, and begin anew with "
    "`kvstore backup run --full` (full=True)"
)


def _compared(where: str, restored: Store, store: Store, at: int) -> int:
    """Compare the state at the oldest time that both keep, and all changes after it."""
    low = max(int(restored.since), int(store.since))
    with store.snapshot(low), restored.snapshot(low):
        found, wanted = (
            (
                fingerprint(row_batches(each.replication.versions(since=low, upto=at))),
                fingerprint(
                    row_batches(each.replication.versions(since=0, upto=low, revisions="latest")),
                    at=low,
                ),
            )
            for each in (restored, store)
        )
    changes, state = (Compared(*pair) for pair in zip(found, wanted, strict=True))
    return require_equal(where, changes, state, since=low, upto=at)


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
