"""The place between builders and stores: the parts of one import and the manifest that seals them,
in a directory or a bucket.

The manifest is written last, and is the commit of the build: files that it does not name are never
added. A staging in a bucket is sent part by part while later ones are built, and fetched by the
store that takes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from kvstore.base.arguments import AGE, is_there, require_path
from kvstore.base.clock import Clock
from kvstore.base.digest import RunningDigest
from kvstore.base.meters import WorkCount
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.bulk.part import PART_NAME, UNFINISHED_SUFFIX, Part, fsync_and_digest
from kvstore.codec.json import JsonObject, read_object
from kvstore.codec.keys import (
    IMPORT_ID_MAX,
    TAIL_BYTES,
    TOMBSTONE,
    VALUE,
    check_data_key,
    encode_reference,
    frame,
    unframe,
)
from kvstore.engine.sorted_file import Figures, LooseFiles, figures_of
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    FormatVersionError,
    ImportRefusedError,
    KeyOrderError,
    NoBucketError,
    OutOfSpaceError,
    UsageError,
    storage_error,
    storage_errors,
)
from kvstore.limits import (
    CROSSING_PARTS_MAX,
    FETCH_SPARE_BYTES,
    JSON_BYTES_MAX,
    KEY_BYTES_MAX,
    OBJECT_PIECE_BYTES,
    OBJECT_PIECES_AT_ONCE,
    UPLOADS_AT_ONCE,
    VALUE_BYTES_MAX,
)
from kvstore.mvcc.expiry_records import require_record
from kvstore.storage.address import open_blob, parse_address, public_address, require_options
from kvstore.storage.contract import Blob, put_file, put_first
from kvstore.storage.journal import OS_FILES
from kvstore.storage.patience import Patience
from kvstore.storage.wrapped import BlobBelow
from kvstore.store import Store
from kvstore.tables import TableCodec
from kvstore.tables.definition import Definition
from kvstore.timeline.imports import INGEST_DIRECTORY

# --------------------------------------------------------------------------------------------------
# The definitions of tables by which the rows of an import were encoded.
#
# Invariants
# 1. A row is added only while the definition that encoded it is the newest one of its table. So
#    each added row has an entry in every index, and a layout that the table knows.


class EncodedBy(NamedTuple):
    """The definition of a table that encoded rows: its revision, and the SHA-256 of its bytes."""

    table: str
    revision: int
    digest: str

    @classmethod
    def of(cls, codec: TableCodec) -> EncodedBy:
        """The definition of a codec."""
        return cls.of_stored(codec.definition.name, codec.stored)

    @classmethod
    def of_stored(cls, name: str, stored: bytes) -> EncodedBy:
        """The definition of a table in its stored form."""
        revision = Definition.from_bytes(name, stored).revision
        return cls(name, revision, hashlib.sha256(stored).hexdigest())


def require_definitions(
    store: Store, tables: Iterable[EncodedBy], where: str
) -> list[Callable[[], None]]:
    """Raise `ImportRefusedError` unless each of `tables` has that very definition in the store.

    Returns checks for the commit, each of which looks again. Raises `UsageError` for a table that
    takes no import.
    """
    checks = []
    for made in tables:
        remedy = "build it again from the rows; a backup: restore it into a new store"
        try:
            table = store.table(made.table)
        except UsageError as error:
            problem = f"it has rows of a table: {error.what}"
            raise ImportRefusedError(where, problem, remedy) from error
        target = table.import_target()
        found = EncodedBy.of(target.codec)
        if found != made:
            differs = f"at revision {found.revision}, and its rows were made at {made.revision}"
            if found.revision == made.revision:
                differs = "not the table of its rows: it has other columns or indexes"
            raise ImportRefusedError(where, f"table {made.table!r} is {differs}", remedy)
        checks.append(target.check)
    return checks


# --------------------------------------------------------------------------------------------------
# Checks that staged files have the rows that the manifest names.
#
#     metadata  bounds, number of rows, import id at both ends, no deletes of any kind. A file tells
#               them without a pass: 0.1 to 0.3 ms. Always checked.
#     rows      each row: its form, its import id, ascending keys. A pass, 0.7 us a row.
#     crossing  parts whose spans cross share no key. A pass over these parts, 0.3 us a row.
#
# Adding an import reads rows only if it is asked to be thorough. Only then does it refuse a
# forged file that has rows of another import between two rows of its own. `Store.verify` finds
# such rows too.


def require_told(part: Part, path: str, import_id: int) -> None:
    """Raise `CorruptionError` unless the metadata of a file fits its part."""
    problem = _untrue(part, figures_of(path), encode_reference(import_id))
    if problem is not None:
        raise CorruptionError(part.name, problem)


@contextmanager
def damage_of(part: Part) -> Iterator[None]:
    """Have a `CorruptionError` of the block name the part, and not the path by which it is read."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(part.name, error.problem) from error


def require_rows(part: Part, path: str, import_id: int) -> None:
    """Raise `CorruptionError` unless each row of a part belongs to the import. Reads all rows."""
    reference = encode_reference(import_id)
    previous, rows = b"", 0
    with LooseFiles([path]) as loose:
        for keys, values in loose.rows():
            for key, value in zip(keys, values, strict=True):
                check_data_key(key)
                stem = key[:-TAIL_BYTES]
                if key[-TAIL_BYTES:-1] != reference:
                    raise CorruptionError(part.name, f"a row of {key[-TAIL_BYTES:-1].hex()}")
                if stem <= previous:
                    raise CorruptionError(part.name, f"key {unframe(stem)[:64]!r} comes twice")
                if len(unframe(stem)) > KEY_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
                    raise CorruptionError(part.name, "a key or value that no store takes")
                if value and key[-1:] == TOMBSTONE:
                    raise CorruptionError(part.name, "a tombstone with a value")
                require_record(unframe(stem), value)
                previous = stem
            rows += len(keys)
    if rows != part.rows:
        raise CorruptionError(part.name, f"{rows} rows, not {part.rows}")


def require_disjoint(directory: Path, parts: Sequence[Part]) -> None:
    """Raise `KeyOrderError` if two of `parts`, which ascend by key, have a key in common.

    Reads only the parts whose spans cross.
    """
    for group in crossing(parts):
        if not _differ(directory, group):
            raise _shared(directory, group)


def depth(parts: Sequence[Part]) -> int:
    """The largest number of parts whose spans contain one common key."""
    ends = [(part.smallest, False) for part in parts] + [(part.largest, True) for part in parts]
    return max(accumulate(-1 if is_end else 1 for _, is_end in sorted(ends)), default=0)


def _untrue(part: Part, file: Figures, reference: bytes) -> str | None:
    """The first difference between the manifest and the file, None if they agree."""
    for end, key, found in (
        ("first", part.smallest, file.first),
        ("last", part.largest, file.last),
    ):
        if found[-1:] not in (TOMBSTONE, VALUE):
            return f"its {end} entry is no row: {found[-64:].hex()}"
        if found[-TAIL_BYTES:-1] != reference:
            return f"its {end} row is of another import: {found[-TAIL_BYTES:-1].hex()}"
        if found[:-TAIL_BYTES] != frame(key):
            return f"its {end} key is not the one that was sealed"
    if file.entries != part.rows:
        return f"it has {file.entries} rows, {part.rows} were sealed"
    return None


def crossing(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Groups of two or more parts. A part crosses another part of its group, and none outside
    it."""
    group: list[Part] = []
    end = b""
    for part in parts:
        if group and part.smallest > end:
            if len(group) > 1:
                yield group
            group = []
        end = max(end, part.largest) if group else part.largest
        group.append(part)
    if len(group) > 1:
        yield group


def _differ(directory: Path, group: Sequence[Part]) -> bool:
    """Whether no key is in two parts. RocksDB merges equal entries into one, and shows a put and a
    delete of one key as neighbours."""
    keys, previous = 0, b""
    with LooseFiles([directory / part.name for part in group]) as loose:
        for entries, _ in loose.rows():
            stems = [previous, *(entry[:-1] for entry in entries)]
            keys += sum(map(bytes.__ne__, stems, stems[1:]))
            previous = stems[-1]
    return keys == sum(part.rows for part in group)


def _shared(directory: Path, group: Sequence[Part]) -> KeyOrderError:
    """The error, with a key that two parts of the group share. Costs a few passes over them."""
    distinct, shared = 1, len(group)
    while shared - distinct > 1:  # `distinct` parts share no key, `shared` parts do
        middle = (distinct + shared) // 2
        if _differ(directory, group[:middle]):
            distinct = middle
        else:
            shared = middle
    late = group[shared - 1]
    where = f"part {late.name} and others of {directory}"
    others = [directory / part.name for part in group[: shared - 1]]
    with LooseFiles(others) as before, LooseFiles([directory / late.name]) as loose:
        for entries, _ in loose.rows():
            for entry in entries:
                if any(before.get(entry[:-1] + kind) is not None for kind in (TOMBSTONE, VALUE)):
                    key = unframe(entry[:-TAIL_BYTES])
                    return KeyOrderError(where, previous=key, key=key)
    raise CorruptionError(where, "their rows are not as many as their writers counted")


# --------------------------------------------------------------------------------------------------
# The seconds that each stage of a load takes: where did the time go?
#
#     compute sort write upload    building an import
#     fetch check compare add      adding it to a store; only pushes with a mode compare

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class StageTimes:
    """Seconds by stage. A stage that is entered again adds to its seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds of the block for the stage `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were counted elsewhere, such as in a task."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """The seconds of each stage so far."""
        return MappingProxyType(self._seconds)


def timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """The result of `work`, and its seconds."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


class TimedItems(Generic[_Item]):
    """The items of an iterable. `seconds` counts how long they were waited for."""

    def __init__(self, items: Iterable[_Item]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> Iterator[_Item]:
        began = time.perf_counter()
        for item in self._items:
            self.seconds += time.perf_counter() - began
            yield item
            began = time.perf_counter()
        self.seconds += time.perf_counter() - began


# --------------------------------------------------------------------------------------------------
# How far the reading of files is, by their bytes.


class Counted(Protocol):
    """Anything that has rows."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        ...


Rows = TypeVar("Rows", bound=Counted)


class Reading:
    """The share of some files that has been read. It is an estimate: text is read ahead, and rows
    of a Parquet file are taken to have the same length."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._sizes = {path: path.stat().st_size for path in paths if path.is_file()}
        self._shares: dict[Path, Callable[[], float]] = {}

    def follow(self, path: Path, share: Callable[[], float]) -> None:
        """Have `share` tell how much of a file has been read, from now on."""
        self._shares[path] = share

    def share_of(self, path: Path) -> float:
        """How much of the bytes of one file has been read, from 0 to 1."""
        return min(self._shares[path](), 1.0) if path in self._shares else 0.0

    @property
    def share(self) -> float:
        """How much of the bytes of all files has been read, from 0 to 1."""
        whole = sum(self._sizes.values())
        read = sum(size * self.share_of(path) for path, size in self._sizes.items())
        return read / whole if whole else 0.0

    def over(self, batches: Iterable[Rows], show: Callable[[int], None]) -> Iterator[Rows]:
        """Yield batches of rows of the files. `show` is called with the rows so far, and an
        estimate of all."""
        rows = 0
        for batch in batches:
            yield batch
            rows += batch.num_rows
            show(WorkCount.at(rows, self.share))


# --------------------------------------------------------------------------------------------------
# The manifest of an import: the list of its sealed parts. Only this module reads it.
#
#     import.json := {"format": 1, "import_id": 16 hex, "rows": n, "bytes": n,
#                     "parts": [{"name", "smallest" hex, "largest" hex, "rows", "bytes",
#                                "digest", "mtime_ns", "inode"}],
#                     "tables": [{"table", "revision", "digest"}], "expiries": true | false,
#                     "checksum": SHA-256 of the rest as sorted, compact JSON}
#
# `tables` names the definitions that encoded rows of tables. `expiries` tells that some parts have
# the records of keys that expire (`kvstore.mvcc.expiry_records`).
#
# Invariants
# 1. Each name has the form that part writers give, so it cannot lead out of the directory.
# 2. Parts ascend by their smallest key. No key is a bound of two parts, so no part is listed twice.
# 3. Writing a manifest that was read gives the same bytes, so its checksum covers every field.
#
# The checksum has no key: it finds damage, and proves nothing about the author. So each field is
# checked as well. `require_told` checks that the files agree with the manifest.

MANIFEST_FORMAT: Final = 1
_DIGEST: Final = re.compile(r"blake3:[0-9a-f]{32}")
_DEFINITION_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_IMPORT_ID: Final = re.compile(r"[0-9a-f]{16}")
_INODE_MAX: Final = (1 << 64) - 1
_TIME_MIN: Final = -(1 << 63)
"""The lowest modification time: file systems have times before 1970."""


@dataclass(frozen=True)
class Manifest:
    """A sealed import: its id, and its parts by key."""

    import_id: int
    parts: tuple[Part, ...]
    tables: tuple[EncodedBy, ...] = ()
    has_expiries: bool = False
    """Whether some parts have the records of expiries."""

    @property
    def rows(self) -> int:
        """Rows of all parts, with the entries of indexes and the records of expiries."""
        return sum(part.rows for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(part.size_bytes for part in self.parts)

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the contents. It identifies the parts sealed under the import's id."""
        canonical = json.dumps(self._fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> str:
        """The bytes of the manifest's file."""
        return json.dumps({**self._fields(), "checksum": self.checksum}, indent=1, sort_keys=True)

    def _fields(self) -> dict[str, Any]:
        return {
            "format": MANIFEST_FORMAT,
            "import_id": f"{self.import_id:016x}",
            "rows": self.rows,
            "bytes": self.size_bytes,
            "parts": [_part_fields(part) for part in self.parts],
            "tables": [table._asdict() for table in self.tables],
            "expiries": self.has_expiries,
        }


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Decode the bytes of a manifest's file. Raises `CorruptionError` if a rule above is broken,
    `FormatVersionError` if a newer release wrote the file."""
    fields = read_object(data, where=where)
    found = fields.get("format")
    if type(found) is not int or found != MANIFEST_FORMAT:
        raise FormatVersionError(where, found=found, supported=(MANIFEST_FORMAT,))
    import_id = fields.text("import_id")
    if not _IMPORT_ID.fullmatch(import_id) or not 0 < int(import_id, 16) <= IMPORT_ID_MAX:
        raise fields.damaged(f"{import_id[:20]!r} is no import id")
    parts = tuple(map(_part, fields.objects("parts")))
    tables = tuple(map(_table, fields.objects("tables")))
    manifest = Manifest(int(import_id, 16), parts, tables, fields.field("expiries", bool))
    if fields.text("checksum") != manifest.checksum:
        raise fields.damaged("it is not as it was sealed: its checksum differs")
    if fields != {**manifest._fields(), "checksum": manifest.checksum}:
        raise fields.damaged("its sums differ from the sums of its parts, or a field is foreign")
    require_parts(parts, where=where)
    return manifest


def require_parts(parts: Sequence[Part], *, where: str) -> None:
    """Raise `CorruptionError` unless one manifest can list all these parts.

    Spans of parts may cross. Only a pass over the rows finds out whether parts share a key.
    """
    names = {part.name for part in parts}
    if len(names) < len(parts):
        raise CorruptionError(where, "a part is listed twice")
    if any(after.smallest < before.smallest for before, after in pairwise(parts)):
        raise CorruptionError(where, "parts are not listed by key")
    if shared_bound(parts) is not None:
        raise CorruptionError(where, "two parts have one key")
    if depth(parts) > CROSSING_PARTS_MAX:
        raise CorruptionError(where, f"more than {CROSSING_PARTS_MAX} parts cross each other")


def shared_bound(parts: Sequence[Part]) -> bytes | None:
    """A key that is a bound of two parts, None if there is none."""
    seen: set[bytes] = set()
    for part in parts:
        bounds = {part.smallest, part.largest}
        if shared := seen & bounds:
            return min(shared)
        seen |= bounds
    return None


def _table(fields: JsonObject) -> EncodedBy:
    table = EncodedBy(
        fields.text("table"), fields.integer("revision", least=1), fields.text("digest")
    )
    if not _DEFINITION_DIGEST.fullmatch(table.digest):
        raise fields.damaged(f"{table.digest[:80]!a} is no digest")
    return table


def _part(fields: JsonObject) -> Part:
    part = Part(
        name=fields.text("name"),
        smallest=fields.hexed("smallest"),
        largest=fields.hexed("largest"),
        rows=fields.integer("rows", least=1),
        size_bytes=fields.integer("bytes", least=1),
        digest=fields.text("digest"),
        mtime_ns=fields.integer("mtime_ns", least=_TIME_MIN),
        inode=fields.integer("inode", most=_INODE_MAX),
    )
    if not PART_NAME.fullmatch(part.name):
        raise fields.damaged(f"{part.name[:60]!a} is no name of a part")
    if max(len(part.smallest), len(part.largest)) > KEY_BYTES_MAX:
        raise fields.damaged(f"a key of more than {KEY_BYTES_MAX} bytes")
    if part.smallest > part.largest or (part.rows > 1) != (part.smallest < part.largest):
        raise fields.damaged(f"{part.rows} rows do not fit between its bounds")
    if not _DIGEST.fullmatch(part.digest):
        raise fields.damaged(f"{part.digest[:80]!a} is no digest")
    return part


def _part_fields(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "smallest": part.smallest.hex(),
        "largest": part.largest.hex(),
        "rows": part.rows,
        "bytes": part.size_bytes,
        "digest": part.digest,
        "mtime_ns": part.mtime_ns,
        "inode": part.inode,
    }


# --------------------------------------------------------------------------------------------------
# The staging places that callers name: a directory of a file system, or a URL of an object store.
#
#     path, file:///path       a directory
#     s3://  gs://  az://      objects below the URL
#     memory://name            objects in the memory of this process

Staging: TypeAlias = "str | os.PathLike[str] | BucketUrl"


def staging_place(
    given: Staging, options: Mapping[str, Any] | None = None, patience: float | None = None
) -> Path | BucketUrl:
    """The directory or the URL that `given` names. `options` and `patience` are for object stores.

    Raises `UsageError` for other texts, and for options of a directory.
    """
    if isinstance(given, BucketUrl):
        return given
    options = require_options(options)
    address = parse_address(given)
    if not address.is_file:
        return BucketUrl(address.url, options, patience)
    if options:
        raise UsageError(
            f"a directory takes no options, not {', '.join(sorted(options))}",
            "leave them out, or pass a URL",
        )
    return require_path(address.path, name="staging")


# --------------------------------------------------------------------------------------------------
# A staging directory: the parts of one import, and the manifest that lists them.
#
#     part-<32 hex>.sst        one sorted part; any number of them, with different keys
#     part-<32 hex>.sst.tmp    left by an attempt that did not finish; never read
#     import.json              the manifest, written last and atomically
#
# Invariants
# 1. Writing the manifest commits the import: parts that it does not name do not belong to it.
# 2. Two parts have no key in common. Their spans may cross.
# 3. A file is unchanged if its size, modification time and inode are as in the manifest. `git` and
#    `rsync` have the same rule. Otherwise, as after a copy, its digest decides. So an import that
#    was built in place is added without being read. RocksDB's block checksums find damage beneath
#    the file system when a block is read.
# 4. Only regular files are read. A name may be a symbolic link to one. A FIFO or a device is
#    refused, because reading it could hang or never end.

MANIFEST_NAME: Final = "import.json"
_STAGE_AGAIN = "stage the import again"


def seal(
    staging: Path, import_id: int, parts: Sequence[Part], tables: Sequence[EncodedBy] = ()
) -> Manifest:
    """Write the manifest of `parts`, whose rows of `tables` were encoded by these definitions.

    Raises `KeyOrderError` if two share keys, `UsageError` if a part is gone or the parts do not fit
    into one import.

    Reads the parts whose spans cross, at 0.3 us a row, to check that they share no key.
    """
    manifest = manifest_of(staging, import_id, parts, tables)
    try:
        for part in manifest.parts:
            open_staged(staging, staging / part.name).close()
    except ImportRefusedError as error:
        raise UsageError(f"{staging} cannot be sealed: {error.problem}", _STAGE_AGAIN) from error
    require_disjoint(staging, manifest.parts)
    write_atomically(staging / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def manifest_of(
    staging: object, import_id: int, parts: Sequence[Part], tables: Sequence[EncodedBy]
) -> Manifest:
    """The manifest of `parts`, which are not looked at. Raises as `seal`."""
    listed = [replace(part, expiries=()) for part in parts]
    listed += [expiry for part in parts for expiry in part.expiries]
    ordered = sorted(listed, key=lambda part: part.smallest)
    if (key := shared_bound(ordered)) is not None:
        raise KeyOrderError(f"parts of {staging}", previous=key, key=key)
    manifest = Manifest(import_id, tuple(ordered), tuple(tables), len(listed) > len(parts))
    try:
        parse_manifest(manifest.to_json().encode(), where=f"{staging}/{MANIFEST_NAME}")
    except CorruptionError as error:
        raise UsageError(f"{staging} cannot be sealed: {error.problem}", _STAGE_AGAIN) from error
    return manifest


def read_manifest(staging: Path) -> Manifest:
    """Read and check the manifest. Raises `ImportRefusedError` if it is missing or damaged,
    `FormatVersionError` if a newer release wrote it."""
    path = staging / MANIFEST_NAME
    try:
        os.lstat(path)
    except FileNotFoundError:
        if not is_there(staging):
            raise ImportRefusedError(str(staging), "nothing is there", "check the path") from None
        raise ImportRefusedError(
            str(staging),
            "no import was staged there, or it was not sealed",
            "check the path, or seal the import",
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise storage_error(str(path), error) from error
        raise ImportRefusedError(
            str(staging), "not a directory", "pass the staging directory"
        ) from None
    try:
        with open_staged(staging, path) as file, storage_errors(str(path)):
            told = os.fstat(file.fileno()).st_size  # a read takes the room that it asks for
            content = file.read(min(told, JSON_BYTES_MAX) + 1)
        return parse_manifest(content, where=str(path))
    except CorruptionError as error:
        raise ImportRefusedError(
            str(staging), f"{error.where}: {error.problem}", _STAGE_AGAIN
        ) from error


def discard(staging: Path) -> None:
    """Remove a staging directory that was given up, although tasks may still write to it.

    The directory is renamed first, so that later writes fail. A file made during the removal would
    leave half a directory, and the next import in that place would be refused.
    """
    gone = staging.absolute()
    try:
        gone = gone.rename(gone.with_name(f".{gone.name}.gone-{secrets.token_hex(4)}"))
    except OSError:  # its parent takes no writes: remove as much as possible
        gone = staging
    shutil.rmtree(gone, ignore_errors=True)


def open_staged(staging: Path, path: Path) -> BinaryIO:
    """Open a file of a staging directory for reading, through a symbolic link as well.

    Raises `ImportRefusedError` unless `path` leads to a regular file.
    """
    try:
        # Look first, because opening a device may have effects. Open without waiting: a FIFO that
        # came meanwhile would not open before somebody wrote into it.
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
        if is_regular:
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
    except FileNotFoundError:
        raise ImportRefusedError(str(staging), f"{path.name} is missing", _STAGE_AGAIN) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise storage_error(str(path), error) from error
    raise ImportRefusedError(
        str(staging), f"{path.name} does not lead to a regular file", _STAGE_AGAIN
    )


class Identity(NamedTuple):
    """The identity of a file and of the state of its bytes, as the file system knows them."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Identity:
        """The identity in a result of `stat`."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def opened_path(file: BinaryIO, path: Path) -> str:
    """A path that leads to the open file even if its name is given to another file, where the
    system has such a path; else `path`."""
    opened = f"/proc/self/fd/{file.fileno()}"
    return opened if os.path.exists(opened) else str(path)


def require_unaltered(staging: Path, file: BinaryIO, part: Part, *, thorough: bool = False) -> None:
    """Raise `ImportRefusedError` unless `file` is the file that was sealed as `part`."""
    found = os.fstat(file.fileno())
    if found.st_size != part.size_bytes:
        problem = f"{part.name} has {found.st_size} bytes, {part.size_bytes} were sealed"
        raise ImportRefusedError(str(staging), problem, _STAGE_AGAIN)
    as_sealed = (found.st_mtime_ns, found.st_ino) == (part.mtime_ns, part.inode)
    if as_sealed and not thorough:
        return
    with storage_errors(str(staging / part.name)):
        digest = fsync_and_digest(file)
    if digest != part.digest:
        raise ImportRefusedError(
            str(staging), f"{part.name} was altered, or belongs to another import", _STAGE_AGAIN
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path` durably. Readers see the old content or the new one.

    Raises `OutOfSpaceError` and `StorageError`.
    """
    unfinished = path.with_suffix(".tmp")
    with storage_errors(str(path)):
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        OS_FILES.sync_directory(str(path.parent))


# --------------------------------------------------------------------------------------------------
# A staging place in an object store: the objects of one import below one URL.
#
#     begun.json           the import id, and when its building began; put first, by one job only
#     part-<32 hex>.sst    one sorted part; any number of them
#     import.json          the manifest, put last; it seals the import
#
# Invariants
# 1. Each object is put under a name that only one attempt has, or by a put that only one job can
#    make. So two jobs cannot mix their parts, and a repeated put changes nothing.
# 2. An object that the manifest does not name does not belong to the import.
# 3. Nothing that a bucket holds is trusted: each object is bounded in size before it is read.

BEGUN_NAME: Final = "begun.json"
_BEGUN_FORMAT: Final = 1


@dataclass(frozen=True)
class BucketUrl:
    """The URL of a staging place, and how to reach it. Picklable: a driver sends it to its tasks.

    `options` go to the object store; without them it is reached as its own tools reach it.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    patience_s: float | None = None

    def open(self) -> Bucket:
        """Open the place. Nothing is read or written."""
        blob = open_blob(self.url, patience=Patience(self.patience_s), **self.options)
        return Bucket(blob, public_address(self.url))

    def below(self, path: str) -> BucketUrl:
        """The place of the objects below `path`, whose characters stand for themselves."""
        address = parse_address(self.url).below(path)
        return BucketUrl(address.url, self.options, self.patience_s)


class Bucket:
    """The objects of one import. `where` names the place in errors."""

    def __init__(self, blob: Blob, where: str) -> None:
        self.blob, self.where = blob, where

    def __str__(self) -> str:
        return self.where

    # -- building ---------------------------------------------------------------------------

    def begin(self, import_id: int, *, now_ns: int) -> None:
        """Take the place for one job. Raises `UsageError` if an import was begun there."""
        if next(iter(self.blob.patience.over(lambda: [*self.blob.list()])), None) is not None:
            raise self._in_use()
        fields = {
            "format": _BEGUN_FORMAT,
            "import_id": f"{import_id:016x}",
            "begun": now_ns,
            "job": secrets.token_hex(16),
        }
        if not put_first(self.blob, BEGUN_NAME, json.dumps(fields, sort_keys=True).encode()):
            raise self._in_use()

    def put_part(self, part: Part, path: Path) -> None:
        """Send a finished part, whose file lies at `path`. Memory is bounded."""
        put_file(self.blob, part.name, path)

    def seal(self, manifest: Manifest) -> None:
        """Put the manifest. Raises `UsageError` if another one was put before."""
        sizes = self._sizes()
        for part in manifest.parts:
            if sizes.get(part.name) != part.size_bytes:
                problem = "is missing" if part.name not in sizes else "is not whole"
                raise UsageError(f"{self} cannot be sealed: {part.name} {problem}", "stage again")
        if not put_first(self.blob, MANIFEST_NAME, manifest.to_json().encode()):
            raise UsageError(f"{self} is sealed", "begin another import")

    def is_sealed(self) -> bool:
        """Whether the manifest is there."""
        found = self.blob.patience.over(lambda: self.blob.size(MANIFEST_NAME))
        return found is not None

    # -- reading ----------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Read and check the manifest. Raises `ImportRefusedError` if it is missing or damaged,
        `FormatVersionError` if a newer release wrote it."""
        content = self._json(MANIFEST_NAME)
        if content is None:
            is_begun = self._json(BEGUN_NAME) is not None
            raise ImportRefusedError(
                self.where,
                "it was not sealed" if is_begun else "nothing is there",
                "seal it" if is_begun else "check the URL",
            )
        try:
            return parse_manifest(content, where=f"{self.where}/{MANIFEST_NAME}")
        except CorruptionError as error:
            problem = f"{error.where}: {error.problem}"
            raise ImportRefusedError(self.where, problem, "stage the import again") from error

    def require_parts(self, manifest: Manifest) -> None:
        """Raise `ImportRefusedError` unless each part is there in its size. Costs one list."""
        sizes = self._sizes()
        for part in manifest.parts:
            found = sizes.get(part.name)
            if found is None:
                raise self.refusal(f"{part.name} is missing")
            if found != part.size_bytes:
                raise self.refusal(f"{part.name} has {found} bytes, {part.size_bytes} were sealed")

    def piece(self, part: Part, start: int, length: int) -> bytes:
        """Some bytes of a part; retried after failures that may pass.

        Raises `ImportRefusedError` if the part is gone or shorter.
        """
        read = self.blob.get_range
        data = self.blob.patience.over(lambda: read(part.name, start=start, length=length))
        if data is None:
            raise self.refusal(f"{part.name} is missing")
        if len(data) != length:
            raise self.refusal(f"{part.name} ends at byte {start + len(data)}")
        return data

    def refusal(self, problem: str) -> ImportRefusedError:
        """The error for an import that is not as it was sealed."""
        return ImportRefusedError(self.where, problem, "stage the import again")

    # -- removing ---------------------------------------------------------------------------

    def begun_ns(self) -> int | None:
        """When the building of the import began; None where no such record is, or a foreign one."""
        content = self._json(BEGUN_NAME)
        if content is None:
            return None
        with suppress(CorruptionError):
            return read_object(content, where=f"{self.where}/{BEGUN_NAME}").integer("begun")
        return None

    def remove(self) -> int:
        """Remove the import: the manifest first, so that nobody adds half of it. Objects of other
        names stay. Returns the bytes that were removed."""
        over, size = self.blob.patience.over, 0
        names = [found.name for found in over(lambda: [*self.blob.list()])]
        parts = [name for name in names if PART_NAME.fullmatch(name)]
        for name in (MANIFEST_NAME, *parts, BEGUN_NAME):
            if name in names:
                size += over(lambda name=name: self.blob.delete(name)) or 0  # type: ignore[misc]
        return size

    def _json(self, name: str) -> bytes | None:
        read = self.blob.get_range
        return self.blob.patience.over(lambda: read(name, start=0, length=JSON_BYTES_MAX + 1))

    def _sizes(self) -> dict[str, int]:
        return dict(self.blob.patience.over(lambda: [*self.blob.list()]))

    def _in_use(self) -> UsageError:
        return UsageError(f"{self} is not empty", "stage each import in a place of its own")


# --------------------------------------------------------------------------------------------------
# Sending the parts of an import to an object store while later parts are built.
#
# Invariants
# 1. The local disk holds `UPLOADS_AT_ONCE` finished parts at most, and the part being written.
# 2. A failed upload is raised to the caller who adds the next part, or who waits for all.


def scratch_directory(parent: str | os.PathLike[str] | None = None) -> Path:
    """A new directory for the parts that are being built, on the disk of temporary files."""
    with storage_errors(str(parent or tempfile.gettempdir())):
        return Path(tempfile.mkdtemp(prefix="kvstore-parts-", dir=parent))


def send(bucket: Bucket, part: Part, scratch: Path) -> None:
    """Send a part and the records of its expiries, and remove their local files."""
    for each in (part, *part.expiries):
        bucket.put_part(each, scratch / each.name)
        with suppress(OSError):
            (scratch / each.name).unlink()


class Uploads:
    """Sends finished parts in threads of its own."""

    def __init__(self, bucket: Bucket, scratch: Path) -> None:
        self._bucket, self._scratch = bucket, scratch
        self._pool = ThreadPoolExecutor(UPLOADS_AT_ONCE, "kvstore-upload")
        self._under_way: set[Future[None]] = set()
        # A process that dies leaves the directory to the cleaning of temporary files.
        self._remove = weakref.finalize(self, _remove, scratch, os.getpid())

    def add(self, part: Part) -> None:
        """Send a part. Waits while `UPLOADS_AT_ONCE` parts are under way."""
        self._wait(UPLOADS_AT_ONCE - 1)
        self._under_way.add(self._pool.submit(send, self._bucket, part, self._scratch))

    def finish(self) -> None:
        """Wait until all parts are there."""
        self._wait(0)

    def close(self) -> None:
        """End the threads, and remove the local files. Repeatable."""
        self._pool.shutdown(cancel_futures=True)
        self._remove()

    def _wait(self, most: int) -> None:
        """Wait until at most `most` parts are under way. Raises the error of a failed one."""
        while len(self._under_way) > most:
            done, left = wait(self._under_way, return_when=FIRST_COMPLETED)
            self._under_way = left
            for each in done:
                each.result()


def _remove(scratch: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove the files of its parent
        shutil.rmtree(scratch, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# Fetching a staged import from an object store to the disk of the store that takes it.
#
#     part-<32 hex>.sst.tmp    a part that is being fetched: its first bytes
#     part-<32 hex>.sst        a part that was fetched whole, and whose digest was compared
#
# Pieces are fetched in parallel, a bounded number of them ahead, and written one after the other.
# So at any moment one part is unfinished. A fetch that was killed continues behind its last byte.
#
# Invariants
# 1. A part has its name only after its digest was compared and its bytes are on disk.
# 2. Memory holds at most `OBJECT_PIECES_AT_ONCE` pieces of `OBJECT_PIECE_BYTES`.
# 3. Nothing is fetched unless all parts are there and fit on the disk.
# 4. One process at a time fetches into a directory: it holds a lock on it.

_LOCK_NAME: Final = "lock"
_READ_BYTES: Final = 1 << 20


class Fetched(NamedTuple):
    """The progress of a fetch: bytes of the import on this disk, and the rate of the fetch."""

    bytes_done: int
    bytes_total: int
    bytes_per_second: float

    def __str__(self) -> str:
        done, total = self.bytes_done / 1e6, self.bytes_total / 1e6
        return f"fetch {done:.1f} of {total:.1f} MB at {self.bytes_per_second / 1e6:.1f} MB/s"


def fetch(
    bucket: Bucket, manifest: Manifest, directory: Path, tell: Callable[[Fetched], None]
) -> None:
    """Bring all parts of `manifest` into `directory`, which may have some of them already.

    `tell` is called before the first piece and after each; an exception from it ends the fetch,
    and a later call continues. Raises `ImportRefusedError` for a part that is missing or altered,
    `OutOfSpaceError` before anything is fetched, `LockedError` while another process fetches here.
    """
    bucket.require_parts(manifest)
    with storage_errors(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)  # the upkeep of the store removes directories that nobody has used
    with closing(OS_FILES.lock(str(directory / _LOCK_NAME))):
        Fetch(bucket, directory, tell).run(manifest)


class Fetch:
    """One fetch of an import."""

    def __init__(self, bucket: Bucket, directory: Path, tell: Callable[[Fetched], None]) -> None:
        self._bucket, self._directory, self._tell = bucket, directory, tell
        self._done = self._total = self._fetched = 0
        self._began = time.perf_counter()

    def run(self, manifest: Manifest) -> None:
        """Fetch the parts that are not whole."""
        self._total = manifest.size_bytes
        missing = []
        for part in manifest.parts:
            if self._size(part.name) == part.size_bytes:
                self._done += part.size_bytes
            else:
                missing.append(part)
        begun = [self._size(part.name + UNFINISHED_SUFFIX) or 0 for part in missing]
        self._done += sum(begun)
        require_space(self._directory, self._total - self._done)
        self._told()
        with ThreadPoolExecutor(OBJECT_PIECES_AT_ONCE, "kvstore-fetch") as pool:
            try:
                for part in missing:
                    if not self._take(part, pool):
                        # Bytes of an earlier fetch were damaged since: begin this part again.
                        self._take(part, pool, is_last=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, part: Part, pool: ThreadPoolExecutor, *, is_last: bool = False) -> bool:
        """Fetch the rest of a part. False if its first bytes, from an earlier fetch, were
        damaged; they are removed then."""
        unfinished = self._directory / (part.name + UNFINISHED_SUFFIX)
        digest = RunningDigest()
        with storage_errors(str(unfinished)):
            with unfinished.open("ab+") as file:
                file.seek(0)
                start = 0
                while data := file.read(_READ_BYTES):
                    digest.update(data)
                    start += len(data)
                is_resumed = start > 0
                for piece in self._pieces(part, start, pool):
                    file.write(piece)
                    digest.update(piece)
                    self._done += len(piece)
                    self._fetched += len(piece)
                    self._told()
                file.flush()
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
            if digest.text() != part.digest or size != part.size_bytes:
                unfinished.unlink()
                self._done -= size
                if is_last or not is_resumed:
                    raise self._bucket.refusal(
                        f"{part.name} was altered, or belongs to another import"
                    )
                return False
            os.replace(unfinished, self._directory / part.name)
        return True

    def _pieces(self, part: Part, start: int, pool: ThreadPoolExecutor) -> Iterator[bytes]:
        """The bytes of a part from `start` on. A bounded number of pieces is fetched ahead."""
        ahead: deque[Future[bytes]] = deque()
        at = start
        while at < part.size_bytes or ahead:
            while at < part.size_bytes and len(ahead) < OBJECT_PIECES_AT_ONCE:
                length = min(OBJECT_PIECE_BYTES, part.size_bytes - at)
                ahead.append(pool.submit(self._bucket.piece, part, at, length))
                at += length
            yield ahead.popleft().result()

    def _size(self, name: str) -> int | None:
        try:
            return (self._directory / name).stat().st_size
        except FileNotFoundError:
            return None

    def _told(self) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        self._tell(Fetched(self._done, self._total, self._fetched / seconds))


def require_space(directory: Path, needed: int) -> None:
    """Raise `OutOfSpaceError` unless `directory` has room for `needed` bytes and for the spare."""
    with storage_errors(str(directory)):
        free = shutil.disk_usage(directory).free
    if needed and needed + FETCH_SPARE_BYTES > free:
        raise OutOfSpaceError(str(directory), needed=needed + FETCH_SPARE_BYTES, free=free)


def fetched_path(store: Path, import_id: int) -> Path:
    """The directory, below the directory of a store, to which the files of an import come."""
    return store / INGEST_DIRECTORY / f"{import_id:016x}.fetched"


def remove_fetched(store: Store, import_ids: Iterable[int]) -> None:
    """Remove the files that came to the directory of a store for these imports. An import that a
    thread has, or that was begun and is neither added nor aborted, keeps its files. Costs a list of
    the directory."""
    if store.path is None:
        return
    place = store.path / INGEST_DIRECTORY
    with storage_errors(str(place)):
        present = {*os.listdir(place)} if place.is_dir() else set()
    for import_id in import_ids:
        fetched = fetched_path(store.path, import_id)
        left = [path for path in (fetched, fetched.with_suffix("")) if path.name in present]
        if not left:
            continue
        with store.imports.alone(import_id, wait=False) as is_ours:
            record = store.imports.get(import_id)
            if is_ours and (record is None or record.added is not None):
                for path in left:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def fetched_to(store: Path | None, manifest: Manifest, *, keeps: bool = False) -> Iterator[Path]:
    """The directory for the files of an import, in the directory of a store.

    It stays after a failure that may pass, so that nothing is fetched twice. With `keeps` it also
    stays after a refusal: the caller tries again, and removes it at last.
    """
    if store is None:
        path = Path(tempfile.mkdtemp(prefix="kvstore-fetched-"))
    else:
        path = fetched_path(store, manifest.import_id)
    try:
        yield path
    except BaseException as error:
        is_place = isinstance(error, AccessDeniedError | NoBucketError)
        is_refused = isinstance(error, UsageError) and not is_place
        if store is None or (is_refused and not keeps):
            shutil.rmtree(path, ignore_errors=True)  # the same files are refused again
        elif isinstance(error, ImportRefusedError | CorruptionError):
            _remove_damaged(path, manifest.parts)
        raise
    shutil.rmtree(path, ignore_errors=True)


def _remove_damaged(directory: Path, parts: Iterable[Part]) -> None:
    """Remove the parts that were damaged since they were fetched: the next fetch brings them
    again. Costs a read of all parts."""
    for part in parts:
        path, digest = directory / part.name, RunningDigest()
        with suppress(OSError), path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
            if digest.text() != part.digest:
                path.unlink()


def as_fetched(directory: Path, manifest: Manifest) -> Iterator[Part]:
    """The parts with the times and inodes of their files here, whose digests were compared."""
    for part in manifest.parts:
        with storage_errors(str(directory / part.name)):
            found = os.stat(directory / part.name)
        yield replace(part, mtime_ns=found.st_mtime_ns, inode=found.st_ino)


# --------------------------------------------------------------------------------------------------
# Staging places as a whole: the manifest of one, and the expiry of old ones below a URL.


class ExpiredStaging(NamedTuple):
    """A staging that was removed: its path below the URL, and its bytes."""

    path: str
    size_bytes: int


def staged_manifest(staging: Staging, options: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a sealed import, in a directory or at a URL. Raises `ImportRefusedError`."""
    place = staging_place(staging, options)
    return read_manifest(place) if isinstance(place, Path) else place.open().manifest()


def has_manifest(url: str) -> bool:
    """Whether a sealed import lies at `url`, in an object store or in memory. One request."""
    blob = open_blob(url)
    return blob.patience.over(lambda: blob.size(MANIFEST_NAME)) is not None


def expire_stagings(
    url: str,
    *,
    older_than: timedelta,
    options: Mapping[str, Any] | None = None,
    patience: float | None = None,
) -> list[ExpiredStaging]:
    """Remove all imports below `url` whose building began `older_than` ago or earlier.

    A sealed import goes as well: a store that has added it does not need it, and any other store
    can no longer add it. Objects that no import has put there stay. Costs one list, one get for
    each import, and one delete for each object.
    """
    age = AGE.or_none.check("older_than", older_than)
    place = staging_place(url, options, patience)
    if not isinstance(place, BucketUrl):
        raise UsageError(f"{url} is no URL", "pass the URL above the stagings")
    if age is None:
        raise UsageError("older_than=None is no age", "pass a timedelta")
    root = place.open()
    oldest = Clock().wall_ns() - int(age.total_seconds() * NS_PER_SECOND)
    removed = []
    names = [found.name for found in root.blob.patience.over(lambda: [*root.blob.list()])]
    for name in names:
        path, _, last = name.rpartition("/")
        if last != BEGUN_NAME:
            continue
        staging = Bucket(BlobBelow(root.blob, path), f"{root.where}/{path}")
        begun = staging.begun_ns()
        if begun is not None and begun <= oldest:
            removed.append(ExpiredStaging(path, staging.remove()))
    return removed
