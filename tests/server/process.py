"""A server in a process of its own, by the command, that tests kill and start again."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path


class ServerProcess:
    """`kvstore serve` on one store, at one address."""

    def __init__(self, store: Path, listen: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "kvstore.cli", "serve", str(store), "--create"]
        self._command += ["--listen", listen, *options]
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.notes: Path | None = None
        """The file to which it prints its notes; by default they are this process's."""

    def begin(self) -> None:
        """Start it, and do not wait."""
        with ExitStack() as stack:
            notes = self.notes and stack.enter_context(self.notes.open("ab"))
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=notes, text=True
            )

    def start(self) -> str:
        """Start it, and return its address once it listens."""
        self.begin()
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("serving "), line
        self.url = line.split()[1]
        return self.url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it by SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def memory_max(self) -> int:
        """Its peak memory in bytes."""
        return memory_max(self.pid)

    def _end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


def memory_max(pid: int) -> int:
    """The peak memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def readers_of(pid: int) -> list[int]:
    """The running reader processes of a process, the oldest first."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"server.reader_process" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return sorted(found)
