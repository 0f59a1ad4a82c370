"""One Arrow scan by several processes, which read a checkpoint of the store side by side.

Iterating holds the interpreter lock, so threads gain nothing. The span is cut into pieces; worker
i of n reads the pieces i, i + n, ... in turn, and writes its rows as files of Arrow IPC, which the
scan maps, unlinks, and hands out in the order of the keys.

    <store>/scans/<token>/checkpoint/     hard links: the state that the scan shows
                         /<piece>-<part>  rows on their way; a worker is a few parts ahead at most

    scan -> worker      a job | "go on", once a part
    worker -> scan      a part's file name | None at the end of a piece, and of the job | an error

Chosen: files rather than pipes, since the scan then copies nothing, and a worker need not wait
while another's rows are taken; processes of our own rather than `multiprocessing`'s, which runs
the caller's main module again in each.

A small span is read sooner by one process: `is_worth_workers` says which.

Invariants
1. A scan shows the state of the moment it was made, whatever is written meanwhile.
2. Whatever ends a scan (its last row, an error, a worker's death, closing it, letting go of it,
   closing the store, the death of its process) removes its directory. Only the death of the machine
   leaves one: opening the store removes that.
3. Workers that were ended early are killed; those that finished wait for the next scan.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, count
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.arrow import ROWS_SCHEMA, row_batches
from kvstore.codec.keys import span_bounds
from kvstore.engine import DATA, Engine, FileSpan
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import ClosedError, StorageError
from kvstore.limits import (
    SCAN_PART_BYTES,
    SCAN_PARTS_AHEAD_MAX,
    SCAN_PIECE_BYTES,
    SCAN_PIECES_MAX,
    SCAN_WORKERS_BYTES_MIN,
    SCAN_WORKERS_MAX,
)
from kvstore.mvcc.scan import Read, live_columns
from kvstore.mvcc.versions import View
from kvstore.span import Span
from kvstore.splits import split_span, user_spans

if TYPE_CHECKING:
    import pyarrow as pa

SCANS_DIRECTORY: Final = "scans"


class Piece(NamedTuple):
    """What one worker reads at a time, and by what it sees."""

    number: int
    span: Span
    read: Read


class Job(NamedTuple):
    """One worker's share of a scan of the database at `source`."""

    source: Path
    directory: Path
    pieces: list[Piece]
    batch_rows: int


class Scanners:
    """The worker processes of one store, started when they are first asked for."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._scans: weakref.WeakSet[ParallelScan] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_closed = False

    def scan(
        self, engine: RocksEngine, view: View, span: Span, as_of: int, *, workers: int, rows: int
    ) -> ParallelScan:
        """The rows of `span` at `as_of`. Costs a checkpoint, and 0.4 s for each new worker."""
        directory = _make_directory(engine)
        crew: list[_Worker] = []
        try:
            source = engine.path
            if not engine.is_read_only:
                source = directory / "checkpoint"
                engine.checkpoint(source)
            crew += (self._take() for _ in range(workers))
            pieces = list(_pieces(engine, view, span, as_of, workers))
            for number, worker in enumerate(crew):
                share = pieces[number::workers]
                worker.start(Job(source, directory, share, rows))
            scan = ParallelScan(crew, len(pieces), directory, self._give_back)
        except BaseException:
            _abandon(crew, directory)
            raise
        with self._lock:
            self._scans.add(scan)
            is_closed = self._is_closed
        if is_closed:
            scan.close()
        return scan

    def close(self) -> None:
        """End all scans and processes. Repeatable."""
        with self._lock:
            self._is_closed = True
            scans, idle = list(self._scans), self._idle
            self._idle = []
        for scan in scans:
            scan.close()
        for worker in idle:
            worker.kill()

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive():
                    return worker
        return _Worker()

    def _give_back(self, crew: list[_Worker]) -> None:
        with self._lock:
            room = 0 if self._is_closed else SCAN_WORKERS_MAX - len(self._idle)
            self._idle += crew[:room]
        for worker in crew[room:]:
            worker.kill()


class ParallelScan:
    """An iterator over record batches. Let go of it, or close it, to end it early."""

    def __init__(
        self,
        crew: list[_Worker],
        pieces: int,
        directory: Path,
        give_back: Callable[[list[_Worker]], None],
    ) -> None:
        self._crew = crew
        self._directory = directory
        self._give_back = give_back
        self._batches = _taken(crew, pieces, directory)
        self._abandon = weakref.finalize(self, _abandon, crew, directory)
        self._is_closed = False

    def __iter__(self) -> ParallelScan:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._is_closed:
            raise ClosedError("the scan")
        try:
            return next(self._batches)
        except StopIteration:
            if self._abandon.detach() is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._give_back(self._crew)
            raise
        except BaseException as error:
            self._abandon()
            if self._is_closed:  # meanwhile, by another thread
                raise ClosedError("the scan") from error
            raise

    def close(self) -> None:
        """End the scan. Repeatable; a scan that has come to its end stays at its end."""
        self._is_closed = self._abandon.alive
        self._abandon()


class _Worker:
    """A process that scans, as its scan holds it."""

    def __init__(self) -> None:
        self.pipe, far = Pipe()
        # What we import, it must find: also what a test or a notebook has put on the path.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(far.fileno())],
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=(far.fileno(),),
            start_new_session=True,  # an interrupt from the terminal is ours: we end it
        )
        far.close()

    def start(self, job: Job) -> None:
        """Have it do a job. Raises `StorageError` if it died."""
        try:
            self.pipe.send(job)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        """The next message. Raises what the worker raised, or `StorageError` if it died."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, BaseException):
            raise message
        return message

    def go_on(self) -> None:
        """Let it write one more part. It may have ended: `receive` says so."""
        with suppress(OSError):
            self.pipe.send(None)

    def _died(self) -> StorageError:
        code = self._process.wait()
        return StorageError(f"a worker process of a scan ended with {code}", "scan again")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it and wait for its end."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()


_MAIN: Final = """\
import sys
sys.path = [entry for entry in sys.path if entry]  # nothing of the working directory
from kvstore.scanners import serve
serve(int(sys.argv[1]))
"""


def _make_directory(engine: RocksEngine) -> Path:
    """Where links to the store's files can be made; of a read-only store nothing is linked."""
    if engine.is_read_only:
        return Path(tempfile.mkdtemp(prefix="kvstore-scan-"))
    directory = engine.path / SCANS_DIRECTORY / secrets.token_hex(8)
    directory.mkdir(parents=True)
    return directory


def is_worth_workers(engine: RocksEngine, span: Span) -> bool:
    """Whether `span` may hold so much, on file and not yet there, that processes are faster."""
    size = sum(file.size_bytes for file in _files(engine, span))
    return size + engine.stats()["data_memtable_bytes"] >= SCAN_WORKERS_BYTES_MIN


def _files(engine: Engine, span: Span) -> list[FileSpan]:
    """The files that share keys with `span`, by user keys."""
    return [
        file
        for file in user_spans(engine.files())
        if file.last >= span.start and (span.end is None or file.first < span.end)
    ]


def _pieces(engine: Engine, view: View, span: Span, as_of: int, workers: int) -> Iterator[Piece]:
    """Cut `span`; a piece fits into what a worker may be ahead, as far as the files tell."""
    files = _files(engine, span)
    wanted = max(4 * workers, sum(file.size_bytes for file in files) // SCAN_PIECE_BYTES)
    stamps = dict(view.stamps)
    for number, piece in enumerate(split_span(span, files, min(wanted, SCAN_PIECES_MAX))):
        yield Piece(number, piece, Read.of(as_of, stamps, view.fragments.cover(piece, as_of)))


def _abandon(crew: list[_Worker], directory: Path) -> None:
    for worker in crew:
        worker.kill()
    shutil.rmtree(directory, ignore_errors=True)


def _taken(crew: list[_Worker], pieces: int, directory: Path) -> Iterator[pa.RecordBatch]:
    """The batches of all pieces, in order."""
    import pyarrow as pa

    for number in range(pieces):
        worker = crew[number % len(crew)]
        while (name := worker.receive()) is not None:
            file = directory / name
            with pa.memory_map(str(file)) as mapped:
                batches = pa.ipc.open_file(mapped)
                file.unlink()
                for at in range(batches.num_record_batches):
                    yield batches.get_batch(at)
            worker.go_on()
    for worker in crew:  # it has let go of the checkpoint, where RocksDB leaves files on closing
        assert worker.receive() is None


# -- in the worker ------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Do jobs until the other end of the pipe is closed."""
    with Connection(descriptor) as pipe:
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            try:
                _do(job, pipe)
                pipe.send(None)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                shutil.rmtree(job.directory, ignore_errors=True)
                return
            except Exception as error:  # noqa: BLE001  # it is raised at the other end
                pipe.send(error)


def _do(job: Job, pipe: Connection) -> None:
    engine = RocksEngine(job.source, read_only=True)
    ahead = 0
    try:
        for piece in job.pieces:
            cursor = engine.cursor(DATA, *span_bounds(piece.span.start, piece.span.end))
            rows = live_columns(cursor, piece.read, chunk=job.batch_rows)
            batches = iter(row_batches(rows))
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
            pipe.send(None)
        for _ in range(ahead):  # the pipe is empty for the next job
            pipe.recv()
    finally:
        engine.close()


def _write(file: Path, batches: Iterator[pa.RecordBatch]) -> None:
    """Write batches to `file` until it is large enough. Each as it is made: it lies in the cache
    then, and the next one takes its memory (45 ns a row of 370)."""
    import pyarrow as pa

    size = 0
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, ROWS_SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
            size += batch.nbytes
            if size >= SCAN_PART_BYTES:
                return
