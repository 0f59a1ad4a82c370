"""A staging place in an object store: the objects of one import below one URL. Parts are sent while
later ones are built, and fetched to the disk of the store that takes the import.

    begun.json           the import id, and when its building began; put first, by one job only
    part-<32 hex>.sst    one sorted part; any number of them
    import.json          the manifest, put last; it seals the import

Invariants
1. Each object is put under a name that only one attempt has, or by a put that only one job can
   make. So two jobs cannot mix their parts, and a repeated put changes nothing.
2. An object that the manifest does not name does not belong to the import.
3. Nothing that a bucket holds is trusted: each object is bounded in size before it is read.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.base.digest import RunningDigest
from kvstore.bulk.manifest import (
    MANIFEST_NAME,
    STAGE_AGAIN,
    Manifest,
    parse_manifest,
    refused_as_damaged,
)
from kvstore.bulk.part import PART_NAME, UNFINISHED_SUFFIX, Part
from kvstore.codec.json import read_object
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    ImportRefusedError,
    NoBucketError,
    OutOfSpaceError,
    UsageError,
    storage_errors,
)
from kvstore.limits import (
    FETCH_SPARE_BYTES,
    JSON_BYTES_MAX,
    OBJECT_PIECE_BYTES,
    OBJECT_PIECES_AT_ONCE,
    UPLOADS_AT_ONCE,
)
from kvstore.storage.address import open_blob, parse_address, public_address
from kvstore.storage.contract import Blob, put_file, put_first
from kvstore.storage.os_files import OS_FILES
from kvstore.storage.patience import Patience
from kvstore.store import Store
from kvstore.timeline.imports import INGEST_DIRECTORY

BEGUN_NAME: Final = "begun.json"
_BEGUN_FORMAT: Final = 1


@dataclass(frozen=True)
class BucketUrl:
    """The URL of a staging place, and how to reach it. Picklable: a driver sends it to its tasks.

    `options` go to the object store; without them it is reached as its own tools reach it.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    patience_s: float | None = None

    def open(self) -> Bucket:
        """Open the place. Nothing is read or written."""
        blob = open_blob(self.url, patience=Patience(self.patience_s), **self.options)
        return Bucket(blob, public_address(self.url))

    def below(self, path: str) -> BucketUrl:
        """The place of the objects below `path`, whose characters stand for themselves."""
        address = parse_address(self.url).below(path)
        return BucketUrl(address.url, self.options, self.patience_s)


class Bucket:
    """The objects of one import. `where` names the place in errors."""

    def __init__(self, blob: Blob, where: str) -> None:
        self.blob, self.where = blob, where

    def __str__(self) -> str:
        return self.where

    # -- building ---------------------------------------------------------------------------

    def begin(self, import_id: int, *, now_ns: int) -> None:
        """Take the place for one job. Raises `UsageError` if an import was begun there."""
        if next(iter(self.blob.patience.over(lambda: [*self.blob.list()])), None) is not None:
            raise self._in_use()
        fields = {
            "format": _BEGUN_FORMAT,
            "import_id": f"{import_id:016x}",
            "begun": now_ns,
            "job": secrets.token_hex(16),
        }
        if not put_first(self.blob, BEGUN_NAME, json.dumps(fields, sort_keys=True).encode()):
            raise self._in_use()

    def put_part(self, part: Part, path: Path) -> None:
        """Send a finished part, whose file lies at `path`. Memory is bounded."""
        put_file(self.blob, part.name, path)

    def seal(self, manifest: Manifest) -> None:
        """Put the manifest. Raises `UsageError` if another one was put before."""
        sizes = self._sizes()
        for part in manifest.parts:
            if sizes.get(part.name) != part.size_bytes:
                problem = "is missing" if part.name not in sizes else "is not whole"
                raise UsageError(f"{self} cannot be sealed: {part.name} {problem}", "stage again")
        if not put_first(self.blob, MANIFEST_NAME, manifest.to_json().encode()):
            raise UsageError(f"{self} is sealed", "begin another import")

    def is_sealed(self) -> bool:
        """Whether the manifest is there."""
        found = self.blob.patience.over(lambda: self.blob.size(MANIFEST_NAME))
        return found is not None

    # -- reading ----------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Read and check the manifest. Raises `ImportRefusedError` if it is missing or damaged,
        `FormatVersionError` if a newer release wrote it."""
        content = self._json(MANIFEST_NAME)
        if content is None:
            is_begun = self._json(BEGUN_NAME) is not None
            raise ImportRefusedError(
                self.where,
                "it was not sealed" if is_begun else "nothing is there",
                "seal it" if is_begun else "check the URL",
            )
        with refused_as_damaged(self.where):
            return parse_manifest(content, where=f"{self.where}/{MANIFEST_NAME}")

    def require_parts(self, manifest: Manifest) -> None:
        """Raise `ImportRefusedError` unless each part is there in its size. Costs one list."""
        sizes = self._sizes()
        for part in manifest.parts:
            found = sizes.get(part.name)
            if found is None:
                raise self.refusal(f"{part.name} is missing")
            if found != part.size_bytes:
                raise self.refusal(f"{part.name} has {found} bytes, {part.size_bytes} were sealed")

    def piece(self, part: Part, start: int, length: int) -> bytes:
        """Some bytes of a part; retried after failures that may pass.

        Raises `ImportRefusedError` if the part is gone or shorter.
        """
        read = self.blob.get_range
        data = self.blob.patience.over(lambda: read(part.name, start=start, length=length))
        if data is None:
            raise self.refusal(f"{part.name} is missing")
        if len(data) != length:
            raise self.refusal(f"{part.name} ends at byte {start + len(data)}")
        return data

    def refusal(self, problem: str) -> ImportRefusedError:
        """The error for an import that is not as it was sealed."""
        return ImportRefusedError(self.where, problem, STAGE_AGAIN)

    # -- removing ---------------------------------------------------------------------------

    def begun_ns(self) -> int | None:
        """When the building of the import began; None where no such record is, or a foreign one."""
        content = self._json(BEGUN_NAME)
        if content is None:
            return None
        with suppress(CorruptionError):
            return read_object(content, where=f"{self.where}/{BEGUN_NAME}").integer("begun")
        return None

    def remove(self) -> int:
        """Remove the import: the manifest first, so that nobody adds half of it. Objects of other
        names stay. Returns the bytes that were removed."""
        over, size = self.blob.patience.over, 0
        names = [found.name for found in over(lambda: [*self.blob.list()])]
        parts = [name for name in names if PART_NAME.fullmatch(name)]
        for name in (MANIFEST_NAME, *parts, BEGUN_NAME):
            if name in names:
                size += over(lambda name=name: self.blob.delete(name)) or 0  # type: ignore[misc]
        return size

    def _json(self, name: str) -> bytes | None:
        read = self.blob.get_range
        return self.blob.patience.over(lambda: read(name, start=0, length=JSON_BYTES_MAX + 1))

    def _sizes(self) -> dict[str, int]:
        return dict(self.blob.patience.over(lambda: [*self.blob.list()]))

    def _in_use(self) -> UsageError:
        return UsageError(f"{self} is not empty", "stage each import in a place of its own")


# --------------------------------------------------------------------------------------------------
# Sending the parts of an import to an object store while later parts are built.
#
# Invariants
# 1. The local disk holds `UPLOADS_AT_ONCE` finished parts at most, and the part being written.
# 2. A failed upload is raised to the caller who adds the next part, or who waits for all.


def scratch_directory(parent: str | os.PathLike[str] | None = None) -> Path:
    """A new directory for the parts that are being built, on the disk of temporary files."""
    with storage_errors(str(parent or tempfile.gettempdir())):
        return Path(tempfile.mkdtemp(prefix="kvstore-parts-", dir=parent))


def send(bucket: Bucket, part: Part, scratch: Path) -> None:
    """Send a part and the records of its expiries, and remove their local files."""
    for each in (part, *part.expiries):
        bucket.put_part(each, scratch / each.name)
        with suppress(OSError):
            (scratch / each.name).unlink()


class Uploads:
    """Sends finished parts in threads of its own."""

    def __init__(self, bucket: Bucket, scratch: Path) -> None:
        self._bucket, self._scratch = bucket, scratch
        self._pool = ThreadPoolExecutor(UPLOADS_AT_ONCE, "kvstore-upload")
        self._under_way: set[Future[None]] = set()
        # A process that dies leaves the directory to the cleaning of temporary files.
        self._remove = weakref.finalize(self, _remove, scratch, os.getpid())

    def add(self, part: Part) -> None:
        """Send a part. Waits while `UPLOADS_AT_ONCE` parts are under way."""
        self._wait(UPLOADS_AT_ONCE - 1)
        self._under_way.add(self._pool.submit(send, self._bucket, part, self._scratch))

    def finish(self) -> None:
        """Wait until all parts are there."""
        self._wait(0)

    def close(self) -> None:
        """End the threads, and remove the local files. Repeatable."""
        self._pool.shutdown(cancel_futures=True)
        self._remove()

    def _wait(self, most: int) -> None:
        """Wait until at most `most` parts are under way. Raises the error of a failed one."""
        while len(self._under_way) > most:
            done, left = wait(self._under_way, return_when=FIRST_COMPLETED)
            self._under_way = left
            for each in done:
                each.result()


def _remove(scratch: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove the files of its parent
        shutil.rmtree(scratch, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# Fetching a staged import from an object store to the disk of the store that takes it.
#
#     part-<32 hex>.sst.tmp    a part that is being fetched: its first bytes
#     part-<32 hex>.sst        a part that was fetched whole, and whose digest was compared
#
# Pieces are fetched in parallel, a bounded number of them ahead, and written one after the other.
# So at any moment one part is unfinished. A fetch that was killed continues behind its last byte.
#
# Invariants
# 1. A part has its name only after its digest was compared and its bytes are on disk.
# 2. Memory holds at most `OBJECT_PIECES_AT_ONCE` pieces of `OBJECT_PIECE_BYTES`.
# 3. Nothing is fetched unless all parts are there and fit on the disk.
# 4. One process at a time fetches into a directory: it holds a lock on it.

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
        is_place = isinstance(error, AccessDeniedError | NoBucketError)
        is_refused = isinstance(error, UsageError) and not is_place
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


def has_manifest(url: str) -> bool:
    """Whether a sealed import lies at `url`, in an object store or in memory. One request."""
    blob = open_blob(url)
    return blob.patience.over(lambda: blob.size(MANIFEST_NAME)) is not None
