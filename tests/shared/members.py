"""Processes that share a store, and note down what they asked and what they heard.

    member      opens the store with `shared=True`, does random steps, and logs the beginning and
                the end of each with the machine's monotonic clock
    parent      kills, stops and closes whoever owns the store, and starts members anew

A log is a file that the kernel has: what a member has logged survives its death.
"""

from __future__ import annotations

import json
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from kvstore.errors import IndeterminateError, PreconditionError, RetryableError

REGISTERS = (b"register/a", b"register/b")
COUNTER = b"counter"
ACCOUNTS = tuple(b"account/%d" % n for n in range(4))
EACH = 100
"""What an account has at the beginning."""

_CLOSE_AND_OPEN = 0.02
"""The share of steps in which a member leaves, and joins anew."""


class Log:
    """The log of one member."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._next = 0

    def note(self, **fields: Any) -> None:
        """Add a line."""
        line = json.dumps({"at": time.monotonic_ns(), **fields}) + "\n"
        os.write(self._file, line.encode())

    def begin(self, name: str, on: bytes, argument: Any = None) -> int:
        """Note the beginning of a step; returns its number."""
        self._next += 1
        self.note(begin=self._next, name=name, on=on.decode(), argument=argument)
        return self._next

    def end(self, number: int, answer: Any = None) -> None:
        """Note its end."""
        self.note(end=number, answer=answer)


def member(path: Path, log_path: Path, name: str, seed: int, pipe: Connection) -> None:
    """Join the store, and do steps until told to stop."""
    log, draw = Log(log_path), random.Random(seed)
    store = kvstore.open(path, shared=True, patience=60)
    pipe.send(os.getpid())
    count = 0
    while not pipe.poll():
        count += 1
        try:
            _step(store, log, draw, name, count)
        except (IndeterminateError, RetryableError) as error:
            log.note(error=repr(error))
        if draw.random() < _CLOSE_AND_OPEN:
            store.close()
            store = kvstore.open(path, shared=True, patience=60)
    store.close()


def _step(store: Any, log: Log, draw: random.Random, name: str, count: int) -> None:
    kind = draw.choice(("put", "swap", "get", "get", "add", "sum", "own", "move", "total"))
    value = f"{name}.{count}"
    register = draw.choice(REGISTERS)
    if kind == "put":
        number = log.begin("put", register, value)
        store.put(register, value.encode())
        log.end(number)
    elif kind == "swap":
        expected = store.get(register)
        told = None if expected is None else expected.decode()
        number = log.begin("swap", register, [told, value])
        try:
            store.put_if(register, value.encode(), expected)
            log.end(number, True)
        except PreconditionError:
            log.end(number, False)
    elif kind == "get":
        number = log.begin("get", register)
        store.refresh()
        found = store.get(register)
        log.end(number, None if found is None else found.decode())
    elif kind == "add":
        number = log.begin("add", COUNTER, 1)
        log.end(number, store.increment(COUNTER))
    elif kind == "sum":
        number = log.begin("get", COUNTER)
        store.refresh()
        found = store.get(COUNTER)
        log.end(number, 0 if found is None else int(found))
    elif kind == "own":
        key = f"own/{name}".encode()
        store.put(key, value.encode())
        found = [store.get(key), dict(store.scan(prefix=key)).get(key), store.get_many([key])[0]]
        assert found == [value.encode()] * 3, (found, value)
        log.note(own=value)
    elif kind == "move":
        source, target = draw.sample(ACCOUNTS, 2)
        mark = f"moved/{value}".encode()

        def move(txn: Any) -> None:
            held = int(txn.get(source))
            txn.put(source, b"%d" % (held - 1))
            txn.put(target, b"%d" % (int(txn.get(target)) + 1))
            txn.put(mark, b"")

        store.transact(move)
        log.note(moved=mark.decode())
    else:
        total = sum(int(value) for _, value in store.scan(prefix=b"account/"))
        assert total == EACH * len(ACCOUNTS), total
