"""Blobs that add one property to another blob: a path, a cache, a bound on rate or on patience.

A read of a collection passes these, from its caller down; each layer but the last may be missing:

    Patience.over   the caller repeats the call after a failure that may pass
    SealedBlob      decrypts (`backup.sealed`)
    CachedBlob      answers from bytes that were fetched before, or FetchedBlob, which keeps chunks
    LimitedBlob     waits for its share of the rate
    FileBlob        or ObjectBlob, MemoryBlob: reads, and sorts the failures

No layer repeats a call by itself: its caller does, with the patience of the storage.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, cast

from kvstore.base.arguments import COUNT
from kvstore.base.digest import DIGEST_BYTES, short_digest
from kvstore.errors import storage_errors
from kvstore.limits import FETCH_CHUNK_BYTES, FOLLOW_END_S
from kvstore.storage.contract import Blob, BlobInfo, put_file, sweep
from kvstore.storage.patience import Patience


class WrappedBlob:
    """`blob`, to which every call goes on. A subclass has the calls that it changes."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob

    @property
    def patience(self) -> Patience:
        """See `Blob.patience`."""
        return self._blob.patience

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`."""
        self._blob.put(name, data, durable=durable)

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return self._blob.get(name)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        return self._blob.get_range(name, start=start, length=length)

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        return self._blob.size(name)

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        return self._blob.delete(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`."""
        return self._blob.list(prefix)

    def sweep(self, *, before_ns: int) -> int:
        """See `Sweeps.sweep`."""
        return sweep(self._blob, before_ns=before_ns)


class BlobBelow:
    """The blobs of `blob` whose names begin with `path`, under the rest of their names. An empty
    path stands for all of them."""

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


# --------------------------------------------------------------------------------------------------
# Bytes that are kept near their reader, up to a bound: in memory, or in a directory.
#
#     <directory>/lock                                  the bytes of all entries, as digits
#     <directory>/<hash of the name 32>/<piece>         digest 16 | bytes        one entry
#
# A *piece* tells which bytes of a blob an entry has. Blobs are written once, so an entry is never
# out of date. The entry that was used longest ago goes first.
#
# Invariants
# 1. An entry whose digest is wrong is no entry: one that a crash tore, one that was cut or altered.
# 2. The processes that share a directory write under one lock, and count an entry before they write
#    it. So the entries never have more bytes than the bound, whenever a process is killed.
# 3. A directory that refuses a write, or is full, keeps nothing. No read fails for it.
# 4. Files of others in the directory stay, and do not count.

_FOLDER = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_PARTIAL = ".partial"
_NOTE_BYTES = 20


class KeptBytes(Protocol):
    """Bytes by the name of a blob and a piece of it."""

    def get(self, name: str, piece: str) -> bytes | None:
        """The bytes, None if they are not kept."""
        ...

    def put(self, name: str, piece: str, data: bytes) -> None:
        """Keep the bytes, if there is room for them."""
        ...

    def forget(self, name: str) -> None:
        """Keep nothing of a blob."""
        ...


class InMemory:
    """Bytes in the memory of this process."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, piece: str) -> bytes | None:
        """See `KeptBytes.get`."""
        with self._lock:
            found = self._kept.get((name, piece))
            if found is not None:
                self._kept.move_to_end((name, piece))
            return found

    def put(self, name: str, piece: str, data: bytes) -> None:
        """See `KeptBytes.put`."""
        with self._lock:
            if len(data) > self._bytes_max or (name, piece) in self._kept:
                return
            self._kept[name, piece] = data
            self._bytes += len(data)
            while self._bytes > self._bytes_max:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def forget(self, name: str) -> None:
        """See `KeptBytes.forget`."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == name]:
                self._bytes -= len(self._kept.pop(key))


class InDirectory:
    """Bytes in files of a directory, which any number of processes share."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        """Makes the directory. Raises a `KVStoreError` if that fails."""
        self._directory = directory
        self._bytes_max = bytes_max
        with storage_errors(f"the cache {directory}"):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, name: str, piece: str) -> bytes | None:
        """See `KeptBytes.get`. No lock."""
        path = self._path(name, piece)
        try:
            entry = path.read_bytes()
        except OSError:
            return None
        data = entry[DIGEST_BYTES:]
        if entry[:DIGEST_BYTES] != _digest(name, piece, data):
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def put(self, name: str, piece: str, data: bytes) -> None:
        """See `KeptBytes.put`. Costs a lock, and at the bound a look at all entries."""
        size = len(data) + DIGEST_BYTES
        if size > self._bytes_max:
            return
        path = self._path(name, piece)
        with suppress(OSError), self._locked() as lock:
            if path.exists():
                return
            total = _total(lock)
            if total is None or total + size > self._bytes_max:
                total = self._evict(self._bytes_max - self._bytes_max // 8 - size)
            _note(lock, total + size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            partial = path.with_name(f"{secrets.token_hex(8)}{_PARTIAL}")
            partial.write_bytes(_digest(name, piece, data) + data)
            partial.replace(path)

    def forget(self, name: str) -> None:
        """See `KeptBytes.forget`. The count of bytes is made anew when the bound is reached."""
        with suppress(OSError), self._locked():
            for path in self._folder(name).iterdir():
                path.unlink()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _evict(self, most: int) -> int:
        """Remove the entries used longest ago until `most` bytes stay; returns how many stay.

        A partial entry is the rest of a killed process: its writer would have the lock.
        """
        found: list[tuple[int, int, Path]] = []
        total = 0
        for folder in [path for path in self._directory.iterdir() if _FOLDER.fullmatch(path.name)]:
            for path in folder.iterdir():
                stat = path.stat()
                if path.name.endswith(_PARTIAL):
                    path.unlink()
                    continue
                found.append((stat.st_mtime_ns, stat.st_size, path))
                total += stat.st_size
        for _, size, path in sorted(found):
            if total <= most:
                break
            path.unlink(missing_ok=True)
            total -= size
            with suppress(OSError):  # not empty
                path.parent.rmdir()
        return total

    def _folder(self, name: str) -> Path:
        return self._directory / short_digest(name.encode()).hex()

    def _path(self, name: str, piece: str) -> Path:
        return self._folder(name) / piece


def _digest(name: str, piece: str, data: bytes) -> bytes:
    return short_digest(f"{name}\0{piece}\0".encode(), data)


def _total(lock: int) -> int | None:
    """The noted bytes of all entries, None where no note can be read."""
    text = os.pread(lock, _NOTE_BYTES + 1, 0)
    return int(text) if text.isdigit() and len(text) == _NOTE_BYTES else None


def _note(lock: int, total: int) -> None:
    os.pwrite(lock, str(total).zfill(_NOTE_BYTES).encode(), 0)


# --------------------------------------------------------------------------------------------------
# A blob whose parts are fetched once, and kept near the reader.
#
# It lies below encryption: the kept bytes of an encrypted collection are encrypted.
#
# Invariants
# 1. Parts are written once, under names that are never used again. So kept bytes need no check of
#    their age, and nothing else is kept.
# 2. A deleted part may still be read from the kept bytes. It has the bytes that it always had.

_SIZE = "size"


class CachedBlob(WrappedBlob):
    """`blob`, with the bytes of its parts kept in `kept`."""

    def __init__(self, blob: Blob, kept: KeptBytes) -> None:
        super().__init__(blob)
        self._kept = kept

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


# --------------------------------------------------------------------------------------------------
# A blob whose parts are fetched once, for work that is continued after a kill.
#
#     <directory>/kept/         chunks of parts, see `InDirectory`
#     <directory>/<part>.lock   held by the process that fetches a chunk of the part
#
# A range is fetched as the chunks that hold it. So readers that ask for other ranges, and other
# processes, find the bytes that one of them has fetched.
#
# Invariant: no byte of a part is fetched twice, unless a kill came between its fetch and its note.

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


# --------------------------------------------------------------------------------------------------
# A blob for a worker that may be stopped: then its calls are repeated for a short while only.


def until_stopped(blob: Blob, stop: threading.Event) -> Blob:
    """`blob`, whose calls are repeated for `FOLLOW_END_S` at most once `stop` is set."""
    return cast("Blob", _HurriedBlob(blob, _UntilStopped(blob.patience, stop)))


class _UntilStopped(Patience):
    """The patience of a storage. Once the worker is stopped, a call is repeated for `FOLLOW_END_S`
    at most."""

    def __init__(self, patience: Patience, stop: threading.Event) -> None:
        def pause(seconds: float) -> None:
            if patience.pause is time.sleep and not stop.is_set():
                stop.wait(seconds)  # the end of the worker ends the pause
            else:
                patience.pause(seconds)

        super().__init__(tell=patience.tell, pause=pause, monotonic=patience.monotonic)
        self._patience, self._stop = patience, stop

    @property
    def seconds(self) -> float:
        """See `Patience.seconds`."""
        known = self._patience.seconds
        return min(known, FOLLOW_END_S) if self._stop.is_set() else known


class _HurriedBlob:
    """`blob` with another patience."""

    def __init__(self, blob: Blob, patience: Patience) -> None:
        self._blob, self.patience = blob, patience

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blob, name)


# --------------------------------------------------------------------------------------------------
# A blob whose bytes pass at a bounded rate, which any number of blobs share.
#
# Invariant: between any two calls of `take`, at most the bytes of one call pass above the rate.


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
        self._rate = COUNT.check("bytes_per_second", bytes_per_second)
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


class LimitedBlob(WrappedBlob):
    """`blob`, with its bytes at the rate of `bandwidth`."""

    def __init__(self, blob: Blob, bandwidth: Bandwidth) -> None:
        super().__init__(blob)
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

    def _taken(self, data: bytes | None) -> bytes | None:
        self._bandwidth.take(len(data or b""))
        return data
