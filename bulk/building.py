"""The two places in which an import is built: a directory, and an object store.

Invariants
1. A place is taken by one job: `begin` refuses a place where something is.
2. The manifest is written last. Until then the place holds no import.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bulk.bucket import Bucket
from bulk.contents import crossing, require_disjoint
from bulk.definitions import EncodedBy
from bulk.fetching import Fetch
from bulk.manifest import Manifest
from bulk.part import Part
from bulk.staging import MANIFEST_NAME, discard, manifest_of, read_manifest, seal
from bulk.uploading import Uploads, scratch_directory
from kvstore.arguments import is_there, require_outside
from kvstore.clock import Clock
from kvstore.errors import StorageError, UsageError
from kvstore.errors.system import storage_errors


class BuildingPlace(Protocol):
    """Where one import is built."""

    def begin(self, import_id: int) -> None:
        """Take the place. Raises `UsageError` if something is there."""
        ...

    def directory(self) -> Path:
        """The directory in which parts are written."""
        ...

    def take(self, part: Part) -> None:
        """Take a part that was written there."""
        ...

    def is_sealed(self) -> bool:
        """Whether this job has sealed the import."""
        ...

    def sealed_id(self) -> int | None:
        """The id of the import that was sealed there, by whomever. None if none was."""
        ...

    def seal(self, import_id: int, parts: Sequence[Part], tables: Sequence[EncodedBy]) -> Manifest:
        """Seal the import; see `bulk.staging.seal`."""
        ...

    def discard(self) -> None:
        """Remove the import, unless it is sealed."""
        ...


class DirectoryPlace:
    """A staging directory. Its parts are written where they stay."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, import_id: int) -> None:
        """See `BuildingPlace.begin`."""
        path = self._path
        require_outside(path, name="staging")
        with storage_errors(str(path)):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                advice = "stage each import in a directory of its own"
                raise UsageError(f"{path} is not empty", advice)
        try:
            with storage_errors(str(path)):
                path.mkdir(parents=True, exist_ok=True)
        except StorageError as error:
            if isinstance(error.__cause__, NotADirectoryError):
                raise UsageError(f"{path} lies in a file", "choose another directory") from error
            raise

    def directory(self) -> Path:
        """See `BuildingPlace.directory`."""
        return self._path

    def take(self, part: Part) -> None:
        """Do nothing: it lies where it belongs."""

    def is_sealed(self) -> bool:
        """See `BuildingPlace.is_sealed`."""
        return is_there(self._path / MANIFEST_NAME)

    def sealed_id(self) -> int | None:
        """See `BuildingPlace.sealed_id`."""
        return read_manifest(self._path).import_id if self.is_sealed() else None

    def seal(self, import_id: int, parts: Sequence[Part], tables: Sequence[EncodedBy]) -> Manifest:
        """See `BuildingPlace.seal`."""
        return seal(self._path, import_id, parts, tables)

    def discard(self) -> None:
        """See `BuildingPlace.discard`."""
        if not self.is_sealed():
            discard(self._path)


class BucketPlace:
    """A staging place in an object store. Its parts are written to the local disk, and sent."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._uploads: Uploads | None = None
        self._scratch: Path | None = None
        self._is_sealed = False

    def begin(self, import_id: int) -> None:
        """See `BuildingPlace.begin`."""
        self._bucket.begin(import_id, now_ns=Clock().wall_ns())

    def directory(self) -> Path:
        """See `BuildingPlace.directory`."""
        if self._scratch is None:
            self._scratch = scratch_directory()
            self._uploads = Uploads(self._bucket, self._scratch)
        return self._scratch

    def take(self, part: Part) -> None:
        """Send a part while others are built."""
        assert self._uploads is not None
        self._uploads.add(part)

    def is_sealed(self) -> bool:
        """See `BuildingPlace.is_sealed`."""
        return self._is_sealed

    def sealed_id(self) -> int | None:
        """See `BuildingPlace.sealed_id`."""
        return self._bucket.manifest().import_id if self._bucket.is_sealed() else None

    def seal(self, import_id: int, parts: Sequence[Part], tables: Sequence[EncodedBy]) -> Manifest:
        """See `BuildingPlace.seal`."""
        if self._uploads is not None:
            self._uploads.finish()
        manifest = manifest_of(self._bucket, import_id, parts, tables)
        self._require_disjoint(manifest)
        self._bucket.seal(manifest)
        self._is_sealed = True
        self._close()
        return manifest

    def discard(self) -> None:
        """See `BuildingPlace.discard`."""
        self._close()
        if not self._bucket.is_sealed():
            self._bucket.remove()

    def _require_disjoint(self, manifest: Manifest) -> None:
        """Parts whose spans cross come back once, because only their rows tell whether they share
        a key."""
        for group in crossing(manifest.parts):
            directory = self.directory()
            crossed = Manifest(manifest.import_id, tuple(group))
            Fetch(self._bucket, directory, lambda _: None).run(crossed)
            require_disjoint(directory, group)

    def _close(self) -> None:
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = self._scratch = None
