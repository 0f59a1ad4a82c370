"""HTTP/1.1 on one socket: a request out, an answer in. One thread at a time.

Python's `http.client` takes three times as long for a small request, most of it for headers.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Iterator

import pyarrow as pa

from kvstore.client.endpoint import Endpoint
from kvstore.client.reply import ReplyHead, read_head, strange
from kvstore.limits import CLIENT_HEAD_BYTES_MAX

_RECEIVE_BYTES = 256 << 10


class Connection:
    """One connection. An error of the operating system leaves it unusable."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.where = str(endpoint)
        self._socket = endpoint.open(timeout)
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(timeout)
        else:  # the kernel's timeouts spare a system call for each one of ours
            self._socket.settimeout(None)
            seconds = struct.pack("ll", int(timeout), int(timeout % 1 * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._buffer = b""
        self._head = endpoint.head
        self._prefix = endpoint.prefix

    def send(self, method: str, target: str, headers: bytes, body: bytes | pa.Buffer) -> None:
        """Send a request."""
        line = f"{method} {self._prefix}{target} HTTP/1.1\r\n".encode()
        size = len(body)
        head = b"%s%s%sContent-Length: %d\r\n\r\n" % (line, self._head, headers, size)
        if size < 16_384:
            self._socket.sendall(head + body if size else head)
        else:
            self._socket.sendall(head)
            self._socket.sendall(body)

    def receive_head(self) -> ReplyHead:
        """The head of the answer. Raises `ConnectionResetError` if there is none."""
        while True:
            buffer = self._buffer
            end = buffer.find(b"\r\n\r\n")
            if end >= 0:
                self._buffer = buffer[end + 4 :]
                head = read_head(buffer[:end], self.where)
                if head.status != 100:
                    return head
                continue
            if len(buffer) > CLIENT_HEAD_BYTES_MAX:
                raise strange(self.where, "an endless head")
            self._buffer = buffer + self._more()

    def receive(self, length: int) -> bytes:
        """The next `length` bytes."""
        buffer = self._buffer
        if len(buffer) == length:
            self._buffer = b""
            return buffer
        if len(buffer) > length:
            self._buffer = buffer[length:]
            return buffer[:length]
        self._buffer = b""
        # Not all at once: a hostile length must not take memory for bytes that never come.
        parts, missing = [buffer], length - len(buffer)
        while missing:
            part = self._socket.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionResetError("the connection ended inside an answer")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def chunks(self) -> Iterator[bytes]:
        """The chunks of a body, to its end."""
        while True:
            size = self._line()
            try:
                length = int(size.partition(b";")[0], 16)
            except ValueError as error:
                raise strange(self.where, f"a chunk of {size[:40]!r} bytes") from error
            if length:
                yield self.receive(length)
            if self._line():
                raise strange(self.where, "a chunk that is longer than it says")
            if not length:
                return

    def is_stale(self) -> bool:
        """Whether the server has closed an idle connection, or sent what nobody asked for."""
        if self._buffer:
            return True
        is_tls = isinstance(self._socket, ssl.SSLSocket)
        try:
            if is_tls:  # a socket with a timeout of Python's would wait for it
                ready = select.poll()
                ready.register(self._socket, select.POLLIN)
                if not ready.poll(0):
                    return False
            # The socket below TLS may have tickets of TLS that nobody asked for.
            news = socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not news or not is_tls

    def close(self) -> None:
        """Close the socket. Repeatable."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > CLIENT_HEAD_BYTES_MAX:
                raise strange(self.where, "an endless line")
            self._buffer += self._more()
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line

    def _more(self) -> bytes:
        part = self._socket.recv(_RECEIVE_BYTES)
        if not part:
            raise ConnectionResetError("the connection ended before an answer")
        return part
