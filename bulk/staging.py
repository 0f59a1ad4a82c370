"""A staging directory: the parts of one import, and the manifest that lists them.

    part-<32 hex>.sst        one sorted part; any number of them, with different keys
    part-<32 hex>.sst.tmp    left by an attempt that did not finish; never read
    import.json              the manifest, written last and atomically

`bulk.manifest` has the form of the manifest, and `bulk.bucket` the same place in an object store.

Invariants
1. Writing the manifest commits the import: parts that it does not name do not belong to it.
2. Two parts have no key in common. Their spans may cross.
3. A file is unchanged if its size, modification time and inode are as in the manifest. `git` and
   `rsync` have the same rule. Otherwise, as after a copy, its digest decides. So an import that
   was built in place is added without being read. RocksDB's block checksums find damage beneath
   the file system when a block is read.
4. Only regular files are read. A name may be a symbolic link to one. A FIFO or a device is
   refused, because reading it could hang or never end.
"""

from __future__ import annotations

import errno
import heapq
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from kvstore.base.arguments import AGE
from kvstore.base.clock import Clock
from kvstore.base.paths import is_there, require_path
from kvstore.base.timestamp import NS_PER_SECOND, AgeLike
from kvstore.bulk.bucket import BEGUN_NAME, Bucket, BucketUrl
from kvstore.bulk.manifest import (
    MANIFEST_NAME,
    STAGE_AGAIN,
    EncodedBy,
    Manifest,
    manifest_of,
    parse_manifest,
    refused_as_damaged,
)
from kvstore.bulk.part import Part, fsync_and_digest
from kvstore.codec.keys import (
    TAIL_BYTES,
    TOMBSTONE,
    VALUE,
    check_data_key,
    encode_reference,
    frame,
    unframe,
)
from kvstore.engine.loose_files import LooseFiles
from kvstore.engine.sorted_file import Figures, figures_of
from kvstore.errors import (
    CorruptionError,
    ImportRefusedError,
    KeyOrderError,
    UsageError,
    storage_error,
    storage_errors,
)
from kvstore.limits import (
    JSON_BYTES_MAX,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
)
from kvstore.mvcc.expiry_records import require_record
from kvstore.remote.control import client_of
from kvstore.storage.address import parse_address, require_options
from kvstore.storage.os_files import OS_FILES
from kvstore.storage.wrapped import BlobBelow
from kvstore.store import Store


def check_definitions(
    store: Store, tables: Iterable[EncodedBy], where: str
) -> list[Callable[[], None]]:
    """Check that each of `tables` has that very definition in the store; returns checks for the
    commit, each of which looks again.

    Raises `ImportRefusedError` for another definition, and `UsageError` for a table that takes no
    import.
    """
    checks = []
    for made in tables:
        remedy = "build it again from the rows; a backup: restore it into a new store"
        try:
            table = (client_of(store) or store).table(made.table)  # the newest definition
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


def require_metadata(part: Part, path: str, import_id: int) -> None:
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
    for keys, values in LooseFiles([path]).rows():
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
    """Whether no key is in two parts. A pass gives equal entries once, and shows a put and a delete
    of one key as neighbours."""
    stems = chain([b""], _stems(directory, group))
    return sum(one != two for one, two in pairwise(stems)) == sum(part.rows for part in group)


def _stems(directory: Path, parts: Sequence[Part]) -> Iterator[bytes]:
    """The entries of parts without their kinds, ascending."""
    for entries, _ in LooseFiles([directory / part.name for part in parts]).rows():
        yield from (entry[:-1] for entry in entries)


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
    others = _stems(directory, group[: shared - 1])
    for one, two in pairwise(heapq.merge(others, _stems(directory, [late]))):
        if one == two:
            key = unframe(one[: 1 - TAIL_BYTES])
            return KeyOrderError(where, previous=key, key=key)
    raise CorruptionError(where, "their rows are not as many as their writers counted")


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
        raise UsageError(f"{staging} cannot be sealed: {error.problem}", STAGE_AGAIN) from error
    require_disjoint(staging, manifest.parts)
    write_atomically(staging / MANIFEST_NAME, manifest.to_json().encode())
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
    with refused_as_damaged(staging):
        with open_staged(staging, path) as file, storage_errors(str(path)):
            told = os.fstat(file.fileno()).st_size  # a read takes the room that it asks for
            content = file.read(min(told, JSON_BYTES_MAX) + 1)
        return parse_manifest(content, where=str(path))


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
        raise ImportRefusedError(str(staging), f"{path.name} is missing", STAGE_AGAIN) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise storage_error(str(path), error) from error
    raise ImportRefusedError(
        str(staging), f"{path.name} does not lead to a regular file", STAGE_AGAIN
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
        raise ImportRefusedError(str(staging), problem, STAGE_AGAIN)
    as_sealed = (found.st_mtime_ns, found.st_ino) == (part.mtime_ns, part.inode)
    if as_sealed and not thorough:
        return
    with storage_errors(str(staging / part.name)):
        digest = fsync_and_digest(file)
    if digest != part.digest:
        raise ImportRefusedError(
            str(staging), f"{part.name} was altered, or belongs to another import", STAGE_AGAIN
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
# Staging places as a whole: the manifest of one, and the expiry of old ones below a URL.


class ExpiredStaging(NamedTuple):
    """A staging that was removed: its path below the URL, and its bytes."""

    path: str
    size_bytes: int


def staged_manifest(staging: Staging, options: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a sealed import, in a directory or at a URL. Raises `ImportRefusedError`."""
    place = staging_place(staging, options)
    return read_manifest(place) if isinstance(place, Path) else place.open().manifest()


def remove_staging(place: Path | BucketUrl) -> None:
    """Remove a staging place whose import was added, or given up."""
    if isinstance(place, Path):
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.open().remove()


def expire_stagings(
    url: str,
    *,
    older_than: AgeLike,
    options: Mapping[str, Any] | None = None,
    patience: float | None = None,
) -> list[ExpiredStaging]:
    """Remove all imports below `url` whose building began `older_than` ago or earlier.

    A sealed import goes as well: a store that has added it does not need it, and any other store
    can no longer add it. Objects that no import has put there stay. Costs one list, one get for
    each import, and one delete for each object.
    """
    age = AGE.check("older_than", older_than)
    place = staging_place(url, options, patience)
    if not isinstance(place, BucketUrl):
        raise UsageError(f"{url} is no URL", "pass the URL above the stagings")
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
