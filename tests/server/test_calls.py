"""Each verb gives through a server the result of the method with its name in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.base.span import RESERVED
from kvstore.errors import (
    ClosedError,
    DeterminateError,
    FencedError,
    HistoryGoneError,
    NotFoundError,
    NotYetWrittenError,
    PreconditionError,
    StorageError,
    UsageError,
)
from kvstore.remote.client import Client, connect
from kvstore.remote.protocol import to_json
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.invocation import ServedVerb
from kvstore.remote.verbs import READ, Verb
from tests.harness.bounds import bounds

STRANGE_KEYS = [
    b"",
    b"a/b",
    b"..",
    b".",
    b"//",
    b"%2F",
    b"\x00\xff",
    b"a?b#c",
    "ü".encode(),
    b"k" * 9000,
]


@pytest.fixture(params=["tcp", "path"])
def client(
    request: pytest.FixtureRequest, store: kvstore.Store, tmp_path: Path
) -> Iterator[Client]:
    """A client of `store`."""
    listening = {
        "tcp": ListenAddress("127.0.0.1", 0),
        "path": ListenAddress(path=str(tmp_path / "s")),
    }
    address = listening[request.param]
    with serving(app(store), address) as running, connect(running.url) as connected:
        yield connected


def test_a_key_of_any_bytes_is_put_read_and_deleted(client: Client, store: kvstore.Store) -> None:
    for key in STRANGE_KEYS:
        first = client.put(key, b"value \x00" + key)
        assert client.get(key) == store.get(key) == b"value \x00" + key
        gone = client.delete(key)
        assert client.get(key, default=b"none") == b"none"
        assert client.get(key, as_of=first) == b"value \x00" + key
        assert client.history(key) == store.history(key)
        assert [each.timestamp for each in client.history(key)] == [gone, first]


def test_updates_and_many_rows_go_through_the_server(client: Client, store: kvstore.Store) -> None:
    assert client.put_many({b"a": b"1", b"b": b"2"}) == store.upper - 1
    assert client.put_many([]) is None
    assert [client.increment(b"a"), client.increment(b"a", -3)] == [2, -1]
    assert client.update(b"b", lambda old: (old or b"") + b"!") == b"2!"
    assert client.update(b"b", lambda old: None) is None
    assert dict(store.scan()) == {b"a": b"-1"}
    assert client.increment(b"c", 2, expires=timedelta(hours=1)) == 2
    assert client.update(b"d", lambda old: b"v", expires=timedelta(hours=1)) == b"v"
    for key in (b"c", b"d"):
        assert timedelta(minutes=59) < (store.ttl(key) or timedelta(0)) <= timedelta(hours=1)
    assert client.increment(b"c", -2) == 0
    assert store.ttl(b"c") is None
    client.delete_range(b"c", b"e")
    store.put(b"a", b"x")
    with pytest.raises(UsageError, match="no counter"):
        client.increment(b"a")
    with pytest.raises(UsageError, match=r"by=1\.5"):
        client.increment(b"a", 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_buffers_are_keys_and_values_of_a_client(client: Client, kind: type) -> None:
    for key in (b"k\0", b"k" * 9000):
        client.put(kind(key), kind(b"v\xff"))
        client.put_if(kind(key), kind(b"w\xff"), expected=kind(b"v\xff"))
        assert client.get(kind(key)) == b"w\xff"
        assert client.update(kind(key), lambda old: bytearray(old or b"")) == b"w\xff"
    for wrong in ("text", None, 7):
        with pytest.raises(UsageError, match="value must be bytes"):
            client.put(b"k", wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="value must be bytes"):
            client.put_if(b"k", wrong, expected=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="change=b'v'; pass a function"):
        client.update(b"k", b"v")  # type: ignore[arg-type]


def test_windows_of_a_client_begin_with_the_oldest_change(
    client: Client, store: kvstore.Store
) -> None:
    store.put(b"a", b"1")
    kept = store.put(b"a", b"2")
    trips = store.table("trips", pa.schema([("id", pa.int64())]), key="id")
    trips.put({"id": 7})
    assert [change.value for change in client.changes("oldest")] == [b"1", b"2"]
    assert client.table("trips").changes("oldest").read_all().num_rows == 1
    store.gc(before=kept)
    store.put(b"a", b"3")
    assert [change.value for change in client.changes("oldest")] == [b"3"]
    assert [event.value for event in client.events("oldest")] == [b"3"]
    assert client.changes_batches("oldest").read_all()["value"].to_pylist() == [b"3"]


def test_a_word_counts_from_the_time_of_the_server(client: Client, store: kvstore.Store) -> None:
    store.put(b"k", b"v")
    assert client.get(b"k", "now") == client.get(b"k", timedelta(0)) == b"v"
    assert list(client.scan(as_of="now")) == [(b"k", b"v")]
    with pytest.raises(UsageError, match="looks like seconds"):
        client.get(b"k", 1_700_000_000)


def test_many_keys_and_times_are_read_at_once(client: Client) -> None:
    times = [client.put(b"k", b"%d" % n) for n in range(5)]
    assert client.get_many([b"k", b"absent"]) == [b"4", None]
    assert client.get_many([b"k"] * 5, times) == [b"0", b"1", b"2", b"3", b"4"]
    assert client.get_many([], times[0]) == []
    assert client.floor(b"kz") == (b"k", b"4")
    assert client.floor_many([b"kz", b"a"], times[1], b"k") == [(b"k", b"1"), None]
    numbers = np.array([int(time) for time in times])
    assert client.get_many([b"k"] * 5, numbers) == client.get_many([b"k"] * 5, list(numbers))
    assert client.floor_many([b"kz"] * 5, numbers)[3] == (b"k", b"3")


@pytest.mark.parametrize("kind", ["store", "client"])
def test_bad_keys_times_and_prefixes_are_refused_alike(
    client: Client, store: kvstore.Store, kind: str
) -> None:
    source: Any = store if kind == "store" else client
    for keys in (None, 5, b"zz", "zz", ["a"], [None]):
        with pytest.raises(UsageError):
            source.get_many(keys)
        with pytest.raises(UsageError):
            source.floor_many(keys)
    days = np.array(["2026-01-01"], "datetime64[ns]")
    for times in ([], [1, 2], days, [None], [True], [1_700_000_000], [datetime(2026, 1, 1)]):  # noqa: DTZ001
        for read in (source.get_many, source.floor_many):
            with pytest.raises(UsageError):
                read([b"k"], times)
    for prefix in ("k", 5, b"k" * 70_000):
        with pytest.raises(UsageError, match="prefix"):
            source.floor(b"k", prefix=prefix)


def test_a_floor_waits_for_no_commit(client: Client, store: kvstore.Store) -> None:
    """Others may hold the lock of commits for as long as a disk takes."""
    store.put(b"k", b"v")
    found: list[object] = []

    def change(old: bytes | None) -> bytes:
        found.append(client.floor(b"l"))  # the commit waits for this function
        return b"w"

    store.update(b"k", change)
    assert found == [(b"k", b"v")]


def test_many_large_values_are_read_in_pieces(client: Client, store: kvstore.Store) -> None:
    """A short request must not have the server hold values without a bound."""
    first = client.put_many({b"%d" % n: bytes(1000) for n in range(20)})
    assert first is not None
    client.put(b"0", b"new")
    keys = [b"%d" % (n % 21) for n in range(100)]
    wanted = store.get_many(keys)
    with bounds(JOIN_VALUE_BYTES_MAX=3000, HISTORY_BYTES_MAX=3000, ARROW_BYTES_MAX=3000):
        assert client.get_many(keys) == wanted
        assert client.get_many(keys, first) == store.get_many(keys, first)
        times = [first, store.upper - 1] * 50
        assert client.get_many(keys, times) == store.get_many(keys, times)
        listed = [to_json(key) for key in keys]
        with pytest.raises(UsageError, match="more than 3000 bytes"):
            client.call("get_many", keys=listed)
        assert client.call("get_many", keys=listed[:2])["values"][0] == "new"
        assert client.floor_many(keys * 4) == store.floor_many(keys * 4)
        assert client.floor_many(keys, times) == store.floor_many(keys, times)
        with pytest.raises(UsageError, match="more than 3000 bytes"):
            client.call("floor", keys=listed)
        client.put(b"a" * 2000, b"")
        with pytest.raises(UsageError, match="the answer to 2 keys has more than 3000 bytes"):
            client.call("floor", keys=["b", "c"])
        client.put(b"b" * 5, bytes(4000))
        for verb in ("get_many", "floor"):
            with pytest.raises(UsageError, match="the answer to 1 keys has more than 3000 bytes"):
                client.call(verb, keys=["bbbbb"])
        assert client.get_many([b"b" * 5]) == [bytes(4000)]
        assert len(client.history(b"0")) == 2
        client.put_many({b"1": bytes(900)})
        client.put(b"1", bytes(2000))
        with pytest.raises(UsageError, match="the versions of b'1' have more than 3000 bytes"):
            client.history(b"1")
    assert not store.holds.needing()


def test_rows_as_json_end_behind_their_bound(store: kvstore.Store) -> None:
    with store.batch() as batch:
        for number in range(50):
            batch.put(b"%02d" % number, bytes(1000))
    with (
        bounds(JSON_ANSWER_BYTES_MAX=1),
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
    ):
        request = Request(f"{running.url}/v1/scan?batch_rows=7")
        request.add_header("Accept", "application/json")
        with urlopen(request) as answer:
            found = json.load(answer)
    assert len(found["rows"]) == 7
    assert not found["whole"]


def test_a_snapshot_stands_still_and_keeps_its_history(
    client: Client, store: kvstore.Store
) -> None:
    client.put_many({b"a": b"1", b"b": b"2"})
    with client.snapshot() as snapshot:
        assert snapshot.as_of == store.upper - 1
        client.put_many({b"a": b"3", b"c": b"4"})
        store.gc(before=store.upper - 1)
        assert store.since == snapshot.as_of
        assert [snapshot.get(b"a"), snapshot.get(b"c"), snapshot.get(b"c", b"-")] == [
            b"1",
            None,
            b"-",
        ]
        assert snapshot.get_many([b"b", b"c"]) == [b"2", None]
        assert [snapshot.floor(b"z"), *snapshot.floor_many([b"0"])] == [(b"b", b"2"), None]
        assert list(snapshot.scan(b"b")) == [(b"b", b"2")]
        assert list(snapshot.scan(reverse=True, limit=1)) == [(b"b", b"2")]
        assert snapshot.scan_batches(None, None, b"a").read_all()["value"].to_pylist() == [b"1"]
        labels = pa.table({"id": pa.array([b"a", b"c"], pa.binary())})
        assert snapshot.join(labels, at=None).read_all()["value"].to_pylist() == [b"1", None]
        later = labels.append_column("ts", [[snapshot.as_of, snapshot.as_of + 1]])
        with pytest.raises(NotYetWrittenError, match=r"row 1, key b'c', .*snapshot ends"):
            snapshot.join(later).read_all()
        assert client.revert_range(b"", None, to=snapshot.as_of) == store.upper - 1
        assert dict(store.scan()) == dict(snapshot.scan())
        assert client.revert_range(b"", None, to=snapshot.as_of) is None
    for late in (lambda: snapshot.get(b"a"), snapshot.scan, snapshot.join_side):
        with pytest.raises(ClosedError):
            late()
    store.gc(before=store.upper - 1)
    assert store.since > snapshot.as_of
    with pytest.raises(HistoryGoneError):
        client.snapshot(snapshot.as_of)
    with client.snapshot("now") as present:
        assert dict(present.scan()) == dict(store.scan())


def test_a_snapshot_renews_its_lease_and_loses_nothing_silently(
    client: Client, store: kvstore.Store
) -> None:
    client.put(b"a", b"1")
    with bounds({"CLIENT_SNAPSHOT_LEASE_S": 0.0001}), client.snapshot() as snapshot:
        client.put(b"a", b"2")
        assert snapshot.get(b"a") == b"1"
        store.gc(before=store.upper - 1)  # the lease has ended: its budget is a moment
        client.put(b"a", b"3")
        with pytest.raises(HistoryGoneError):
            snapshot.get(b"a")


def test_a_batch_is_written_at_one_time(client: Client, store: kvstore.Store) -> None:
    with client.batch() as batch:
        for number in range(50):
            batch.put(b"k%02d" % number, b"%d" % number)
        batch.delete_range(b"k10", b"k20")
        batch.delete(b"k00")
        batch.put(b"k15", b"again")
    assert {change.timestamp for change in store.changes(0)} == {batch.timestamp}
    assert list(client.scan()) == list(store.scan())
    assert len(list(client.scan())) == 40
    with client.batch() as empty, pytest.raises(UsageError, match="there is no table 'flights'"):
        empty.table("flights")
    assert empty.timestamp is None


def test_a_scan_has_the_rows_of_the_store(client: Client, store: kvstore.Store) -> None:
    with store.batch() as batch:
        for number in range(40_000):
            batch.put(b"k%05d" % number, b"v" * (number % 50))
    then = store.upper - 1
    with store.batch() as batch:
        batch.delete_range(b"k1", b"k3")
    assert client.scan_batches().read_all() == store.scan_batches().read_all()
    assert list(client.scan(as_of=then)) == list(store.scan(as_of=then))
    for arguments in (
        {"prefix": b"k39"},
        {"start": b"k00010", "end": b"k00020", "reverse": True},
        {"limit": 7},
        {"limit": 0},
    ):
        assert list(client.scan(**arguments)) == list(store.scan(**arguments))
    changes = client.changes_batches(0)
    assert changes.read_all() == store.changes_batches(0, upto=store.upper - 1).read_all()


def test_conditions_hold_on_the_server(client: Client) -> None:
    client.put_if(b"k", b"1", None)
    with pytest.raises(PreconditionError) as caught:
        client.put_if(b"k", b"2", None)
    assert (caught.value.key, caught.value.expected, caught.value.found) == (b"k", None, b"1")
    stamp = client.put_if(b"k", b"2", b"1")
    client.delete_if(b"k", unchanged_since=stamp)
    with pytest.raises(PreconditionError):
        client.delete_if(b"k", unchanged_since=stamp)
    assert client.delete_range(b"a", b"z", idempotent=True) is None


def test_frontiers_and_figures_are_those_of_the_store(client: Client, store: kvstore.Store) -> None:
    stamp = client.put(b"k", b"v")
    assert client.upper == store.upper > stamp
    assert (client.since, client.store_id) == (store.since, store.store_id)
    assert client.sync() > stamp
    assert client.durable > stamp
    assert client.stats()["holds"] == 0


def test_an_error_has_its_class_its_message_and_its_facts(client: Client) -> None:
    with pytest.raises(NotYetWrittenError) as caught:
        client.get(b"k", as_of=1 << 62)
    assert caught.value.as_of == 1 << 62
    assert caught.value.upper < caught.value.as_of
    assert "is not complete" in str(caught.value)
    with pytest.raises(NotYetWrittenError):
        client.scan_batches(as_of=1 << 62)
    with pytest.raises(UsageError, match="no verb 'nothing'"):
        client.call("nothing")
    with pytest.raises(UsageError, match="argument 'keyy'"):
        client.call("get", keyy="a")


def test_an_application_with_tokens_and_a_prefix_guards_each_key(store: kvstore.Store) -> None:
    secret = "s" * 32
    tokens = [Token(secret, ["write"], b"mine/")]
    with store.batch() as batch:
        batch.put(b"mine/1", b"1")
        batch.put(b"other", b"2")
    with serving(app(store, tokens), ListenAddress("127.0.0.1", 0)) as running:
        with pytest.raises(UsageError, match="it has no token"):
            connect(running.url)
        with pytest.raises(UsageError, match="does not know the token"):
            connect(running.url, token="t" * 32)
        with connect(running.url, token=secret) as client:
            assert list(client.scan()) == [(b"mine/1", b"1")]
            assert client.get(b"mine/1") == b"1"
            client.put(b"mine/2", b"2")
            for refused in (
                lambda: client.get(b"other"),
                lambda: client.put(b"other", b""),
                lambda: client.get_many([b"mine/1", b"other"]),
                lambda: list(client.scan(b"m", b"n")),
                lambda: client.delete_range(b"mine/", b"n"),
                lambda: client.floor(b"other"),
                lambda: client.history(b"other"),
                client.stats,
            ):
                with pytest.raises(kvstore.errors.AccessDeniedError):
                    refused()
    assert store.get(b"other") == b"2"


def test_a_path_is_opened_at_the_first_call_and_closed_with_the_application(tmp_path: Path) -> None:
    served = app(tmp_path / "store")
    assert not (tmp_path / "store").exists()
    with serving(served, ListenAddress("127.0.0.1", 0)) as running, connect(running.url) as client:
        client.put(b"k", b"v", durability="sync")
    with kvstore.open(tmp_path / "store") as store:
        assert store.get(b"k") == b"v"


def test_nobody_at_an_address_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no store and no socket is at"):
        connect(tmp_path / "nothing", patience=0)
    with pytest.raises(DeterminateError, match="connecting to"):
        connect("http://127.0.0.1:1", patience=0)


def test_another_service_at_an_address_is_told(tmp_path: Path) -> None:
    """Its answers are JSON, and none of ours."""
    with (
        kvstore.open(None, engine="memory") as store,
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        connect(running.url) as client,
    ):
        times = client.call("times")
    wrong = [{**times, "upper": "soon"}, {**times, "upper": None}, {"upper": times["upper"]}, {}]
    answers = [b"[" * 100_000, *(json.dumps(each).encode() for each in wrong)]

    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = answers.pop()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            while answers:
                with pytest.raises(StorageError, match="check the address"):
                    connect(f"http://127.0.0.1:{other.server_port}")
        finally:
            other.shutdown()
            thread.join()


def test_relative_addresses_stay_where_they_were(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service, or a program that uses it, may change its directory."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    with (
        serving(app(store), ListenAddress(path="socket")) as running,
        connect("socket") as client,
        connect(running.url) as other,
    ):
        monkeypatch.chdir(tmp_path)
        with ThreadPoolExecutor(4) as threads:  # each call needs a connection
            waits = [threads.submit(client.wait_beyond, client.upper) for _ in range(4)]
            while any(not each.done() for each in waits):
                client.put(b"k", b"v")
        assert other.get(b"k") == b"v"
    assert not (deep / "socket").exists()
    monkeypatch.chdir(deep)
    served = app("later")
    monkeypatch.chdir(tmp_path)
    with serving(served, ListenAddress("127.0.0.1", 0)) as running, connect(running.url) as client:
        client.put(b"k", b"v")
    assert (deep / "later").is_dir()
    for address in ("", 5):
        with pytest.raises(UsageError, match="address"):
            connect(address)  # type: ignore[arg-type]


def test_a_client_of_little_time_waits_for_news_in_small_steps(
    store: kvstore.Store, tmp_path: Path
) -> None:
    """The server answers a wait before the client gives up."""
    with serving(app(store), ListenAddress(path=str(tmp_path / "s"))) as running:
        with connect(running.url, timeout=0.5, patience=0) as client:
            before = client.put(b"k", b"1")
            client.wait_beyond(client.upper, timeout=2.0)
            feed = client.feed("news", start=before)
            batches = feed.batches(follow=True, heartbeat=0.6)
            assert [next(batches).events for _ in range(3)] == [[], [], []]
        with connect(running.url, timeout=float("inf"), patience=float("inf")) as client:
            assert client.get(b"k") == b"1"
        with pytest.raises(UsageError, match="timeout=0"):
            connect(running.url, timeout=0)


@pytest.mark.parametrize("host", ["[::1", "a" * 70, "h\u2100st", "host:99999", "user:secret@host"])
def test_an_address_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        connect(f"http://{host}", patience=0)


@pytest.mark.parametrize("tokens", [["secret"], "secret", [None], 5])
def test_a_secret_alone_is_no_token(store: kvstore.Store, tokens: Any) -> None:
    with pytest.raises(UsageError, match=r"kvstore\.server\.Token") as refused:
        app(store, tokens)
    assert "secret" not in str(refused.value)


def test_the_openapi_document_describes_every_verb(client: Client) -> None:
    document = client.call("openapi.json")
    named = {path.rpartition("/")[2] for path in document["paths"]}
    assert {"scan", "batch", "open_feed", "fetch", "gc", "{key}"} <= named
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert method == "parameters" or operation["description"], path
    schemas = document["components"]["schemas"]
    assert set(schemas) == {"Bytes", "Time", "Error"}


def test_a_hold_keeps_history_until_it_is_released(client: Client, store: kvstore.Store) -> None:
    client.hold("for ever", max_age=timedelta.max).release()
    first = client.put(b"k", b"1")
    client.put(b"k", b"2")
    with client.hold("mine", at=first) as hold:
        assert store.gc(before=store.upper - 1).since <= first
        assert client.get(b"k", as_of=first) == b"1"
        assert hold.timestamp == first
        again = client.hold("mine")
        with pytest.raises(FencedError):
            hold.move(store.upper - 1)
        hold.token = again.token
        hold.move(store.upper - 1)
    assert store.holds.all() == []


def test_keys_of_tables_are_refused_and_left_out(client: Client, store: kvstore.Store) -> None:
    store.put(b"a", b"1")
    table = store.table("t", pa.schema([("id", pa.int64()), ("n", pa.int64())]), key=["id"])
    table.put({"id": 1, "n": 1})
    rows = dict(store.scan(start=RESERVED))
    key = max(rows)
    for write in (
        lambda: client.put(key, b"1"),
        lambda: client.delete(key),
        lambda: client.put_many({b"b": b"2", key: b"1"}),
        lambda: client.put_if(key, b"1", expected=rows[key]),
        lambda: client.delete_if(key, expected=rows[key]),
        lambda: client.pop(key),
        lambda: client.increment(key),
        lambda: client.update(key, lambda old: b"1"),
        lambda: client.delete_range(key, key + b"\xff"),
        lambda: client.clear_range(RESERVED, key + b"\xff"),
        lambda: client.transact(lambda txn: txn.put(key, b"1")),
        lambda: client.transact(lambda txn: txn.delete_range(key, key + b"\xff")),
    ):
        with pytest.raises(UsageError, match="belongs to tables"):
            write()
    assert list(client.scan()) == [(b"a", b"1")]
    assert dict(client.scan(start=RESERVED)) == rows == dict(store.scan(start=RESERVED))
    with client.transaction() as txn:
        assert list(txn.scan()) == [(b"a", b"1")]
        table.put({"id": 2, "n": 2})  # a plain scan leaves it out
        txn.put(b"b", b"2")
    assert client.delete_range(b"", b"\xff" * 20) is not None
    upper = store.upper
    assert client.delete_range(b"", b"\xff" * 20, idempotent=True) is None
    assert store.upper == upper
    assert [row["id"] for row in table.rows()] == [1, 2]


def test_the_owner_does_the_upkeep_that_a_client_asks_for(
    client: Client, store: kvstore.Store, tmp_path: Path
) -> None:
    first = client.put(b"a", b"1")
    client.put(b"a", b"2")
    client.hold("mine", at=first)
    copied = client.checkpoint(tmp_path / "copy")
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        assert copied < copy.upper
        assert copy.get(b"a", as_of=first) == b"1"
    kept = client.gc(before=store.upper - 1)
    assert [record.name for record in kept.held_by] == ["mine"]
    assert client.drop_hold("mine").timestamp == first
    report = client.gc(before=store.upper - 1)
    assert report.since == store.since > first
    assert report.versions == 1
    client.clear_range(b"a", b"b")
    assert [client.get(b"a"), client.history(b"a")] == [None, []]
    with pytest.raises(UsageError, match="absolute"):
        client.checkpoint("copy")


def test_keys_are_counted_and_listed_without_values_and_a_mapping_writes(
    client: Client, store: kvstore.Store
) -> None:
    client.mapping(prefix=b"e/", expires="+1h")[b"k"] = b"v"
    assert timedelta(minutes=59) < (store.ttl(b"e/k") or timedelta(0)) <= timedelta(hours=1)
    store.delete(b"e/k")
    view = client.mapping("json", prefix=b"m/")
    view.update({"a": 1, "b": [2]})
    view["c"] = {"n": 3}
    before = client.put(b"z", b"1")
    del view["a"]
    assert dict(view.rows()) == {"b": [2], "c": {"n": 3}}
    assert [len(view), "a" in view, view["b"]] == [2, False, [2]]
    assert list(client.keys()) == list(store.keys()) == [b"m/b", b"m/c", b"z"]
    past = client.keys(prefix=b"m/", as_of=before, reverse=True, limit=2)
    assert list(past) == [b"m/c", b"m/b"]
    assert [client.count(), client.count(b"n"), client.count(as_of=before)] == [3, 1, 4]
    view.clear()
    assert dict(store.scan()) == {b"z": b"1"}


def test_a_feed_of_a_prefix_has_its_keys_alone(client: Client) -> None:
    for number in range(4):
        client.put(b"%d/k" % (number % 2), b"%d" % number)
    feed = client.feed("f", start="oldest", prefix=b"1/")
    assert [event.value for batch in feed for event in batch.events] == [b"1", b"3"]
    with pytest.raises(UsageError, match="span and prefix"):
        client.feed("f", prefix=b"1/", span=kvstore.Span())


def test_metrics_are_read_by_prometheus(store: kvstore.Store) -> None:
    tokens = [Token("r" * 32), Token("p" * 32, prefix=b"a")]
    with serving(app(store, tokens), ListenAddress("127.0.0.1", 0)) as running:

        def scraped(secret: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {secret}"}
            asked = Request(f"{running.url}/metrics", headers=headers)
            try:
                with urlopen(asked) as reply:
                    return reply.status, reply.read().decode()
            except HTTPError as error:
                return error.code, ""

        before = store.metrics()["kvstore_commits_total"].value
        store.put(b"k", b"v")
        status, text = scraped("r" * 32)
        families = {each.name: each for each in text_string_to_metric_families(text)}
        assert status == 200
        assert set(families) == {name.removesuffix("_total") for name in store.metrics()}
        assert families["kvstore_commits"].samples[0].value == before + 1
        assert [scraped("p" * 32)[0], scraped("x" * 32)[0]] == [403, 401]
        families = {
            each.name: each for each in text_string_to_metric_families(scraped("r" * 32)[1])
        }
        samples = families["kvstore_requests"].samples
        counts = {each.labels["result"]: each.value for each in samples}
        assert counts == {"answered": 1, "failed": 2}


def test_a_verb_with_a_defect_is_a_failed_request(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a bug")

    def failed() -> float:
        return store.metrics()["kvstore_requests_total"].values["failed",]

    headers = {"Content-Type": "application/json"}
    broken = ServedVerb(Verb("broken", READ), fail)
    with serving(app(store, verbs=[broken]), ListenAddress("127.0.0.1", 0)) as running:
        before = failed()
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(f"{running.url}/v1/broken", b"{}", headers))
        assert caught.value.code == 500
        assert b"the server has a defect" in caught.value.read()
        assert failed() == before + 1
    assert "a call of b'/v1/broken' failed" in caplog.text
