"""Verbs of readers in many processes: joins, windows by key, files, and leases that end."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, Store
from kvstore.errors import (
    AccessDeniedError,
    HistoryGoneError,
    NotYetWrittenError,
    RetryableError,
    UsageError,
)
from kvstore.remote.client import Client, connect
from kvstore.remote.client.transport import read_batch
from kvstore.remote.server import ListenAddress, Running, Token, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.http import BrokenStreamError, arrow_parts
from tests.harness.bounds import TINY, bounds
from tests.harness.seeds import seed_of
from tests.joins.histories import KEYS, table, write_at_random

LOCAL = ListenAddress("127.0.0.1", 0)
SEED = "KVSTORE_REMOTE_JOIN_SEED"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", clock=clock, durability="async") as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> Iterator[Client]:
    with serving(app(store), LOCAL) as running, connect(running.url) as connected:
        yield connected


@pytest.mark.parametrize("tiny", [{}, TINY], ids=["whole", "tiny"])
def test_joins_and_windows_of_a_client_are_the_ones_of_its_store(
    store: Store, client: Client, clock: ManualClock, tmp_path: Path, tiny: dict[str, int]
) -> None:
    pick = random.Random(seed_of(SEED, None))
    moments = [at for at in write_at_random(store, clock, tmp_path, pick) if at >= store.since]
    count = 30 if tiny else 300  # one round trip for every three labels
    with bounds(tiny):
        labels = table([(pick.choice([*KEYS, b"zz"]), pick.choice(moments)) for _ in range(count)])
        for max_age in (None, timedelta(microseconds=30)):
            for on_gone in ("error", "null"):
                found = client.join(labels, max_age=max_age, on_gone=on_gone).read_all()
                assert found == store.join(labels, max_age=max_age, on_gone=on_gone).read_all()
        side_by_side = kvstore.join(labels, [kvstore.Join(client, prefix="a_"), store])
        assert side_by_side.read_all().column_names[-2:] == ["value", "value_timestamp"]
        assert not store.holds.all()
        low, high = sorted(pick.sample(moments, 2))
        for revisions in ("all", "latest"):
            window = {"since": int(low), "upto": int(high), "revisions": revisions}
            rows = client.rows("versions", **window).read_all().to_pylist()
            rows += client.rows("versions", **window, ranges=True).read_all().to_pylist()
            found = [(r["timestamp"], r["key"], r["value"], r["end_key"]) for r in rows]
            assert sorted(found, key=repr) == sorted(
                [
                    (int(change.timestamp), change.key, change.value, change.end_key)
                    for change in store.changes(low, high, revisions=revisions)
                ],
                key=repr,
            )


def test_labels_travel_in_pieces_that_a_server_takes(store: Store, client: Client) -> None:
    keys = [b"%d/" % number + b"k" * 200 for number in range(300)]
    at = store.put_many(dict.fromkeys(keys, b"v"))
    labels = table([(key, at) for key in keys])
    with bounds(SERVER_BODY_BYTES_MAX=20_000):
        assert client.join(labels).read_all() == store.join(labels).read_all()


@contextlib.contextmanager
def relayed(running: Running, cuts: list[int]) -> Iterator[str]:
    """The address of a relay to a server. It cuts its first connections, each once so many bytes of
    answers have passed. `cuts` loses the numbers that were used."""

    def pump(source: socket.socket, target: socket.socket, most: float) -> None:
        with contextlib.suppress(OSError):
            while most > 0 and (part := source.recv(1 << 14)):
                most -= len(part)
                target.sendall(part)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near = stack.enter_context(listener.accept()[0])
                place = (running.address.host, running.address.port)
                far = stack.enter_context(socket.create_connection(place))
                most = cuts.pop(0) if cuts else math.inf
                for ends in ((near, far, math.inf), (far, near, most)):
                    threading.Thread(target=pump, args=ends).start()

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def test_joins_ask_again_for_an_answer_that_breaks_off(store: Store) -> None:
    keys = [b"%04d" % number for number in range(2000)]
    at = store.put_many({key: key * 250 for key in keys})
    labels = table([(key, at) for key in keys])
    docs = store.table("docs", pa.schema({"id": pa.int64(), "text": pa.binary()}), key="id")
    ids = pa.concat_tables(pa.table({"id": range(at, at + 40)}) for at in range(0, 2000, 40))
    docs.put_batch(pa.table({"id": range(2000), "text": [key * 250 for key in keys]}))
    with serving(app(store), LOCAL) as running:
        for cuts in ([300_000, 900_000], [1_900_000], [10_000] * 3):
            given = list(cuts)
            with relayed(running, given) as url, connect(url) as client:
                assert client.join(labels).read_all() == store.join(labels).read_all()
            assert not given
            with relayed(running, cuts) as url, connect(url) as client:
                found = client.table("docs").join(ids, on="id", at=None).read_all()
            assert found == docs.join(ids, on="id", at=None).read_all()
            assert not cuts


def test_an_answer_of_many_parts_that_breaks_off_later_than_the_patience_is_asked_for_again(
    store: Store,
) -> None:
    """The patience begins with the failure: a slow client needs it most."""
    at = store.put_many({b"%04d" % number: bytes(1000) for number in range(2000)})
    labels = table([(b"%04d" % number, at) for number in range(2000)])
    with (
        serving(app(store), LOCAL) as running,
        relayed(running, [500_000]) as url,
        connect(url, patience=0.001) as client,
    ):
        assert client.join(labels).read_all() == store.join(labels).read_all()


def test_an_error_of_a_join_names_the_row(store: Store, client: Client) -> None:
    stamp = store.put(b"a", b"1")
    with bounds({"JOIN_ROWS_FIRST": 2, "JOIN_ROWS_MAX": 2}):
        labels = table([(b"a", stamp)] * 5 + [(b"b", 1 << 62)])
        with pytest.raises(NotYetWrittenError, match="row 5, key b'b'"):
            client.join(labels).read_all()
    with pytest.raises(UsageError, match="a join without rows"):
        client.call("join")


def test_a_stream_that_fails_ends_with_its_error() -> None:
    schema = pa.schema([("a", pa.binary())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"a": [b"1"]}, schema)
        raise HistoryGoneError(as_of=3, since=5)

    parts = arrow_parts(pa.RecordBatchReader.from_batches(schema, batches()))
    assert pa.ipc.read_schema(pa.py_buffer(next(parts))) == schema
    assert read_batch(next(parts), schema, "there").num_rows == 1
    with pytest.raises(HistoryGoneError) as caught:
        read_batch(next(parts), schema, "there")
    assert caught.value.since == 5
    with pytest.raises(BrokenStreamError):
        next(parts)


def test_a_lease_keeps_history_until_its_end(
    store: Store, client: Client, clock: ManualClock
) -> None:
    first = store.put(b"a", b"1")
    clock.advance(5_000_000_000)
    store.put(b"a", b"2")
    assert client.lease("mine", first, seconds=10) == first
    assert [record.kind for record in store.holds.all()] == ["reader"]
    clock.advance(9_000_000_000)
    assert store.gc(store.upper - 1).since <= first
    client.lease("mine", first, seconds=10)  # this renews the lease
    clock.advance(9_000_000_000)
    assert store.gc(store.upper - 1).since <= first
    assert client.get(b"a", as_of=first) == b"1"
    clock.advance(2_000_000_000)
    store.put(b"a", b"3")
    assert store.gc(store.upper - 1).since > first
    with pytest.raises(HistoryGoneError):
        client.lease("mine", first, seconds=10)
    client.lease("other", seconds=10)
    # the lease that ended was removed
    assert [record.name for record in store.holds.all()] == ["reader/other"]
    client.release_lease("other")
    client.release_lease("other")
    assert not store.holds.all()


def test_leases_are_bounded_and_reach_no_other_hold(store: Store) -> None:
    store.put(b"a/1", b"1")
    store.put(b"b/1", b"1")
    store.put(b"b/2", b"1")
    store.delete_range(b"a", b"c")
    held = store.holds.take("backup")
    secret = "r" * 20
    with (
        serving(app(store, [Token(secret, ["read"], b"b/")]), LOCAL) as running,
        connect(running.url, secret, patience=0) as reader,
        bounds({"READER_LEASES_MAX": 2}),
    ):
        reader.lease("backup", seconds=10)
        reader.release_lease("backup")
        assert held.timestamp  # the hold is still ours
        for name in ("one", "two", "two"):
            reader.lease(name, seconds=10)
        with pytest.raises(RetryableError, match="2 leases"):
            reader.lease("three", seconds=10)
        for seconds in (0, 90_000):
            with pytest.raises(UsageError, match="seconds"):
                reader.lease("one", seconds=seconds)
        with pytest.raises(UsageError, match="of a lease"):
            reader.lease("", seconds=1)
        reader.release_lease("two")
        with pytest.raises(AccessDeniedError):
            reader.join(table([(b"a/1", 1)])).read_all()
        ranges = reader.rows("versions", since=0, ranges=True).read_all().to_pylist()
        assert [(row["key"], row["end_key"]) for row in ranges] == [(b"b/", b"b0")]
        store.checkpoint(store.path.parent / "flushed")  # type: ignore[union-attr]
        (file,) = reader.call("files")["files"]
        assert (file["first"], file["last"]) == ("b/", "b/2")
