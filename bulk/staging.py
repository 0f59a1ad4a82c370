"""A staging directory: the parts of one import, and the manifest that lists them.

    part-<32 hex>.sst        one sorted part; any number of them, with different keys
    part-<32 hex>.sst.tmp    left by an attempt that did not finish; never read
    import.json              the manifest (`bulk.manifest`), written last and atomically

Invariants
1. Writing the manifest commits the import: parts that it does not name do not belong to it.
2. Two parts have no key in common. Their spans may cross.
3. A file is unchanged if its size, modification time and inode are as in the manifest. `git` and
   `rsync` have the same rule. Otherwise, as after a copy, its digest decides. So an import that was
   built in place is added without being read. RocksDB's block checksums find damage beneath the
   file system when a block is read.
4. Only regular files are read. A name may be a symbolic link to one. A FIFO or a device is refused,
   because reading it could hang or never end.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from bulk.contents import require_disjoint
from bulk.definitions import EncodedBy
from bulk.manifest import (
    Manifest,
    parse_manifest,
    shared_bound,
)
from bulk.part import Part
from bulk.sst import fsync_and_digest
from kvstore.arguments import is_there
from kvstore.errors import (
    CorruptionError,
    ImportRefusedError,
    KeyOrderError,
    UsageError,
)
from kvstore.errors.system import storage_error, storage_errors
from kvstore.journal import OS_FILES
from kvstore.limits import JSON_BYTES_MAX

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
