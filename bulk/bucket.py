"""A staging place in an object store: the objects of one import below one URL.

    begun.json           the import id, and when its building began; put first, by one job only
    part-<32 hex>.sst    one sorted part; any number of them
    import.json          the manifest (`bulk.manifest`), put last; it seals the import

Invariants
1. Each object is put under a name that only one attempt has, or by a put that only one job can
   make. So two jobs cannot mix their parts, and a repeated put changes nothing.
2. An object that the manifest does not name does not belong to the import.
3. Nothing that a bucket holds is trusted: each object is bounded in size before it is read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bulk.manifest import Manifest, parse_manifest
from bulk.part import PART_NAME, Part
from kvstore.codec.json import read_object
from kvstore.errors import CorruptionError, ImportRefusedError, UsageError
from kvstore.limits import JSON_BYTES_MAX
from kvstore.storage.address import open_blob, parse_address, public_address
from kvstore.storage.contract import Blob, put_file, put_first
from kvstore.storage.patience import Patience

MANIFEST_NAME: Final = "import.json"
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
