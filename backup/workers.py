"""Work in pieces, done by this process and by others beside it.

    for number, found in shared(work, pieces, workers=2, tell=tally.add): ...

Pieces, results and the work itself are sent through pipes, so they are small and can be pickled. A
worker runs `serve(descriptor)` of this module. It is no process of `multiprocessing`, which would
run the caller's main module again.

Invariants
1. Each piece is done once. This process does pieces too, and gives one to every idle worker.
2. When the iteration ends, by an error or an interrupt too, no worker is left.
3. The death of either process closes its end of the pipe, so the other one learns of it, and a
   worker ends at once. A fork of this process keeps no copy of its end.
4. An interrupt of the terminal reaches this process alone, which ends the workers.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from kvstore.base.forks import own, undivided
from kvstore.errors import StorageError

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")
_HUNG_UP: Final = (EOFError, BrokenPipeError, ConnectionResetError)

TellRows: TypeAlias = "Callable[[int], None]"
"""Called with the rows that were done since the last call."""


class _Done(NamedTuple):
    """The result of a piece, on its way to the process that shares the work."""

    result: Any


def shared(
    work: Callable[[_Piece, TellRows], _Result],
    pieces: Sequence[_Piece],
    *,
    workers: int,
    tell: TellRows,
    here: Callable[[_Piece, TellRows], _Result] | None = None,
) -> Iterator[tuple[int, _Result]]:
    """Do `work` for each piece in `workers` processes; yields the numbers and results as they come.

    This process does `here` for its pieces, or `work`. The first error of any piece is raised.
    """
    crew = _Crew(work, pieces, tell)
    mine = here or work
    try:
        crew.start(min(workers, len(pieces)) - 1)
        while True:
            crew.listen()
            while crew.done:
                yield crew.done.popleft()
            if crew.left:
                number, piece = crew.left.popleft()
                yield number, mine(piece, crew.told)
            elif crew.busy:
                crew.listen(until_done=True)
            elif not crew.done:
                return
    finally:
        crew.kill()


class _Crew:
    """The workers, and the pieces that they do."""

    def __init__(self, work: object, pieces: Sequence[Any], tell: TellRows) -> None:
        self._work, self._tell = work, tell
        self._workers: list[WorkerProcess] = []
        self.left = deque(enumerate(pieces))
        self.busy: dict[WorkerProcess, int] = {}
        self.done: deque[tuple[int, Any]] = deque()

    def start(self, count: int) -> None:
        """Start workers, and give each a piece."""
        for _ in range(count):
            worker = WorkerProcess(
                "kvstore.backup.workers", what="a shared job", remedy="repeat the call"
            )
            self._workers.append(worker)
            self._give(worker)

    def told(self, rows: int) -> None:
        """Count rows of this process's own piece, and look after the workers."""
        self._tell(rows)
        self.listen()

    def listen(self, *, until_done: bool = False) -> None:
        """Take the messages of the workers; with `until_done` wait until a piece is done."""
        while self.busy:
            pipes = {worker.pipe: worker for worker in self.busy}
            ready = wait(list(pipes), None if until_done and not self.done else 0)
            for pipe in ready:
                self._heard(pipes[pipe])  # type: ignore[index]  # one of the pipes given
            if not ready or (until_done and self.done):
                return

    def kill(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()

    def _heard(self, worker: WorkerProcess) -> None:
        message = worker.hear()
        if isinstance(message, _Done):
            self.done.append((self.busy.pop(worker), message.result))
            self._give(worker)
        else:
            self._tell(message)

    def _give(self, worker: WorkerProcess) -> None:
        if self.left:
            number, piece = self.left.popleft()
            worker.tell((self._work, piece))
            self.busy[worker] = number


def serve(descriptor: int) -> None:
    """Do pieces until the other end of the pipe is closed: the loop of a worker."""
    with Connection(descriptor) as pipe, suppress(*_HUNG_UP):
        todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(pipe, todo), daemon=True).start()
        while True:
            work, piece = todo.get()
            answer: object
            try:
                answer = _Done(work(piece, pipe.send))
            except _HUNG_UP:
                raise
            except Exception as error:  # noqa: BLE001  # raised again at the other end
                answer = error
            pipe.send(answer)


def _listen(pipe: Connection, todo: queue.SimpleQueue[Any]) -> None:
    """Pass messages on. In a thread of its own: it ends a piece that nobody waits for any more."""
    with suppress(EOFError, OSError):
        while True:
            todo.put(pipe.recv())
    os._exit(1)


class WorkerProcess:
    """A process that works for this one, and the pipe between the two, seen from here."""

    def __init__(self, module: str, *, what: str, remedy: str) -> None:
        """`what` it works for, and the `remedy` of its death, stand in errors."""
        self._what, self._remedy = what, remedy
        # The worker must find our imports, also from a path that a test or a notebook has added.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with undivided():  # a copy of its end in a fork would hide its death
            self.pipe, far = Pipe()
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(module), str(far.fileno())],
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(far.fileno(),),
                start_new_session=True,
            )
            far.close()
            own(self, f"a worker process of {what}", endings=("kill",))

    def fork_let_go(self) -> None:
        """Hang up in a forked child: the worker ends when the last copy of this end is closed."""
        self.pipe.close()

    def tell(self, message: object) -> None:
        """Send it a message. Raises `StorageError` if it died."""
        try:
            self.pipe.send(message)
        except OSError as error:
            raise self._died() from error

    def hear(self) -> Any:
        """Its next message. Raises the worker's error, or `StorageError` if it died."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, BaseException):
            raise message
        return message

    def _died(self) -> StorageError:
        code = self.process.wait()
        what = f"a worker process of {self._what} ended with {code}"
        return StorageError(what, self._remedy)

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End it and wait for its end. Its pipe stays open for a thread that listens to it."""
        self.process.kill()
        self.process.wait()


PROGRAM: Final = """\
import sys
sys.path = [entry for entry in sys.path if entry]  # nothing of the working directory
from {0} import serve
serve(int(sys.argv[1]))
"""
