"""A staging directory: the parts of one import, and the manifest that makes them one.

    part-<32 hex>.sst        one sorted part; several, disjoint
    part-<32 hex>.sst.tmp    left by an attempt that did not finish; never read
    import.json              the manifest, written last and atomically

    import.json := {"format": 2, "import_id": 16 hex, "rows": n, "bytes": n,
                    "parts": [{"name", "smallest" hex, "largest" hex, "rows", "bytes",
                               "digest", "mtime_ns", "inode"}],
                    "checksum": SHA-256 of the rest as sorted, compact JSON}

In format 1, which is read as well, a part's digest is named `sha256`.

Invariants
1. The manifest is the commit of building: parts it does not name do not exist.
2. Parts are listed by key and share none.
3. A file is as it was sealed if its size, modification time and inode are (what `git` and `rsync`
   go by); where one differs, as after a copy, its digest decides. So adding an import that was
   built in place does not read it. Damage beneath the file system is found by RocksDB's block
   checksums when a block is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bulk.part import Part
from bulk.sst import fsync_and_digest
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import (
    FormatVersionError,
    ImportRefusedError,
    KeyOrderError,
    StorageError,
    UsageError,
)
from kvstore.journal import OS_FILES
from kvstore.journal.files import storage_errors

MANIFEST_NAME: Final = "import.json"
MANIFEST_FORMAT: Final = 2
_DIGEST_NAMES: Final = {1: "sha256", MANIFEST_FORMAT: "digest"}
"""By the formats that are read: what a part's digest is called."""
_STAGE_AGAIN = "stage the import again"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was sealed: the import's id and its parts, by key."""

    import_id: int
    parts: tuple[Part, ...]
    format: int = MANIFEST_FORMAT

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def checksum(self) -> str:
        """SHA-256 of the contents: the identity of what was sealed under the import's id."""
        return _checksum(self._fields())

    def to_json(self) -> str:
        """The manifest's file."""
        return json.dumps({**self._fields(), "checksum": self.checksum}, indent=1, sort_keys=True)

    def _fields(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "import_id": f"{self.import_id:016x}",
            "rows": self.rows,
            "bytes": self.size_bytes,
            "parts": [_part_fields(part, _DIGEST_NAMES[self.format]) for part in self.parts],
        }


def seal(staging: Path, import_id: int, parts: Sequence[Part]) -> Manifest:
    """Write the manifest of `parts`. Raises `KeyOrderError` if two share keys."""
    ordered = sorted(parts, key=lambda part: part.smallest)
    for before, after in pairwise(ordered):
        if after.smallest <= before.largest:
            raise KeyOrderError(
                f"parts {before.name} and {after.name} of {staging}",
                previous=before.largest,
                key=after.smallest,
            )
    for part in ordered:
        if not (staging / part.name).is_file():
            raise UsageError(f"{staging / part.name} is gone", _STAGE_AGAIN)
    manifest = Manifest(import_id, tuple(ordered))
    write_atomically(staging / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def read_manifest(staging: Path) -> Manifest:
    """Read and check the manifest. Raises `ImportRefusedError` if it is missing or altered,
    `FormatVersionError` if a newer release wrote it."""
    path = staging / MANIFEST_NAME
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ImportRefusedError(
            str(staging), "no manifest: it was not sealed", "seal it"
        ) from None
    except NotADirectoryError:
        raise ImportRefusedError(
            str(staging), "not a directory", "pass the staging directory"
        ) from None
    except OSError as error:
        raise StorageError(f"reading {path} failed: {error}", "look at the disk") from error
    except ValueError as error:
        raise ImportRefusedError(
            str(staging), f"unreadable manifest: {error}", _STAGE_AGAIN
        ) from error
    found = fields.get("format") if isinstance(fields, dict) else None
    if found not in _DIGEST_NAMES:
        raise FormatVersionError(str(path), found=found, supported=tuple(_DIGEST_NAMES))
    if fields.pop("checksum", None) != _checksum(fields):
        raise ImportRefusedError(str(staging), "the manifest was altered", _STAGE_AGAIN)
    import_id = int(fields["import_id"], 16)
    assert 0 < import_id <= IMPORT_ID_MAX, "the checksum covers what seal() wrote"
    parts = tuple(_part(part, _DIGEST_NAMES[found]) for part in fields["parts"])
    return Manifest(import_id, parts, found)


def discard(staging: Path) -> None:
    """Remove a staging directory that is given up, though tasks may be at work in it still.

    It goes by a rename first: what they write then has no place, where a file made during the
    removal would leave half a directory, and the next to stage there would be refused.
    """
    gone = staging.absolute()
    try:
        gone = gone.rename(gone.with_name(f".{gone.name}.gone-{secrets.token_hex(4)}"))
    except OSError:  # its parent is not ours to write in: remove what can be
        gone = staging
    shutil.rmtree(gone, ignore_errors=True)


def require_unaltered(staging: Path, path: Path, part: Part, *, thorough: bool = False) -> None:
    """Raise `ImportRefusedError` unless `path` is the file that was sealed as `part`."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise ImportRefusedError(str(staging), f"{part.name} is missing", _STAGE_AGAIN) from None
    if found.st_size != part.size_bytes:
        problem = f"{part.name} has {found.st_size} bytes, {part.size_bytes} were sealed"
        raise ImportRefusedError(str(staging), problem, _STAGE_AGAIN)
    as_sealed = (found.st_mtime_ns, found.st_ino) == (part.mtime_ns, part.inode)
    if as_sealed and not thorough:
        return
    if fsync_and_digest(path, like=part.digest) != part.digest:
        raise ImportRefusedError(
            str(staging), f"{part.name} was altered, or belongs to another import", _STAGE_AGAIN
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path` whole, durably: readers see the old content or the new.

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


def _checksum(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _part_fields(part: Part, digest_name: str) -> dict[str, Any]:
    return {
        "name": part.name,
        "smallest": part.smallest.hex(),
        "largest": part.largest.hex(),
        "rows": part.rows,
        "bytes": part.size_bytes,
        digest_name: part.digest,
        "mtime_ns": part.mtime_ns,
        "inode": part.inode,
    }


def _part(fields: dict[str, Any], digest_name: str) -> Part:
    return Part(
        name=fields["name"],
        smallest=bytes.fromhex(fields["smallest"]),
        largest=bytes.fromhex(fields["largest"]),
        rows=fields["rows"],
        size_bytes=fields["bytes"],
        digest=fields[digest_name],
        mtime_ns=fields["mtime_ns"],
        inode=fields["inode"],
    )
