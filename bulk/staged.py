"""`Import`: building a bulk load in a staging directory. Needs no store, and no contact to one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from bulk.manifest import Manifest
from bulk.part import Part, PartWriter
from bulk.staging import MANIFEST_NAME, seal
from kvstore.arguments import require_path
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import StorageError, UsageError
from kvstore.journal.files import storage_errors


class Import:
    """A bulk load being built. Its rows get their timestamp when `bulk.ingest` adds it.

    Write parts, each in ascending key order, with keys that no other part has; any number of
    them, one after the other or from several processes. Then seal.
    """

    def __init__(self, staging: Path, import_id: int) -> None:
        self.staging = staging
        self.import_id = import_id
        self._writers: list[PartWriter] = []
        self._parts: list[Part] = []

    @classmethod
    def create(cls, staging: str | os.PathLike[str], *, import_id: int | None = None) -> Import:
        """Begin an import in `staging`, which must be empty or not there.

        The id is random unless given; give one to make a whole job repeatable: an id that was
        added is not added again. Raises `UsageError` if the directory is in use.
        """
        path = require_path(staging, name="staging")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} is not empty", "stage each import in a directory of its own")
        if import_id is None:
            import_id = secrets.randbits(63) or 1
        if type(import_id) is not int or not 0 < import_id <= IMPORT_ID_MAX:
            raise UsageError(f"import id {import_id!r}", "ids are integers, 1 to 2**63 - 1")
        try:
            with storage_errors(str(path)):
                path.mkdir(parents=True, exist_ok=True)
        except StorageError as error:
            if isinstance(error.__cause__, NotADirectoryError):
                raise UsageError(f"{path} lies in a file", "choose another directory") from error
            raise
        return cls(path, import_id)

    def writer(self, *, compression: str = "lz4") -> PartWriter:
        """A writer of one more part; use it as a context manager, or call `finish`.

        Raises `UsageError` once the import is sealed.
        """
        self._require_unsealed()
        writer = _Collecting(self.staging, self.import_id, self._parts, compression)
        self._writers.append(writer)
        return writer

    def seal(self, parts: Sequence[Part] | None = None) -> Manifest:
        """Write the manifest: from now on the import can be added, and no longer be changed.

        `parts` are those that other processes wrote with `PartWriter`; by default those of
        this object's own writers. Raises `KeyOrderError` if two parts share a key,
        `UsageError` if it is sealed or a writer is still open.
        """
        self._require_unsealed()
        if any(not writer.is_closed for writer in self._writers):
            raise UsageError(f"a writer of {self.staging} is still open", "finish it first")
        return seal(self.staging, self.import_id, [*self._parts, *(parts or ())])

    def _require_unsealed(self) -> None:
        if (self.staging / MANIFEST_NAME).exists():
            raise UsageError(f"{self.staging} is sealed", "begin another import")


class _Collecting(PartWriter):
    """A part writer that hands its part to the import it belongs to."""

    def __init__(self, staging: Path, import_id: int, parts: list[Part], compression: str) -> None:
        super().__init__(staging, import_id, compression=compression)
        self._collected = parts

    def finish(self) -> Part | None:
        part = super().finish()
        if part is not None:
            self._collected.append(part)
        return part
