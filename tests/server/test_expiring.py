"""Keys that expire, for clients: by a server, by its readers, and beside the owner of a store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, Store, Timestamp
from kvstore.errors import ConflictError, PreconditionError, UsageError
from kvstore.remote.client import Client, connect, connect_async
from kvstore.remote.server import ListenAddress, Running, Token, serving
from kvstore.remote.server.app import app
from kvstore.tables.definition import table_prefix
from kvstore.timeline.request_notes import RequestToken
from tests.server.test_hostile import request, say, status

START = 1_700_000_000_000_000_000
HOUR = 3600 * 10**9
LIFE = timedelta(hours=1)
HERE = ListenAddress("127.0.0.1", 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", clock=clock, control=True) as opened:
        yield opened


@pytest.fixture
def running(store: Store) -> Iterator[Running]:
    with serving(app(store), HERE) as server:
        yield server


@pytest.fixture(params=["address", "path"])
def client(request: pytest.FixtureRequest, running: Running, store: Store) -> Iterator[Client]:
    """A client of the server, and one of the socket in the store's directory."""
    with connect(running.url if request.param == "address" else store.path) as connected:
        yield connected


def about(life: timedelta | None) -> timedelta | None:
    """A duration in whole seconds: each call takes a nanosecond of the clock."""
    return None if life is None else timedelta(seconds=round(life.total_seconds()))


def test_a_key_of_a_client_expires_at_its_time(
    client: Client, store: Store, clock: ManualClock
) -> None:
    at = client.put(b"k", b"v", expires=LIFE)
    assert client.ttl(b"k") == store.ttl(b"k") == LIFE
    assert [client.ttl(b"absent"), client.put(b"plain", b"v"), client.ttl(b"plain")][::2] == [
        None
    ] * 2
    clock.advance(HOUR)
    assert [client.get(b"k"), dict(client.scan())] == [None, {b"plain": b"v"}]
    deleted, written = client.history(b"k")
    assert (deleted.timestamp, written.timestamp) == (at + HOUR, at)


def test_every_kind_of_write_takes_every_kind_of_time(
    client: Client, store: Store, clock: ManualClock
) -> None:
    moment = datetime.fromtimestamp(START // 10**9 + 3600, UTC)
    long = b"k" * 9000  # it travels in the body
    times: list[Any] = [LIFE, "+1h", moment, Timestamp(START + HOUR), "2023-11-14T23:13:20Z"]
    for number, expires in enumerate(times):
        client.put(b"put%d" % number, b"v", expires=expires)
        client.put_many({b"many%d" % number: b"v"}, expires=expires)
        client.put_if(b"if%d" % number, b"v", None, expires=expires)
        with client.transaction() as txn:
            txn.put(b"txn%d" % number, txn.get(b"put0") or b"", expires=expires)
    client.put(long, b"v", expires="+1h")
    lives = [client.ttl(key) for key, _ in client.scan()]
    assert len(lives) == 4 * len(times) + 1
    assert {about(life) for life in lives} == {LIFE}
    clock.advance(2 * HOUR)
    assert client.count() == 0
    assert dict(store.scan()) == {}


def test_the_last_put_of_a_batch_decides(client: Client, clock: ManualClock) -> None:
    with client.batch() as batch:
        batch.put(b"a", b"1", expires=LIFE)
        batch.put(b"a", b"1")
        batch.put(b"b", b"1")
        batch.put(b"b", b"1", expires=LIFE)
        batch.put(b"c", b"1", expires=LIFE)
        batch.delete(b"c")
        batch.put(b"d", b"1", expires=LIFE)
        batch.put(b"d", b"1", expires=2 * LIFE)
    assert [client.ttl(key) for key in (b"a", b"b", b"c", b"d")] == [None, LIFE, None, 2 * LIFE]
    clock.advance(HOUR)
    assert sorted(client.keys()) == [b"a", b"d"]


def test_persist_and_touch(client: Client, clock: ManualClock) -> None:
    for key in (b"kept", b"touched"):
        client.put(key, b"v", expires=LIFE)
    stamp = client.persist(b"kept")
    assert stamp == client.upper - 1
    assert [client.persist(b"kept"), client.persist(b"absent")] == [None, None]
    client.put_if(b"touched", b"v", b"v", expires=3 * LIFE)
    with pytest.raises(PreconditionError):
        client.put_if(b"touched", b"v", b"w", expires=LIFE)
    clock.advance(2 * HOUR)
    assert dict(client.scan()) == {b"kept": b"v", b"touched": b"v"}


def test_a_transaction_conflicts_with_an_expiry(client: Client, clock: ManualClock) -> None:
    client.put(b"k", b"v", expires=LIFE)
    txn = client.transaction()
    assert txn.get(b"k") == b"v"
    txn.put(b"other", b"v", expires=LIFE)
    clock.advance(HOUR)
    with pytest.raises(ConflictError, match=r"was written at \d+-\d\d-\d\dT.*reads at \d+-"):
        txn.commit()


def test_a_transaction_and_a_join_show_no_key_that_has_expired(
    client: Client, clock: ManualClock
) -> None:
    client.put(b"k", b"v", expires=LIFE)
    clock.advance(HOUR)
    with client.transaction() as txn:
        assert [txn.get(b"k"), list(txn.scan())] == [None, []]
    client.put(b"k", b"v", expires=LIFE)
    clock.advance(HOUR)
    joined = client.join(pa.table({"id": [b"k"]}), at=None).read_all()
    assert joined.column("value").to_pylist() == [None]


def test_a_value_of_a_unique_index_is_free_once_its_row_expired(
    client: Client, clock: ManualClock
) -> None:
    """The first call after the due time is the put that needs the value."""
    schema = pa.schema([("id", pa.int64()), ("mail", pa.string())])
    users = client.table("users", schema, "id", {"mail": kvstore.unique("mail")})
    users.put({"id": 1, "mail": "a@x"}, expires=LIFE)
    clock.advance(HOUR)
    users.put({"id": 2, "mail": "a@x"})
    assert [row["id"] for row in users.find("mail", "a@x")] == [2]


def test_times_that_cannot_be_are_refused(client: Client, running: Running) -> None:
    wrong: list[Any] = [
        timedelta(0),
        -LIFE,
        Timestamp(START),
        "now",
        "-1h",
        "soon",
        12,
        "+1y",
        "+999999w",
        timedelta.max,
        True,
    ]
    for expires in wrong:
        with pytest.raises(UsageError):
            client.put(b"k", b"v", expires=expires)
        with pytest.raises(UsageError):
            client.put_many({b"k": b"v"}, expires=expires)
    operation = {"op": "delete", "key": "k", "expires": "+1h"}
    for body in (
        {"key": "k", "value": "v", "expires": [1]},
        {"ops": [operation]},
        {"ops": [{**operation, "op": "put", "value": "v", "expires": 1.5}]},
        {"ops": [{**operation, "op": "put", "value": "v", "expires": "+99999999999999999w"}]},
    ):
        verb = "batch" if "ops" in body else "put"
        heard = say(
            running,
            request(
                "POST", f"/v1/{verb}", json.dumps(body).encode(), "Content-Type: application/json"
            ),
        )
        assert status(heard) == 400, (body, heard)
    assert client.count() == 0


def test_people_write_keys_that_expire(running: Running, store: Store) -> None:
    assert status(say(running, request("PUT", "/v1/keys/a?expires=+1h", b"v"))) == 200
    operation = {"op": "put", "key": "b", "value": "v", "expires": "2023-11-14T23:13:20Z"}
    body = json.dumps({"ops": [operation]}).encode()
    heard = say(running, request("POST", "/v1/batch", body, "Content-Type: application/json"))
    assert status(heard) == 200
    assert [about(store.ttl(b"a")), about(store.ttl(b"b"))] == [LIFE, LIFE]
    heard = say(running, request("GET", "/v1/ttl?key=a"))
    assert 3599 < json.loads(heard.rpartition(b"\r\n\r\n")[2])["seconds"] <= 3600


def test_a_request_that_comes_again_after_its_time_has_its_first_result(
    store: Store, clock: ManualClock
) -> None:
    """The answer was lost, and the client asks again when the key is gone already."""
    requests, token = store.requests, RequestToken("writer", 1, START)
    due = requests.due(Timestamp(START + HOUR), token)
    writes = requests.write_set()
    writes.put_expiring(b"k", b"v", due)
    first = requests.commit(writes, token, None)
    clock.advance(2 * HOUR)
    again = requests.write_set()
    again.put_expiring(b"k", b"v", requests.due(Timestamp(START + HOUR), token))
    assert requests.commit(again, token, None) == first
    assert store.get(b"k") is None
    with pytest.raises(UsageError, match="does not lie ahead"):
        requests.due(Timestamp(START + HOUR), RequestToken("writer", 2, START))
    persist = RequestToken("other", 1, START)
    store.put(b"k", b"v", expires=LIFE)
    kept = requests.persist(b"k", persist, None)
    assert requests.persist(b"k", persist, None) == kept


def test_a_token_with_a_prefix_expires_its_own_keys_alone(store: Store) -> None:
    secret = "s" * 32
    with (
        serving(app(store, [Token(secret, ["write"], prefix=b"a")]), HERE) as running,
        connect(running.url, secret) as client,
    ):
        client.put(b"a1", b"v", expires=LIFE)
        assert client.ttl(b"a1") == LIFE
        store.put(b"b1", b"v", expires=LIFE)
        for refused in (
            lambda: client.put(b"b1", b"v", expires=LIFE),
            lambda: client.put_many({b"b1": b"v"}, expires=LIFE),
            lambda: client.ttl(b"b1"),
            lambda: client.persist(b"b1"),
        ):
            with pytest.raises(kvstore.errors.AccessDeniedError):
                refused()
    assert about(store.ttl(b"b1")) == LIFE


def test_coroutines(running: Running, clock: ManualClock) -> None:
    async def work() -> None:
        async with await connect_async(running.url) as client:
            await client.put(b"a", b"v", expires=LIFE)
            await client.put_many({b"b": b"v"}, expires="+1h")
            async with client.batch() as batch:
                batch.put(b"c", b"v", expires=LIFE)
            assert [about(await client.ttl(key)) for key in (b"a", b"b", b"c")] == [LIFE] * 3
            assert await client.persist(b"a") is not None
            clock.advance(HOUR + 1000)
            assert [key async for key, _ in client.scan()] == [b"a"]

    asyncio.run(work())


def test_a_script_beside_the_owner(store: Store, clock: ManualClock) -> None:
    assert store.path is not None
    with connect(store.path) as owner:
        owner.put(b"k", b"v", expires=LIFE)
        owner.put(b"kept", b"v", expires=LIFE)
        assert owner.persist(b"kept") is not None
    clock.advance(HOUR)
    assert dict(store.scan()) == {b"kept": b"v"}


def test_readers_show_no_key_that_has_expired(tmp_path: Path) -> None:
    """The owner writes the deletes that are due when a reader asks it."""
    with (
        kvstore.open(tmp_path / "store") as store,
        serving(app(store), HERE, readers=1) as running,
        connect(running.url) as client,
    ):
        client.put(b"plain", b"v")
        assert client.get(b"plain") == b"v"  # the reader has seen a store without expiries
        for number in range(20):
            key = b"k%d" % number
            client.put(key, b"v", expires=f"+{20 + number}ms")
            due = client.call("ttl", key=key.decode())["expires"]
            while due is not None:
                before = store.now()
                found = client.get(key) if number % 2 else dict(client.scan(prefix=key)).get(key)
                if found is None:
                    break
                assert before < due
            assert client.ttl(key) is None
        deletes = [change for change in store.changes(0) if change.op == "delete"]
        assert len(deletes) == 20
        assert client.get(b"plain") == b"v"


@pytest.mark.parametrize("unique", [False, True], ids=["plain", "unique"])
def test_rows_of_a_client_expire_with_their_index_entries(
    client: Client, store: Store, clock: ManualClock, unique: bool
) -> None:
    schema = pa.schema([("id", pa.int64()), ("mail", pa.string())])
    index = kvstore.unique("mail") if unique else ["mail"]
    mine = client.table("users", schema, "id", {"mail": index})
    theirs = store.table("users")
    mine.put({"id": 1, "mail": "a"}, expires=LIFE)
    mine.put_batch([{"id": 2, "mail": "b"}, {"id": 3, "mail": "c"}], expires=2 * LIFE)
    with client.transaction() as transaction:
        transaction.table("users").put({"id": 4, "mail": "d"}, expires=LIFE)
        transaction.table("users").put({"id": 5, "mail": "e"})
    assert [about(mine.ttl(number)) for number in (1, 2, 4, 5)] == [LIFE, 2 * LIFE, LIFE, None]
    if not unique:
        with client.batch() as batch:
            batch.table("users").put({"id": 6, "mail": "f"}, expires=LIFE)
            batch.table("users").put({"id": 7, "mail": "g"}, expires=2 * LIFE)
            batch.put(b"k", b"v", expires=LIFE)
    mine.put({"id": 3, "mail": "c"})  # stays from now on
    clock.advance(HOUR + 10**9)
    left = {2, 3, 5} if unique else {2, 3, 5, 7}
    assert {row["id"] for row in theirs.scan().read_all().to_pylist()} == left
    assert mine.get(1) is None
    assert not mine.find("mail", "a").read_all().num_rows
    clock.advance(HOUR)
    assert {row["id"] for row in mine.scan().read_all().to_pylist()} == {3, 5}
    entries = len(list(store.keys(prefix=table_prefix(1)))) - 2
    assert entries == 2, "no entry outlives its row"
    assert store.verify().ok


def test_a_row_with_a_time_that_has_passed_is_refused(client: Client) -> None:
    schema = pa.schema([("id", pa.int64()), ("mail", pa.string())])
    users = client.table("users", schema, "id")
    with pytest.raises(UsageError, match="expires"):
        users.put({"id": 1, "mail": "a"}, expires=Timestamp(START - 1))
    assert users.get(1) is None


def test_a_column_of_a_clients_table_tells_when_rows_expire(
    client: Client, store: Store, clock: ManualClock
) -> None:
    schema = pa.schema(
        [("id", pa.int64()), ("zone", pa.string()), ("until", pa.timestamp("us", "UTC"))]
    )
    mine = client.table("codes", schema, "id", {"zone": "zone"}, expires="until")
    until = datetime.fromtimestamp(START // 10**9 + 3600, UTC)

    def row(number: int, moment: datetime | None) -> dict[str, Any]:
        return {"id": number, "zone": "a", "until": moment}

    mine.put(row(1, until))
    mine.insert(row(2, until))
    mine.put_batch(pa.Table.from_pylist([row(3, until), row(4, None)], schema))
    with client.transaction() as transaction:
        transaction.table("codes").put(row(5, until))
    with client.batch() as batch:
        batch.table("codes").put(row(6, until))
    mine.put(row(7, until))
    mine.update(7, until=None)
    assert [about(mine.ttl(number)) for number in (1, 2, 3, 4)] == [LIFE, LIFE, LIFE, None]
    with pytest.raises(UsageError, match="'until' tells when its rows expire"):
        mine.put(row(8, None), expires=LIFE)
    with pytest.raises(UsageError, match="update the row: until=None"):
        mine.persist(1)
    clock.advance(HOUR)
    assert [each["id"] for each in mine.find("zone", "a")] == [4, 7]
    assert [each["id"] for each in store.table("codes").rows()] == [4, 7]
    mine.alter(expires=False, add={"note": pa.string()})
    assert store.table("codes").expires is None
    mine.alter(expires="until")
    assert [mine.expires, store.table("codes").expires] == ["until"] * 2
