"""`Import` builds a bulk load in a staging directory, without contact to a store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from bulk.definitions import EncodedBy
from bulk.manifest import Manifest
from bulk.part import Part, PartWriter
from bulk.staging import MANIFEST_NAME, seal
from kvstore.arguments import is_there, require_path
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import StorageError, UsageError
from kvstore.errors.system import storage_errors


class Import:
    """A bulk load being built. Its rows get their timestamp when `bulk.ingest` adds it.

    Write any number of parts, one after the other or from several processes, and seal the import.
    Keys ascend within a part, and two parts share no key.

    Example:

        load = bulk.Import.create("staging")
        with load.writer() as writer:
            for number in range(1000):
                writer.put(b"UA/%04d" % number, b"scheduled")
        load.seal()
        stamp = bulk.ingest(store, "staging")
        assert store.count(as_of=stamp) == 1000
    """

    def __init__(self, staging: Path, import_id: int) -> None:
        self.staging = staging
        self.import_id = import_id
        self._writers: list[PartWriter] = []
        self._parts: list[Part] = []

    @classmethod
    def create(cls, staging: str | os.PathLike[str], *, import_id: int | None = None) -> Import:
        """Begin an import in `staging`, which must be empty or absent.

        The id is random unless given. A given id makes a whole job repeatable, because the store
        adds an id once. Raises `UsageError` if the directory is in use.
        """
        path = require_path(staging, name="staging")
        with storage_errors(str(path)):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                advice = "stage each import in a directory of its own"
                raise UsageError(f"{path} is not empty", advice)
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
        """A writer of one more part. Use it as a context manager, or call `finish`.

        Raises `UsageError` once the import is sealed.
        """
        self._require_unsealed()
        writer = _Collecting(self.staging, self.import_id, self._parts, compression)
        self._writers.append(writer)
        return writer

    def seal(
        self, parts: Sequence[Part] | None = None, *, tables: Sequence[EncodedBy] = ()
    ) -> Manifest:
        """Write the manifest. The import can be added now, and no longer changed.

        `parts` are the parts that other processes wrote with `PartWriter`. By default they are the
        parts of this object's own writers. `tables` are the definitions that encoded the rows of
        tables, without which no store takes such rows. Raises `KeyOrderError` if two parts share a
        key, `UsageError` if the import is sealed or a writer is still open.
        """
        self._require_unsealed()
        if any(not writer.is_closed for writer in self._writers):
            raise UsageError(f"a writer of {self.staging} is still open", "finish it first")
        return seal(self.staging, self.import_id, [*self._parts, *(parts or ())], tables)

    def _require_unsealed(self) -> None:
        if is_there(self.staging / MANIFEST_NAME):
            raise UsageError(f"{self.staging} is sealed", "begin another import")


class _Collecting(PartWriter):
    """A part writer that hands its finished part to its import."""

    def __init__(self, staging: Path, import_id: int, parts: list[Part], compression: str) -> None:
        super().__init__(staging, import_id, compression=compression)
        self._collected = parts

    def finish(self) -> Part | None:
        part = super().finish()
        if part is not None:
            self._collected.append(part)
        return part
