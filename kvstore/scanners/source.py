"""The database that the processes of a scan read, and the loop of its workers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from enum import Enum
from itertools import chain, count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.arrow import row_batches, rows_schema
from kvstore.codec.keys import span_bounds
from kvstore.engine import DATA
from kvstore.engine.rocks import RocksEngine
from kvstore.limits import SCAN_PART_BYTES, SCAN_PARTS_AHEAD_MAX
from kvstore.mvcc.fragments import Cover
from kvstore.mvcc.scan import Read, live_columns
from kvstore.mvcc.version import Stamps
from kvstore.span import Span

if TYPE_CHECKING:
    import pyarrow as pa


_HUNG_UP: Final = (EOFError, BrokenPipeError, ConnectionResetError)


class Word(Enum):
    """The messages between scan and worker, beside jobs, pieces, names of parts and errors."""

    ASK = "what next?"
    GO_ON = "that part is done with"
    END = "that was all"


class ScanJob(NamedTuple):
    """A scan, in the form that each of its processes needs: the database at `source`, at the moment
    whose files are in `home`."""

    source: Path
    home: Path
    directory: Path
    as_of: int
    stamps: Stamps
    batch_rows: int


class ScanPiece(NamedTuple):
    """A stretch of keys that one process reads, with the range tombstones over it."""

    number: int
    span: Span
    cover: Cover


class ScanSource:
    """The database of a scan in one of its processes. The scan's own process opens the checkpoint
    beside its store. Of a read-only store it reads the store itself."""

    def __init__(self, job: ScanJob, *, beside: RocksEngine | None = None) -> None:
        self._job = job
        self._owns_engine = beside is None or not beside.is_read_only
        self._engine = (
            RocksEngine(job.source, read_only=True, home=job.home, beside=beside)
            if beside is None or self._owns_engine
            else beside
        )

    def batches(self, piece: ScanPiece) -> Iterator[pa.RecordBatch]:
        """The rows of a piece."""
        job = self._job
        read = Read(job.as_of, job.stamps, piece.cover.nearby if piece.cover.starts else None)
        cursor = self._engine.cursor(DATA, *span_bounds(piece.span.start, piece.span.end))
        return iter(row_batches(live_columns(cursor, read, chunk=job.batch_rows)))

    def close(self) -> None:
        """Close the database. Repeatable."""
        if self._owns_engine:
            self._engine.close()


def serve(descriptor: int) -> None:
    """Do jobs until the other end of the pipe is closed, then remove the files that it has left."""
    job: ScanJob | None = None
    with Connection(descriptor) as pipe, suppress(*_HUNG_UP):
        try:
            while True:
                pipe.send(Word.ASK)
                while (message := pipe.recv()) is Word.GO_ON:  # on the job before
                    pass
                job = message
                try:
                    _do(message, pipe)
                except _HUNG_UP:
                    raise
                except Exception as error:  # noqa: BLE001  # raised again at the other end
                    pipe.send(error)
        finally:
            if job is not None:
                shutil.rmtree(job.directory, ignore_errors=True)


def _do(job: ScanJob, pipe: Connection) -> None:
    ahead = 0
    with closing(ScanSource(job)) as source:
        while True:
            pipe.send(Word.ASK)
            while (piece := pipe.recv()) is Word.GO_ON:
                ahead -= 1
            if piece is Word.END:
                return
            batches = source.batches(piece)
            for part in count():
                first = next(batches, None)
                if first is None:
                    break
                while ahead == SCAN_PARTS_AHEAD_MAX or (ahead and pipe.poll()):
                    pipe.recv()
                    ahead -= 1
                name = f"{piece.number}-{part}"
                _write(job.directory / name, chain([first], batches))
                pipe.send(name)
                ahead += 1


def _write(file: Path, batches: Iterator[pa.RecordBatch]) -> None:
    """Write batches to `file` until it is large enough. Each is written as soon as it is made:
    it is in the cache then, and the next one reuses its memory (45 ns a row of 370)."""
    import pyarrow as pa

    size = 0
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, rows_schema()) as writer:
        for batch in batches:
            writer.write_batch(batch)
            size += batch.nbytes
            if size >= SCAN_PART_BYTES:
                return
