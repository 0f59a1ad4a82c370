"""Fetching a staged import from an object store to the disk of the store that takes it.

    part-<32 hex>.sst.tmp    a part that is being fetched: its first bytes
    part-<32 hex>.sst        a part that was fetched whole, and whose digest was compared

Pieces are fetched in parallel, a bounded number of them ahead, and written one after the other. So
at any moment one part is unfinished. A fetch that was killed continues behind its last byte.

Invariants
1. A part has its name only after its digest was compared and its bytes are on disk.
2. Memory holds at most `OBJECT_PIECES_AT_ONCE` pieces of `OBJECT_PIECE_BYTES`.
3. Nothing is fetched unless all parts are there and fit on the disk.
4. One process at a time fetches into a directory: it holds a lock on it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from bulk.bucket import Bucket
from bulk.manifest import Manifest
from bulk.part import Part
from bulk.sst import UNFINISHED_SUFFIX
from kvstore.digest import RunningDigest
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    ImportRefusedError,
    OutOfSpaceError,
    UsageError,
)
from kvstore.errors.system import storage_errors
from kvstore.imports import INGEST_DIRECTORY
from kvstore.journal import OS_FILES
from kvstore.limits import FETCH_SPARE_BYTES, OBJECT_PIECE_BYTES, OBJECT_PIECES_AT_ONCE
from kvstore.store import Store

_LOCK_NAME: Final = "lock"
_READ_BYTES: Final = 1 << 20


class Fetched(NamedTuple):
    """The progress of a fetch: bytes of the import on this disk, and the rate of the fetch."""

    bytes_done: int
    bytes_total: int
    bytes_per_second: float

    def __str__(self) -> str:
        done, total = self.bytes_done / 1e6, self.bytes_total / 1e6
        return f"fetch {done:.1f} of {total:.1f} MB at {self.bytes_per_second / 1e6:.1f} MB/s"


def fetch(
    bucket: Bucket, manifest: Manifest, directory: Path, tell: Callable[[Fetched], None]
) -> None:
    """Bring all parts of `manifest` into `directory`, which may have some of them already.

    `tell` is called before the first piece and after each; an exception from it ends the fetch,
    and a later call continues. Raises `ImportRefusedError` for a part that is missing or altered,
    `OutOfSpaceError` before anything is fetched, `LockedError` while another process fetches here.
    """
    bucket.require_parts(manifest)
    with storage_errors(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)  # the upkeep of the store removes directories that nobody has used
    with closing(OS_FILES.lock(str(directory / _LOCK_NAME))):
        Fetch(bucket, directory, tell).run(manifest)


class Fetch:
    """One fetch of an import."""

    def __init__(self, bucket: Bucket, directory: Path, tell: Callable[[Fetched], None]) -> None:
        self._bucket, self._directory, self._tell = bucket, directory, tell
        self._done = self._total = self._fetched = 0
        self._began = time.perf_counter()

    def run(self, manifest: Manifest) -> None:
        """Fetch the parts that are not whole."""
        self._total = manifest.size_bytes
        missing = []
        for part in manifest.parts:
            if self._size(part.name) == part.size_bytes:
                self._done += part.size_bytes
            else:
                missing.append(part)
        begun = [self._size(part.name + UNFINISHED_SUFFIX) or 0 for part in missing]
        self._done += sum(begun)
        require_space(self._directory, self._total - self._done)
        self._told()
        with ThreadPoolExecutor(OBJECT_PIECES_AT_ONCE, "kvstore-fetch") as pool:
            try:
                for part in missing:
                    if not self._take(part, pool):
                        # Bytes of an earlier fetch were damaged since: begin this part again.
                        self._take(part, pool, is_last=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, part: Part, pool: ThreadPoolExecutor, *, is_last: bool = False) -> bool:
        """Fetch the rest of a part. False if its first bytes, from an earlier fetch, were
        damaged; they are removed then."""
        unfinished = self._directory / (part.name + UNFINISHED_SUFFIX)
        digest = RunningDigest()
        with storage_errors(str(unfinished)):
            with unfinished.open("ab+") as file:
                file.seek(0)
                start = 0
                while data := file.read(_READ_BYTES):
                    digest.update(data)
                    start += len(data)
                is_resumed = start > 0
                for piece in self._pieces(part, start, pool):
                    file.write(piece)
                    digest.update(piece)
                    self._done += len(piece)
                    self._fetched += len(piece)
                    self._told()
                file.flush()
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
            if digest.text() != part.digest or size != part.size_bytes:
                unfinished.unlink()
                self._done -= size
                if is_last or not is_resumed:
                    raise self._bucket.refusal(
                        f"{part.name} was altered, or belongs to another import"
                    )
                return False
            os.replace(unfinished, self._directory / part.name)
        return True

    def _pieces(self, part: Part, start: int, pool: ThreadPoolExecutor) -> Iterator[bytes]:
        """The bytes of a part from `start` on. A bounded number of pieces is fetched ahead."""
        ahead: deque[Future[bytes]] = deque()
        at = start
        while at < part.size_bytes or ahead:
            while at < part.size_bytes and len(ahead) < OBJECT_PIECES_AT_ONCE:
                length = min(OBJECT_PIECE_BYTES, part.size_bytes - at)
                ahead.append(pool.submit(self._bucket.piece, part, at, length))
                at += length
            yield ahead.popleft().result()

    def _size(self, name: str) -> int | None:
        try:
            return (self._directory / name).stat().st_size
        except FileNotFoundError:
            return None

    def _told(self) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        self._tell(Fetched(self._done, self._total, self._fetched / seconds))


def require_space(directory: Path, needed: int) -> None:
    """Raise `OutOfSpaceError` unless `directory` has room for `needed` bytes and for the spare."""
    with storage_errors(str(directory)):
        free = shutil.disk_usage(directory).free
    if needed and needed + FETCH_SPARE_BYTES > free:
        raise OutOfSpaceError(str(directory), needed=needed + FETCH_SPARE_BYTES, free=free)


def fetched_path(store: Path, import_id: int) -> Path:
    """The directory, below the directory of a store, to which the files of an import come."""
    return store / INGEST_DIRECTORY / f"{import_id:016x}.fetched"


def remove_fetched(store: Store, import_ids: Iterable[int]) -> None:
    """Remove the files that came to the directory of a store for these imports. An import that a
    thread has, or that was begun and is neither added nor aborted, keeps its files. Costs a list of
    the directory."""
    if store.path is None:
        return
    place = store.path / INGEST_DIRECTORY
    with storage_errors(str(place)):
        present = {*os.listdir(place)} if place.is_dir() else set()
    for import_id in import_ids:
        fetched = fetched_path(store.path, import_id)
        left = [path for path in (fetched, fetched.with_suffix("")) if path.name in present]
        if not left:
            continue
        with store.imports.alone(import_id, wait=False) as is_ours:
            record = store.imports.get(import_id)
            if is_ours and (record is None or record.added is not None):
                for path in left:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def fetched_to(store: Path | None, manifest: Manifest, *, keeps: bool = False) -> Iterator[Path]:
    """The directory for the files of an import, in the directory of a store.

    It stays after a failure that may pass, so that nothing is fetched twice. With `keeps` it also
    stays after a refusal: the caller tries again, and removes it at last.
    """
    if store is None:
        path = Path(tempfile.mkdtemp(prefix="kvstore-fetched-"))
    else:
        path = fetched_path(store, manifest.import_id)
    try:
        yield path
    except BaseException as error:
        is_refused = isinstance(error, UsageError) and not isinstance(error, AccessDeniedError)
        if store is None or (is_refused and not keeps):
            shutil.rmtree(path, ignore_errors=True)  # the same files are refused again
        elif isinstance(error, ImportRefusedError | CorruptionError):
            _remove_damaged(path, manifest.parts)
        raise
    shutil.rmtree(path, ignore_errors=True)


def _remove_damaged(directory: Path, parts: Iterable[Part]) -> None:
    """Remove the parts that were damaged since they were fetched: the next fetch brings them
    again. Costs a read of all parts."""
    for part in parts:
        path, digest = directory / part.name, RunningDigest()
        with suppress(OSError), path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
            if digest.text() != part.digest:
                path.unlink()


def as_fetched(directory: Path, manifest: Manifest) -> Iterator[Part]:
    """The parts with the times and inodes of their files here, whose digests were compared."""
    for part in manifest.parts:
        with storage_errors(str(directory / part.name)):
            found = os.stat(directory / part.name)
        yield replace(part, mtime_ns=found.st_mtime_ns, inode=found.st_ino)
