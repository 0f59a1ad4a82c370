"""The log of a process that serves a store: lines on stderr, by `logging` of the standard library.

    {"time": "2026-11-29T10:00:00.123456Z", "level": "info", "logger": "kvstore.server",
     "event": "listening", "url": "http://127.0.0.1:7447", ...}

`kvstore serve` begins it. A service that serves its own store has handlers of its own, and may give
them `kvstore.metrics.JsonLines`.

Invariants
1. A request is told without its key, its query and its body: keys are never logged, and the page's
   address has a token in its query.
2. A request that readers have handed to the owner is told by the reader, which knows the caller.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvstore.base.notices import JsonLines, is_on, notice
from kvstore.remote.protocol import KEYS_PATH, VERBS_PATH
from kvstore.remote.server.http import Head, Message, Send

LogForm: TypeAlias = Literal["json", "text", "off"]
SERVER: Final = "kvstore.server"
REQUESTS: Final = "kvstore.requests"

_PATH_CHARACTERS_MAX: Final = 60
"""Of a path that is no verb: a stranger chooses it."""


class Log(NamedTuple):
    """What a process tells. Its reader processes tell the same."""

    form: LogForm = "off"
    requests: bool = False
    slow_s: float | None = None

    @property
    def slow(self) -> timedelta | None:
        """The duration from which on an operation is slow; None if none is told."""
        return None if self.slow_s is None else timedelta(seconds=self.slow_s)


_told = Log()


@contextmanager
def told(log: Log) -> Iterator[None]:
    """Write the log of this process to stderr within the block."""
    global _told
    before, _told = _told, log
    handler = logging.StreamHandler(sys.stderr)
    is_json = log.form == "json"
    handler.setFormatter(
        JsonLines() if is_json else logging.Formatter("%(asctime)s %(name)s %(message)s")
    )
    logger, requests = logging.getLogger("kvstore"), logging.getLogger(REQUESTS)
    if log.form == "off":
        logger = logging.getLogger("kvstore.slow")
    levels = [(each, each.level) for each in (logger, requests)]
    if log.form != "off":
        logger.setLevel(logging.INFO)
        if not log.requests:
            requests.setLevel(logging.WARNING)
    if log.form != "off" or log.slow_s is not None:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for each, level in levels:
            each.setLevel(level)
        _told = before


def begun() -> Log:
    """The log of this process."""
    return _told


def tells_requests() -> bool:
    """Whether somebody wants to know of requests. One comparison."""
    return is_on(REQUESTS)


async def telling(serve: Callable[[Send], Awaitable[None]], head: Head, send: Send) -> None:
    """Serve a request, and tell of it behind its answer. Some 20 us."""
    began, status, size = time.perf_counter(), 0, 0

    async def noting(message: Message) -> None:
        nonlocal status, size
        status = message.get("status", status)
        size += len(message.get("body", b""))
        await send(message)

    try:
        await serve(noting)
    finally:
        facts: dict[str, Any] = {"method": head.method, "path": _shown(head.path)}
        length = head.headers.get(b"content-length", b"0")
        notice(
            REQUESTS,
            "request",
            **facts,
            status=status,
            seconds=round(time.perf_counter() - began, 6),
            bytes_in=int(length) if length.isdigit() and len(length) < 19 else 0,
            bytes_out=size,
            client=head.client or "local",
        )


def _shown(path: bytes) -> str:
    if path.startswith(KEYS_PATH.encode()):
        return KEYS_PATH
    most = len(path) if path.startswith(VERBS_PATH.encode()) else _PATH_CHARACTERS_MAX
    return path[: min(most, _PATH_CHARACTERS_MAX)].decode("ascii", "backslashreplace")
