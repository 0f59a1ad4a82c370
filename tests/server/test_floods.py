"""Clients that read, trickle, reset and vanish at random leave nothing behind at the server."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import IOBase
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore.remote.client.calls import Reply, rows_request
from kvstore.remote.protocol import ARROW_TYPE, KEYS_SCHEMA, LABELS_SCHEMA
from kvstore.remote.server import ListenAddress, server_tls
from kvstore.remote.server.app import app
from kvstore.remote.server.guarded import GuardedServer
from kvstore.remote.server.invocation import Answer, Invocation, ServedVerb
from kvstore.remote.server.running import bound, server_config
from kvstore.remote.verbs import READ, VERBS, Verb
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

VALUE = bytes(range(256)) * (8 << 10)
"""A value of 2 MiB: sockets hold less than two of it."""
ROWS = {b"row %03d" % number: bytes([number]) * 300_000 for number in range(30)}
TARGETS = (b"/v1/keys/large", b"/v1/keys/small", b"/v1/keys/absent", b"/v1/scan?prefix=row", b"/no")
WAIT_S = 60
LOCAL = ListenAddress("127.0.0.1", 0)
Dial = Callable[[], socket.socket]


@contextlib.contextmanager
def served(
    store: kvstore.Store,
    address: ListenAddress,
    tls: ssl.SSLContext | None,
    loop: str,
    verbs: Sequence[Verb] = (),
) -> Iterator[tuple[GuardedServer, ListenAddress]]:
    """A server on one of the event loops, and where it listens."""
    listener = bound(address)
    config = server_config(app(store, verbs=verbs), tls)
    config.loop = loop
    server = GuardedServer(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        server.is_up.wait()
        yield server, address if address.path else address._replace(port=listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def dialler(address: ListenAddress, tls: ssl.SSLContext | None) -> Dial:
    """Opens connections to a server."""

    def dial() -> socket.socket:
        if address.path:
            opened = socket.socket(socket.AF_UNIX)
            opened.connect(address.path)
        else:
            opened = socket.create_connection((address.host, address.port))
        opened.settimeout(WAIT_S)
        return opened if tls is None else tls.wrap_socket(opened, server_hostname=address.host)

    return dial


def misbehave(dial: Dial, draw: random.Random) -> None:
    """One client: it asks for some things at once, takes some of the answers, and goes."""
    requests = b""
    for _ in range(draw.randint(1, 4)):
        method = draw.choice([b"GET", b"GET", b"GET", b"HEAD", b"BAD"])
        ending = draw.choice([b"close", b"keep-alive", b"keep-alive"])
        lines = b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n\r\n"
        requests += lines % (method, draw.choice(TARGETS), ending)
    with contextlib.suppress(OSError), dial() as opened:
        opened.sendall(requests)
        for _ in range(draw.choice([0, 1, 5, 200])):
            if not select.select([opened], [], [], draw.choice([0, 0.7]))[0]:
                break
            if not opened.recv(draw.choice([10, 1 << 16, 1 << 20])):
                break
        match draw.randrange(4):
            case 0:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case 1:
                opened.shutdown(socket.SHUT_WR)
                select.select([opened], [], [], 0.1)
            case 2:
                opened.sendall(b"no request\r\n\r\n")


def until(is_so: Callable[[], bool], told: str) -> None:
    """Wait for a condition, for a bounded time."""
    ends = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ends, told
        threading.Event().wait(0.02)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("way", ["plain", "tls"])
def test_a_client_that_reads_slowly_gets_every_byte_of_many_parts_and_of_a_value_behind_them(
    store: kvstore.Store, certificate: tuple[Path, Path], way: str, loop: str
) -> None:
    store.put_many({b"large": VALUE * 8, **ROWS})
    tls = server_tls(*certificate) if way == "tls" else None
    caller = ssl.create_default_context(cafile=str(certificate[0])) if tls else None
    asks = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n\r\n"
    with (
        bounds(SERVER_PIECE_BYTES=20_000, ARROW_BYTES_MAX=1 << 20),
        served(store, LOCAL, tls, loop) as (_, place),
        dialler(place, caller)() as opened,
        opened.makefile("rb", 10_000) as heard,
    ):
        opened.sendall(asks % (b"/v1/scan?prefix=row", b"keep-alive"))
        opened.sendall(asks % (b"/v1/keys/large", b"close"))
        stream = b"".join(chunks(heard))
        with pa.ipc.open_stream(stream) as rows:
            found = rows.read_all().to_pydict()
        assert dict(zip(found["key"], found["value"], strict=True)) == ROWS
        assert read_head(heard).startswith(b"HTTP/1.1 200")
        assert heard.read() == VALUE * 8


def read_head(heard: IOBase) -> bytes:
    """The head of an answer."""
    lines = []
    while (line := heard.readline()) != b"\r\n":
        assert line
        lines.append(line)
    return b"".join(lines)


def chunks(heard: IOBase) -> Iterator[bytes]:
    """The chunks of an answer."""
    assert read_head(heard).startswith(b"HTTP/1.1 200")
    while size := int(heard.readline(), 16):
        yield heard.read(size)
        assert heard.readline() == b"\r\n"
    assert heard.readline() == b"\r\n"


@pytest.mark.parametrize("verb", ["get_many", "floor", "join", "table_join"])
def test_clients_that_stall_before_answers_to_many_keys_get_them_whole(
    store: kvstore.Store, verb: str
) -> None:
    keys = [b"%02d" % number for number in range(16)]
    store.put_many(dict.fromkeys(keys, VALUE))
    docs = store.table("docs", pa.schema({"id": pa.int64(), "text": pa.binary()}), key="id")
    docs.put_batch(pa.table({"id": range(16), "text": [VALUE] * 16}))
    newest = pa.array([store.upper - 1] * 16, pa.int64())
    question = {"on": ["id"], "at": "at", "known_at": None, "columns": ["text"]}
    labels = pa.table({"id": range(16), "at": newest})
    arguments = {"table": "docs", "question": json.dumps(question)}
    asked = pa.table([pa.array(keys, pa.binary())], schema=KEYS_SCHEMA)
    times = pa.table([asked.column("key"), newest], schema=LABELS_SCHEMA)
    rows = {"get_many": asked, "floor": asked, "join": times, "table_join": labels}[verb]
    given = arguments if verb == "table_join" else {}
    request = rows_request(VERBS[verb], rows, given, Reply.table)
    asks = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAccept: %s\r\n" % (
        request.target.encode(),
        ARROW_TYPE.encode(),
    )
    length = len(request.body)
    asks += b"Content-Type: %s\r\nContent-Length: %d\r\n\r\n" % (request.kind.encode(), length)
    with (
        served(store, LOCAL, None, "auto") as (server, place),
        contextlib.ExitStack() as opened,
    ):
        stalled = [opened.enter_context(dialler(place, None)()) for _ in range(4)]
        for each in stalled:
            each.sendall(asks + request.body)
        until(lambda: len(server.server_state.unsent.slow) == 4, "an answer does not wait")
        for each in stalled:
            with each.makefile("rb") as heard, pa.ipc.open_stream(b"".join(chunks(heard))) as rows:
                found = rows.read_all()
            values = found.column("text" if verb == "table_join" else "value")
            assert values.to_pylist() == [VALUE] * len(keys)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_client_that_closes_its_half_gets_the_answer_that_waits(
    store: kvstore.Store, loop: str
) -> None:
    store.put(b"large", VALUE * 16)
    with (
        served(store, LOCAL, None, loop) as (server, place),
        dialler(place, None)() as opened,
        opened.makefile("rb") as heard,
    ):
        opened.sendall(b"GET /v1/keys/large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: server.server_state.unsent.memory > 0, "no answer waits")
        opened.shutdown(socket.SHUT_WR)
        read_head(heard)
        assert heard.read() == VALUE * 16


def endless(call: Invocation) -> Answer:
    """An answer of rows without an end."""
    batch = pa.RecordBatch.from_pydict({"key": [bytes(100_000)]})
    return pa.RecordBatchReader.from_batches(batch.schema, itertools.repeat(batch))


def test_a_stream_ends_once_its_client_has_gone_although_a_request_waits_behind_it(
    store: kvstore.Store,
) -> None:
    verb = ServedVerb(Verb("endless", READ, is_read=True), endless)
    with served(store, LOCAL, None, "auto", verbs=[verb]) as (server, place):
        with dialler(place, None)() as opened:
            opened.sendall(b"GET /v1/endless HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
            assert opened.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: not server.server_state.tasks, "the stream goes on")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("way", ["plain", "tls", "unix"])
def test_a_flood_leaves_no_memory_no_connection_and_no_line_of_log(
    store: kvstore.Store,
    certificate: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    way: str,
    loop: str,
) -> None:
    store.put_many({b"large": VALUE, b"small": b"v", **ROWS})
    draw = seeded()
    address = ListenAddress("", 0, str(tmp_path / "s")) if way == "unix" else LOCAL
    tls = server_tls(*certificate) if way == "tls" else None
    caller = ssl.create_default_context(cafile=str(certificate[0])) if tls else None
    with (
        bounds(SERVER_REQUEST_S_MAX=0.5, SERVER_IDLE_S_MAX=1.0, SERVER_PIECE_BYTES=20_000),
        bounds(SERVER_UNSENT_BYTES_MAX=5 << 20, ARROW_BYTES_MAX=1 << 20),
        served(store, address, tls, loop) as (server, place),
    ):
        dial, state = dialler(place, caller), server.server_state
        with ThreadPoolExecutor(12) as clients:
            seeds = [draw.getrandbits(32) for _ in range(120)]
            for each in [clients.submit(misbehave, dial, random.Random(seed)) for seed in seeds]:
                each.result()
        until(lambda: not state.connections and not state.tasks, f"left: {state.connections}")
        assert state.unsent.memory == 0
        assert state.unsent.slow == set()
        assert state.turned_away == 0
        until(lambda: not any(claim.is_pin for claim in store.holds.needing()), "a pin is left")
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []
