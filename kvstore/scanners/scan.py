"""A parallel scan, from the call to its last row: its checkpoint, its pieces, its batches, its end.

Invariants
1. The pieces cover the span in key order and share no key. The batches come piece by piece.
2. A call that fails leaves neither a directory nor a process behind.
3. The end of a scan runs once, whatever causes it. It removes the directory, and a worker that may
   have the checkpoint open is dead before that.
4. At most `SCAN_WORKERS_MAX` workers rest; none rests once the store is closed.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.engine import Engine, FileSpan
from kvstore.engine.rocks import RocksEngine
from kvstore.engine.rocks_secondary import SecondaryEngine
from kvstore.errors import ClosedError, StorageError
from kvstore.forks import own
from kvstore.limits import (
    SCAN_PIECE_BYTES,
    SCAN_PIECES_MAX,
    SCAN_WORKERS_BYTES_MIN,
    SCAN_WORKERS_MAX,
)
from kvstore.mvcc.versions import ReadView
from kvstore.scanners.crew import Crew, ScanWorker
from kvstore.scanners.source import ScanJob, ScanPiece, ScanSource
from kvstore.span import Span
from kvstore.splits import split_span, user_spans

if TYPE_CHECKING:
    import pyarrow as pa

SCANS_DIRECTORY: Final = "scans"


class Scanners:
    """The worker processes of one store. The first scan that wants them starts them."""

    def __init__(self) -> None:
        self.idle: list[ScanWorker] = []
        self.scans: weakref.WeakSet[ParallelScan] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_closed = False
        own(self, "the parallel scans of a store")

    def scan(
        self,
        engine: RocksEngine,
        view: ReadView,
        span: Span,
        as_of: int,
        *,
        workers: int,
        rows: int,
    ) -> ParallelScan:
        """The rows of `span` at `as_of`, read by several processes, this one included. Costs a
        checkpoint, and opening it."""
        directory = _new_directory(engine)
        taken: list[ScanWorker] = []
        try:
            directory.mkdir(mode=0o700, parents=True)
            if engine.is_read_only:
                source, home = engine.path.absolute(), directory / "home"
                engine.lay_out(home)
            else:
                source = home = directory / "checkpoint"
                engine.checkpoint(source)
            job = ScanJob(source, home, directory, as_of, dict(view.stamps), rows)
            pieces = list(_pieces(engine, view, span, as_of, workers))
            taken += (self._take() for _ in range(workers - 1))
            crew = Crew(job, pieces, taken)  # the workers open the checkpoint meanwhile
            scan = ParallelScan(engine, job, pieces, crew, self._give_back)
        except BaseException:
            for worker in taken:
                worker.kill()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        with self._lock:
            self.scans.add(scan)
            is_closed = self._is_closed
        if is_closed:
            scan.close()
        return scan

    def close(self) -> None:
        """End all scans and processes. Repeatable."""
        with self._lock:
            self._is_closed = True
            scans, idle = list(self.scans), self.idle
            self.idle = []
        for scan in scans:
            scan.close()
        for worker in idle:
            worker.kill()

    def _take(self) -> ScanWorker:
        with self._lock:
            while self.idle:
                worker = self.idle.pop()
                if worker.is_alive():
                    return worker
        return ScanWorker()

    def _give_back(self, workers: list[ScanWorker]) -> None:
        with self._lock:
            room = 0 if self._is_closed else SCAN_WORKERS_MAX - len(self.idle)
            self.idle += workers[:room]
        for worker in workers[room:]:
            worker.kill()


class ParallelScan:
    """An iterator over record batches. To end it early, close it or drop the last reference."""

    def __init__(
        self,
        engine: RocksEngine,
        job: ScanJob,
        pieces: Sequence[ScanPiece],
        crew: Crew,
        give_back: Callable[[list[ScanWorker]], None],
    ) -> None:
        source = ScanSource(job, beside=engine)
        self.crew = crew
        self._batches = _taken(job, pieces, source, crew)
        self._end = weakref.finalize(self, _clean_up, crew, source, job.directory, give_back)
        self._is_closed = False
        own(self, "the scan")

    def fork_let_go(self) -> None:
        """In a forked child: the files and processes are the parent's, so nothing is cleaned up."""
        self._end.detach()

    def __iter__(self) -> ParallelScan:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._is_closed:
            raise ClosedError("the scan")
        try:
            return next(self._batches)
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            self._end()
            if self._is_closed:  # another thread closed it meanwhile
                raise ClosedError("the scan") from error
            raise

    def close(self) -> None:
        """End the scan. Repeatable; a scan that has come to its end stays at its end."""
        self._is_closed = self._end.alive
        self._end()


def _new_directory(engine: RocksEngine) -> Path:
    """The scan's directory: beside the store's files, which it links, unless they are read-only."""
    token = secrets.token_hex(8)
    if engine.is_read_only:
        return Path(tempfile.gettempdir()) / f"kvstore-scan-{token}"
    return engine.path / SCANS_DIRECTORY / token


def is_worth_workers(engine: RocksEngine, span: Span) -> bool:
    """Whether `span` may hold enough bytes, in files and memtables, for processes to be faster.
    Other processes cannot open the state of a database that another process writes."""
    if isinstance(engine, SecondaryEngine):
        return False
    size = sum(file.size_bytes for file in _files(engine, span))
    return size + engine.stats()["data_memtable_bytes"] >= SCAN_WORKERS_BYTES_MIN


def _files(engine: Engine, span: Span) -> list[FileSpan]:
    """The files whose spans of user keys cross `span`."""
    return [
        file
        for file in user_spans(engine.files())
        if file.last >= span.start and (span.end is None or file.first < span.end)
    ]


def _pieces(
    engine: Engine, view: ReadView, span: Span, as_of: int, workers: int
) -> Iterator[ScanPiece]:
    """Cut `span` into a few pieces for each process, and into more if it is large."""
    files = _files(engine, span)
    wanted = max(4 * workers, sum(file.size_bytes for file in files) // SCAN_PIECE_BYTES)
    for number, piece in enumerate(split_span(span, files, min(wanted, SCAN_PIECES_MAX))):
        yield ScanPiece(number, piece, view.fragments.cover(piece, as_of))


def _clean_up(
    crew: Crew, source: ScanSource, directory: Path, give_back: Callable[[list[ScanWorker]], None]
) -> None:
    try:
        for worker in crew.at_work():
            worker.kill()
        source.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        give_back(crew.resting())


def _taken(
    job: ScanJob, pieces: Sequence[ScanPiece], source: ScanSource, crew: Crew
) -> Iterator[pa.RecordBatch]:
    """The batches of all pieces, in order."""
    for piece in pieces:
        if crew.keeps(piece.number):
            for batch in source.batches(piece):
                yield batch
                crew.listen()
        else:
            for part in crew.parts(piece.number):
                yield from batches_of(job.directory / part)
    crew.finish()


def batches_of(file: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a part that a worker wrote. Raises `StorageError` if it cannot be read."""
    import pyarrow as pa

    with _reading(file), pa.memory_map(str(file)) as mapped:
        batches = pa.ipc.open_file(mapped)
        file.unlink()
        for at in range(batches.num_record_batches):
            batch = batches.get_batch(at)
            batch.validate(full=True)  # offsets out of it would end the process
            yield batch


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"reading {file} failed: {error}", "scan again") from error
