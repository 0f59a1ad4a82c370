"""Bytes that are kept near their reader, up to a bound: in memory, or in a directory.

    <directory>/lock                                  the bytes of all entries, as digits
    <directory>/<hash of the name 32>/<piece>         digest 16 | bytes        one entry

A *piece* tells which bytes of a blob an entry has. Blobs are written once, so an entry is never out
of date. The entry that was used longest ago goes first.

Invariants
1. An entry whose digest is wrong is no entry: one that a crash tore, one that was cut or altered.
2. The processes that share a directory write under one lock, and count an entry before they write
   it. So the entries never have more bytes than the bound, whenever a process is killed.
3. A directory that refuses a write, or is full, keeps nothing. No read fails for it.
4. Files of others in the directory stay, and do not count.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from kvstore.digest import DIGEST_BYTES, short_digest
from kvstore.errors.system import storage_errors

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
