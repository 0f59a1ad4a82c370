"""A process that works for this one, and the pipe between the two.

The process runs `serve(descriptor)` of a module of ours. It is no process of `multiprocessing`,
which would run the caller's main module again.

Invariants
1. The death of either process closes its end of the pipe, so the other one learns of it. A fork of
   this process keeps no copy of its end.
2. An interrupt of the terminal reaches this process alone, which ends the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Pipe
from typing import Any, Final

from kvstore.base.forks import own, undivided
from kvstore.errors import StorageError


class WorkerProcess:
    """One such process, seen from here."""

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
