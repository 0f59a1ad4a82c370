"""The workers of a scan: processes, and the piece that each of them reads.

Invariants
1. The pieces are handed out in key order, each to one process: the scan or one worker.
2. A worker gets one answer to each of its questions, and one `GO_ON` for each part that the scan
   has finished. So a worker is at most `SCAN_PARTS_AHEAD_MAX` parts ahead.
3. The scan waits only for a worker that reads a piece, or that closes the database at the end.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterator, Sequence

from kvstore.errors import StaleReaderError
from kvstore.limits import SCAN_PARTS_AHEAD_MAX
from kvstore.scanners.source import ScanJob, ScanPiece, Word
from kvstore.worker_process import WorkerProcess


class ScanWorker(WorkerProcess):
    """A process that reads for scans, seen from its scan."""

    def __init__(self) -> None:
        self.asks = False
        """Whether it has asked for work and waits for the answer. It has no piece then."""
        super().__init__("kvstore.scanners.source", what="a scan", remedy="scan again")


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
