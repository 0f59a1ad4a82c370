"""Tables of a client: rows that it writes and reads equal the rows of the store's own table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kvstore
from kvstore import Join, unique
from kvstore.errors import (
    AccessDeniedError,
    ConflictError,
    HistoryGoneError,
    NotFoundError,
    NotUniqueError,
    NotYetWrittenError,
    TableAlteredError,
    UsageError,
)
from kvstore.remote.client import Client, connect
from kvstore.remote.control import as_store
from kvstore.remote.protocol import ARROW_TYPE, to_json
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from kvstore.tables.definition import index_prefix
from kvstore.tables.sources import digest_of
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

pytestmark = pytest.mark.usefixtures("each_engine")

SCHEMA = pa.schema(
    [
        ("zone", pa.string()),
        ("id", pa.int64()),
        ("name", pa.string()),
        ("mail", pa.string()),
        ("seen", pa.timestamp("us", "UTC")),
    ]
)
INDEXES = {"by_name": ["name"], "mail": unique("mail")}
SECRET = "s" * 32


@pytest.fixture
def client(store: kvstore.Store) -> Iterator[Client]:
    listening = serving(app(store), ListenAddress("127.0.0.1", 0))
    with listening as running, connect(running.url) as connected:
        yield connected


@pytest.fixture
def people(client: Client) -> kvstore.Table:
    return client.table("people", SCHEMA, key=["zone", "id"], indexes=INDEXES)


def person(number: int, **columns: Any) -> dict[str, Any]:
    seen = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=number)
    row = {"zone": "ab"[number % 2], "id": number, "name": f"n{number % 3}", "mail": None}
    return row | {"seen": seen} | columns


KINDS_OF_WRITES = (
    *("put", "put_batch", "arrow", "update", "insert"),
    *("delete", "delete_many", "delete_range", "revert", "alter", "drop"),
)


def test_each_read_and_write_is_that_of_the_store(client: Client, store: kvstore.Store) -> None:
    """Both write at random. After each write, every read gives the same by the client and by the
    store."""
    rng = seeded("TABLE_CLIENT_SEED")
    tables = [client.table("people", SCHEMA, ["zone", "id"], INDEXES), store.table("people")]
    mine, its = tables
    times: list[Any] = [None]
    made_at = 0
    for _ in range(40):
        table = rng.choice(tables)
        row = person(rng.randrange(8), name=rng.choice(["x", "y", None]))
        what = rng.choice(KINDS_OF_WRITES)
        if what == "put":
            times.append(table.put(row))
        elif what == "put_batch":
            times.append(table.put_batch([row, person(9)]))
        elif what == "arrow":
            earlier = row | {"name": "earlier"}  # the last row of a key wins
            rows = pa.Table.from_pylist([earlier, person(10), row], its.schema)
            ttl = rng.choice([None, timedelta(days=1)])
            times.append(table.put_batch(rows, expires=ttl))
        elif what == "update" and its.get(row["zone"], row["id"]) is not None:
            times.append(table.update(row["zone"], row["id"], name="z"))
        elif what == "delete":
            times.append(table.delete(row["zone"], row["id"]))
        elif what == "delete_many":
            times.append(table.delete_many([(row["zone"], row["id"]), ("b", 9)]))
        elif what == "delete_range":
            times.append(table.delete_range((row["zone"], row["id"]), (row["zone"], row["id"] + 3)))
        elif what == "revert":
            kept = [at for at in times if at is not None and at >= made_at]
            if kept:
                where = rng.choice([None, pc.field("name") == "x"])
                span = rng.choice([(), "a"])
                to = rng.choice(kept)
                times.append(table.revert(to, prefix=span, where=where))
                for each in tables:
                    how = {"columns": ["zone", "id", "name"], "filter": where}
                    passed = [each.scan(as_of=at, **how).read_all() for at in (None, to)]
                    assert span or passed[0].equals(passed[1])
        elif what == "drop":
            times.append(table.drop())
            for gone in (
                lambda: mine.get("a", 1),
                mine.scan,
                lambda row=row: mine.put(row),
                mine.count,
            ):
                with pytest.raises(NotFoundError, match="no table 'people'"):
                    gone()
            remake = rng.choice([client, store])
            remake.table("people", SCHEMA, ["zone", "id"], INDEXES)
            made_at = store.now()
        elif what == "insert" and its.get(row["zone"], row["id"]) is None:
            times.append(table.insert(row))
        elif what == "insert":
            for each in tables:
                with pytest.raises(NotUniqueError, match=f"the key is taken by .*id={row['id']}"):
                    each.insert(row)
        elif what == "alter" and "extra" in its.schema.names:
            its.alter(drop=["extra"])
        elif what == "alter":
            its.alter(add={"extra": (pa.int64(), 5)})
        key, as_of = (row["zone"], row["id"]), rng.choice(times[-6:])
        columns = rng.choice([None, ["seen", "id"]])
        how: dict[str, Any] = {"as_of": as_of, "columns": columns}
        limit, reverse = rng.choice([None, 2]), rng.choice([True, False])
        calls_: list[Callable[[kvstore.Table], Any]] = [
            lambda table, key=key, how=how: table.get(*key, **how),
            lambda table, key=key, how=how: table.get_many([key, ("a", 99)], **how),
            lambda table, key=key: table.history(*key),
            lambda table, how=how, n=limit, r=reverse: list(
                table.rows("a", limit=n, reverse=r, **how)
            ),
            lambda table, how=how: table.scan(**how).read_all(),
            lambda table, how=how, n=limit, r=reverse: list(
                table.find("by_name", "x", limit=n, reverse=r, **how)
            ),
            lambda table, as_of=as_of: (table.count(as_of=as_of), table.count("a", as_of=as_of)),
            lambda table: table.changes(0).read_all(),
            lambda table: (table.schema, table.key, table.indexes, table.event_time),
        ]
        for call in calls_:
            assert call(mine) == call(its)
    assert client.tables() == store.tables() == ["people"]


def test_a_unique_index_holds_among_clients(
    client: Client, store: kvstore.Store, people: kvstore.Table
) -> None:
    """Threads that put rows with the same address: one wins, and the error of each other names the
    winner's row."""
    told: list[NotUniqueError] = []

    def put(number: int) -> None:
        try:
            people.put(person(number, mail="one@x"))
        except NotUniqueError as error:
            told.append(error)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = store.table("people").rows()
    assert len(told) == 5
    assert all(f"id={winner['id']}" in str(error) for error in told)
    with pytest.raises(NotUniqueError):
        client.transact(lambda txn: txn.table("people").put(person(8, mail="one@x")))
    with pytest.raises(NotUniqueError):
        people.put_batch([person(8, mail="two@x"), person(9, mail="two@x")])
    assert len(list(people.rows())) == 1


def test_a_unique_value_may_move_to_another_row_in_one_commit(
    client: Client, people: kvstore.Table
) -> None:
    """The server gets the rows of a commit without their order."""
    people.put_batch([person(1, mail="one@x"), person(2, mail="two@x")])
    with client.transaction() as txn:
        table = txn.table("people")
        table.delete("b", 1)
        table.put(person(0, mail="one@x"))
    with client.transaction() as txn:
        table = txn.table("people")
        table.update("a", 2, mail=None)
        table.put(person(0, mail="two@x"), expires="+1h")
        table.update("a", 2, mail="one@x")
    assert {row["id"]: row["mail"] for row in people.rows()} == {0: "two@x", 2: "one@x"}
    with client.batch() as batch:
        batch.table("people").delete("a", 0)
        batch.table("people").put(person(4, mail="two@x"))
    batch = client.batch()
    batch.table("people").delete("a", 2)
    batch.table("people").put(person(4, mail="two@x"))
    batch.table("people").put(person(5, mail="two@x"), expires="+1h")
    with pytest.raises(NotUniqueError, match="id=4"):
        batch.__exit__(None, None, None)
    assert {row["id"]: row["mail"] for row in people.rows()} == {2: "one@x", 4: "two@x"}


def test_batches_and_transactions_collect_rows_of_arrow(
    client: Client, people: kvstore.Table
) -> None:
    """Sent by itself, such a change travels as columns. Among other writes it must not get lost."""
    rows = [person(number) for number in range(4)]
    some, others = (pa.Table.from_pylist(part, people.schema) for part in (rows[:2], rows[2:]))
    with client.batch() as batch:
        batch.table("people").put_batch(some)
        batch.put(b"k", b"v")
    with client.transaction() as txn:
        txn.table("people").put_batch(others)
    assert sorted(people.rows(), key=lambda row: row["id"]) == rows
    assert client.get(b"k") == b"v"


def test_transactions_and_batches_have_tables(client: Client, people: kvstore.Table) -> None:
    people.put(person(1, mail="one@x"))
    with client.transaction() as txn:
        table = txn.table("people")
        table.put(person(2, name="own"))
        table.update("b", 1, name="own")
        txn.put(b"k", b"v")
        assert [row["id"] for row in table.find("by_name", "own")] == [2, 1]
        assert [row["id"] for row in people.find("by_name", "own")] == []
    assert [row["id"] for row in people.find("by_name", "own")] == [2, 1]
    assert {version.timestamp for version in people.history("a", 2)} == {txn.timestamp}
    late = client.transaction()
    late.table("people").update("b", 1, name="late")
    people.update("b", 1, name="first")
    with pytest.raises(ConflictError):
        late.commit()
    with client.batch() as batch:
        batch.put(b"k", b"w")
        batch.table("people").put(person(3, name="own"))
        batch.table("people").delete("a", 2)
    assert batch.timestamp is not None
    assert [row["id"] for row in people.find("by_name", "own")] == [3]
    assert client.get(b"k") == b"w"


def test_rows_of_an_older_definition_are_encoded_again(
    client: Client, store: kvstore.Store, people: kvstore.Table
) -> None:
    people.put(person(1))
    its = store.table("people")
    its.alter(drop=["seen"], add={"score": pa.int32()}, add_index={"by_score": "score"})
    with pytest.raises(UsageError, match="no column 'seen'"):
        people.put(person(2))
    its.build_index("by_score")
    without = {name: value for name, value in person(2).items() if name != "seen"}
    people.put(without | {"score": 7})
    assert [row["id"] for row in people.find("by_score", 7)] == [2]
    batch = client.batch()
    batch.table("people").put(without)
    its.alter(add={"late": pa.int32()})
    with pytest.raises(TableAlteredError):
        batch.__exit__(None, None, None)
    assert batch.timestamp is None
    its.alter(drop_index=["by_score"])
    with pytest.raises(UsageError, match="no index 'by_score'"):
        people.find("by_score", 7)


def test_a_table_of_another_schema_is_not_made(client: Client, people: kvstore.Table) -> None:
    assert client.table("people", SCHEMA, key=["zone", "id"], indexes=INDEXES).key == people.key
    assert client.table("people", SCHEMA, key=["zone", "id"]).indexes == people.indexes
    with pytest.raises(UsageError, match="people"):
        client.table("people", SCHEMA, key=["id"])
    with pytest.raises(UsageError, match="there is no table 'other'"):
        client.table("other")
    with pytest.raises(UsageError, match="use the table of the store"):
        people.tidy()


def test_latest_rows_on_two_axes(client: Client, store: kvstore.Store) -> None:
    schema = pa.schema([("id", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64())])
    mine = client.table("readings", schema, key="id", event_time="ts")
    its = store.table("readings")
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    for minute, value in ((1, 10), (5, 50), (3, 30)):
        mine.put({"id": "d", "ts": start + timedelta(minutes=minute), "v": value})
    known = store.sync() - 1
    mine.put({"id": "d", "ts": start + timedelta(minutes=3), "v": 31})
    for at in (None, start, start + timedelta(minutes=4), start + timedelta(minutes=9)):
        for known_at in (None, known):
            found = mine.latest("d", at=at, known_at=known_at)
            assert found == its.latest("d", at=at, known_at=known_at)
    assert mine.latest("d", at=start + timedelta(minutes=4), columns=["v"]) == {"v": 31}
    its.alter(add={"until": pa.timestamp("us", "UTC")}, valid_to="until")
    mine.put({"id": "e", "ts": start, "v": 1, "until": start + timedelta(minutes=2)})
    for columns in (None, ["v"]):
        for minute in (1, 2, 3):
            at = start + timedelta(minutes=minute)
            found = mine.latest("e", at=at, columns=columns)
            assert found == its.latest("e", at=at, columns=columns)
            assert (found is None) == (minute > 1)


def test_a_tolerance_is_an_integer_of_any_library(client: Client) -> None:
    schema = pa.schema([("id", pa.string()), ("at", pa.int64()), ("v", pa.int64())])
    counts = client.table("counts", schema, key="id", event_time="at")
    counts.put({"id": "d", "at": 10, "v": 1})
    labels = pa.table({"id": ["d", "d"], "t": [15, 16]})
    for tolerance in (5, np.int64(5), np.uint8(5)):
        found = counts.join(labels, "id", "t", columns=["v"], tolerance=tolerance)
        assert found.read_all()["v"].to_pylist() == [1, None]


def test_a_class_stands_for_the_rows(client: Client) -> None:
    from dataclasses import dataclass

    @dataclass
    class Place:
        id: int
        name: str

    places = client.table("places", Place, key="id")
    places.put(Place(1, "a"))
    assert places.get(1) == Place(1, "a")
    assert list(places.rows()) == [Place(1, "a")]


def test_hostile_rows_are_refused_and_nothing_is_written(
    client: Client, store: kvstore.Store, people: kvstore.Table
) -> None:
    people.put(person(1, name="n"))
    codec = store.table("people").codec()
    key, value = codec.row(person(2))
    entry = codec.entry(codec.definition.index("by_name"), person(2, name="evil"))
    named = {"people": digest_of(codec)}
    upper = store.upper
    hostile: list[tuple[dict[bytes, bytes | None], dict[str, str]]] = [
        ({entry: b""}, named),
        ({key: value, entry: None}, named),
        ({key: b""}, named),
        ({key: value[:-1]}, named),
        ({key: b"\xff" + value[1:]}, named),
        ({key[:-1]: value}, named),
        ({key + b"\x00": None}, named),
        ({index_prefix(200, 0) + b"a": value}, named),
        ({key: value}, {}),
        ({key: value}, {"other": "00"}),
        ({key: value}, {"people": "00" * 32}),
        ({key: value[:1] + b"\x05\x00" + value[3:]}, named),
        ({codec.key.prefix[:9] + b"\x00kvstore.tables\x00people": b"{}"}, named),
    ]
    for rows, definitions in hostile:
        ops = [
            {"op": "delete", "key": to_json(at)}
            if stored is None
            else {"op": "put", "key": to_json(at), "value": to_json(stored)}
            for at, stored in rows.items()
        ]
        with pytest.raises((UsageError, TableAlteredError)):
            client.call("batch", ops=ops, definitions=json.dumps(definitions))
    for wrong in ("{", "[]", '{"people": 1}'):
        with pytest.raises(UsageError, match="definitions"):
            client.call("batch", ops=[], definitions=wrong)
    for start, end in (
        (b"a", None),
        (b"a", b"b"),
        (codec.key.prefix, codec.key.prefix + b"\xff" * 9),
    ):
        place = {"start": to_json(start), "end": to_json(end)}
        with pytest.raises((UsageError, TableAlteredError)):
            client.rows("table_find", table="people", index="by_name", **place)
    with pytest.raises((UsageError, TableAlteredError)):
        client.rows("table_scan", table="people", start=to_json(entry))
    with pytest.raises(UsageError, match="definition"):
        client.call("make_table", table="new", definition='{"v": 1}')
    assert store.upper == upper
    assert list(people.rows()) == [person(1, name="n")]


def test_a_token_with_a_prefix_opens_no_table(store: kvstore.Store) -> None:
    store.table("people", SCHEMA, key=["zone", "id"]).put(person(1))
    tokens = [Token(SECRET, ("write",), b"flights/"), Token("r" * 32, ("read",))]
    with serving(app(store, tokens=tokens), ListenAddress("127.0.0.1", 0)) as running:
        with connect(running.url, token=SECRET) as client:
            with pytest.raises(AccessDeniedError):
                client.table("people")
            with pytest.raises(AccessDeniedError, match="a call of a table"):
                client.rows("table_scan", table="people")
        with connect(running.url, token="r" * 32) as client:
            assert client.table("people").get("b", 1) == person(1)
            with pytest.raises(AccessDeniedError):
                client.table("people").put(person(2))
            with pytest.raises(AccessDeniedError):
                client.table("new", SCHEMA, key="id")
    assert store.tables() == ["people"]


def test_scripts_beside_an_owner_have_its_tables(tmp_path: Path) -> None:
    """A moment of the files stays as it is while the owner writes by its socket."""
    with kvstore.open(tmp_path / "owned", control=True) as owner:
        its = owner.table("people", SCHEMA, key=["zone", "id"], indexes=INDEXES)
        its.put(person(1))
        with kvstore.connect(tmp_path / "owned") as client:
            client.table("people").put(person(2, name="socket"))
            with as_store(client) as beside:
                table = beside.table("people")
                assert [row["id"] for row in table.rows()] == [2, 1]
                served = client.table("people")
                served.put(person(3, name="beside"))
                served.update("a", 2, name="new")
                with pytest.raises(NotUniqueError):
                    served.put_batch([person(n, mail="one@x") for n in (4, 5)])
                assert [row["id"] for row in table.rows()] == [2, 1]
        assert [row["id"] for row in its.find("by_name", "beside")] == [3]
        assert [row["id"] for row in its.find("by_name", "new")] == [2]


def test_a_batch_of_rows_is_written_whole_in_pieces_that_travel(
    client: Client, store: kvstore.Store, people: kvstore.Table
) -> None:
    rows = [person(number) for number in range(200)]
    with bounds(SERVER_STREAM_ROWS=7):
        people.put_batch(pa.Table.from_pylist(rows, people.schema))
        assert people.scan().read_all().num_rows == 200
        assert [row["id"] for row in people.find("by_name", "n1")] == [
            row["id"] for row in store.table("people").find("by_name", "n1")
        ]
    with bounds(SERVER_LARGE_BYTES_MAX=4096), pytest.raises(UsageError, match="travel"):
        people.put_batch(pa.Table.from_pylist(rows, people.schema))


@pytest.mark.parametrize("is_event", [False, True], ids=["rows", "events"])
def test_a_client_joins_labels_with_a_table(
    client: Client, store: kvstore.Store, is_event: bool
) -> None:
    pick = seeded()
    schema = pa.schema([("user", pa.int64()), ("at", pa.int64()), ("plan", pa.string())])
    given: dict[str, Any] = {"key": "user", "event_time": "at" if is_event else None}
    mine = client.table("seen", schema, **given)
    stamps = []
    for step in range(40):
        row = {"user": pick.randrange(3), "at": int(store.now()), "plan": str(step)}
        stamps.append(mine.put(row) if pick.random() < 0.8 or not stamps else store.sync())
    theirs = store.table("seen")
    labels = pa.table(
        {
            "who": pa.array([pick.randrange(4) for _ in range(25)]).dictionary_encode(),
            "ts": [int(pick.choice(stamps)) for _ in range(25)],
            "then": [int(pick.choice(stamps)) for _ in range(25)],
        }
    )
    questions: list[dict[str, Any]] = [
        {},
        {"columns": ["plan"], "prefix": "f_"},
        {"max_age": timedelta(milliseconds=2)},
        {"max_age": timedelta(microseconds=20)},
    ]
    if is_event:
        questions += [{"known_at": "then"}, {"known_at": stamps[20]}]
    else:
        questions.append({"at": None})
    with bounds(JOIN_ROWS_FIRST=4, SERVER_STREAM_ROWS=3):
        for question in questions:
            found = mine.join(labels, "who", **question).read_all()
            assert found == theirs.join(labels, "who", **question).read_all(), question
        late = labels.slice(0, 6).to_pylist()
        late[5]["then" if is_event else "ts"] = int(store.upper) + 10**18
        how: dict[str, Any] = {"known_at": "then"} if is_event else {}
        with pytest.raises(NotYetWrittenError, match="row 5"):
            mine.join(pa.Table.from_pylist(late, labels.schema), "who", **how).read_all()
    for wrong, problem in (
        ({"on": "nobody"}, "no column 'nobody'"),
        ({"on": "who", "columns": ["nothing"]}, "nothing"),
        ({"on": ["who", "ts"]}, "name the labels' columns"),
        ({"on": "who", "at": "who"}, "who"),
    ):
        with pytest.raises(UsageError, match=problem):
            mine.join(labels, **wrong).read_all()  # type: ignore[arg-type]  # wrong
    assert all(hold.kind != "reader" for hold in store.holds.all()), "the leases ended"


def test_hostile_questions_of_a_join_are_refused(client: Client, store: kvstore.Store) -> None:
    client.table("users", pa.schema([("user", pa.int64()), ("plan", pa.string())]), "user")
    sink = pa.BufferOutputStream()
    labels = pa.table({"user": [1], "ts": [0]})
    with pa.ipc.new_stream(sink, labels.schema) as writer:
        writer.write_table(labels)
    body = sink.getvalue().to_pybytes()
    whole = {"on": ["user"], "at": "ts", "known_at": None, "columns": ["plan"]}
    wrongs = (
        "",
        "[]",
        "{}",
        json.dumps({**whole, "on": "user"}),
        json.dumps({**whole, "on": [7]}),
        json.dumps({**whole, "at": 7}),
        json.dumps({**whole, "known_at": [1]}),
        json.dumps({**whole, "columns": None}),
    )
    with serving(app(store), ListenAddress("127.0.0.1", 0)) as running:
        for wrong in wrongs:
            query = urlencode({"table": "users", "question": wrong})
            url, kind = f"{running.url}/v1/table_join?{query}", {"Content-Type": ARROW_TYPE}
            with pytest.raises(HTTPError) as refused:
                urlopen(Request(url, body, kind))
            told = json.loads(refused.value.read())
            assert (told["error"], told["what"][:8]) == ("UsageError", "question")
    with pytest.raises(UsageError, match="without labels"):
        client.call("table_join", table="users", question=json.dumps(whole))


def test_a_table_of_a_client_is_a_source_of_a_join(client: Client, store: kvstore.Store) -> None:
    users = client.table("users", pa.schema([("user", pa.int64()), ("plan", pa.string())]), "user")
    first = users.put({"user": 1, "plan": "free"})
    users.put_batch([{"user": number, "plan": "paid"} for number in range(3)])
    gone = users.delete(2)
    store.table("users").alter(add={"seats": (pa.int64(), 1)})
    last = users.put({"user": 2, "plan": "free", "seats": 7})
    store.put(b"k", b"v")
    labels = pa.table(
        {"user": [1, 1, 2, 2, 9], "id": [b"k"] * 5, "ts": [first, last, gone, last, last]}
    )

    def sources(table: kvstore.Table) -> list[Any]:
        return [Join(table, prefix="u_"), Join(table, columns=["seats"]), client]

    with bounds(JOIN_ROWS_FIRST=2, JOIN_ROWS_MAX=2):
        joined = kvstore.join(labels, sources(users)).read_all()
    assert joined == kvstore.join(labels, sources(store.table("users"))).read_all()
    assert joined["u_plan"].to_pylist() == ["free", "paid", None, "free", None]
    assert joined["seats"].to_pylist() == [1, 1, None, 7, None]
    assert all(hold.kind != "reader" for hold in store.holds.all()), "the leases ended"
    store.gc(before=store.upper - 1)
    with pytest.raises(HistoryGoneError, match="row 0"):
        kvstore.join(labels, [users]).read_all()
