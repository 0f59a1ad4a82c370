"""Requests that a reader process hands to the owner of its store."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kvstore.errors import IndeterminateError
from kvstore.remote import control_socket
from kvstore.remote.server.http import Head, Message
from kvstore.remote.server.reader_process import Forwarder


def test_an_answer_that_breaks_off_leaves_the_request_in_doubt(tmp_path: Path) -> None:
    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError(message)

    def answer() -> None:
        opened, _ = listener.accept()
        with opened:
            opened.recv(1 << 16)
            opened.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort")

    with control_socket.listen(tmp_path) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        owner = Forwarder(tmp_path, control_socket.SOCKET_NAME)
        head = Head("PUT", b"/v1/keys/k", b"", {}, None)
        with pytest.raises(IndeterminateError, match="its answer broke off"):
            asyncio.run(owner.forward(head, b"v", receive, send))
        thread.join()
