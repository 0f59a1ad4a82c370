"""A proxy in front of an S3-speaking server: it counts requests, and makes the bucket misbehave.

    with Proxy("http://127.0.0.1:5000") as proxy:
        collection = Collection("s3://bucket/backups", options={"endpoint": proxy.url, ...})
        proxy.weather = lambda request: Answer.BUSY if pick.random() < 0.1 else Answer.WHOLE

`weather` is asked in the thread of each request, before the request is handed on. It may wait: the
bucket is slow then. The server and its clients do not know the proxy, so its failures take the
same way through the client library as failures of a provider.
"""

from __future__ import annotations

import enum
import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple
from urllib.parse import urlsplit

_METHODS: Final = ("GET", "PUT", "HEAD", "DELETE", "POST")
_OWN_HEADERS: Final = ("transfer-encoding", "connection", "content-length")


class Answer(enum.Enum):
    """The proxy's treatment of a request."""

    WHOLE = "the server's answer"
    BUSY = "503, and the server does not hear of the request"
    FAILED = "500, and the server does not hear of the request"
    DROPPED = "the connection breaks, and the server does not hear of the request"
    LOST = "the server carries the request out, and the connection breaks before its answer"


_REFUSED: Final = {
    Answer.BUSY: (503, b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"),
    Answer.FAILED: (500, b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"),
}


class Request(NamedTuple):
    """One request, and the bytes of the server's answer. `range` is empty for a whole object."""

    method: str
    path: str
    range: str = ""
    size_bytes: int = 0


class Proxy:
    """Hands requests on to `server`, and notes each that the server answered."""

    def __init__(self, server: str) -> None:
        self.requests: list[Request] = []
        self.weather: Callable[[Request], Answer] = lambda _: Answer.WHOLE
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, server))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def taken(self) -> list[Request]:
        """The requests since the last call."""
        found, self.requests = self.requests, []
        return found

    def close(self) -> None:
        """End the proxy. Requests that wait in `weather` are not waited for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _handler(proxy: Proxy, server: str) -> type[BaseHTTPRequestHandler]:
    address = urlsplit(server).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def hand_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, self.headers.get("Range", ""))
            answer = proxy.weather(request)
            if answer is Answer.DROPPED:
                self.close_connection = True
                return
            if answer in _REFUSED:
                status, text = _REFUSED[answer]
                self._send(status, [], text, str(len(text)))
                return
            link = http.client.HTTPConnection(address)
            link.request(self.command, self.path, body, dict(self.headers))
            found = link.getresponse()
            data = found.read()
            link.close()
            proxy.requests.append(request._replace(size_bytes=len(data)))
            if answer is Answer.LOST:
                self.close_connection = True
                return
            told = found.getheader("Content-Length") if self.command == "HEAD" else None
            self._send(found.status, found.getheaders(), data, told or str(len(data)))

        def _send(
            self, status: int, headers: list[tuple[str, str]], data: bytes, length: str
        ) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in _OWN_HEADERS:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    for method in _METHODS:
        setattr(Handler, f"do_{method}", Handler.hand_on)
    return Handler
