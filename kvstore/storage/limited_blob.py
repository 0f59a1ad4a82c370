"""A blob whose bytes pass at a bounded rate, which any number of blobs share.

Invariant: between any two calls of `take`, at most the bytes of one call pass above the rate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from kvstore.arguments import require_count
from kvstore.storage.contract import Blob, BlobInfo


class Bandwidth:
    """A rate in bytes a second, for all threads that share the object."""

    def __init__(
        self,
        bytes_per_second: int,
        *,
        pause: Callable[[float], object] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `UsageError` unless the rate is a number above 0."""
        self._rate = require_count(bytes_per_second, name="bytes_per_second")
        self._pause, self._monotonic = pause, monotonic
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Wait until the bytes of earlier calls have had their time, then let `size` bytes pass."""
        with self._lock:
            now = self._monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + size / self._rate
        if begin > now:
            self._pause(begin - now)


class LimitedBlob:
    """`blob`, with its bytes at the rate of `bandwidth`."""

    def __init__(self, blob: Blob, bandwidth: Bandwidth) -> None:
        self.patience = blob.patience
        self._blob = blob
        self._bandwidth = bandwidth

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`."""
        self._bandwidth.take(len(data))
        self._blob.put(name, data, durable=durable)

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return self._taken(self._blob.get(name))

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        return self._taken(self._blob.get_range(name, start=start, length=length))

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        return self._blob.size(name)

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        return self._blob.delete(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`."""
        return self._blob.list(prefix)

    def restore(self, name: str) -> None:
        """See `Blob.restore`."""
        self._blob.restore(name)

    def _taken(self, data: bytes | None) -> bytes | None:
        self._bandwidth.take(len(data or b""))
        return data
