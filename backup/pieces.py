"""A restore in pieces, by several processes, and continued after a kill.

    <scratch>/plan.json            the rows to restore, and the spans of the pieces
    <scratch>/<piece>-<token>/     the sorted files of a piece
    <scratch>/<piece>.json         the record of a whole piece: its files, their digests, its rows
    <scratch>/fetched/             the bytes of parts, for the next attempt (`resume=True`)
    <scratch>/store/               the store that is put together

`bulk.places` makes the scratch directory, locks it, and moves the store to its place.

Invariants
1. A record is written after its files are on disk. A piece without a sound record is built again.
2. The files of a piece are linked into the store, which each attempt puts together anew. So a kill
   loses no piece, until the store is at its place.
3. Compaction and expiry may come between two attempts: rows at and above `since` stay the same. The
   store is readable from the newest `since` that one of its pieces was built at.
4. A plan is continued only by a restore of the same rows.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from backup.place import PlaceAddress
from backup.restore import built_from
from backup.shard import Blob, ShardSnapshot, Split, Tally, View
from backup.sharing import TellRows, shared
from bulk.sst import fsync_and_digest
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import CorruptionError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.journal import OS_FILES
from kvstore.limits import RESTORE_PIECE_BYTES, RESTORE_PIECES_MAX, RESTORE_RECORD_BYTES_MAX
from kvstore.mvcc import RangeTombstone
from kvstore.opening import StoreBuilder
from kvstore.span import Span

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
            Split(snapshot.rule, snapshot.as_of, span, snapshot.batches),
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
