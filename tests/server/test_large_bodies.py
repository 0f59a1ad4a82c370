"""Requests above the usual bound: batches and values that wait in a temporary file."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import connect
from kvstore.errors import (
    AccessDeniedError,
    OutOfSpaceError,
    RetryableError,
    StorageError,
    UsageError,
)
from kvstore.remote.server import ListenAddress, app, serving
from kvstore.remote.server.running import Running
from kvstore.server import Token
from tests.harness.bounds import bounds
from tests.server.process import ServerProcess
from tests.server.test_hostile import ARROW, CHUNKED, request, say, status

LIMIT = 10_000
SMALL = {"SERVER_BODY_BYTES_MAX": LIMIT, "SERVER_SPOOL_PART_BYTES": 700, "SERVER_STREAM_ROWS": 30}
READER, WRITER = "r" * 20, "w" * 20


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def running(store: kvstore.Store, temporary: Path) -> Iterator[Running]:
    store.put(b"k", b"v")
    with (
        bounds(SMALL, SERVER_REQUEST_S_MAX=0.5),
        serving(app(store), ListenAddress("127.0.0.1", 0)) as server,
    ):
        yield server
        with connect(server.url) as client:  # others are served, whatever the test did
            assert client.get(b"k") == b"v"
    assert list(temporary.iterdir()) == []


def sent(rows: dict[str, list[Any]]) -> bytes:
    schema = pa.schema([("op", pa.uint8()), ("key", pa.binary()), ("value", pa.binary())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.table(rows, schema=schema))
    return bytes(sink.getvalue())


def test_large_batches_and_values_are_written_as_small_ones(
    running: Running, store: kvstore.Store
) -> None:
    rng = random.Random(1)
    rows = {b"r%05d" % n: rng.randbytes(rng.randrange(60)) for n in range(1500)}
    with connect(running.url) as client:
        at = client.put_many(rows)
        assert dict(store.scan(prefix=b"r")) == rows
        assert {change.timestamp for change in store.changes(at - 1)} == {at}
        client.put(b"value", bytes(5 * LIMIT))
        assert store.get(b"value") == bytes(5 * LIMIT)
        with client.batch() as batch:  # all kinds of writes
            batch.delete_range(b"r00000", b"r00500")
            for key, value in list(rows.items())[400:]:
                if value[:1] < b"\x30":
                    batch.delete(key)
                else:
                    batch.put(key, value * 2, expires="+1h" if value[:1] > b"\xd0" else None)
        late = {
            key: value * 2
            for number, (key, value) in enumerate(rows.items())
            if number >= 400 and value[:1] >= b"\x30"
        }
        assert dict(store.scan(prefix=b"r")) == late
        ending = [key for key, value in late.items() if rows[key][:1] > b"\xd0"]
        assert ending
        assert all((store.ttl(key) is not None) == (key in set(ending)) for key in late)
        table = client.table("t", pa.schema([("id", pa.int64()), ("s", pa.string())]), key="id")
        table.put_batch(pa.table({"id": range(1500), "s": ["text" * 5] * 1500}))
        assert len(store.table("t")) == 1500
        with client.transaction() as txn:
            assert txn.get(b"k") == b"v"
            for key in rows:
                txn.put(key, b"x" * 20)
        assert set(dict(store.scan(prefix=b"r")).values()) == {b"x" * 20}


def test_a_large_request_of_another_kind_is_refused_before_it_is_read(
    running: Running, store: kvstore.Store
) -> None:
    upper, json = store.upper, "Content-Type: application/json"
    arrow = f"Content-Type: {ARROW}"
    for path, method, headers, length, expected in (
        ("/v1/batch", "POST", (json,), LIMIT + 1, 413),
        ("/v1/get_many", "POST", (arrow,), LIMIT + 1, 413),
        ("/v1/batch", "POST", (arrow,), (2 << 30) + 1, 413),
        ("/v1/keys/k", "PUT", (), (1 << 30) + 1, 413),
    ):
        assert status(say(running, request(method, path, b"", *headers, length=length))) == expected
    chunk = b"%x\r\n%s\r\n" % (LIMIT, bytes(LIMIT))
    for closes in (b"", b"Connection: close\r\n"):  # the rest never comes, and nobody waits for it
        head = b"PUT /v1/keys/k HTTP/1.1\r\nHost: localhost\r\n" + closes + CHUNKED + b"\r\n\r\n"
        heard = say(running, head, chunk, chunk)
        assert (status(heard), b"connection: close" in heard) == (413, True)
    late = say(running, head, chunk)
    assert (status(late), b"connection: close" in late) == (400, True)
    assert store.upper == upper


def test_a_hostile_large_body_is_refused_and_changes_nothing(
    running: Running, store: kvstore.Store
) -> None:
    upper, rng = store.upper, random.Random(2)
    whole = sent(
        {"op": [1] * 1000, "key": [b"%06d" % n for n in range(1000)], "value": [b"v" * 9] * 1000}
    )
    null = sent(
        {
            "op": [1] * 1000,
            "key": [b"%06d" % n for n in range(1000)],
            "value": [b"v"] * 999 + [None],
        }
    )
    wrong = sent(
        {"op": [9] * 1000, "key": [b"%06d" % n for n in range(1000)], "value": [b"v"] * 1000}
    )
    refused = [rng.randbytes(2 * LIMIT), whole[: len(whole) // 2], bytes(2 * LIMIT), null, wrong]
    for _ in range(20):
        torn = bytearray(whole)
        for _ in range(3):
            torn[rng.randrange(400)] = rng.randrange(256)
        refused.append(bytes(torn))
    done = 0
    for body in refused:
        heard = say(running, request("POST", "/v1/batch", body, f"Content-Type: {ARROW}"))
        done += status(heard) == 200
        assert status(heard) in (200, 400), heard[:300]
    assert done <= 20
    assert store.upper == upper or done
    heard = say(
        running,
        request("POST", "/v1/batch", whole[:LIMIT], f"Content-Type: {ARROW}", length=len(whole)),
    )
    assert status(heard) == 400  # the rest did not come in time
    with bounds(SERVER_LARGE_MEMORY_BYTES_MAX=100_000):
        heard = say(running, request("POST", "/v1/batch", whole, f"Content-Type: {ARROW}"))
        assert status(heard) == 413


def test_room_for_large_requests_is_bounded(
    running: Running, store: kvstore.Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with connect(running.url, patience=0) as client:
        few = bounds(SERVER_SPOOL_BYTES_MAX=2 * LIMIT)
        with few, pytest.raises(RetryableError, match="large requests"):
            client.put(b"value", bytes(3 * LIMIT))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.raises(StorageError) as found:
            client.put(b"value", bytes(3 * LIMIT))
        assert "TMPDIR" in str(found.value)
        assert not isinstance(found.value, OutOfSpaceError)
    assert store.get(b"value") is None


def test_who_may_not_write_fills_no_disk(store: kvstore.Store, temporary: Path) -> None:
    tokens = [Token(READER, ["read"]), Token(WRITER, ["write"], prefix=b"mine/")]
    with bounds(SMALL), serving(app(store, tokens), ListenAddress("127.0.0.1", 0)) as server:
        with connect(server.url, token=READER) as client:
            monkey = bytes(3 * LIMIT)
            with pytest.raises(AccessDeniedError):
                client.put(b"mine/k", monkey)
        with connect(server.url, token=WRITER) as client:
            rows = {b"mine/%05d" % n: b"v" * 20 for n in range(1000)}
            client.put_many(rows)
            with pytest.raises(AccessDeniedError):
                client.put_many({**rows, b"yours": b"v"})
            with pytest.raises(AccessDeniedError):
                client.put(b"yours", bytes(3 * LIMIT))
        assert dict(store.scan()) == rows


def test_a_large_value_goes_through_reader_processes(tmp_path: Path) -> None:
    """The limits are the real ones: 64 MiB was the bound of every request."""
    server = ServerProcess(tmp_path / "store", "127.0.0.1:0", "--readers", "1")
    server.start()
    try:
        with connect(server.url) as client:
            client.put(b"large", bytes(65 << 20))
            assert client.ttl(b"large") is None
            assert client.count() == 1
    finally:
        server.stop()
    with kvstore.open(tmp_path / "store") as store:
        assert store.get(b"large") == bytes(65 << 20)


def test_a_batch_above_all_bounds_is_refused_by_the_client(running: Running) -> None:
    few = bounds(SERVER_LARGE_BYTES_MAX=LIMIT)
    with connect(running.url) as client, few, pytest.raises(UsageError, match="travel"):
        client.put_many({b"%05d" % n: b"v" * 20 for n in range(1000)})
