"""A blob whose parts are fetched once, for work that is continued after a kill.

    <directory>/kept/         chunks of parts, see `kept_bytes`
    <directory>/<part>.lock   held by the process that fetches a chunk of the part

A range is fetched as the chunks that hold it. So readers that ask for other ranges, and other
processes, find the bytes that one of them has fetched.

Invariant: no byte of a part is fetched twice, unless a kill came between its fetch and its note.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.digest import short_digest
from kvstore.errors.system import storage_errors
from kvstore.limits import FETCH_CHUNK_BYTES
from kvstore.storage.cached_blob import CachedBlob
from kvstore.storage.contract import Blob
from kvstore.storage.kept_bytes import InDirectory

_UNBOUNDED = 1 << 62


class FetchedBlob(CachedBlob):
    """`blob`, with its parts kept in `directory`, which the caller removes when all is done."""

    def __init__(self, blob: Blob, directory: Path) -> None:
        """Makes the directory. Raises a `KVStoreError` if that fails."""
        super().__init__(blob, InDirectory(directory / "kept", _UNBOUNDED))
        self._directory = directory
        self._last: tuple[str, int, bytes] | None = None

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        if "/part/" not in name or length < 1:
            return self._blob.get_range(name, start=start, length=length)
        first, last = start // FETCH_CHUNK_BYTES, (start + length - 1) // FETCH_CHUNK_BYTES
        found: list[bytes] = []
        for number in range(first, last + 1):
            chunk = self._chunk(name, number)
            if chunk is None:
                return None
            found.append(chunk)
        return b"".join(found)[start - first * FETCH_CHUNK_BYTES :][:length]

    def _chunk(self, name: str, number: int) -> bytes | None:
        """The chunk with that number. The last one stays in memory for its neighbours."""
        if self._last is not None and self._last[:2] == (name, number):
            return self._last[2]
        start, length = number * FETCH_CHUNK_BYTES, FETCH_CHUNK_BYTES
        chunk = self._once(
            name,
            f"chunk-{number}",
            lambda: self._blob.get_range(name, start=start, length=length),
        )
        if chunk is not None:
            self._last = name, number, chunk
        return chunk

    def _once(self, name: str, piece: str, fetch: Callable[[], bytes | None]) -> bytes | None:
        if "/part/" not in name:
            return fetch()
        found = self._kept.get(name, piece)
        if found is not None:
            return found
        with self._locked(name):
            return super()._once(name, piece, fetch)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = self._directory / f"{short_digest(name.encode()).hex()}.lock"
        with storage_errors(str(path)), path.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
