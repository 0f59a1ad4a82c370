"""The workers of a scan: processes, and who of them reads what."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe
from typing import Any, Final

from kvstore.errors import StorageError
from kvstore.limits import SCAN_PARTS_AHEAD_MAX
from kvstore.scanners.source import GO_ON, Job, Piece


class Worker:
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


class Crew:
    """The workers of one scan: who reads which piece, and what there is of it."""

    def __init__(self, job: Job, pieces: Sequence[Piece], workers: Sequence[Worker]) -> None:
        self._job = job
        self._pieces = pieces
        self._free = 0
        """Nobody has this piece, nor any behind it."""
        self._left: deque[int] = deque()
        """Pieces before it that are left to the scan."""
        self._leave = 1
        """So many are left to it: as it waits for workers, or they for it, one more or less."""
        self._given: dict[int, tuple[Worker, deque[str | None]]] = {}
        """The pieces that workers have and the scan has not come to, and their parts as far as they
        are written; None behind the last."""
        self._parts: dict[Worker, deque[str | None]] = {}
        """Those of the piece that each reads now."""
        self._told: set[Worker] = set()
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
            worker.send(GO_ON)
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

    def _answer(self, worker: Worker) -> None:
        worker.asks = True
        if worker in self._parts:
            self._parts.pop(worker).append(None)
        for answer in self._answers[worker]:
            worker.asks = False
            worker.send(answer)
            return

    def _answers_to(self, worker: Worker) -> Iterator[Job | Piece | None]:
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
from kvstore.scanners.source import serve
serve(int(sys.argv[1]))
"""
