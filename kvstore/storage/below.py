"""The blobs of another blob whose names begin with one path, under the rest of their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvstore.storage.contract import Blob, BlobInfo, put_file
from kvstore.storage.patience import Patience


class BlobBelow:
    """The part of `blob` below `path`, as a blob. An empty path stands for all of it."""

    def __init__(self, blob: Blob, path: str) -> None:
        self._blob = blob
        self._prefix = path.strip("/") + "/" if path.strip("/") else ""

    @property
    def patience(self) -> Patience:
        """See `Blob.patience`."""
        return self._blob.patience

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`."""
        self._blob.put(self._prefix + name, data, durable=durable)

    def put_file(self, name: str, path: Path) -> None:
        """See `TakesFiles.put_file`."""
        put_file(self._blob, self._prefix + name, path)

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return self._blob.get(self._prefix + name)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        return self._blob.get_range(self._prefix + name, start=start, length=length)

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        return self._blob.size(self._prefix + name)

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        return self._blob.delete(self._prefix + name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`."""
        for found in self._blob.list(self._prefix + prefix):
            yield BlobInfo(found.name.removeprefix(self._prefix), found.size)

    def restore(self, name: str) -> None:
        """See `Blob.restore`."""
        self._blob.restore(self._prefix + name)
