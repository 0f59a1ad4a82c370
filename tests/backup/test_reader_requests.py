"""The requests and bytes of a reader, counted by a proxy in front of an S3 server."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from obstore.store import ObjectStore

import backup
import kvstore
from tests.shard.conftest import s3_bucket, s3_server

__all__ = ["s3_bucket", "s3_server"]

MIB = 1 << 20
ROWS = 24_000


class Request(NamedTuple):
    """One answered request."""

    method: str
    path: str
    has_range: bool
    bytes: int
    range: str = ""


class Trouble(NamedTuple):
    """How a request fares: after a wait it is refused with a status, is dropped, or its answer is
    lost."""

    status: int = 0
    is_dropped: bool = False
    is_lost: bool = False
    wait_s: float = 0.0


class Proxy:
    """Hands requests on to a server, and notes each."""

    def trouble(self) -> Trouble:
        """The trouble of the next request: none, unless a subclass says so."""
        return Trouble()

    def __init__(self, server: str) -> None:
        self.requests: list[Request] = []
        self.closing = threading.Event()
        proxy, address = self, urlsplit(server).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def hand_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                trouble = proxy.trouble()
                proxy.closing.wait(trouble.wait_s)
                self.close_connection |= trouble.is_dropped or trouble.is_lost
                if trouble.is_dropped:
                    return
                if trouble.status:
                    self.send_response(trouble.status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                link = http.client.HTTPConnection(address)
                link.request(self.command, self.path, body, dict(self.headers))
                answer = link.getresponse()
                data = answer.read()
                if trouble.is_lost:
                    link.close()
                    return
                span = self.headers.get("Range", "")
                request = Request(self.command, self.path, bool(span), len(data), span)
                proxy.requests.append(request)
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                shown = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", shown or str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                link.close()

            def log_message(self, *_: object) -> None:
                pass

        for method in ("GET", "PUT", "HEAD", "DELETE", "POST"):
            setattr(Handler, f"do_{method}", Handler.hand_on)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def taken(self) -> list[Request]:
        """The requests for parts since the last call."""
        found = [request for request in self.requests if "/part/" in request.path]
        self.requests.clear()
        return found


@pytest.fixture
def proxy(s3_server: str) -> Iterator[Proxy]:
    made = Proxy(s3_server)
    yield made
    made.close()


@pytest.fixture
def url(s3_bucket: Callable[[], ObjectStore]) -> str:
    return f"s3://{s3_bucket().config['bucket']}/place"  # type: ignore[attr-defined]


def opened(url: str, proxy: Proxy, passphrase: str | None) -> backup.Collection:
    options: dict[str, Any] = {
        "endpoint": proxy.url,
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
    }
    return backup.Collection(url, passphrase, options=options)


@pytest.mark.parametrize("passphrase", [None, "correct horse"], ids=["clear", "sealed"])
def test_a_cold_get_costs_three_ranges_a_warm_one_and_a_kept_one_none(
    store: kvstore.Store, proxy: Proxy, url: str, tmp_path: Path, passphrase: str | None
) -> None:
    pick = random.Random(1)
    keys = [b"key%08d" % number for number in range(ROWS)]
    for begin in range(0, ROWS, 4000):
        with store.batch() as batch:
            for key in keys[begin : begin + 4000]:
                batch.put(key, pick.randbytes(300))
    collection = opened(url, proxy, passphrase)
    collection.backup(store)
    with store.batch() as batch:
        for key in pick.sample(keys, 3000):  # a part of just below 1 MiB
            batch.put(key, pick.randbytes(300))
    collection.backup(store)
    assert [info.parts for info in collection.list()] == [1, 1]
    as_of = kvstore.Timestamp(collection.upper - 1)

    with collection.open(cache=tmp_path / "cache") as reader:
        proxy.taken()
        for key in (keys[5], keys[-6]):
            assert reader.get(key) == store.get(key, as_of)
            cold = [r for r in proxy.taken() if r.method == "GET"]
            assert len(cold) <= 3
            assert sum(r.bytes for r in cold) <= 2 * MIB
        counts: list[int] = []
        for key in pick.sample(keys, 30):
            assert reader.get(key) == store.get(key, as_of)
            found = proxy.taken()
            counts.append(len(found))
            assert sum(r.bytes for r in found) <= 2 * MIB
        assert max(counts) <= 2  # one, and one more where a filter is wrong
        assert sum(counts) <= len(counts) + 3
        again = pick.sample(keys, 100)
        reader.get_many(again)
        proxy.taken()
        for key in again:
            assert reader.get(key) == store.get(key, as_of)
        assert proxy.taken() == []
    collection.compact()
    with opened(url, proxy, passphrase).open(cache=tmp_path / "other") as reader:
        proxy.taken()
        assert reader.get(keys[7]) == store.get(keys[7], as_of)
        cold = proxy.taken()
        assert len([r for r in cold if r.method == "GET"]) <= 3
        assert sum(r.bytes for r in cold if r.method == "GET") <= 2 * MIB
        assert reader.get(b"key00000007x") is None
    with opened(url, proxy, passphrase).open(cache=tmp_path / "other") as reader:
        proxy.taken()
        assert reader.get(keys[7]) == store.get(keys[7], as_of)
        assert proxy.taken() == []  # another process has the same cache
    if passphrase is not None:
        entries = [path.read_bytes() for path in (tmp_path / "other").rglob("*-*")]
        assert entries
        assert not any(b"key0" in entry for entry in entries)
