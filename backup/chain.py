"""A chain of batches in a directory: the storage of a collection on local files.

    LOCK                            held by whoever is writing
    parts/<32 hex>.parquet          versions of one batch, sorted (backup/rows.py)
    batches/<8 digits>.json         one batch, numbered from 0; its file is the commit

    batch := {"format": 1, "lower", "upper", "since", "source", "seconds",
              "parts": [{"name", "rows", "bytes", "sha256"}], "checksum": SHA-256 of the rest}

A batch covers the times `lower <= t < upper`, and begins where the one before it ended.

Invariants
1. Batches are contiguous: each `lower` is the `upper` before; the first is 0.
2. A batch's file appears once all its parts are on disk, and never changes: parts that none names
   were left by a backup that did not finish, and are removed by the next.
3. One writer at a time, by an exclusive lock on LOCK that the system drops with the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from backup.rows import VERSIONS_SCHEMA
from bulk.sst import fsync_and_hash
from bulk.staging import fsync_directory, write_atomically
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    KVStoreError,
    LockedError,
    NotAStoreError,
    OutOfSpaceError,
    StorageError,
)

BATCH_FORMAT: Final = 1
ROWS_PER_PART: Final = 2_000_000
"""Rows of one part: some 100 MB compressed, so that parts can be read and replaced one by one."""

ROWS_PER_GROUP: Final = 65_536
"""Rows of one row group: what a reader of a narrow key span has to decode at least."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """One Parquet file of a batch."""

    name: str
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One link of the chain: all versions with `lower <= timestamp < upper`."""

    lower: int
    upper: int
    since: int
    source: str
    seconds: float
    parts: tuple[PartFile, ...]


class Chain(Protocol):
    """What a collection needs of its storage. Local files here; shards on any storage later."""

    def batches(self) -> list[StoredBatch]:
        """All batches, in order of time. Raises `CorruptionError` if one is damaged or missing."""
        ...

    def writing(self) -> Any:
        """A context in which this process alone may append. Raises `LockedError`."""
        ...

    def append(
        self, versions: Iterable[pa.RecordBatch], *, lower: int, upper: int, since: int, source: str
    ) -> StoredBatch:
        """Write the batch `[lower, upper)`; it exists when this returns."""
        ...

    def read(self, part: PartFile) -> Iterator[pa.RecordBatch]:
        """The rows of a part whose bytes are as written. Raises `CorruptionError`."""
        ...

    def open(self, part: PartFile) -> pq.ParquetFile:
        """A part to be read in pieces: whoever needs a narrow span reads no more than that.

        Only its size is compared with what was written. Raises `CorruptionError`.
        """
        ...

    def check(self, part: PartFile) -> str | None:
        """What is wrong with a part's bytes, None if nothing is."""
        ...


class LocalChain:
    """A chain in a local directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parts = root / "parts"
        self._batches = root / "batches"
        if root.exists() and not root.is_dir():
            raise NotAStoreError(str(root), "a file, not a directory", "choose another path")
        if root.exists() and any(root.iterdir()) and not self._batches.is_dir():
            raise NotAStoreError(str(root), "a directory of other files", "choose an empty one")

    def batches(self) -> list[StoredBatch]:
        if not self._batches.is_dir():
            return []
        chain: list[StoredBatch] = []
        for number, path in enumerate(sorted(self._batches.glob("*.json"))):
            batch = _read_batch(path)
            expected = chain[-1].upper if chain else 0
            if int(path.stem) != number or batch.lower != expected:
                raise CorruptionError(str(path), f"the chain breaks: nothing covers {expected} on")
            chain.append(batch)
        return chain

    @contextmanager
    def writing(self) -> Iterator[None]:
        for directory in (self._parts, self._batches):
            directory.mkdir(parents=True, exist_ok=True)
        with (self._root / "LOCK").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise LockedError(str(self._root), "another backup") from error
            self._remove_orphans()
            yield

    def append(
        self, versions: Iterable[pa.RecordBatch], *, lower: int, upper: int, since: int, source: str
    ) -> StoredBatch:
        started = time.perf_counter()
        parts = tuple(self._write_parts(versions))
        if parts:
            fsync_directory(self._parts)
        seconds = round(time.perf_counter() - started, 3)
        batch = StoredBatch(lower, upper, since, source, seconds, parts)
        number = len(list(self._batches.glob("*.json")))
        with _translated(str(self._root)):
            write_atomically(self._batches / f"{number:08d}.json", _encode(batch))
        return batch

    def read(self, part: PartFile) -> Iterator[pa.RecordBatch]:
        problem = self.check(part)
        if problem is not None:
            raise CorruptionError(str(self._parts / part.name), problem)
        with pq.ParquetFile(self._parts / part.name) as file:
            yield from file.iter_batches(batch_size=ROWS_PER_GROUP)

    def open(self, part: PartFile) -> pq.ParquetFile:
        path = self._parts / part.name
        problem = self._misfit(part)
        if problem is not None:
            raise CorruptionError(str(path), problem)
        try:
            return pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise CorruptionError(str(path), str(error)) from error

    def check(self, part: PartFile) -> str | None:
        problem = self._misfit(part)
        if problem is not None:
            return problem
        same = fsync_and_hash(self._parts / part.name) == part.sha256
        return None if same else "its checksum differs"

    def _misfit(self, part: PartFile) -> str | None:
        path = self._parts / part.name
        if not path.exists():
            return "the part is missing"
        if path.stat().st_size != part.size_bytes:
            return f"{path.stat().st_size} bytes, {part.size_bytes} were written"
        return None

    def _write_parts(self, versions: Iterable[pa.RecordBatch]) -> Iterator[PartFile]:
        batches = iter(versions)
        batch = next(batches, None)
        while batch is not None:
            path = self._parts / f"{uuid.uuid4().hex}.parquet"
            rows = 0
            with _translated(str(path)):
                with pq.ParquetWriter(path, VERSIONS_SCHEMA, compression="zstd") as writer:
                    while batch is not None and rows < ROWS_PER_PART:
                        writer.write_batch(batch, row_group_size=ROWS_PER_GROUP)
                        rows += batch.num_rows
                        batch = next(batches, None)
                digest = fsync_and_hash(path)
            yield PartFile(path.name, rows, path.stat().st_size, digest)

    def _remove_orphans(self) -> None:
        """Parts that no batch names, and unfinished files. Only the writer may, under the lock."""
        named = {part.name for batch in self.batches() for part in batch.parts}
        for path in [*self._parts.iterdir(), *self._batches.glob("*.tmp")]:
            if path.name not in named:
                path.unlink()


@contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except KVStoreError:
        raise
    except OSError as error:
        if error.errno == 28 or "No space left" in str(error):
            raise OutOfSpaceError(where) from error
        raise StorageError(f"writing {where} failed: {error}", "run the backup again") from error


def _encode(batch: StoredBatch) -> bytes:
    fields: dict[str, Any] = {
        "format": BATCH_FORMAT,
        "lower": batch.lower,
        "upper": batch.upper,
        "since": batch.since,
        "source": batch.source,
        "seconds": batch.seconds,
        "parts": [
            {"name": p.name, "rows": p.rows, "bytes": p.size_bytes, "sha256": p.sha256}
            for p in batch.parts
        ],
    }
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1).encode()


def _read_batch(path: Path) -> StoredBatch:
    try:
        fields = json.loads(path.read_bytes())
        version = fields["format"]
        checksum = fields.pop("checksum")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(str(path), f"not a batch: {error}") from error
    if version != BATCH_FORMAT:
        raise FormatVersionError(str(path), found=version, supported=BATCH_FORMAT)
    if checksum != _checksum(fields):
        raise CorruptionError(str(path), "its checksum differs: it was altered")
    parts = (PartFile(p["name"], p["rows"], p["bytes"], p["sha256"]) for p in fields["parts"])
    return StoredBatch(
        fields["lower"],
        fields["upper"],
        fields["since"],
        fields["source"],
        fields["seconds"],
        tuple(parts),
    )


def _checksum(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
