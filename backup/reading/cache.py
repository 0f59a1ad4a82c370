"""The cache of a reader, as its owner asks for it."""

from __future__ import annotations

import os

from kvstore.arguments import require_count, require_path
from kvstore.limits import READER_CACHE_BYTES
from kvstore.storage.kept_bytes import InDirectory, InMemory


def keeping(
    directory: str | os.PathLike[str] | None, bytes_max: int | None
) -> InDirectory | InMemory:
    """Keeps `bytes_max` bytes in a directory, or in memory where none is given.

    Raises `UsageError` for a number below 0 and for a URL, another `KVStoreError` where the
    directory cannot be made.
    """
    size = READER_CACHE_BYTES if bytes_max is None else bytes_max
    require_count(size, name="cache_bytes", least=0)
    if directory is None:
        return InMemory(size)
    return InDirectory(require_path(directory, name="cache"), size)
