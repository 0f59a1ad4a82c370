"""The few knobs of RocksDB that a store offers. None keeps the default of `kvstore.limits` or of
RocksDB."""

from __future__ import annotations

from dataclasses import dataclass, fields

import rocksdict as rocks

from kvstore.arguments import require_count
from kvstore.limits import BLOCK_CACHE_BYTES, VALUE_CACHE_BYTES

_LEAST = {"write_buffer_bytes": 64 << 10, "background_jobs": 1, "open_files": 16}
_MOST = {
    "cache_bytes": 1 << 46,
    "value_cache_bytes": 1 << 46,
    "write_buffer_bytes": 1 << 40,
    "background_jobs": 256,
    "open_files": (1 << 31) - 1,
}


@dataclass(frozen=True, slots=True)
class Options:
    """How a store uses memory, threads and files: `kvstore.open(path, options=Options(...))`.

    `cache_bytes` holds uncompressed blocks of files (512 MiB by default); a smaller cache costs
    reads of blocks that have to be fetched and unpacked again. `write_buffer_bytes` is the size at
    which the newest commits of a family of keys go to a file (64 MiB); up to two such buffers are
    in memory, for data and for changes, and smaller ones make more files to be merged.
    `value_cache_bytes` holds the newest values of keys that are read again and again (32 MiB; 0: no
    such cache). A `get` that finds its key there takes a tenth of the time.
    `background_jobs` is the number of threads that write and merge files (2). `open_files` bounds
    the files that are kept open (no bound); reads of other files open them again.
    Raises `UsageError` for a value that is no count, or too small to work.
    """

    cache_bytes: int | None = None
    write_buffer_bytes: int | None = None
    background_jobs: int | None = None
    open_files: int | None = None
    value_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                least = _LEAST.get(field.name, 0)
                require_count(value, name=field.name, least=least, most=_MOST[field.name])

    def cache(self) -> int:
        """The bytes of the block cache."""
        return BLOCK_CACHE_BYTES if self.cache_bytes is None else self.cache_bytes

    def value_cache(self) -> int:
        """The bytes of the cache of newest values."""
        return VALUE_CACHE_BYTES if self.value_cache_bytes is None else self.value_cache_bytes

    def set_database(self, options: rocks.Options) -> None:
        """Set the knobs of the database."""
        if self.background_jobs is not None:
            options.set_max_background_jobs(self.background_jobs)
        if self.open_files is not None:
            options.set_max_open_files(self.open_files)

    def set_family(self, options: rocks.Options) -> None:
        """Set the knobs of one family."""
        if self.write_buffer_bytes is not None:
            options.set_write_buffer_size(self.write_buffer_bytes)


DEFAULTS = Options()
