"""A reader process of a server: it answers reads from the files of the store.

    reads       a live reader of this process, which looks at the writer's files before each read
    the rest    the owner of the store, see `kvstore.server.forwarding`

Its owner starts it (`kvstore.server.readers`) with a line of JSON on stdin, and keeps stdin open as
long as it lives. The process writes a line to stdout once it is ready.

Invariants
1. A read shows each commit whose answer was sent before the read came, whichever process took it.
2. A caller is admitted here before anything is handed to the owner, because the owner sees no
   address of the caller. The owner compares the token once more.
3. A read that this process cannot answer at present is answered by the owner. So is a read behind
   the time at which a key expires, until the owner has deleted the key.
4. The process ends with its owner, also with one that was killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstore.errors import NotYetWrittenError, RetryableError, StorageError
from kvstore.limits import SERVER_READER_STALENESS_S
from kvstore.live import LiveReader, follow
from kvstore.protocol import KEYS_PATH, VERBS_PATH
from kvstore.server.access import Grant, Tokens
from kvstore.server.app import App
from kvstore.server.exchange import Message, Receive, Send, read_form
from kvstore.server.forwarding import Forwarder
from kvstore.server.head import Head
from kvstore.server.running import server_config, server_tls
from kvstore.server.sharing import SharingServer

_KEYS: Final = KEYS_PATH.encode()
_VERBS: Final = VERBS_PATH.encode()
_NAMES: Final = "get get_many floor scan keys count history changes events versions join"
READS: Final = frozenset(_VERBS + name.encode() for name in _NAMES.split())
"""The paths of the verbs that a reader answers. Others write, or tell of the owner."""

_MENDED_BY_OWNER: Final = (NotYetWrittenError, RetryableError, StorageError)
"""Failures of a reader that the owner does not have: it can complete the present time, and no file
is taken away from it."""


class ReadingApp(App):
    """The application of a reader process."""

    def __init__(self, reader: LiveReader, tokens: Tokens | None, owner: Forwarder) -> None:
        super().__init__(reader, tokens=tokens)
        self._reader, self._owner = reader, owner
        self._is_fresh = False

    async def _answer(
        self, head: Head, access: Grant, body: bytes, receive: Receive, send: Send
    ) -> None:
        if _is_read(head):
            answer = _Answer(send)
            try:
                self._catch_up()
                if not self._reader.is_waiting:
                    await super()._answer(head, access, body, receive, answer)
                    return
            except _MENDED_BY_OWNER:
                if answer.has_begun:
                    raise
        await self._owner.forward(head, body, receive, send)

    async def _serve_page(self, head: Head, receive: Receive, send: Send) -> None:
        """The owner makes the page: it knows the claims, and does what a form asks for."""
        if not self.has_tokens:
            head.require_here()
        body = await read_form(head, receive)
        await self._owner.forward(head, body, receive, send)

    def _catch_up(self) -> None:
        """Look at the writer's files, once for all requests that have come. A request that comes
        later begins in a later turn of the event loop, behind `_expire`."""
        if not self._is_fresh:
            self._reader.refresh()
            self._is_fresh = True
            asyncio.get_running_loop().call_soon(self._expire)

    def _expire(self) -> None:
        self._is_fresh = False


class _Answer:
    """Sends an answer, and knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)


def _is_read(head: Head) -> bool:
    if head.path.startswith(_KEYS):
        return head.method in ("GET", "HEAD")
    return head.path in READS


def main() -> None:
    """Read the orders of the owner, and serve until a signal comes or the owner has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the owner ends its readers
    orders = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_owner, name="kvstore-owner", daemon=True).start()
    listener = socket.socket(fileno=orders["listener"])
    store, tokens = Path(orders["store"]), orders["tokens"]
    with follow(store, SERVER_READER_STALENESS_S) as reader:
        owner = Forwarder(store, orders["owner"])
        known = None if tokens is None else Tokens.of_fields(tokens)
        run(ReadingApp(reader, known, owner), listener, orders["tls"], ready=_say_ready)
        owner.close()


def run(
    app: App, listener: socket.socket, tls: list[str] | None, *, ready: Callable[[], None]
) -> None:
    """Accept connections at a socket that other processes share, until a signal comes."""
    context: Any = None if tls is None else server_tls(*tls)
    SharingServer(server_config(app, context), listener, ready=ready).run([])


def _say_ready() -> None:
    os.write(1, b"ready\n")


def _end_with_owner() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)
