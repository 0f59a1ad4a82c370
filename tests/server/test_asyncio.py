"""The client for asyncio, and the server mounted into an application of FastAPI."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi import FastAPI
from uvicorn import Config

import kvstore
from kvstore.errors import AccessDeniedError, ClosedError, PreconditionError, StorageError
from kvstore.remote.client import connect, connect_async
from kvstore.remote.client.asynchronous import CallThreads
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.guarded import GuardedProtocol, GuardedServer
from kvstore.remote.server.running import bound
from tests.harness.forks import reap

LOCAL = ListenAddress("127.0.0.1", 0)


def test_coroutines_read_and_write_tables(store: kvstore.Store) -> None:
    schema = pa.schema([("user", pa.int64()), ("plan", pa.string())])

    async def run(url: str) -> None:
        async with await connect_async(url) as client:
            users = await client.table("users", schema, "user", {"by_plan": ["plan"]})
            first = await users.put({"user": 1, "plan": "free"})
            await users.put_batch([{"user": n, "plan": "paid"} for n in range(3)])
            await users.put({"user": 7, "plan": "free"}, expires=timedelta(hours=1))
            await users.update(2, plan="free")
            left = await users.ttl(7)
            assert left is not None
            assert left > timedelta(minutes=59)
            assert await users.get(1) == {"user": 1, "plan": "paid"}
            assert await users.get(1, as_of=first, columns=["plan"]) == {"plan": "free"}
            assert (await users.get_many([[0], [9]]))[1] is None
            assert [row.timestamp for row in await users.history(1)][-1] == first
            await users.delete(7)
            found = [row async for row in users.find("by_plan", "free")]
            assert [row["user"] for row in found] == [2]
            assert [row["user"] async for row in users.rows(limit=2)] == [0, 1]
            assert (await users.schema()).names == ["user", "plan"]
            assert (await users.key(), await users.event_time()) == (["user"], None)
            assert await users.indexes() == {"by_plan": ["plan"]}
            rows = [batch async for batch in users.scan()]
            assert sum(batch.num_rows for batch in rows) == 3
            labels = pa.table({"user": [1], "ts": pa.array([first], pa.int64())})
            joined = [batch async for batch in users.join(labels, "user")]
            assert joined[0]["plan"].to_pylist() == ["free"]
            changes = [batch async for batch in users.changes(0, images="post")]
            assert sum(batch.num_rows for batch in changes) == 7
            assert await client.tables() == ["users"]
            await users.alter(add={"seats": (pa.int8(), 1)}, add_index={"by_seats": "seats"})
            assert await users.build_index("by_seats") is not None
            async with client.snapshot() as then:
                before, now = await then.table("users"), await users.count()
                await users.delete_range(prefix=())
                assert (await users.count(), await before.count()) == (0, now)
                await users.revert(then.as_of)
                assert await users.count() == now
            assert len([row async for row in users.find("by_seats", 1)]) == 3

    with serving(app(store), LOCAL) as running:
        asyncio.run(run(running.url))


def test_coroutines_do_what_the_methods_do(store: kvstore.Store) -> None:
    async def run(url: str) -> None:
        async with await connect_async(url) as client:
            stamps = await asyncio.gather(*(client.put(b"%d" % n, b"v") for n in range(50)))
            assert len(set(stamps)) == 50
            assert await client.get(b"7") == b"v"
            assert await client.get(b"absent", default=b"d") == b"d"
            assert await client.get_many([b"1", b"x"]) == [b"v", None]
            assert [row async for row in client.scan()] == list(store.scan())
            async with client.batch() as batch:
                batch.put(b"a", b"1")
            assert batch.timestamp == await client.upper() - 1
            with suppress(InterruptedError):
                async with client.batch() as dropped:
                    dropped.put(b"a", b"2")
                    raise InterruptedError
            with pytest.raises(PreconditionError):
                await client.put_if(b"a", b"3", None)

            def add(txn: kvstore.Transaction) -> None:
                txn.put(b"n", b"%d" % (int(txn.get(b"n") or b"0") + 1))

            await asyncio.gather(*(client.transact(add, attempts=1000) for _ in range(5)))
            assert store.get(b"n") == b"5"
            count = 0
            async for changes in client.changes_batches(0):
                count += changes.num_rows
            assert count == 56
            events = []
            async for found in client.feed("feed", 0, follow=False):
                events += found.events
            assert len(events) == 56
            labels = pa.table({"id": pa.array([b"n", b"none"], pa.binary())})
            joined = [batch async for batch in client.join(labels, at=None)]
            assert joined == store.join(labels, at=None).read_all().to_batches()
            gone = await client.gc(before=store.upper - 1)
            assert gone.since == store.since > 0
            assert await client.pop(b"a") == b"1"
            assert await client.put_many({b"c": b"1", b"d": b"5"}) == await client.upper() - 1
            assert await client.increment(b"c", 4) == 5
            assert await client.update(b"d", lambda old: (old or b"") + b"!") == b"5!"
            assert await client.count() == store.count()
            assert [key async for key in client.keys(b"c", b"n")] == [b"c", b"d"]
            assert await client.floor_many([b"cc"]) == [(b"c", b"5")]
            assert await client.durable() <= await client.upper() <= await client.now()
            await client.drop_feed("feed")
            async with client.snapshot() as snapshot, client.hold("kept"):
                await client.delete(b"c")
                assert snapshot.as_of < store.upper - 1
                assert await snapshot.get(b"c") == (await snapshot.get_many([b"c"]))[0] == b"5"
                assert await snapshot.floor(b"cc") == (b"c", b"5")
                assert [row async for row in snapshot.scan(b"c", b"d")] == [(b"c", b"5")]
                assert [hold.name for hold in store.holds.all() if hold.name == "kept"]
            assert not store.holds.all()
            with pytest.raises(ClosedError):
                await snapshot.get(b"c")
            since = gone.since
            assert [each async for each in client.changes(since)] == list(store.changes(since))
            assert [each async for each in client.events(since)] == list(store.events(since))
            assert [each async for each in client.epochs()] == list(store.epochs())
            assert await client.generations() == store.generations()
            waiting = asyncio.create_task(client.wait_beyond(store.upper))
            await client.put(b"k", b"v")
            await waiting
            assert (await client.verify()).ok
            assert await client.to_time("now") <= store.now()
            assert (await client.metrics()).keys() == store.metrics().keys()
            assert await client.store_id() == store.store_id
            scan = client.scan_batches(batch_rows=1)
            await anext(scan)
            await scan.aclose()

    with serving(app(store), LOCAL) as running:
        asyncio.run(run(running.url))


def test_a_cancelled_coroutine_keeps_nothing_at_the_server(store: kvstore.Store) -> None:
    """It is cancelled before its call, in it, and behind it."""

    async def run(url: str) -> None:
        async with await connect_async(url) as client:
            takes: list[Callable[[], AbstractAsyncContextManager[object]]] = [
                lambda: client.hold("kept"),
                client.snapshot,
                client.changeset,
            ]
            for take, turns in product(takes, range(8)):
                await cancelled(inside(take()), turns)
        with pytest.raises(ClosedError):
            await client.get(b"k")

    with serving(app(store), LOCAL) as running:
        asyncio.run(run(running.url))
        assert not store.holds.all()
        assert store.force_quiescence(timeout=0) == store.upper - 1


def test_a_stream_is_cancelled_within_a_step(store: kvstore.Store) -> None:
    async def read(rows: AsyncIterator[object]) -> None:
        async for _ in rows:
            pass

    async def run(url: str) -> None:
        async with await connect_async(url, timeout=1) as client:
            await client.put(b"k", b"v")
            for turns in range(8):
                await cancelled(read(client.keys()), turns)
                await cancelled(read(client.changes(0)), turns)
            # the consumer waits for news
            await cancelled(read(client.feed("news", "now")), 100)

    with serving(app(store), LOCAL) as running:
        asyncio.run(run(running.url))


def test_a_cancelled_coroutine_raises_no_error_of_its_end() -> None:
    """The cancellation may come when the call is done, and its coroutine does not know yet."""

    def refuse(_: object) -> None:
        raise StorageError("the server", "it has gone")

    async def run() -> None:
        threads = CallThreads("a client")
        for turns in range(100):
            task = asyncio.create_task(threads.take(lambda: "taken", refuse))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            task.cancel()
            (found,) = await asyncio.gather(task, return_exceptions=True)
            assert found == "taken" or isinstance(found, asyncio.CancelledError)
        await threads.close()

    asyncio.run(run())


def test_closing_ends_the_calls_that_wait_for_news(store: kvstore.Store) -> None:
    """There may never be news, so nobody waits for them."""
    waits = {"/fetch": 2, "/wait_beyond": 1}
    both_wait = threading.Event()
    served = app(store)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        for name, left in waits.items():
            if left and scope.get("path", "").endswith(name):
                waits[name] = left - 1
        if not any(waits.values()):
            both_wait.set()
        await served(scope, receive, send)

    async def read(rows: AsyncIterator[object]) -> None:
        async for _ in rows:
            pass

    async def run(url: str) -> None:
        client = await connect_async(url, timeout=1)
        upper = await client.put(b"k", b"v")
        calls = [read(client.feed("news", "oldest")), client.wait_beyond(upper + 10**18)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.to_thread(both_wait.wait)
        await client.close()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, ClosedError)

    with hosted(watched) as url:
        asyncio.run(run(url))


async def inside(block: AbstractAsyncContextManager[object]) -> None:
    async with block:
        await asyncio.Event().wait()


async def cancelled(work: Coroutine[Any, Any, None], turns: int) -> None:
    """Cancel the work after some turns of the event loop, if it is not done before."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@contextmanager
def hosted(application: Any) -> Iterator[str]:
    """An application on a free port, run by uvicorn with its defaults."""
    listener = bound(LOCAL)
    server = GuardedServer(Config(application, http=GuardedProtocol, log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        server.is_up.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_coroutines_of_a_forked_child_have_threads_of_their_own(store: kvstore.Store) -> None:
    with serving(app(store), LOCAL) as running:

        async def work(key: bytes) -> kvstore.AsyncClient:
            async with await connect_async(running.url) as other:
                await other.put(key, b"v")
            client = await connect_async(running.url)
            await client.put(key, b"w")
            return client

        client = asyncio.run(work(b"parent"))

        async def again() -> bytes | None:
            async with client:
                return await client.get(b"parent")

        assert in_child(lambda: asyncio.run(again()) == b"w") == 0
        assert asyncio.run(again()) == b"w"


def test_an_answer_under_way_at_the_close_opens_no_store_again(tmp_path: Path) -> None:
    served = app(tmp_path / "store")

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            served.close()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b""}

    line = {"type": "http", "method": "GET", "path": "/v1/stats", "query_string": b""}
    asyncio.run(
        served({**line, "headers": [(b"host", b"localhost")], "client": None}, receive, send)
    )
    kvstore.open(tmp_path / "store").close()


def test_an_application_refuses_the_requests_of_a_forked_child(store: kvstore.Store) -> None:
    """The threads of its parent, which do most calls, are not there."""
    served = app(store)

    async def ask(path: str) -> list[MutableMapping[str, Any]]:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b""}

        line = {"type": "http", "method": "GET", "path": path, "query_string": b""}
        await served({**line, "headers": [(b"host", b"localhost")], "client": None}, receive, send)
        return sent

    def refuses() -> bool:
        found = [asyncio.run(ask(path)) for path in ("/v1/stats", "/v1/keys/k", "/metrics")]
        served.close()
        return all(b"ForkedError" in answer[1]["body"] for answer in found)

    assert asyncio.run(ask("/v1/stats"))[0]["status"] == 200
    assert in_child(refuses) == 0
    assert asyncio.run(ask("/v1/stats"))[0]["status"] == 200
    served.close()


def in_child(is_right: Callable[[], bool]) -> int:
    """The status of a forked child: 0 if the function returned true there."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if is_right() else 2
        finally:
            os._exit(status)
    return reap(child)


def test_an_application_mounts_the_server_beside_its_own_paths(store: kvstore.Store) -> None:
    service = FastAPI()
    secret = "s" * 32

    @service.get("/flights/{key}")
    def flight(key: str) -> dict[str, str | None]:
        value = store.get(key.encode())
        return {"status": None if value is None else value.decode()}

    service.mount("/some/store", app(store, [Token(secret, ["write"])]))
    with hosted(service) as url:
        with connect(f"{url}/some/store", secret) as client:
            for key in (b"AA1", b"a/b", b"..", b"", b"\xff %"):
                client.put(key, b"late")
                assert client.get(key) == store.get(key) == b"late"
            assert len(client.scan_batches().read_all()) == 5
        with pytest.raises(AccessDeniedError):
            connect(f"{url}/some/store", "t" * 32)
