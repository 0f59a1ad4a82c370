"""Processes that own a store and listen, with or without load, until they are told to end."""

from __future__ import annotations

import itertools
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore

ACKNOWLEDGED = "acknowledged"
"""The file beside the store that has the number of each acknowledged row of the load."""

PAUSE_S = 0.001
"""Between two rows: where a sync costs nothing, a load without end would be as large as memory."""


def row(number: int) -> tuple[bytes, bytes]:
    """A row of the load."""
    return b"load/%08d" % number, struct.pack(">Q", number) * 25


def own(path: Path, engine: str, first: int | None, pipe: Connection) -> None:
    """Own the store until told to stop. With `first`, write rows from this number on."""
    with kvstore.open(path, engine, control=True) as store:
        pipe.send(os.getpid())
        if first is None:
            while pipe.recv() == "fork":
                child = os.fork()
                if child == 0:  # it lives until it is killed
                    while True:
                        signal.pause()
                pipe.send(child)
            return
        with (path.parent / ACKNOWLEDGED).open("ab", buffering=0) as noted:
            for number in itertools.count(first):
                store.put(*row(number))
                noted.write(struct.pack(">Q", number))
                if pipe.poll(PAUSE_S):
                    return


def acknowledged(path: Path) -> int:
    """The number below which all rows of the load are durable; 0 if none is."""
    noted = path.parent / ACKNOWLEDGED
    data = noted.read_bytes() if noted.exists() else b""
    whole = data[: len(data) // 8 * 8]
    return struct.unpack(">Q", whole[-8:])[0] + 1 if whole else 0


class Owner:
    """A child process that owns a store."""

    def __init__(self, spawn: Any, path: Path, engine: str, first: int | None) -> None:
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=own, args=(path, engine, first, theirs))
        self.process.start()
        theirs.close()
        self.pid: int = self._pipe.recv()

    def fork(self) -> int:
        """Make it fork a child that stays alive; returns the child's process id."""
        self._pipe.send("fork")
        child: int = self._pipe.recv()
        return child

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """Make it close the store, and wait for its end."""
        self._pipe.send("stop")
        self.process.join()
        assert self.process.exitcode == 0


@contextmanager
def owning(
    spawn: Any, path: Path, engine: str = "rocksdb", *, load: bool = False
) -> Iterator[Owner]:
    """A process that owns the store within the block."""
    owner = Owner(spawn, path, engine, acknowledged(path) if load else None)
    try:
        yield owner
        if owner.process.is_alive():
            owner.stop()
    finally:
        owner.kill()
