"""One Arrow scan by several processes, which read a checkpoint side by side: cuts of the key space,
workers, and the scan.
"""

from __future__ import annotations

import secrets
import select
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from enum import Enum
from itertools import chain, count, repeat, zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.base.forks import own
from kvstore.base.span import Span
from kvstore.base.worker_process import WorkerProcess
from kvstore.codec.keys import TAIL_BYTES, check_data_key, span_bounds, unframe
from kvstore.engine import DATA, Engine
from kvstore.engine.api import FileSpan
from kvstore.engine.rocks import RocksEngine
from kvstore.engine.rocks_secondary import SecondaryEngine
from kvstore.errors import ClosedError, CorruptionError, StaleReaderError, StorageError
from kvstore.limits import (
    SCAN_PART_BYTES,
    SCAN_PARTS_AHEAD_MAX,
    SCAN_PIECE_BYTES,
    SCAN_PIECES_MAX,
    SCAN_WORKERS_BYTES_MIN,
    SCAN_WORKERS_MAX,
)
from kvstore.mvcc.arrow import row_batches, rows_schema
from kvstore.mvcc.fragments import Cover
from kvstore.mvcc.key_history import Stamps
from kvstore.mvcc.scan import Read, live_columns
from kvstore.mvcc.versions import ReadView

if TYPE_CHECKING:
    import pyarrow as pa


# --------------------------------------------------------------------------------------------------
# Cuts of the key space into pieces of about equal size in bytes.
#
# Cutting reads the bounds and sizes of the files and no row. It takes each file to be equally dense
# between its bounds. The pieces are even if there are many files, or if keys are spread evenly.
# They are disjoint and complete in every case.

_DIGITS: Final = 8
"""Bytes behind the common prefix that two bounds are interpolated over."""

_ALPHABETS: Final = (b"0123456789", b"0123456789abcdef", b"0123456789ABCDEF")
"""The digits of numbers in keys. Between bounds of digits all keys have digits, so most of 256 byte
values would be cuts where no key is."""

_BYTES: Final = bytes(range(256))


def split_span(span: Span, files: Iterable[FileSpan], count: int) -> list[Span]:
    """Cut `span` into at most `count` pieces, ascending, from user keys that bound `files`."""
    pieces = sorted(_pieces(span, list(files), count))
    total = sum(size for _, size in pieces)
    cuts: list[bytes] = []
    passed = 0.0
    for start, size in pieces:
        due = passed + size / 2 >= total * (len(cuts) + 1) / count
        if due and start > (cuts[-1] if cuts else span.start):
            cuts.append(start)
        passed += size
    starts = [span.start, *cuts[: count - 1]]
    return [Span(a, b) for a, b in zip(starts, [*starts[1:], span.end], strict=True)]


def user_spans(files: Iterable[FileSpan]) -> Iterator[FileSpan]:
    """The files of `data`, with their bounds as user keys. Files of other families are left out."""
    for file in files:
        try:
            check_data_key(file.first)
            check_data_key(file.last)
        except CorruptionError:
            continue
        first, last = (unframe(key[:-TAIL_BYTES]) for key in (file.first, file.last))
        yield FileSpan(first, last, file.size_bytes)


def _pieces(span: Span, files: list[FileSpan], count: int) -> Iterator[tuple[bytes, float]]:
    """Start and bytes of stretches of the files inside `span`, none above a quarter share."""
    inside = [
        (max(first, span.start), last if span.end is None else min(last, span.end), size)
        for first, last, size in files
        if last >= span.start and (span.end is None or first < span.end)
    ]
    total = sum(size for *_, size in inside)
    for first, last, size in inside:
        steps = max(1, min(count * 4, -(-size * count * 4 // max(total, 1))))
        for start in _ladder(first, last, steps):
            yield start, size / steps


def _ladder(first: bytes, last: bytes, steps: int) -> Iterator[bytes]:
    """The keys 0, 1, ... `steps - 1` steps of the way from `first` to `last`, by their bytes."""
    yield first
    if first >= last:
        yield from repeat(first, steps - 1)
        return
    pairs = enumerate(zip(first, last, strict=False))
    common = next((at for at, (a, b) in pairs if a != b), len(first))
    lows = first[common : common + _DIGITS]
    highs = last[common : common + _DIGITS]
    alphabets = []
    low = high = 0
    for a, b in zip_longest(lows, highs, fillvalue=0):
        alphabets.append(alphabet := _alphabet(a, b))
        low = low * len(alphabet) + alphabet.index(a)
        high = high * len(alphabet) + alphabet.index(b)
    for step in range(1, steps):
        rest = low + (high - low) * step // steps
        digits = bytearray()
        for alphabet in reversed(alphabets):
            rest, digit = divmod(rest, len(alphabet))
            digits.append(alphabet[digit])
        digits.reverse()
        yield first[:common] + digits.rstrip(b"\0")


def _alphabet(low: int, high: int) -> bytes:
    """The bytes that keys have where one bound has `low` and the other `high`."""
    return next((each for each in _ALPHABETS if low in each and high in each), _BYTES)


# --------------------------------------------------------------------------------------------------
# The database that the processes of a scan read, and the loop of its workers.

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


# --------------------------------------------------------------------------------------------------
# The workers of a scan: processes, and the piece that each of them reads.
#
# Invariants
# 1. The pieces are handed out in key order, each to one process: the scan or one worker.
# 2. A worker gets one answer to each of its questions, and one `GO_ON` for each part that the scan
#    has finished. So a worker is at most `SCAN_PARTS_AHEAD_MAX` parts ahead.
# 3. The scan waits only for a worker that reads a piece, or that closes the database at the end.


class ScanWorker(WorkerProcess):
    """A process that reads for scans, seen from its scan."""

    def __init__(self) -> None:
        self.asks = False
        """Whether it has asked for work and waits for the answer. It has no piece then."""
        super().__init__("kvstore.mvcc.parallel_scan", what="a scan", remedy="scan again")


class Crew:
    """The workers of one scan, and the pieces that they read."""

    def __init__(
        self, job: ScanJob, pieces: Sequence[ScanPiece], workers: Sequence[ScanWorker]
    ) -> None:
        self._job = job
        self._pieces = pieces
        self.workers = workers
        self._free = 0
        """The first piece that no process has."""
        self._own: deque[int] = deque()
        """Pieces before it that the scan keeps for itself and has not reached."""
        self._keep = 1
        """How many pieces the scan keeps: one more after it waited for a worker, one fewer after a
        worker waited for it."""
        self._reading: dict[ScanWorker, int] = {}
        """The piece that each worker is reading."""
        self._given: dict[int, tuple[ScanWorker, deque[str | None]]] = {}
        """Pieces of workers that the scan has not finished: the worker, and the parts that it wrote
        and the scan has not taken. None follows the last part."""
        self.ahead = dict.fromkeys(workers, 0)
        """How many parts of each worker the scan has not finished."""
        self._told: set[ScanWorker] = set()
        """The workers that know of the scan. A worker that is starting may never learn of it."""
        self._open: set[ScanWorker] = set()
        """The workers that have the database open."""
        self._by_descriptor = {worker.pipe.fileno(): worker for worker in workers}
        self._poll = select.poll()  # 0.6 us a look; `multiprocessing.connection.wait` 4
        for descriptor, worker in self._by_descriptor.items():
            self._poll.register(descriptor, select.POLLIN)
            if worker.asks:
                self._answer(worker)

    def keeps(self, number: int) -> bool:
        """Whether the scan, which has reached this piece, must read it itself."""
        if self._own and number == self._own[0]:
            self._own.popleft()
            return True
        if number == self._free:
            self._free += 1
            return True
        return False

    def parts(self, number: int) -> Iterator[str]:
        """The parts of a worker's piece. Use each part before you ask for the next."""
        worker, parts = self._given[number]
        if not parts:
            self._keep += 1
        elif self.ahead[worker] == SCAN_PARTS_AHEAD_MAX:
            self._keep = max(self._keep - 1, 0)
        while True:
            while not parts:
                self.listen(wait=True)
            part = parts.popleft()
            if part is None:
                break
            yield part
            self.ahead[worker] -= 1
            worker.tell(Word.GO_ON)
            self.listen()
        del self._given[number]

    def listen(self, *, wait: bool = False) -> None:
        """Take the messages of the workers, and give work to idle ones."""
        while heard := self._poll.poll(None if wait else 0):
            for descriptor, _ in heard:
                worker = self._by_descriptor[descriptor]
                try:
                    message = worker.hear()
                except (
                    StaleReaderError
                ):  # it came too late to open the files, which this process has open
                    self._open.discard(worker)
                    continue
                if message is Word.ASK:
                    worker.asks = True
                    self._answer(worker)
                else:
                    self.ahead[worker] += 1
                    self._given[self._reading[worker]][1].append(message)
            wait = False

    def finish(self) -> None:
        """Wait until no worker has the database open, because closing RocksDB leaves files."""
        while self.at_work():
            self.listen(wait=True)

    def at_work(self) -> list[ScanWorker]:
        """The workers that have the database open, or are opening it."""
        return [worker for worker in self.workers if worker in self._told and not worker.asks]

    def resting(self) -> list[ScanWorker]:
        """The other workers, for another scan."""
        at_work = self.at_work()
        return [worker for worker in self.workers if worker not in at_work]

    def _answer(self, worker: ScanWorker) -> None:
        """Tell a worker to open the database, to read a piece of it, or to close it."""
        if worker in self._reading:
            self._given[self._reading.pop(worker)][1].append(None)
        message: ScanJob | ScanPiece | Word
        if worker in self._open:
            piece = self._next()
            if piece is None:
                self._open.remove(worker)
                message = Word.END
            else:
                self._reading[worker] = piece.number
                self._given[piece.number] = worker, deque()
                message = piece
        elif worker not in self._told and self._free < len(self._pieces):
            self._told.add(worker)
            self._open.add(worker)
            message = self._job
        else:
            return
        worker.asks = False
        worker.tell(message)

    def _next(self) -> ScanPiece | None:
        """The next piece for a worker, behind the pieces that the scan keeps."""
        while len(self._own) < self._keep and self._free < len(self._pieces):
            self._own.append(self._free)
            self._free += 1
        if self._free == len(self._pieces):
            return None
        self._free += 1
        return self._pieces[self._free - 1]


# --------------------------------------------------------------------------------------------------
# A parallel scan, from the call to its last row: its checkpoint, its pieces, its batches, its end.
#
# Invariants
# 1. The pieces cover the span in key order and share no key. The batches come piece by piece.
# 2. A call that fails leaves neither a directory nor a process behind.
# 3. The end of a scan runs once, whatever causes it. It removes the directory, and a worker that
#    may have the checkpoint open is dead before that.
# 4. At most `SCAN_WORKERS_MAX` workers rest; none rests once the store is closed.

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
            pieces = list(_scan_pieces(engine, view, span, as_of, workers))
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


def _scan_pieces(
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
