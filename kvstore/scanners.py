"""One Arrow scan by several processes, this one among them, which read a checkpoint side by side.

Iterating holds the interpreter lock, so threads gain nothing. The span is cut into pieces, which
are handed out in the order of the keys. The scan reads the next one itself while workers read later
ones: one that has nothing to read is given the first piece that nobody has, behind one or a few
that are left to the scan. So the first rows wait for no worker, and each process reads what it can.

A worker writes its rows as files of Arrow IPC, which the scan maps, unlinks, and hands out.

    <store>/scans/<token>/checkpoint/     hard links: the state that the scan shows
                         /<piece>-<part>  rows on their way; a worker is a few parts ahead at most

    scan -> worker      a job | a piece | "go on", once a part | the end of the job
    worker -> scan      a part's file name | "what next?", also at the end of a piece | an error

Chosen: files rather than pipes, since the scan then copies nothing, and a worker need not wait
while another's rows are taken; processes of our own rather than `multiprocessing`'s, which runs
the caller's main module again in each.

A small span is read sooner by one process: `is_worth_workers` says which.

Invariants
1. A scan shows the state of the moment it was made, whatever is written meanwhile.
2. Whatever ends a scan (its last row, an error, a worker's death, closing it, letting go of it,
   closing the store, the death of its process) removes its directory. Only the machine's death, or
   the process's while it starts its first workers, leaves one: opening the store removes that.
3. Workers that were ended early are killed; those that finished wait for the next scan.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
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
from kvstore.mvcc.fragments import Cover
from kvstore.mvcc.scan import Read, live_columns
from kvstore.mvcc.version import Stamps
from kvstore.mvcc.versions import View
from kvstore.span import Span
from kvstore.splits import split_span, user_spans

if TYPE_CHECKING:
    import pyarrow as pa

SCANS_DIRECTORY: Final = "scans"

_GO_ON: Final = True


class Job(NamedTuple):
    """A scan, as each of its processes needs to know it: of the database at `source`."""

    source: Path
    directory: Path
    as_of: int
    stamps: Stamps
    batch_rows: int


class Piece(NamedTuple):
    """What one process reads at a time, and the range tombstones that it sees there."""

    number: int
    span: Span
    cover: Cover


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
        """The rows of `span` at `as_of`, read by so many processes, of which this is one. Costs a
        checkpoint, and opening it."""
        directory = _make_directory(engine)
        crew: list[_Worker] = []
        try:
            source = engine.path
            if not engine.is_read_only:
                source = directory / "checkpoint"
                engine.checkpoint(source)
            job = Job(source, directory, as_of, dict(view.stamps), rows)
            crew += (self._take() for _ in range(workers - 1))
            pieces = list(_pieces(engine, view, span, as_of, workers))
            scan = ParallelScan(engine, job, pieces, crew, self._give_back)
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
        engine: RocksEngine,
        job: Job,
        pieces: Sequence[Piece],
        workers: list[_Worker],
        give_back: Callable[[list[_Worker]], None],
    ) -> None:
        self._workers = workers
        self._directory = job.directory
        self._give_back = give_back
        crew = _Crew(job, pieces, workers)  # they open the checkpoint meanwhile
        self._source = _Source(job, beside=engine)
        self._batches = _taken(job, pieces, self._source, crew)
        self._abandon = weakref.finalize(self, _abandon, workers, job.directory, self._source)
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
                _abandon([], self._directory, self._source)
                self._give_back(self._workers)
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

    asks = False
    """Whether it has said that it has nothing to do, and not been answered."""
    ahead = 0
    """Parts that it has written and the scan has not done with."""

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

    def send(self, message: Any) -> None:
        """Tell it something. Raises `StorageError` if it died."""
        try:
            self.pipe.send(message)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        """Its next message. Raises what the worker raised, or `StorageError` if it died."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, BaseException):
            raise message
        return message

    def _died(self) -> StorageError:
        code = self._process.wait()
        return StorageError(f"a worker process of a scan ended with {code}", "scan again")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it and wait for its end. Its pipe stays open for who listens to it meanwhile."""
        self._process.kill()
        self._process.wait()


class _Crew:
    """The workers of one scan: who reads which piece, and what there is of it."""

    def __init__(self, job: Job, pieces: Sequence[Piece], workers: Sequence[_Worker]) -> None:
        self._job = job
        self._pieces = pieces
        self._free = 0
        """Nobody has this piece, nor any behind it."""
        self._left: deque[int] = deque()
        """Pieces before it that are left to the scan."""
        self._leave = 1
        """So many are left to it: as it waits for workers, or they for it, one more or less."""
        self._given: dict[int, tuple[_Worker, deque[str | None]]] = {}
        """The pieces that workers have and the scan has not come to, and their parts as far as they
        are written; None behind the last."""
        self._parts: dict[_Worker, deque[str | None]] = {}
        """Those of the piece that each reads now."""
        self._told: set[_Worker] = set()
        """Who knows of the scan. A worker that is being started may not before its end."""
        self._answers = {worker: self._answers_to(worker) for worker in workers}
        self._by_descriptor = {worker.pipe.fileno(): worker for worker in workers}
        self._poll = select.poll()
        for descriptor, worker in self._by_descriptor.items():
            self._poll.register(descriptor, select.POLLIN)
            if worker.asks:
                self._answer(worker)

    def leaves(self, number: int) -> bool:
        """Whether the piece that the scan has come to is its own to read, as it then is."""
        if number == self._free:
            self._free += 1
        elif self._left and number == self._left[0]:
            self._left.popleft()
        else:
            return False
        return True

    def parts(self, number: int) -> Iterator[str]:
        """The parts of a worker's piece, each to be used before the next is asked for."""
        worker, parts = self._given.pop(number)
        if not parts:
            self._leave += 1
        elif worker.ahead == SCAN_PARTS_AHEAD_MAX:
            self._leave = max(self._leave - 1, 0)
        while True:
            while not parts:
                self.hear(wait=True)
            part = parts.popleft()
            if part is None:
                return
            yield part
            worker.ahead -= 1
            worker.send(_GO_ON)
            self.hear()

    def hear(self, *, wait: bool = False) -> None:
        """Take what workers have said, and answer those that ask."""
        while heard := self._poll.poll(None if wait else 0):
            for descriptor, _ in heard:
                worker = self._by_descriptor[descriptor]
                message = worker.receive()
                if message is None:
                    self._answer(worker)
                else:
                    worker.ahead += 1
                    self._parts[worker].append(message)
            wait = False

    def finish(self) -> None:
        """Wait for who knows of the scan. They have let go of the checkpoint then, where RocksDB
        leaves files on closing."""
        while not all(worker.asks for worker in self._told):
            self.hear(wait=True)

    def _answer(self, worker: _Worker) -> None:
        worker.asks = True
        if worker in self._parts:
            self._parts.pop(worker).append(None)
        for answer in self._answers[worker]:
            worker.asks = False
            worker.send(answer)
            return

    def _answers_to(self, worker: _Worker) -> Iterator[Job | Piece | None]:
        """What a worker is told each time it asks: the job, pieces of it, its end."""
        if self._free >= len(self._pieces):
            return
        self._told.add(worker)
        yield self._job
        while (number := self._next()) < len(self._pieces):
            parts: deque[str | None] = deque()
            self._given[number] = worker, parts
            self._parts[worker] = parts
            yield self._pieces[number]
        yield None

    def _next(self) -> int:
        """The piece to give to a worker; none has the number of all."""
        while len(self._left) < self._leave and self._free < len(self._pieces):
            self._left.append(self._free)
            self._free += 1
        number = self._free
        self._free = min(number + 1, len(self._pieces))
        return number


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
    for number, piece in enumerate(split_span(span, files, min(wanted, SCAN_PIECES_MAX))):
        yield Piece(number, piece, view.fragments.cover(piece, as_of))


def _abandon(crew: list[_Worker], directory: Path, source: _Source | None = None) -> None:
    for worker in crew:
        worker.kill()
    if source is not None:
        source.close()
    shutil.rmtree(directory, ignore_errors=True)


def _taken(
    job: Job, pieces: Sequence[Piece], source: _Source, crew: _Crew
) -> Iterator[pa.RecordBatch]:
    """The batches of all pieces, in order."""
    import pyarrow as pa

    for piece in pieces:
        if crew.leaves(piece.number):
            for batch in source.batches(piece):
                yield batch
                crew.hear()
        else:
            for part in crew.parts(piece.number):
                file = job.directory / part
                with pa.memory_map(str(file)) as mapped:
                    batches = pa.ipc.open_file(mapped)
                    file.unlink()
                    for at in range(batches.num_record_batches):
                        yield batches.get_batch(at)
    crew.finish()


class _Source:
    """What a scan reads, as one of its processes holds it."""

    def __init__(self, job: Job, *, beside: RocksEngine | None = None) -> None:
        self._job = job
        self._engine = RocksEngine(job.source, read_only=True, beside=beside)

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """The rows of a piece."""
        job = self._job
        read = Read.of(job.as_of, job.stamps, piece.cover)
        cursor = self._engine.cursor(DATA, *span_bounds(piece.span.start, piece.span.end))
        return iter(row_batches(live_columns(cursor, read, chunk=job.batch_rows)))

    def close(self) -> None:
        """Let go of the database. Repeatable."""
        self._engine.close()


# -- in a worker --------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Do jobs until the other end of the pipe is closed."""
    with Connection(descriptor) as pipe, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            pipe.send(None)
            while (job := pipe.recv()) is _GO_ON:  # on the job before
                pass
            try:
                _do(job, pipe)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                shutil.rmtree(job.directory, ignore_errors=True)
                return
            except Exception as error:  # noqa: BLE001  # it is raised at the other end
                pipe.send(error)


def _do(job: Job, pipe: Connection) -> None:
    ahead = 0
    with closing(_Source(job)) as source:
        while True:
            pipe.send(None)
            while (piece := pipe.recv()) is _GO_ON:
                ahead -= 1
            if piece is None:
                break
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
