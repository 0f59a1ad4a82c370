"""Large answers that clients do not take are bounded together; a client that reads gets all."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.limits import SERVER_PIPELINED_MAX
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, server_tls, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.guarded import Outbox, Unsent
from tests.harness.bounds import bounds
from tests.server.process import ServerProcess, memory_max, readers_of

LARGE = 32 << 20
"""Bytes of a value: sockets hold some 10 MiB of it."""


class Pipe:
    """A transport that has room for some bytes, until somebody takes them."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.outbox = Outbox(self, Unsent())
        self.pieces: list[bytes] = []
        self.held = self.taken = b""
        self.has_ended = False

    def write(self, data: bytes) -> None:
        assert not self.has_ended
        self.pieces.append(data)
        self.held += bytes(data)
        if len(self.held) > self._room:
            self.outbox.pause()

    def take(self, size: int) -> None:
        """Take some bytes, as a client does."""
        was_full = len(self.held) > self._room
        self.taken, self.held = self.taken + self.held[:size], self.held[size:]
        if was_full and len(self.held) <= self._room:
            self.outbox.resume()
            has_room = self.outbox.hand_on()
            assert has_room == (len(self.held) <= self._room)

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def is_closing(self) -> bool:
        return self.has_ended

    def close(self) -> None:
        assert not self.has_ended
        self.has_ended = True


writes = st.binary(max_size=12)
takes = st.integers(1, 9)


@given(st.lists(writes | takes, max_size=30), st.integers(0, 5), st.integers(1, 4))
def test_all_bytes_leave_in_their_order_and_before_the_end(
    steps: list[bytes | int], room: int, piece: int
) -> None:
    with bounds(SERVER_PIECE_BYTES=piece):
        pipe, written = Pipe(room), b""
        for step in steps:
            if isinstance(step, int):
                pipe.take(step)
            else:
                pipe.outbox.write(step)
                written += step
            left = len(written) - len(pipe.taken)
            assert pipe.outbox.get_write_buffer_size() == left
        pipe.outbox.close()
        assert pipe.outbox.is_closing()
        while pipe.outbox.get_write_buffer_size():
            assert pipe.has_ended == (not pipe.outbox.memory)
            pipe.take(1)
        assert pipe.taken == written
        assert pipe.has_ended


def test_a_transport_keeps_no_answer_that_is_not_counted() -> None:
    with bounds(SERVER_PIECE_BYTES=10):
        pipe = Pipe(room=100)
        pipe.outbox.write(bytes(95))
        assert pipe.outbox.memory == 0
        assert max(memoryview(memoryview(piece).obj).nbytes for piece in pipe.pieces) == 10


def test_the_connection_that_keeps_most_for_longest_is_cut() -> None:
    cut: list[int] = []

    class Stuck(Pipe):
        def __init__(self, number: int) -> None:
            super().__init__(0)
            self.outbox = Outbox(self, unsent)
            self._number = number

        def get_extra_info(self, _: str) -> None:
            """A pipe has no socket."""

        def abort(self) -> None:
            cut.append(self._number)

    unsent = Unsent()
    with bounds(SERVER_PIECE_BYTES=1, SERVER_UNSENT_BYTES_MAX=100):
        first, second, third, fourth = (Stuck(number).outbox for number in range(4))
        first.write(bytes(10))
        second.write(bytes(80))
        assert cut == []
        third.write(bytes(40))
        assert cut == [1]
        fourth.write(bytes(500))  # it has come last, and stays with more than all may have
        assert sorted(cut) == [0, 1, 2]
        first.write(b"not sent any more")
        assert (first.memory, fourth.memory) == (0, 500)
        fourth.end()
        third.write(bytes(200))
        assert len(cut) == 3


ASKS = b"GET /v1/keys/large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@contextlib.contextmanager
def asked(
    place: tuple[str, int], tls: ssl.SSLContext | None, asks: bytes = ASKS
) -> Iterator[socket.socket]:
    """A connection that has asked for the large value, and reads nothing."""
    with socket.create_connection(place) as opened, contextlib.ExitStack() as stack:
        if tls is not None:
            opened = stack.enter_context(tls.wrap_socket(opened, server_hostname=place[0]))
        opened.sendall(asks)
        select.select([opened], [], [])  # the server has begun its answer
        yield opened


def body_bytes(opened: socket.socket) -> int:
    """The bytes of the answer, up to its end or the end of the connection."""
    head, size = b"", 0
    with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
        while size < LARGE and (part := opened.recv(1 << 20)):
            if b"\r\n\r\n" in head:
                size += len(part)
            else:
                head += part
                size = len(head.partition(b"\r\n\r\n")[2])
    return size


@pytest.mark.parametrize("has_tls", [False, True])
def test_clients_that_read_nothing_make_room_for_one_that_reads(
    store: kvstore.Store, certificate: tuple[Path, Path], has_tls: bool
) -> None:
    store.put(b"large", bytes(LARGE))
    store.put(b"k", b"v")
    tls = server_tls(*certificate) if has_tls else None
    caller = ssl.create_default_context(cafile=str(certificate[0])) if has_tls else None
    with (
        bounds(SERVER_UNSENT_BYTES_MAX=3 * LARGE),
        serving(app(store), ListenAddress("127.0.0.1", 0), tls=tls) as running,
        connect(running.url, ca=str(certificate[0]) if has_tls else None) as client,
        contextlib.ExitStack() as opened,
    ):
        place = (running.address.host, running.address.port)
        stuck = [opened.enter_context(asked(place, caller)) for _ in range(5)]
        assert client.get(b"k") == b"v"
        assert client.get(b"large") == bytes(LARGE)
        reading = opened.enter_context(asked(place, caller))
        assert body_bytes(reading) == LARGE
        found = [body_bytes(each) for each in stuck]
        assert [size == LARGE for size in found] == [False] * 3 + [True] * 2, found


def test_a_large_row_counts_whole_behind_which_a_small_request_waits(store: kvstore.Store) -> None:
    store.put(b"large", bytes(LARGE))
    asks = ASKS.replace(b"keys/large", b"scan") + ASKS.replace(b"large", b"absent")
    with (
        bounds(SERVER_REQUEST_S_MAX=600.0),  # no client is cut because it is slow
        bounds(SERVER_UNSENT_BYTES_MAX=11 * LARGE),  # two rows, each in memory five times
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        contextlib.ExitStack() as opened,
    ):
        place = (running.address.host, running.address.port)
        stuck = [opened.enter_context(asked(place, None, asks)) for _ in range(3)]
        watch = select.poll()
        for each in stuck:
            watch.register(each, 0)
        assert watch.poll(60_000)  # the server has cut one


def test_requests_that_wait_behind_another_are_bounded(store: kvstore.Store) -> None:
    store.put(b"large", bytes(LARGE))
    store.put(b"k", b"v")
    small = ASKS.replace(b"large", b"k")
    last = small.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with serving(app(store), ListenAddress("127.0.0.1", 0)) as running:
        place = (running.address.host, running.address.port)
        with asked(place, None, ASKS + small * (SERVER_PIPELINED_MAX - 1) + last) as opened:
            heard = bytearray()
            while part := opened.recv(1 << 20):
                heard += part
        assert heard.count(b"\r\n\r\nv") == SERVER_PIPELINED_MAX
        assert len(heard) > LARGE
        with asked(place, None, ASKS + small * (SERVER_PIPELINED_MAX + 1)) as opened:
            assert body_bytes(opened) == 0


def test_an_answer_that_is_taken_in_drops_is_cut_off(store: kvstore.Store) -> None:
    """Each drop is taken in time, and the whole answer would take an hour."""
    store.put(b"large", bytes(LARGE))
    with (
        bounds(SERVER_REQUEST_S_MAX=0.3),
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        asked((running.address.host, running.address.port), None) as opened,
    ):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        watch = select.poll()
        watch.register(opened, 0)
        while not watch.poll(5):  # until the server has cut it; a drop each 5 ms
            assert opened.recv(10)


@pytest.mark.parametrize("readers", [0, 1])
def test_clients_that_do_not_read_leave_a_server_within_its_memory(
    tmp_path: Path, readers: int
) -> None:
    """Sixty of them ask for values of 16 MiB, and thirty for a scan of them."""
    with kvstore.open(tmp_path / "store") as store:
        for number in range(4):
            store.put(b"%d" % number, bytes(LARGE // 2))
        store.put(b"k", b"v")
    server = ServerProcess(tmp_path / "store", "127.0.0.1:0", "--readers", str(readers))
    server.start()
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stuck, connect(server.url) as client:
        for number in range(90):
            opened = stuck.enter_context(socket.create_connection((host, int(port))))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            target = b"scan" if number % 3 == 0 else b"keys/%d" % (number % 4)
            opened.sendall(b"GET /v1/%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
            assert client.get(b"k") == b"v"
        assert opened.recv(12) == b"HTTP/1.1 200"
        for number in range(4):
            assert client.get(b"%d" % number) == bytes(LARGE // 2)
        for pid in [server.pid, *readers_of(server.pid)]:
            assert memory_max(pid) < 1500 << 20
    assert server.stop() == 0
