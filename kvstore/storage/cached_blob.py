"""A blob whose parts are fetched once, and kept near the reader.

It lies below encryption: the kept bytes of an encrypted collection are encrypted.

Invariants
1. Parts are written once, under names that are never used again. So kept bytes need no check of
   their age, and nothing else is kept.
2. A deleted part may still be read from the kept bytes. It has the bytes that it always had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.storage.contract import Blob, BlobInfo
from kvstore.storage.kept_bytes import KeptBytes

_SIZE = "size"


class CachedBlob:
    """`blob`, with the bytes of its parts kept in `kept`."""

    def __init__(self, blob: Blob, kept: KeptBytes) -> None:
        self.patience = blob.patience
        self._blob = blob
        self._kept = kept

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`."""
        self._blob.put(name, data, durable=durable)

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return self._once(name, "whole", lambda: self._blob.get(name))

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        return self._once(
            name,
            f"{start}-{length}",
            lambda: self._blob.get_range(name, start=start, length=length),
        )

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""

        def digits() -> bytes | None:
            found = self._blob.size(name)
            return None if found is None else b"%d" % found

        found = self._once(name, _SIZE, digits)
        return None if found is None else int(found)

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        self._kept.forget(name)
        return self._blob.delete(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`."""
        return self._blob.list(prefix)

    def restore(self, name: str) -> None:
        """See `Blob.restore`."""
        self._blob.restore(name)

    def forget(self, name: str) -> None:
        """Fetch the bytes of a part anew when they are asked for: the kept ones are damaged."""
        self._kept.forget(name)

    def _once(self, name: str, piece: str, fetch: Callable[[], bytes | None]) -> bytes | None:
        if "/part/" not in name:
            return fetch()
        found = self._kept.get(name, piece)
        if found is None:
            found = fetch()
            if found is not None:
                self._kept.put(name, piece, found)
        return found
