"""Restoring: the parts of a collection become a store, in pieces and in bounded memory."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from kvstore import bulk
from kvstore.backup.chains import (
    Chains,
    no_backup,
)
from kvstore.backup.expiries import RECORDS, Rows, records_of
from kvstore.backup.place import CollectionPlace, PlaceAddress
from kvstore.backup.rows import points_of, range_rows, tables_in
from kvstore.backup.shard import Blob, Shard, Split, Storage
from kvstore.backup.shard.rows.part_reader import touches
from kvstore.backup.shard.rows.rules import AsOf, View, Window
from kvstore.backup.shard.shard_snapshot import ShardSnapshot
from kvstore.backup.workers import TellRows, shared
from kvstore.base.arguments import integer
from kvstore.base.meters import OnProgress, Tally
from kvstore.base.span import RESERVED, Span
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.ingest import staging_beside
from kvstore.bulk.part import SstFile, Written, fsync_and_digest
from kvstore.bulk.seed import appearing
from kvstore.bulk.staging import check_definitions
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import (
    CorruptionError,
    HistoryGoneError,
    UsageError,
    storage_errors,
)
from kvstore.feeds.replica import FirstCopy
from kvstore.limits import (
    RESTORE_FILE_BYTES,
    RESTORE_PIECE_BYTES,
    RESTORE_PIECES_MAX,
    RESTORE_RECORD_BYTES_MAX,
    WORKERS_MAX,
)
from kvstore.mvcc import RangeTombstone
from kvstore.opening import StoreBuilder, building
from kvstore.storage.os_files import OS_FILES
from kvstore.store import Store
from kvstore.timeline.reserved import FIRST_ROW


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


def restore_into_store(
    store: Store, snapshot: ShardSnapshot, span: Span, tally: Tally, *, expiring: Rows | None
) -> Timestamp:
    """Add the live rows of a snapshot to a store as one import; returns its stamp.

    `expiring` reads them if the snapshot has keys that expire. Rows of tables are added to tables
    with the same definitions. Raises `ImportRefusedError` where the store has others, before any
    row is read.
    """
    tables = tables_in(snapshot, span)
    check_definitions(store, tables, "the backup")
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
    if span.intersect(RECORDS.start, RECORDS.end) is not None:
        return
    place = directory / "expiries"
    place.mkdir()
    yield from built_from(tally.over(records_of(snapshot, view, span)), place)
