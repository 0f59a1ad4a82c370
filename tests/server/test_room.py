"""Room for answers: counted, first come first served, and given back by answers that end early."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.client import connect
from kvstore.errors import RetryableError
from kvstore.server import ListenAddress, app, serving
from kvstore.server.room import Room
from kvstore.testing.bounds import bounds
from tests.server.process import ServerProcess


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with bounds(SERVER_ANSWER_BYTES_MAX=100):
        yield


def test_waiters_come_in_in_their_order_and_an_answer_alone_may_be_large() -> None:
    async def run() -> list[int]:
        room, order = Room(), []
        with room.share() as first, room.share() as refused:
            await first.wait(1000)
            assert not room.fits(1)
            with pytest.raises(RetryableError, match="answers of too many bytes"):
                refused.take(1)

            async def enter(number: int, size: int) -> None:
                with room.share() as share:
                    await share.wait(size)
                    order.append(number)

            waiting = [asyncio.ensure_future(enter(*each)) for each in ((1, 90), (2, 90), (3, 5))]
            await asyncio.sleep(0)
            first.become(20)
            await asyncio.sleep(0)
            assert order == []  # 110 bytes would be too many, and the third one came later
            first.become(10)
            await asyncio.gather(*waiting)
        with room.share() as last:
            last.take(100)
        return order

    assert asyncio.run(run()) == [1, 2, 3]


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_waiter_that_is_cancelled_holds_nothing(is_woken: bool) -> None:
    async def run() -> None:
        room = Room()
        with room.share() as first:
            await first.wait(100)

            async def enter() -> None:
                with room.share() as share:
                    await share.wait(60)
                    await asyncio.Event().wait()

            cancelled, next_one = (asyncio.ensure_future(enter()) for _ in range(2))
            await asyncio.sleep(0)
            if is_woken:
                first.give_back()
            cancelled.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cancelled
            first.give_back()
            await asyncio.sleep(0)
            assert not room.fits(60)  # the next one is in
            next_one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await next_one
            assert room.fits(1000)

    asyncio.run(run())


def test_answers_to_reads_are_refused_and_streams_wait(store: kvstore.Store) -> None:
    """All streams of rows pass through room for one part, one after the other."""
    rows = {b"%04d" % number: bytes(200) for number in range(2000)}
    store.put_many(rows)
    store.put(b"large", b"v" * 100_000)
    with (
        bounds(SERVER_STREAM_ROWS=100),
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        connect(running.url) as client,
    ):
        scans = [client.scan_batches(b"0", b"9") for _ in range(4)]
        for _ in range(20):
            for scan in scans:
                assert scan.read_next_batch().num_rows > 50
        assert client.get(b"large") == b"v" * 100_000
        assert client.get_many(list(rows)) == list(rows.values())
        assert client.pop(b"large") == b"v" * 100_000


def test_clients_that_do_not_read_leave_a_server_within_its_memory(tmp_path: Path) -> None:
    """Sixty of them ask for values of 16 MiB, and thirty for a scan of them."""
    with kvstore.open(tmp_path / "store") as store:
        for number in range(4):
            store.put(b"%d" % number, bytes(16 << 20))
        store.put(b"k", b"v")
    server = ServerProcess(tmp_path / "store", "127.0.0.1:0")
    server.start()
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stuck, connect(server.url) as client:
        for number in range(90):
            opened = stuck.enter_context(socket.create_connection((host, int(port))))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            target = b"scan" if number % 3 == 0 else b"keys/%d" % (number % 4)
            opened.sendall(b"GET /v1/%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
            assert client.get(b"k") == b"v"
        assert opened.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 503")
        for _ in range(50):
            assert client.get(b"k") == b"v"
        assert server.memory_max() < 1500 << 20
    assert server.stop() == 0
