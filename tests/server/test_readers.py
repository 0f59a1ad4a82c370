"""Reader processes behind one port: their answers, and deaths of processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import (
    AccessDeniedError,
    ConflictError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.remote.client import connect
from kvstore.remote.server import App, ListenAddress, Running, Token, server_tls, serving
from kvstore.remote.server.app import app
from tests.harness.seeds import seeded
from tests.server.process import ServerProcess, readers_of
from tests.server.test_hostile import request, say, status

HERE = ListenAddress("127.0.0.1", 0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvstore.Store]:
    """One store for all tests of this module, because processes take long to start."""
    with kvstore.open(tmp_path_factory.mktemp("served") / "store") as opened:
        yield opened


@pytest.fixture(scope="module")
def running(served: kvstore.Store) -> Iterator[Running]:
    """A server of `served` with two readers."""
    with serving(app(served), HERE, readers=2) as server:
        yield server


def until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_a_read_shows_every_write_before_it_whoever_made_it(
    running: Running, served: kvstore.Store
) -> None:
    """Writes by the owner's threads and by clients, each read at once by several connections."""
    draw = seeded()
    # each thread has a connection, to one of the readers
    clients = [connect(running.url) for _ in range(4)]
    for _ in range(150):
        key, value = b"k%d" % draw.randrange(5), draw.randbytes(5)
        way = draw.randrange(4)
        if way == 0:
            stamp = served.put(key, value)
        elif way == 1:
            stamp = draw.choice(clients).put(key, value)
        elif way == 2:
            stamp = draw.choice(clients).delete(key)
        else:
            with draw.choice(clients).batch() as batch:
                batch.delete_range(b"k0", b"k3")
                batch.put(key, value)
            assert batch.timestamp is not None
            stamp = batch.timestamp
        reader = draw.choice(clients)
        assert reader.get(key) == served.get(key)
        assert dict(reader.scan()) == dict(served.scan())
        assert reader.history(key)[0].timestamp == stamp
    for client in clients:
        client.close()


def test_a_reader_hands_the_changeset_of_a_write_on(
    running: Running, served: kvstore.Store
) -> None:
    with connect(running.url) as client, client.changeset() as changeset:
        stamp = client.put(b"in a changeset", b"1")
    assert [event.changeset for event in served.events(stamp - 1)] == [changeset.id]


def test_every_verb_goes_through_a_reader(running: Running, served: kvstore.Store) -> None:
    store = served
    store.delete_range(b"", b"z")
    with connect(running.url) as client:
        first = client.put_many({b"a": b"1", b"b": b"2", b"n": b"5"})
        assert client.get_many([b"a", b"x"]) == [b"1", None]
        assert client.floor(b"aa") == (b"a", b"1")
        assert [client.increment(b"n"), client.pop(b"b")] == [6, b"2"]
        assert client.put_if(b"a", b"3", b"1") == store.upper - 1
        assert client.get(b"a", as_of=first) == b"1"
        assert client.get(b"a", as_of=client.now()) == b"3"  # the owner completes this time
        with pytest.raises(NotYetWrittenError):
            client.get(b"a", as_of="2200-01-01T00:00:00Z")
        txn = client.transaction()
        assert txn.get(b"a") == b"3"
        store.put(b"a", b"4")
        txn.put(b"a", b"5")
        with pytest.raises(ConflictError):
            txn.commit()
        changes = client.changes_batches(0).read_all()
        assert changes["key"].to_pylist()[-1] == b"a"
        assert changes.num_rows == store.changes_batches(0).read_all().num_rows
        labels = pa.table({"id": [b"a"], "ts": pa.array([first], pa.int64())})
        assert client.join(labels).read_all()["value"].to_pylist() == [b"1"]
        with client.feed("f", start=first - 1) as feed:
            events = [event for batch in feed for event in batch.events]
            feed.ack(feed.position)
        assert [event.key for event in events][:3] == [b"a", b"b", b"n"]
        assert client.stats().keys() == store.stats().keys()
        client.drop_feed("f")
        client.gc(keep=None, before=client.upper)
        assert client.since == store.since
        with pytest.raises(UsageError, match="no verb"):
            client.call("nothing")
        client.put(b"big", bytes(3 << 20))
        assert client.get(b"big") == bytes(3 << 20)


def test_killed_readers_are_started_again_and_nothing_is_lost(
    running: Running, served: kvstore.Store
) -> None:
    draw, over = seeded(), threading.Event()
    written, errors = [0, 0], []

    def work(number: int) -> None:
        try:
            with connect(running.url, patience=120) as client:
                while not over.is_set():
                    client.increment(b"n%d" % number)
                    written[number] += 1
                    assert client.get(b"n%d" % number) == b"%d" % written[number]
        except BaseException as error:  # noqa: BLE001  # the test fails on it below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        before, killed = sum(written), draw.choice(readers_of(os.getpid()))
        os.kill(killed, signal.SIGKILL)
        until(lambda: sum(written) > before + 20 or bool(errors))  # noqa: B023
        until(lambda: len(set(readers_of(os.getpid())) - {killed}) == 2)  # noqa: B023
    over.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert served.metrics()["kvstore_background_failures_total"].values["server",] >= 4
    assert [served.get(b"n%d" % number) for number in range(2)] == [b"%d" % n for n in written]


@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=pytest.mark.soak)])
def test_a_killed_owner_takes_its_readers_with_it_and_the_next_one_goes_ahead(
    tmp_path: Path, kills: int
) -> None:
    draw, written, errors, over = seeded(), [0], [], threading.Event()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    server = ServerProcess(tmp_path / "store", listen, "--readers", "2")

    def write() -> None:
        try:
            with connect(f"http://{listen}", patience=120) as client:
                while not over.is_set():
                    client.put(b"k", b"%d" % written[0])
                    written[0] += 1
        except BaseException as error:  # noqa: BLE001  # the test fails on it below
            errors.append(error)

    server.start()
    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(kills):
        before = written[0] + draw.randint(3, 20)
        until(lambda: written[0] > before or bool(errors))  # noqa: B023
        readers = readers_of(server.pid)
        assert len(readers) == 2
        server.kill()
        until(lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in readers))  # noqa: B023
        server.start()
    over.set()
    thread.join()
    assert not errors
    assert server.stop() == 0
    with kvstore.open(tmp_path / "store") as store:
        values = [int(version.value or b"") for version in store.history(b"k")]
    assert values == list(range(written[0]))[::-1]


def test_a_stopped_reader_holds_up_its_own_callers_alone(running: Running) -> None:
    stopped = readers_of(os.getpid())[0]
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: ") T " in Path(f"/proc/{stopped}/stat").read_text())
    try:
        for number in range(20):
            with connect(running.url) as client:
                client.put(b"k", b"%d" % number)
                assert client.get(b"k") == b"%d" % number
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_tokens_hold_at_readers_and_their_secrets_stay_with_the_owner(
    store: kvstore.Store,
) -> None:
    secret, other = "s" * 32, "w" * 32
    tokens = [Token(secret, ["read"], prefix=b"a"), Token(other, ["write"])]
    with serving(app(store, tokens), HERE, readers=1) as running:
        with connect(running.url, other) as writer, connect(running.url, secret) as client:
            writer.put(b"a1", b"1")
            writer.put(b"b1", b"1")
            assert dict(client.scan()) == {b"a1": b"1"}
            for refused in (
                lambda: client.get(b"b1"),
                lambda: client.put(b"a1", b"2"),
                lambda: writer.call("gc"),
            ):
                with pytest.raises(AccessDeniedError):
                    refused()
        with pytest.raises(AccessDeniedError):
            connect(running.url)
        assert status(say(running, request("PUT", "/v1/keys/k", b"v"))) == 401
        for pid in readers_of(os.getpid()):
            place = Path(f"/proc/{pid}")
            told = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
            assert secret.encode() not in told
    assert store.get(b"k") is None


def test_readers_speak_tls(store: kvstore.Store, certificate: tuple[Path, Path]) -> None:
    with serving(app(store), HERE, tls=server_tls(*certificate), readers=1) as running:
        assert running.url.startswith("https://")
        with connect(running.url, ca=certificate[0]) as client:
            stamp = client.put(b"k", b"v")
            assert client.history(b"k")[0].timestamp == stamp
        with socket.create_connection((running.address.host, running.address.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with connect(running.url, ca=certificate[0]) as client:
            assert client.get(b"k") == b"v"


def test_a_caller_that_the_owner_cannot_see_is_admitted_by_the_reader(running: Running) -> None:
    """The reader reaches the owner by a socket of this user. A check by the owner alone would admit
    every caller."""
    for header in ("Origin: http://evil.example", "X-Forwarded-For: 10.0.0.1"):
        heard = say(running, request("PUT", "/v1/keys/secret", b"v", header))
        assert status(heard) == 403
    assert status(say(running, request("GET", "/v1/keys/secret"))) == 404
    for line in (b"PUT /v1/keys/a\x01b HTTP/1.1", b"PUT v1/keys/k HTTP/1.1"):
        heard = say(running, line + b"\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nv")
        assert not heard or status(heard) == 400
    with connect(running.url) as client:
        assert [client.get(key) for key in (b"secret", b"a\x01b")] == [None, None]


def test_readers_of_a_store_in_memory_are_refused(tmp_path: Path) -> None:
    for place in (None, tmp_path / "memory"):
        with (
            kvstore.open(place, "memory") as store,
            pytest.raises(UsageError, match="in memory"),
            serving(app(store), HERE, readers=1),
        ):
            pass


def test_a_signal_ends_a_server_in_order_from_its_first_moments(tmp_path: Path) -> None:
    """A signal comes when the store is open, and when the address was printed. Each ends the server
    with code 0."""
    server = ServerProcess(tmp_path / "store", "127.0.0.1:0", "--readers", "1")
    control = tmp_path / "store" / "control" / "socket"
    server.begin()
    until(control.exists)
    assert server.stop() == 0
    server.start()
    assert server.stop() == 0
    assert not control.exists()  # this shows that the store was closed


def test_an_answer_ends_when_its_caller_has_gone(store: kvstore.Store) -> None:
    """uvicorn drops parts for a caller who has gone, without an error."""
    with store.batch() as batch:
        for number in range(100):
            batch.put(b"%03d" % number, b"v")
    sent = asyncio.run(_sent_until_gone(app(store), 3))
    assert 3 <= sent < 20  # of a hundred parts in all


async def _sent_until_gone(served: App, parts: int) -> int:
    sent, gone = 0, asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal sent
        sent += 1
        if sent == parts:
            gone.set()
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/scan",
        "query_string": b"batch_rows=1",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    await served(scope, receive, send)
    return sent
