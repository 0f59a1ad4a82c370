"""`Import` builds a bulk load without contact to a store, in a directory or an object store."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import pyarrow as pa

from kvstore.base.clock import Clock
from kvstore.base.paths import is_there, require_outside
from kvstore.bulk.bucket import Bucket, Fetch, Uploads, scratch_directory
from kvstore.bulk.manifest import MANIFEST_NAME, EncodedBy, Manifest, manifest_of
from kvstore.bulk.part import Part, PartWriter
from kvstore.bulk.staging import (
    Staging,
    crossing,
    discard,
    read_manifest,
    require_disjoint,
    seal,
    staging_place,
)
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import StorageError, UsageError, storage_errors
from kvstore.timeline.imports import INGEST_DIRECTORY

ROWS_PER_PART: Final = 2_000_000
"""Rows of one SST file. A file has a few hundred megabytes then, a good size for compactions."""


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

    def __init__(self, place: Path | Bucket, import_id: int, max_bytes: int | None) -> None:
        self.staging: Path | str = place if isinstance(place, Path) else place.where
        self.import_id = import_id
        self._build: BuildingPlace = (
            DirectoryPlace(place) if isinstance(place, Path) else BucketPlace(place)
        )
        self._max_bytes = max_bytes
        self._writers: list[PartWriter] = []
        self._parts: list[Part] = []

    @classmethod
    def create(
        cls,
        staging: Staging,
        *,
        import_id: int | None = None,
        max_bytes: int | None = None,
        options: Mapping[str, Any] | None = None,
        patience: float | None = None,
    ) -> Import:
        """Begin an import in `staging`, a directory or URL where nothing is.

        The id is random unless given. A given id makes a whole job repeatable, because the store
        adds an id once. `max_bytes` bounds the files of the import: the stores that take it have
        no room for more. `options` are passed to an object store, whose failures that may pass are
        retried for `patience` seconds. There the parts are built on the local disk, sent while
        others are built, and removed: the disk needs room for a few parts.

        Raises `UsageError` if the place is in use, and the errors of an object store.
        """
        place = staging_place(staging, options, patience)
        if import_id is None:
            import_id = secrets.randbits(63) or 1
        if type(import_id) is not int or not 0 < import_id <= IMPORT_ID_MAX:
            raise UsageError(f"import id {import_id!r}", "ids are integers, 1 to 2**63 - 1")
        return cls.begin_at(
            place if isinstance(place, Path) else place.open(), import_id, max_bytes
        )

    @classmethod
    def begin_at(cls, place: Path | Bucket, import_id: int, max_bytes: int | None) -> Import:
        """Begin an import at a place that is open. Otherwise as `create`."""
        made = cls(place, import_id, max_bytes)
        made._build.begin(import_id)
        return made

    def writer(self, *, compression: str = "lz4") -> PartWriter:
        """A writer of one more part. Use it as a context manager, or call `finish`.

        Raises `UsageError` once the import is sealed.
        """
        self._require_unsealed()
        writer = _Collecting(self._build.directory(), self.import_id, self._take, compression)
        self._writers.append(writer)
        return writer

    def write_sorted(self, rows: Iterable[pa.RecordBatch]) -> None:
        """Write rows that ascend by key, as `PartWriter.write` takes them, into parts of a good
        size. Raises `KeyOrderError` for a key that comes twice."""
        writer: PartWriter | None = None
        written = 0
        try:
            for batch in rows:
                if writer is None or written >= ROWS_PER_PART:
                    if writer is not None:
                        writer.finish()
                    writer, written = self.writer(), 0
                writer.write(batch)
                written += batch.num_rows
            if writer is not None:
                writer.finish()
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise

    def seal(
        self, parts: Sequence[Part] | None = None, *, tables: Sequence[EncodedBy] = ()
    ) -> Manifest:
        """Write the manifest. The import can be added now, and no longer changed.

        `parts` are the parts that other processes wrote with `PartWriter`, and sent if the staging
        place is a URL. By default they are the parts of this object's own writers. `tables` are the
        definitions that encoded the rows of tables, without which no store takes such rows. Raises
        `KeyOrderError` if two parts share a key, `UsageError` if the import is sealed, too large,
        or a writer is still open.
        """
        self._require_unsealed()
        if any(not writer.is_closed for writer in self._writers):
            raise UsageError(f"a writer of {self.staging} is still open", "finish it first")
        listed = [*self._parts, *(parts or ())]
        self._require_size(sum(part.size_bytes for part in listed))
        return self._build.seal(self.import_id, listed, tables)

    def discard(self) -> None:
        """Give the import up, and remove its files. Does nothing to one that is sealed."""
        self._build.discard()

    def __repr__(self) -> str:
        rows = sum(part.rows for part in self._parts)
        parts = f"{len(self._parts)} {'part' if len(self._parts) == 1 else 'parts'}"
        state = f"{parts} with {rows:,} rows written here"
        return f"<kvstore.bulk.Import {self.import_id:016x} in {self.staging}, {state}>"

    def __enter__(self) -> Import:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()

    def _take(self, part: Part) -> None:
        self._require_size(sum(each.size_bytes for each in (*self._parts, part)))
        self._build.take(part)
        self._parts.append(part)

    def _require_size(self, size: int) -> None:
        if self._max_bytes is not None and size > self._max_bytes:
            raise UsageError(
                f"the import in {self.staging} has {size:,} bytes, "
                f"and max_bytes={self._max_bytes:,}",
                "load less at once, or raise max_bytes",
            )

    def _require_unsealed(self) -> None:
        if self._build.is_sealed():
            raise UsageError(f"{self.staging} is sealed", "begin another import")


class _Collecting(PartWriter):
    """A part writer that hands its finished part to its import."""

    def __init__(
        self, staging: Path, import_id: int, take: Callable[[Part], None], compression: str
    ) -> None:
        super().__init__(staging, import_id, compression=compression)
        self._take = take

    def finish(self) -> Part | None:
        part = super().finish()
        if part is not None:
            self._take(part)
        return part


# --------------------------------------------------------------------------------------------------
# The two places in which an import is built: a directory, and an object store.
#
# Invariants
# 1. A place is taken by one job: `begin` refuses a place where something is.
# 2. The manifest is written last. Until then the place holds no import.

_OF_A_STORE: Final = re.compile(rf"/{INGEST_DIRECTORY}/staging-[0-9a-f]{{16}}(/|$)")
"""Where a call that sorts and adds rows builds them: in the store itself, which tidies it."""


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
        if not _OF_A_STORE.search(str(path)):
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
