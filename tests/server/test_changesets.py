"""Changesets of clients: opened at the server, carried by writes, and ended by themselves."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import BusyError, ClosedError, RetryableError, UsageError
from kvstore.remote.client import Client, connect, connect_async
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.changesets import LentChangesets
from tests.harness.bounds import bounds
from tests.server.process import ServerProcess


@pytest.fixture
def client(store: kvstore.Store, tmp_path: Path) -> Iterator[Client]:
    """A client of `store`."""
    address = ListenAddress(path=str(tmp_path / "s"))
    with serving(app(store), address) as running, connect(running.url) as connected:
        yield connected


def test_writes_inside_the_block_belong_to_it(client: Client, store: kvstore.Store) -> None:
    client.put(b"before", b"1")
    since = store.upper - 1
    with client.changeset() as outer:
        client.put(b"a", b"1")
        with client.changeset() as inner:
            with client.batch() as batch:
                batch.put(b"b", b"1")
                batch.delete(b"a")
            client.increment(b"n")
        client.transact(lambda txn: txn.put(b"c", b"1"))
        thread = threading.Thread(target=client.put, args=(b"own", b"1"))
        thread.start()
        thread.join()
        inside = contextvars.copy_context()
        thread = threading.Thread(target=inside.run, args=(client.put, b"d", b"1"))
        thread.start()
        thread.join()
        with pytest.raises(UsageError, match="inside a changeset"):
            client.force_quiescence()
        with pytest.raises(BusyError):
            contextvars.Context().run(partial(client.force_quiescence, timeout=0.0))
    client.put(b"after", b"1")
    tagged = {event.key: event.changeset for event in store.events(since)}
    assert outer.id is not None
    assert inner.id is not None
    assert [tagged[key] for key in (b"a", b"c", b"d")] == [inner.id, outer.id, outer.id]
    assert tagged[b"b"] == tagged[b"n"] == inner.id
    assert {tagged[b"own"], tagged[b"after"]}.isdisjoint({inner.id, outer.id})
    assert (outer.events, inner.events) == (3, 3)
    assert sum(epoch.events for epoch in store.epochs()) == len(list(store.events(0)))
    assert client.force_quiescence() == store.upper - 1
    with pytest.raises(ClosedError), outer:
        pass


def test_a_changeset_that_nobody_writes_to_ends(
    client: Client, store: kvstore.Store, tmp_path: Path
) -> None:
    with bounds(SERVER_CHANGESET_S=0.0):
        with client.changeset() as changeset:
            outside = contextvars.Context()
            written = outside.run(client.force_quiescence)  # waits for its end
            with pytest.raises(ClosedError, match="is closed"):
                client.put(b"late", b"1")
        assert store.get(b"late") is None
        assert changeset.events == 0
        assert written <= store.upper
    with bounds(SERVER_CHANGESETS_MAX=1), client.changeset():
        client.put(b"k", b"v")
        with (
            connect(tmp_path / "s", patience=0.0) as other,
            pytest.raises(RetryableError, match="1 changesets"),
        ):
            other.changeset().open()


def test_a_write_does_not_wake_the_thread_that_ends_changesets(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Counter[str]()
    wait = threading.Condition.wait

    def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
        waits[threading.current_thread().name] += 1
        return wait(condition, timeout)

    monkeypatch.setattr(threading.Condition, "wait", counted)
    with client.changeset(), client.changeset():
        for number in range(30):
            client.put(b"k", b"%d" % number)
        assert waits["kvstore-changesets"] <= 1


def test_a_changeset_ends_behind_a_write_that_takes_longer_than_its_time(
    store: kvstore.Store,
) -> None:
    lent = LentChangesets(store)
    name, _ = lent.open(None)
    with bounds(SERVER_CHANGESET_S=0.0):
        stamp = lent.within(name, None, lambda: store.put(b"k", b"v"))
    assert store.force_quiescence() >= stamp  # waits for its end
    with pytest.raises(ClosedError):
        lent.end(name)
    lent.close()


def test_a_server_that_stops_ends_the_changesets_of_its_callers(
    store: kvstore.Store, tmp_path: Path
) -> None:
    address = ListenAddress(path=str(tmp_path / "s"))
    with serving(app(store), address) as running, connect(running.url, patience=0.0) as client:
        changeset = client.changeset()
        changeset.open()
        assert not list(store.epochs())
    assert store.force_quiescence() == store.upper - 1


def test_a_changeset_ends_with_its_server_and_a_repeated_write_has_its_answer(
    tmp_path: Path,
) -> None:
    server = ServerProcess(tmp_path / "store", str(tmp_path / "socket"))
    with connect(server.start(), patience=60) as client:
        with client.changeset():
            client.put(b"a", b"1")
            server.kill()
            server.begin()
            with pytest.raises(ClosedError):
                client.put(b"b", b"1")
        stamp = client.put(b"c", b"1")
        assert [event.key for event in client.events(0)] == [b"a", b"c"]
        assert client.upper > stamp
    assert server.stop() == 0


def test_coroutines_have_changesets(store: kvstore.Store) -> None:
    async def run(url: str) -> None:
        async with await connect_async(url) as client:
            async with client.changeset() as changeset:
                await client.put(b"a", b"1")
                await asyncio.gather(client.put(b"b", b"1"), client.put(b"c", b"1"))
            await client.put(b"d", b"1")
        found = {event.key: event.changeset for event in store.events(0)}
        assert [found[key] == changeset.id for key in (b"a", b"b", b"c", b"d")] == [True] * 3 + [
            False
        ]
        assert changeset.events == 3

    with serving(app(store), ListenAddress("127.0.0.1", 0)) as running:
        asyncio.run(run(running.url))
