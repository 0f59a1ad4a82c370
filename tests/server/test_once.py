"""A write that is sent again is done once, by the same server and by one that was started anew."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import (
    ConflictError,
    ForkedError,
    IndeterminateError,
    PreconditionError,
    UsageError,
)
from kvstore.mvcc import WriteSet
from kvstore.remote.client import Client, connect
from kvstore.remote.client.client import ClientFeed, ClientHold, ClientSnapshot
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.timeline.request_notes import RequestToken
from tests.harness.bounds import bounds
from tests.harness.forks import STATUS, reap
from tests.harness.seeds import seeded
from tests.server.process import ServerProcess
from tests.txn.serialization import Record, cycle, edges

pytestmark = pytest.mark.on_disk

WRITERS = 3


def put(store: kvstore.Store, value: bytes, token: RequestToken) -> kvstore.Timestamp:
    writes = WriteSet()
    writes.put(b"k", value)
    return store.requests.commit(writes, token, None)


@pytest.mark.usefixtures("each_engine")
def test_a_request_is_done_once_also_by_the_next_process(tmp_path: Path) -> None:
    token = RequestToken("writer", 1, 0)
    with kvstore.open(tmp_path / "store") as store:
        first = put(store, b"1", token)
        assert put(store, b"again", token) == first
    with kvstore.open(tmp_path / "store") as store:
        assert put(store, b"again", token) == first
        assert [version.value for version in store.history(b"k")] == [b"1"]
        second = put(store, b"2", RequestToken("writer", 2, first))
        with pytest.raises(UsageError, match="request 1 of writer, which has made request 2"):
            put(store, b"again", token)
        assert [version.timestamp for version in store.history(b"k")] == [second, first]


@pytest.mark.usefixtures("each_engine")
def test_every_kind_of_write_is_repeated_with_its_first_result(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        requests = store.requests
        store.put(b"k", b"0")

        def deletion() -> WriteSet:
            writes = WriteSet()
            writes.delete(b"k")
            return writes

        def spanning() -> WriteSet:
            writes = WriteSet()
            writes.delete_range(b"a", b"z")
            return writes

        def putting(value: bytes) -> WriteSet:
            writes = WriteSet()
            writes.put(b"k", value)
            return writes

        def twice(call: object) -> object:
            assert callable(call)
            done = call()
            assert call() == done
            return done

        span = kvstore.Span(b"a", b"z")
        condition = {"expected": b"0", "unchanged_since": None}
        twice(
            lambda: requests.write_if(putting(b"1"), b"k", RequestToken("a", 1), None, **condition)
        )
        assert twice(lambda: requests.pop(b"k", RequestToken("a", 2), None)) == b"1"
        assert twice(lambda: requests.pop(b"k", RequestToken("a", 3), None)) is None
        store.put(b"k", b"2")
        done = twice(lambda: requests.delete_live_range(spanning(), span, RequestToken("b"), None))
        assert done is not None
        store.put(b"k", b"3")
        assert requests.delete_live_range(spanning(), span, RequestToken("b"), None) == done
        assert store.get(b"k") == b"3"
        read_at = store.upper - 1
        reads = kvstore.transaction.ReadSet()
        reads.add_key(b"k")
        twice(lambda: requests.commit_reads(deletion(), reads, read_at, RequestToken("c"), None))
        with pytest.raises(ConflictError):
            requests.commit_reads(deletion(), reads, read_at, RequestToken("d"), None)
        assert len(store.history(b"k")) == 7
        assert twice(lambda: requests.increment(b"n", 5, RequestToken("e", 1), None)) == 5
        store.increment(b"n")
        # a repeated request gets its own first sum
        assert requests.increment(b"n", 5, RequestToken("e", 1), None) == 5
        assert store.get(b"n") == b"6"


def test_a_writer_that_was_forgotten_is_told_so_and_a_new_one_is_not(
    store: kvstore.Store,
) -> None:
    with bounds(REQUEST_WRITERS_MAX=2):
        before = store.upper - 1
        put(store, b"a", RequestToken("a", 1, before))
        put(store, b"b", RequestToken("b", 1, before))
        put(store, b"c", RequestToken("c", 1, before))
        with pytest.raises(IndeterminateError, match="no longer has the note"):
            put(store, b"again", RequestToken("a", 1, before))
        put(store, b"d", RequestToken("d", 1, store.upper - 1))
        with pytest.raises(IndeterminateError):
            put(store, b"again", RequestToken("b", 1, before))
        assert [version.value for version in store.history(b"k")] == [b"d", b"c", b"b", b"a"]


def test_a_new_writer_passes_over_no_notes_but_those_that_are_forgotten(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0

    class Counted(dict[str, object]):
        def __iter__(self) -> Iterator[str]:
            nonlocal passed
            for writer in super().__iter__():
                passed += 1
                yield writer

    monkeypatch.setattr("kvstore.timeline.request_notes.dict", Counted, raising=False)
    with bounds(REQUEST_WRITERS_MAX=50):
        for number in range(200):
            put(store, b"v", RequestToken(f"w{number}", 1, store.upper - 1))
    assert passed == 150


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_a_killed_server_loses_no_acknowledged_write_and_does_none_twice(
    tmp_path: Path, kills: int
) -> None:
    """Writers write while the server is killed and started: each value is put once, in order."""
    draw = seeded()
    server = ServerProcess(tmp_path / "store", str(tmp_path / "socket"))
    written: dict[int, int] = {}
    errors: list[BaseException] = []
    is_over = threading.Event()
    with connect(server.start(), patience=120) as client:

        def write(writer: int) -> None:
            number = 0
            try:
                while not is_over.is_set():
                    client.put(b"writer %d" % writer, b"%d" % number)
                    number += 1
                    written[writer] = number
            except BaseException as error:  # noqa: BLE001  # the test fails on it below
                errors.append(error)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(WRITERS)]
        for thread in threads:
            thread.start()
        for kill in range(kills):
            before = sum(written.values())
            while sum(written.values()) < before + draw.randint(5, 60) and not errors:
                time.sleep(0.001)
            server.kill()
            server.start()
            assert not errors, f"after kill {kill}"
        is_over.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert server.stop() == 0
    with kvstore.open(tmp_path / "store") as store:
        for writer in range(WRITERS):
            values = [int(version.value or b"") for version in store.history(b"writer %d" % writer)]
            assert values == list(range(written[writer]))[::-1]


@pytest.mark.parametrize("readers", [0, 2])
def test_recorded_histories_of_clients_are_serialisable(tmp_path: Path, readers: int) -> None:
    """Transactions and conditional writes of several clients; each value names the transaction that
    wrote it."""
    keys = [b"k%d" % number for number in range(6)]
    done: list[tuple[Record, dict[bytes, bytes | None]]] = []
    refused: list[Exception] = []
    seed = seeded().getrandbits(32)
    with (
        kvstore.open(tmp_path / "store", "rocksdb", durability="async") as store,
        serving(app(store), ListenAddress("127.0.0.1", 0), readers=readers) as running,
    ):

        def run(worker: int) -> None:
            draw = random.Random(seed + worker)
            with connect(running.url) as client:
                for number in range(40):
                    name = f"{worker}.{number}"
                    record, seen = Record(name), {}
                    try:
                        if draw.random() < 0.3:
                            key = draw.choice(keys)
                            seen = {key: client.get(key)}
                            at = client.put_if(key, name.encode(), seen[key])
                            record.writes = {key: at}
                        else:
                            transact(client, draw, record, seen)
                    except (ConflictError, PreconditionError) as error:
                        refused.append(error)
                    else:
                        done.append((record, seen))

        def transact(
            client: Client,
            draw: random.Random,
            record: Record,
            seen: dict[bytes, bytes | None],
        ) -> None:
            with client.transaction() as txn:
                if draw.random() < 0.4:
                    low, high = sorted(draw.sample(range(7), 2))
                    rows = dict(txn.scan(keys[low], b"k%d" % high))
                    seen.update({key: rows.get(key) for key in keys[low:high]})
                else:
                    seen.update({key: txn.get(key) for key in draw.sample(keys, 2)})
                written = draw.sample(keys, draw.randint(0, 2))
                for key in written:
                    txn.put(key, record.name.encode())
            record.writes = dict.fromkeys(written, txn.timestamp or 0)

        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stamps = {each.name.encode(): at for each, _ in done for at in each.writes.values()}
    for record, seen in done:
        record.reads = {key: stamps[value] if value else 0 for key, value in seen.items()}
    assert len(done) > 50
    assert refused
    assert cycle(edges([record for record, _ in done])) is None


def test_a_forked_child_has_connections_and_tokens_of_its_own(store: kvstore.Store) -> None:
    address = ListenAddress("127.0.0.1", 0)
    with serving(app(store), address) as running, connect(running.url) as client:
        client.put(b"k", b"parent")
        child = os.fork()
        if not child:
            status = 1
            try:
                for number in range(50):
                    client.put(b"child", b"%d" % number)
                    assert client.get(b"child") == b"%d" % number
                status = 0
            finally:
                os._exit(status)
        for number in range(50):
            client.put(b"k", b"%d" % number)
            assert client.get(b"k") == b"%d" % number
        assert reap(child) == 0
        assert client.get(b"child") == b"49"
        assert len(client.history(b"k")) == 51


def test_a_forked_child_ends_nothing_that_its_parent_has_taken(store: kvstore.Store) -> None:
    """A child leaves the blocks of its parent: the snapshot, the hold and the changeset stay."""
    parent, status = os.getpid(), 1

    def parts_of_the_child(snapshot: ClientSnapshot, feed: ClientFeed) -> None:
        with pytest.raises(ForkedError, match="take another from the client"):
            snapshot.get(b"k")
        with pytest.raises(ForkedError):
            next(feed.batches())

    def parts_of_the_parent(snapshot: ClientSnapshot, hold: ClientHold) -> None:
        client.put(b"k", b"2")
        client.gc(keep=timedelta(0))
        assert snapshot.get(b"k") == b"1"
        assert hold.timestamp < client.upper

    address = ListenAddress("127.0.0.1", 0)
    with serving(app(store), address) as running, connect(running.url) as client:
        client.put(b"k", b"1")
        feed = client.feed("news", start="now")
        with client.changeset() as changeset:
            try:
                with client.snapshot() as snapshot, client.hold("mine") as hold:
                    child = os.fork()
                    if os.getpid() != parent:
                        parts_of_the_child(snapshot, feed)
                    else:
                        assert reap(child) == STATUS
                        parts_of_the_parent(snapshot, hold)
                changeset.end()
                status = STATUS
            finally:
                if os.getpid() != parent:
                    os._exit(status)
        assert changeset.events == 1
