"""`Import` builds a bulk load without contact to a store, in a directory or an object store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pyarrow as pa

from bulk.addresses import Staging, staging_place
from bulk.bucket import Bucket
from bulk.building import BucketPlace, BuildingPlace, DirectoryPlace
from bulk.definitions import EncodedBy
from bulk.manifest import Manifest
from bulk.part import Part, PartWriter
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import UsageError

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
