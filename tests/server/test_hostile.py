"""Hostile, slow and broken clients: each is answered or cut off, and the others are served."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import AccessDeniedError, RetryableError, UsageError
from kvstore.remote.client import connect
from kvstore.remote.client.transport import Endpoint, Pool
from kvstore.remote.protocol import WRITES_SCHEMA
from kvstore.remote.server import ListenAddress, Running, Token, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.http import head_of
from kvstore.remote.verbs import PUT
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded
from tests.server.process import ServerProcess

SECRET = "s" * 32
GZIP = b"Transfer-Encoding: gzip, chunked"
CHUNKED = b"Transfer-Encoding: chunked"
TWICE = CHUNKED + b"\r\n" + CHUNKED
GZIP_FIRST = b"Transfer-Encoding: gzip\r\n" + CHUNKED
ARROW = "application/vnd.apache.arrow.stream"


@pytest.fixture
def running(store: kvstore.Store) -> Iterator[Running]:
    """A server that waits for no client longer than half a second."""
    store.put(b"k", b"v")
    with (
        bounds(SERVER_REQUEST_S_MAX=0.5, SERVER_BODY_BYTES_MAX=1 << 20, SERVER_HEAD_BYTES_MAX=9000),
        serving(app(store), ListenAddress("127.0.0.1", 0)) as server,
    ):
        yield server
        with connect(server.url) as client:  # other clients are served, whatever the test did
            assert client.get(b"k") == b"v"


def say(running: Running, *parts: bytes, ends: bool = False) -> bytes:
    """Send parts to the server; returns its answer up to the close of the connection or a
    silence."""
    with socket.create_connection((running.address.host, running.address.port)) as opened:
        opened.settimeout(60)
        heard = b""
        with contextlib.suppress(OSError):
            for part in parts:
                opened.sendall(part)
            if ends:
                opened.shutdown(socket.SHUT_WR)
            while part := opened.recv(1 << 16):
                heard += part
        return heard


def request(
    method: str, path: str, body: bytes = b"", *headers: str, length: int | None = None
) -> bytes:
    """A request that asks the server to close the connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def status(heard: bytes) -> int:
    return int(heard[9:12])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00" * 100,
        b"GET / HTTP/1.1",  # never ends
        b"GET /v1/keys/k HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /v1/keys/k HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        request("PUT", "/v1/keys/k", b"x", length=1000),  # its body never comes
        b"GET /v1/keys/" + b"k" * 100_000,
        b"GET /v1/keys/k HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
        b"PUT /v1/keys/k HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1;" + b"x" * 100_000,
    ],
    ids=range(10),
)
def test_bytes_that_are_no_request_end_the_connection(running: Running, sent: bytes) -> None:
    heard = say(running, sent)
    assert heard == b"" or status(heard) >= 400


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (request("GET", "/v1/keys/../stats"), 404),
        (request("GET", "/v1/keys/%2e%2e%2fstats"), 404),
        (request("GET", "//v1//keys//k"), 404),
        (request("GET", "/v1/keys/k/../k"), 404),
        (request("GET", "/etc/passwd"), 404),
        (request("GET", "/v1/../../etc/passwd"), 404),
        (request("GET", "/v1/%00"), 404),
        (request("GET", "/v1/keys/k?as_of=1e9"), 400),
        (request("GET", "/v1/keys/k?as_of=" + "9" * 400), 400),
        (request("GET", "/v1/keys/k?key=other"), 400),
        (request("GET", "/v1/keys/k?as_of=1&as_of=2"), 400),
        (request("POST", "/v1/keys/k"), 405),
        (request("PUT", "/v1/keys/k", b"0\r\n\r\n").replace(b"Content-Length: 5", GZIP), 400),
        (request("GET", "/v1/batch"), 405),
        (request("PUT", "/v1/keys/k", b"", length=1 << 40), 413),
        (request("PUT", "/v1/keys/k?durability=never", b"v"), 400),
        (request("PUT", "/v1/keys/k", b"v", "Idempotency-Key: " + "x" * 100), 400),
        (request("PUT", "/v1/keys/k", b"v", "Idempotency-Key: a.99999999999999999999"), 400),
        (request("GET", "/v1/keys/k", b"", "Origin: https://evil.example"), 403),
        (request("GET", "/v1/keys/k", b"", "X-Forwarded-For: 127.0.0.1"), 403),
        (request("GET", "/v1/keys/k").replace(b"localhost", b"evil.example"), 403),
    ],
    ids=range(21),
)
def test_tricks_are_refused_and_read_nothing(running: Running, sent: bytes, expected: int) -> None:
    heard = say(running, sent)
    assert status(heard) == expected
    assert json.loads(heard.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 0",
        b"Content-Length: 5, 5",
        b"Content-Length: 5\r\n" + CHUNKED,
        CHUNKED + b"\r\nContent-Length: 5",
        CHUNKED + b"\r\nTransfer-Encoding: identity",
        CHUNKED + b"\r\nTransfer-Encoding: gzip",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding : chunked",
        TWICE,
        GZIP_FIRST,
    ],
)
def test_a_request_whose_end_is_in_doubt_is_refused(
    running: Running, store: kvstore.Store, framing: bytes
) -> None:
    before = store.upper
    asked = request("PUT", "/v1/keys/k", b"0\r\n\r\n", "Connection: keep-alive")
    hidden = request("DELETE", "/v1/keys/k")
    asked = asked.replace(b"Content-Length: 5", framing).replace(b"Connection: close\r\n", b"")
    assert status(say(running, asked)) == 400
    say(running, asked + hidden)
    assert store.upper == before


@pytest.mark.parametrize("name", [b"content-length", b"transfer-encoding"])
def test_a_mounted_application_refuses_two_lengths_as_well(name: bytes) -> None:
    lines = [(name, b"5"), (name, b"5")]
    scope = {"method": "PUT", "path": "/", "query_string": b"", "headers": lines}
    with pytest.raises(UsageError):
        _ = head_of(scope).length


def stream(schema: pa.Schema, *columns: list[object]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


GOOD = stream(WRITES_SCHEMA, [1, 3], [b"a", b"b"], [None, None], [b"v", None], [-(10**9), None])
WRITES = WRITES_SCHEMA.remove(4)
OTHER = pa.schema([("op", pa.uint8()), ("key", pa.string()), ("more", pa.int8())])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"ops": 1}',
        b'{"ops": [1]}',
        b'{"ops": [{"op": "put", "key": "a"}]}',
        b'{"ops": [{"op": "drop", "key": "a"}]}',
        b'{"ops": [{"op": ["put"], "key": "a", "value": "v"}]}',
        b'{"ops": [{"op": "put", "key": {"base64": "?"}, "value": "v"}]}',
        b'{"ops": [{"op": "put", "key": "\\ud800", "value": "v"}]}',
        b'{"ops": [], "ops": []}',
        b'{"ops": NaN}',
        b'{"oops": []}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=range(15),
)
def test_malformed_json_is_refused(running: Running, store: kvstore.Store, body: bytes) -> None:
    before = store.upper
    heard = say(running, request("POST", "/v1/batch", body, "Content-Type: application/json"))
    assert status(heard) == 400
    assert store.upper == before


@pytest.mark.parametrize(
    "body",
    [
        GOOD[:50],
        GOOD[: len(GOOD) // 2],
        b"\xff" * 500,
        stream(OTHER, [1], ["a"], [1]),
        stream(WRITES.remove(3), [1], [b"a"], [None]),
        stream(WRITES, [1], [b"a"], [None], [None]),
        stream(WRITES, [9], [b"a"], [None], [None]),
        stream(WRITES, [5], [b"b"], [b"a"], [None]),
        stream(WRITES, [3], [b"b"], [b"c"], [None]),
        stream(WRITES_SCHEMA, [3], [b"b"], [None], [None], [-1]),
        stream(WRITES_SCHEMA, [1], [b"b"], [None], [b"v"], [0]),
        stream(WRITES_SCHEMA, [1], [b"b"], [None], [b"v"], [-(2**63)]),
        stream(WRITES_SCHEMA, [1], [b"b"], [None], [b"v"], [2**63 - 1]),
    ],
    ids=range(13),
)
def test_malformed_arrow_is_refused(running: Running, store: kvstore.Store, body: bytes) -> None:
    before = store.upper
    heard = say(running, request("POST", "/v1/batch", body, f"Content-Type: {ARROW}"))
    assert status(heard) == 400
    assert store.upper == before


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (stream(WRITES, [9], [b"a"], [None], [None]), "the code 9; pass one of 0, 1, 2, 3, 5"),
        (stream(WRITES, [1], [b"a"], [None], [None]), "no put with a value; pass a value with"),
        (stream(WRITES, [3], [b"b"], [b"c"], [None]), "no range with an end; pass an end with"),
        (
            stream(WRITES_SCHEMA, [3], [b"b"], [None], [None], [-1]),
            "expires, and is no put; pass a due time with puts alone",
        ),
    ],
    ids=range(4),
)
def test_a_wrong_operation_is_told_with_its_rule(running: Running, body: bytes, told: str) -> None:
    heard = say(running, request("POST", "/v1/batch", body, f"Content-Type: {ARROW}"))
    failure = json.loads(heard.partition(b"\r\n\r\n")[2])
    assert told in f"{failure['what']}; {failure['remedy']}"


def test_mutated_arrow_never_takes_the_server_down(running: Running, store: kvstore.Store) -> None:
    draw = seeded()
    for _ in range(150):
        body = bytearray(GOOD)
        for _ in range(draw.randint(1, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        heard = say(running, request("POST", "/v1/batch", bytes(body), f"Content-Type: {ARROW}"))
        assert status(heard) in (200, 400)
    assert store.verify().problems == ()


def await_no_pin(store: kvstore.Store) -> None:
    """Wait until no stream keeps history, for a minute at most."""
    ends = time.monotonic() + 60
    while any(claim.is_pin for claim in store.holds.needing()):
        assert time.monotonic() < ends, "a stream keeps history"
        threading.Event().wait(0.05)


def test_a_client_that_reads_nothing_is_cut_off_and_its_history_goes_free(
    running: Running, store: kvstore.Store
) -> None:
    with store.batch() as batch:
        for number in range(2000):
            batch.put(b"row %d" % number, bytes(20_000))
    with socket.create_connection((running.address.host, running.address.port)) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.sendall(request("GET", "/v1/scan"))
        opened.recv(100)
        await_no_pin(store)


def test_a_client_that_goes_away_leaves_nothing(running: Running, store: kvstore.Store) -> None:
    with store.batch() as batch:
        for number in range(500):
            batch.put(b"row %d" % number, bytes(20_000))
    for _ in range(30):
        with socket.create_connection((running.address.host, running.address.port)) as opened:
            opened.sendall(request("GET", "/v1/scan"))
            opened.recv(100)
    with connect(running.url) as client:
        assert len(list(client.scan(prefix=b"row"))) == 500
    # this client closes its half at once
    heard = say(running, request("GET", "/v1/keys/k"), ends=True)
    assert heard == b"" or status(heard) == 200


def test_a_body_that_trickles_in_is_cut_off(running: Running, store: kvstore.Store) -> None:
    """Each byte comes in time, and the whole request would take hours."""
    before = store.upper
    with socket.create_connection((running.address.host, running.address.port)) as opened:
        opened.sendall(request("PUT", "/v1/keys/k", b"", length=1 << 20))
        for _ in range(200):
            opened.sendall(b"x")
            if select.select([opened], [], [], 0.05)[0]:
                break
        heard = opened.recv(1 << 16)
    assert status(heard) == 400
    assert b"the rest of the request did not come" in heard
    assert store.upper == before


def test_clients_that_hang_up_or_read_nothing_are_not_logged(
    running: Running, store: kvstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    with store.batch() as batch:
        for number in range(2000):
            batch.put(b"row %d" % number, bytes(20_000))
    scan = request("GET", "/v1/scan").replace(b"close", b"keep-alive")
    for taken in range(60):
        with socket.create_connection((running.address.host, running.address.port)) as opened:
            opened.sendall(scan * 2)
            for _ in range(taken):
                opened.recv(1 << 16)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with socket.create_connection((running.address.host, running.address.port)) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.sendall(scan)
        opened.recv(100)
        await_no_pin(store)
    with connect(running.url) as client:
        assert client.get(b"k") == b"v"
    assert caplog.records == []


def test_a_request_that_breaks_off_is_not_logged(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    whole = request("POST", "/v1/put", b"{", length=100)
    for _ in range(5):
        assert say(running, whole, ends=True) == b""
        assert status(say(running, b"no request\r\n\r\n")) == 400
        upgrade = request("GET", "/v1/keys/k", b"", "Upgrade: websocket")
        assert status(say(running, upgrade.replace(b"close", b"Upgrade, close"))) == 200
    with connect(running.url) as client:  # the server handles this after the broken requests
        assert client.get(b"k") == b"v"
    assert caplog.records == []


def test_streams_and_bytes_are_bounded(running: Running, store: kvstore.Store) -> None:
    with connect(running.url, patience=0) as client:
        with bounds(SERVER_STREAMS_MAX=0), pytest.raises(RetryableError, match="open streams"):
            client.scan_batches()
        with bounds(SERVER_MEMORY_BYTES_MAX=100):
            with pytest.raises(RetryableError, match="too many bytes"):
                client.put(b"k2", bytes(1000))
            client.put(b"k2", b"short")
        with pytest.raises(UsageError, match="at most 1048576"):
            client.get_many([b"k" * 1024] * 2048)


def test_a_full_server_says_so_and_that_nothing_was_done(
    running: Running, store: kvstore.Store
) -> None:
    address = (running.address.host, running.address.port)
    before = store.upper
    with contextlib.ExitStack() as idle, bounds(SERVER_CONNECTIONS_MAX=2):
        for _ in range(2):
            opened = idle.enter_context(socket.create_connection(address))
            opened.sendall(request("GET", "/v1/keys/k").replace(b"close", b"keep-alive"))
            assert status(opened.recv(1 << 16)) == 200
        with pytest.raises(RetryableError, match="has 2 connections; try again") as found:
            connect(running.url, patience=0)
        assert type(found.value) is RetryableError
        for body in (b"v", bytes(1 << 20)):
            heard = say(running, request("PUT", "/v1/keys/k", body))
            assert status(heard) == 503
            assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"] == "RetryableError"
        with bounds(SERVER_TURNED_AWAY_MAX=0):
            assert say(running, request("PUT", "/v1/keys/k", b"v")) == b""
        with bounds(SERVER_TURNED_AWAY_S=0.05):  # it neither reads nor closes
            stays = idle.enter_context(socket.create_connection(address))
            while stays.recv(1 << 16):
                pass
        idle.close()
        with connect(running.url, patience=60) as client:
            assert client.get(b"k") == b"v"
    assert store.upper == before


def test_a_client_reads_the_answer_of_a_server_that_has_closed_before_it_sent() -> None:
    """Its request finds a connection that was reset, and the answer lies in it."""
    error = b'{"error": "RetryableError", "what": "full", "remedy": "", "fields": {}}'
    head = b"HTTP/1.1 503 No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            opened, _ = listener.accept()
            opened.sendall(head % len(error) + error)
            opened.recv(1)
            opened.close()  # the rest of the request is unread: a reset

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = Endpoint.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")
        pool = Pool(endpoint, timeout=60, patience=0)
        with pytest.raises(RetryableError, match="full"):
            pool.call(PUT, key=b"k", value=bytes(64 << 20))
        thread.join()


def test_json_of_many_small_items_is_refused(running: Running, store: kvstore.Store) -> None:
    """As Python objects they take thirty times the bytes of the request."""
    before, body = store.upper, b'{"ops": [%s {}]}' % (b"{}, " * 30_000)
    with bounds(SERVER_MEMORY_BYTES_MAX=1 << 20):
        heard = say(running, request("POST", "/v1/batch", body, "Content-Type: application/json"))
        assert status(heard) == 400
        assert b"too many items" in heard
        assert store.upper == before
        with connect(running.url) as client:
            marks = b'a text, of many [{ " \\ marks' * 4000
            client.put_if(b"text", marks, None)
            assert client.get(b"text") == marks


def test_a_flood_leaves_the_server_within_its_memory(tmp_path: Path) -> None:
    """Fifty clients announce 60 MiB each, send some of it, and stall; others are served."""
    server = ServerProcess(tmp_path / "store", "127.0.0.1:0")
    server.start()
    host, port = server.url.removeprefix("http://").split(":")
    stalled: list[socket.socket] = []
    try:
        with connect(server.url, patience=120) as client:
            client.put(b"k", b"v")
            before = server.memory_max()
            head = request("PUT", "/v1/keys/k", b"", length=60 << 20).replace(b"close", b"open")
            for _ in range(50):
                opened = socket.create_connection((host, int(port)))
                opened.setblocking(False)
                stalled.append(opened)
                with contextlib.suppress(OSError):
                    opened.send(head)
                    for _ in range(64):
                        opened.send(bytes(1 << 18))
            for _ in range(100):
                assert client.get(b"k") == b"v"
            assert server.memory_max() - before < 400 << 20
    finally:
        for opened in stalled:
            opened.close()
        assert server.stop() == 0


def test_wrong_tokens_are_refused_and_never_told(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    served = app(store, [Token(SECRET, ["read"])])
    with serving(served, ListenAddress("127.0.0.1", 0)) as server:
        for header in (
            "",
            "Bearer",
            "Bearer  ",
            "Basic " + SECRET,
            "Bearer " + SECRET[1:],
            "Bearer \xff",
        ):
            extra = [f"Authorization: {header}"] if header else []
            heard = say(server, request("GET", "/v1/stats", b"", *extra))
            assert status(heard) == 401
            assert SECRET.encode() not in heard
        with connect(server.url, token=SECRET) as client:
            assert client.get(b"k") is None
            with pytest.raises(AccessDeniedError, match="needs the right 'write'"):
                client.put(b"k", b"v")
    assert SECRET not in caplog.text
    assert SECRET not in repr(served) + repr(Token(SECRET))


def test_a_hostile_server_cannot_take_a_client_down() -> None:
    """Answers that are no HTTP, or that are shorter than they declare."""
    answers = [
        b"",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 400 No\r\nContent-Type: application/json\r\nContent-Length: 23\r\n\r\n"
        b'{"error": "SystemExit"} ',
        b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbad",
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for each in answers:
                opened, _ = listener.accept()
                with opened, contextlib.suppress(OSError):
                    opened.recv(1 << 16)
                    opened.sendall(each)

        thread = threading.Thread(target=answer)
        thread.start()
        for _ in answers:
            with pytest.raises(kvstore.errors.KVStoreError):
                connect(f"http://127.0.0.1:{listener.getsockname()[1]}", patience=0, timeout=60)
        thread.join()
