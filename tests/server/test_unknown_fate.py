"""A server dies with the answer to a write: the client never says that a write was surely not done
while it is done."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import (
    AccessDeniedError,
    ConflictError,
    CorruptionError,
    IndeterminateError,
    KVStoreError,
    NotUniqueError,
    PreconditionError,
    StorageError,
    TableAlteredError,
)
from kvstore.remote.protocol import to_json
from kvstore.remote.server.app import app
from kvstore.remote.server.service import VerbCall
from kvstore.remote.server.tokens import WHOLE, Grant
from kvstore.tables.sources import digest_of
from kvstore.timeline.request_notes import RequestToken
from tests.harness.seeds import seeded
from tests.server.cut_off import Served, served

_LONG_KEY = b"k" * 5000
_SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


class Case(NamedTuple):
    """A call that writes: the request that does it, and whether the store then shows it."""

    name: str
    request: bytes
    call: Callable[[Any, Path], Any]
    is_done: Callable[[kvstore.Store], bool]
    has_twin: bool = True
    """Whether the asyncio client has the call in the same form."""


def _in_transaction(client: Any, _: Path) -> Any:
    return client.transact(lambda txn: txn.put(b"new", txn.get(b"k")))


def _upper_case(client: Any, _: Path) -> Any:
    return client.update(b"k", lambda value: value.upper())


def _opened(client: Any, _: Path) -> Any:
    with client.changeset():
        raise AssertionError("it is not open")


def _acked(client: Any, _: Path) -> None:
    with client.feed("known") as feed:
        batch = next(feed.batches())
        feed.ack(batch)


_PUT, _DELETE = b"PUT /v1/keys/", b"/v1/delete"
CASES = [
    Case("put", _PUT, lambda c, _: c.put(b"new", b"v"), lambda s: s.get(b"new") == b"v"),
    Case(
        "put_long",
        b"/v1/put ",
        lambda c, _: c.put(_LONG_KEY, b"v"),
        lambda s: s.get(_LONG_KEY) == b"v",
    ),
    Case("delete", _DELETE, lambda c, _: c.delete(b"k"), lambda s: s.get(b"k") is None),
    Case(
        "delete_range",
        b"/v1/delete_range",
        lambda c, _: c.delete_range(b"k", b"l"),
        lambda s: s.get(b"k") is None,
    ),
    Case(
        "delete_range_idempotent",
        b"/v1/delete_range",
        lambda c, _: c.delete_range(b"k", b"l", idempotent=True),
        lambda s: s.get(b"k") is None,
    ),
    Case(
        "put_many",
        b"/v1/batch",
        lambda c, _: c.put_many([(b"new", b"v")]),
        lambda s: s.get(b"new") == b"v",
    ),
    Case(
        "put_if",
        b"/v1/put_if",
        lambda c, _: c.put_if(b"k", b"new", b"value"),
        lambda s: s.get(b"k") == b"new",
    ),
    Case(
        "delete_if",
        b"/v1/delete_if",
        lambda c, _: c.delete_if(b"k", b"value"),
        lambda s: s.get(b"k") is None,
    ),
    Case("pop", b"/v1/pop", lambda c, _: c.pop(b"k"), lambda s: s.get(b"k") is None),
    Case(
        "increment", b"/v1/increment", lambda c, _: c.increment(b"n"), lambda s: s.get(b"n") == b"2"
    ),
    Case(
        "persist", b"/v1/persist", lambda c, _: c.persist(b"due"), lambda s: s.ttl(b"due") is None
    ),
    Case("transact", b"/v1/batch", _in_transaction, lambda s: s.get(b"new") == b"value"),
    Case("update", b"/v1/batch", _upper_case, lambda s: s.get(b"k") == b"VALUE"),
    Case(
        "revert_range",
        b"/v1/revert_range",
        lambda c, _: c.revert_range(b"k", b"l", 0),
        lambda s: s.get(b"k") is None,
    ),
    Case("sync", b"/v1/sync", lambda c, _: c.sync(), lambda s: True),
    Case(
        "make_table",
        b"/v1/make_table",
        lambda c, _: c.table("new", _SCHEMA, "id"),
        lambda s: s.tables() == ["new", "t"],
    ),
    Case(
        "table_put",
        b"/v1/batch",
        lambda c, _: c.table("t").put({"id": 2, "name": "b"}),
        lambda s: s.table("t").get(2) is not None,
        has_twin=False,
    ),
    Case(
        "table_delete",
        b"/v1/batch",
        lambda c, _: c.table("t").delete(1),
        lambda s: s.table("t").get(1) is None,
        has_twin=False,
    ),
    Case(
        "table_update",
        b"/v1/batch",
        lambda c, _: c.table("t").update(1, name="b"),
        lambda s: s.table("t").get(1)["name"] == "b",
        has_twin=False,
    ),
    Case(
        "alter_table",
        b"/v1/alter_table",
        lambda c, _: c.table("t").alter(add={"more": pa.int64()}),
        lambda s: "more" in s.table("t").schema.names,
        has_twin=False,
    ),
    Case(
        "delete_range",
        b"/v1/batch",
        lambda c, _: c.table("t").delete_range(1, 2),
        lambda s: s.table("t").get(1) is None,
        has_twin=False,
    ),
    Case(
        "revert_table",
        b"/v1/revert_table",
        lambda c, _: c.table("t").revert(c.table("t").history(1)[0].timestamp),
        lambda s: s.table("t").count() == 1,
        has_twin=False,
    ),
    Case(
        "clear_table",
        b"/v1/clear_table",
        lambda c, _: c.table("t").clear(),
        lambda s: True,
        has_twin=False,
    ),
    Case(
        "drop_table",
        b"/v1/drop_table",
        lambda c, _: c.table("t").drop(),
        lambda s: s.tables() == [],
        has_twin=False,
    ),
    Case(
        "build_index",
        b"/v1/build_index",
        lambda c, _: c.table("t").build_index("by_name"),
        lambda s: True,
        has_twin=False,
    ),
    Case(
        "hold", b"/v1/hold ", lambda c, _: c.hold("new"), lambda s: len(s.holds.all()) == 3, False
    ),
    Case(
        "drop_hold",
        b"/v1/drop_hold",
        lambda c, _: c.drop_hold("known"),
        lambda s: len(s.holds.all()) == 1,
    ),
    Case(
        "move_hold",
        b"/v1/move_hold",
        lambda c, _: c.hold("known").move(c.upper - 1),
        lambda s: s.holds.all() != [],
        has_twin=False,
    ),
    Case(
        "release_hold",
        b"/v1/release_hold",
        lambda c, _: c.hold("known").release(),
        lambda s: len(s.holds.all()) == 1,
        has_twin=False,
    ),
    Case(
        "open_feed",
        b"/v1/open_feed",
        lambda c, _: c.feed("new"),
        lambda s: True,
        has_twin=False,
    ),
    Case("ack", b"/v1/ack", _acked, lambda s: True, has_twin=False),
    Case(
        "drop_feed",
        b"/v1/drop_feed",
        lambda c, _: c.drop_feed("known"),
        lambda s: len(s.holds.all()) == 1,
    ),
    Case(
        "lease",
        b"/v1/lease",
        lambda c, _: c.lease("mine", seconds=60),
        lambda s: True,
        has_twin=False,
    ),
    Case(
        "release_lease",
        b"/v1/release_lease",
        lambda c, _: c.release_lease("mine"),
        lambda s: True,
        has_twin=False,
    ),
    Case("open_changeset", b"/v1/open_changeset", _opened, lambda s: True, has_twin=False),
    Case("gc", b"/v1/gc", lambda c, _: c.gc(keep=timedelta(0)), lambda s: True),
    Case(
        "checkpoint", b"/v1/checkpoint", lambda c, path: c.checkpoint(path / "copy"), lambda s: True
    ),
    Case("clear_range", b"/v1/clear_range", lambda c, _: c.clear_range(b"k", b"l"), lambda s: True),
    Case("reshard", b"/v1/reshard", lambda c, _: c.reshard(2), lambda s: len(s.generations()) == 2),
    Case(
        "force_quiescence",
        b"/v1/force_quiescence",
        lambda c, _: c.force_quiescence(),
        lambda s: True,
    ),
    Case(
        "submit_task",
        b"/v1/submit_task",
        lambda c, _: c.tasks.insert("q", b"v", id="one"),
        lambda s: s.tasks.get("one") is not None,
        has_twin=False,
    ),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that each case gets a copy of."""
    path = tmp_path_factory.mktemp("template") / "store"
    with kvstore.open(path) as store:
        store.put(b"k", b"value")
        store.put(b"n", b"1")
        store.put(b"due", b"v", expires=timedelta(hours=1))
        table = store.table("t", _SCHEMA, "id")
        table.put({"id": 1, "name": "a"})
        table.put({"id": 3, "name": "c"})
        table.alter(add_index={"by_name": ["name"]})
        store.hold("known")
        store.feed("known", 0).close()
    return path


def _failure_of(case: Case, address: str, place: Path, running: Served, *, twin: bool) -> Exception:
    """The error of the call, whose answer never comes."""

    async def by_asyncio() -> None:
        async with await kvstore.connect_async(address, patience=0.1) as client:
            running.cut_at(case.request)
            await case.call(client, place)

    def by_threads() -> None:
        with kvstore.connect(address, patience=0.1) as client:
            running.cut_at(case.request)
            case.call(client, place)

    with pytest.raises(KVStoreError) as failed:
        asyncio.run(by_asyncio()) if twin else by_threads()
    return failed.value


_WAYS = ["path", "url", "path asyncio", "url asyncio"]


_SHORT = [
    *("put", "put_many", "increment", "pop", "put_if", "transact"),
    *("table_put", "sync", "ack", "hold", "gc", "make_table"),
]
"""A case for each way in which requests are sent and sent again."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in _SHORT else pytest.mark.soak)
        for case in CASES
    ],
)
def test_a_write_whose_server_died_with_its_answer_is_of_unknown_fate(
    case: Case, spawn: Any, template: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each case takes one way here, and all of them as a soak."""
    ways = [way for way in _WAYS if case.has_twin or "asyncio" not in way]
    if request.config.getoption("markexpr") != "soak":
        ways = [ways[_SHORT.index(case.name) % len(ways)]]
    for number, way in enumerate(ways):
        place = tmp_path / str(number)
        shutil.copytree(template, place / "store")
        with served(spawn, place / "store") as running:
            address = str(place / "store") if way.startswith("path") else running.url
            error = _failure_of(case, address, place, running, twin="asyncio" in way)
            assert running.hit.wait(60)
        assert isinstance(error, IndeterminateError), (way, error)
        with kvstore.open(place / "store") as store:
            assert case.is_done(store), way


# -- what a refusal tells --------------------------------------------------------------------


def _answer(status: int, error: str) -> bytes:
    body = json.dumps({"error": error, "what": "it", "remedy": "", "fields": {}}).encode()
    return (
        b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        b"Connection: close\r\n\r\n%s" % (status, len(body), body)
    )


_FRONTIERS = ("since", "upper", "durable", "whole_since", "indexed_since", "now")
_TIMES = json.dumps({**dict.fromkeys(_FRONTIERS, 5), "store_id": "s"}).encode()
_WELCOME = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_TIMES),
    _TIMES,
)


@contextmanager
def _answering(answers: Sequence[bytes]) -> Iterator[str]:
    """A server that gives each connection the next answer, and the last one for ever."""
    left = [_WELCOME, *answers]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    with near, suppress(OSError):
                        while near.recv(1 << 16):
                            answer = left.pop(0) if len(left) > 1 else left[0]
                            near.sendall(answer)
                            if answer is not _WELCOME:
                                break

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (503, "RetryableError", IndeterminateError),
        (503, "DeterminateError", IndeterminateError),
        (503, "BusyError", IndeterminateError),
        (403, "AccessDeniedError", IndeterminateError),
        (400, "UsageError", IndeterminateError),
        (503, "ClosedError", IndeterminateError),
        (409, "ConflictError", ConflictError),
        (412, "PreconditionError", PreconditionError),
        (409, "TableAlteredError", TableAlteredError),
        (400, "NotUniqueError", NotUniqueError),
        (500, "CorruptionError", CorruptionError),
    ],
)
def test_behind_a_lost_answer_only_the_store_can_say_that_nothing_was_done(
    status: int, error: str, told: type[KVStoreError]
) -> None:
    answers = [b"", _answer(status, error)]
    with (
        _answering(answers) as url,
        kvstore.connect(url, patience=0.1) as client,
        pytest.raises(KVStoreError) as failed,
    ):
        client.increment(b"n")
    assert type(failed.value) is told
    with (
        _answering(answers[1:]) as url,
        kvstore.connect(url, patience=0.1) as client,
        pytest.raises(KVStoreError) as failed,
    ):
        client.increment(b"n")
    assert type(failed.value).__name__ == error


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_that_has_lost_the_server_says_nothing_of_a_write(status: int) -> None:
    """A proxy answers so for a request that never left it, and for one whose answer was lost."""
    answer = b"HTTP/1.1 %d No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno" % status
    with (
        _answering([answer]) as url,
        kvstore.connect(url, patience=0.1) as client,
        pytest.raises(IndeterminateError, match=f"status {status} and no error of ours"),
    ):
        client.put(b"k", b"v")


# -- requests that come again ------------------------------------------------------------------


def _twice(store: kvstore.Store, verb: str, meanwhile: Callable[[], object], **fields: Any) -> Any:
    """The answers to a request that comes, and comes again after `meanwhile`."""
    service = app(store).service
    token = RequestToken("writer", 1, 0)
    first = service.run(VerbCall(service.verb(verb), WHOLE, fields, None, token))
    meanwhile()
    return first, service.run(VerbCall(service.verb(verb), WHOLE, fields, None, token))


def test_a_transaction_that_was_done_is_not_refused_for_history_that_is_gone(
    store: kvstore.Store,
) -> None:
    store.put(b"k", b"1")
    read_at = int(store.upper) - 1
    ops = [{"op": "read", "key": "k"}, {"op": "put", "key": "k", "value": "2"}]
    first, second = _twice(
        store, "batch", lambda: store.gc(keep=timedelta(0)), ops=ops, read_at=read_at
    )
    assert first == second
    assert len(store.history(b"k")) <= 2


def test_a_row_that_was_put_is_not_put_again_where_its_table_was_altered(
    store: kvstore.Store,
) -> None:
    """The client of a table encodes a refused row anew, under another token."""
    table = store.table("t", _SCHEMA, "id")
    codec = table.codec()
    key, value = codec.row({"id": 1, "name": "a"})
    ops = [{"op": "put", "key": to_json(key), "value": to_json(value)}]
    first, second = _twice(
        store,
        "batch",
        lambda: table.alter(add={"more": pa.int64()}),
        ops=ops,
        definitions=json.dumps({"t": digest_of(codec)}),
    )
    assert first == second
    assert len(table.history(1)) == 1


def test_a_sum_that_was_made_is_told_where_the_key_has_no_number_by_now(
    store: kvstore.Store,
) -> None:
    first, second = _twice(store, "increment", lambda: store.put(b"n", b"text"), key="n")
    assert first == second == {"sum": 1}


@pytest.mark.parametrize("verb", ["increment", "pop"])
def test_a_result_whose_history_is_gone_is_unknown_and_not_refused(
    store: kvstore.Store, verb: str
) -> None:
    store.put(b"n", b"1")

    def meanwhile() -> None:
        store.put(b"n", b"7")
        store.gc(keep=timedelta(0))

    with pytest.raises(IndeterminateError, match="the history of its result is gone"):
        _twice(store, verb, meanwhile, key="n")


def test_a_caller_without_access_to_a_key_gets_no_answer_of_its_request(
    store: kvstore.Store,
) -> None:
    store.put(b"secret", b"1")
    service, token = app(store).service, RequestToken("writer", 1, 0)
    service.run(VerbCall(service.verb("pop"), WHOLE, {"key": "secret"}, None, token))
    other = Grant(frozenset({"read", "write"}), b"mine/")
    with pytest.raises(AccessDeniedError):
        service.run(VerbCall(service.verb("pop"), other, {"key": "secret"}, None, token))


def test_a_request_waits_for_its_first_attempt(store: kvstore.Store) -> None:
    """The first attempt waits for a lock while the client sends the request again. A refusal of
    the second one would be wrong, because the first one could still be done."""
    service, token = app(store).service, RequestToken("writer", 1, 0)
    store.put(b"k", b"old")
    fields = {"key": "k", "value": "new", "expected": "old"}
    answers: list[Any] = []

    def attempt() -> None:
        answers.append(service.run(VerbCall(service.verb("put_if"), WHOLE, fields, None, token)))

    attempts = [threading.Thread(target=attempt) for _ in range(2)]
    with store.requests.unless_busy() as is_ours:
        assert is_ours
        for each in attempts:
            each.start()
        # On the event loop an attempt would not wait either.
        assert (
            service.run_short(VerbCall(service.verb("put_if"), WHOLE, fields, None, token)) is None
        )
    for each in attempts:
        each.join()
    assert answers[0] == answers[1]
    assert len(store.history(b"k")) == 2


# -- many kills --------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.parametrize("by", ["path", "url"])
def test_counters_of_killed_owners_have_what_was_acknowledged(
    by: str, kills: int, spawn: Any, tmp_path: Path
) -> None:
    """A caller writes again only what was surely not done. Nothing is lost, and nothing is done
    twice: each counter has all increments that were acknowledged, and of those of unknown fate
    some."""
    draw = seeded()
    path = tmp_path / "store"
    with kvstore.open(path):
        pass
    sure, unknown = 0, 0
    with served(spawn, path) as running:
        address = str(path) if by == "path" else running.url
        for _ in range(kills):
            with kvstore.connect(address, patience=draw.choice([0.0, 0.05, 0.2])) as client:
                for _ in range(draw.randint(1, 30)):
                    client.increment(b"n")
                    sure += 1
                running.cut_at(b"/v1/increment")
                with pytest.raises(StorageError):  # a `RetryableError` would be made up for
                    client.increment(b"n")
                unknown += 1
            running.start()
        with kvstore.connect(address) as client:
            found = int(client.get(b"n") or 0)
            assert len(client.history(b"n")) == found
        running.stop()
    assert sure <= found <= sure + unknown


def test_an_owner_that_comes_back_tells_what_became_of_a_write(spawn: Any, tmp_path: Path) -> None:
    """The client waits for it, within its patience."""
    path = tmp_path / "store"
    with kvstore.open(path):
        pass
    with served(spawn, path) as running, kvstore.connect(path, patience=60) as client:
        running.cut_at(b"/v1/increment")
        sums: list[int] = []
        caller = threading.Thread(target=lambda: sums.append(client.increment(b"n")))
        caller.start()
        running.hit.wait()
        running.start()
        caller.join()
        assert sums == [1]
        assert client.increment(b"n") == 2
        running.kill()
    with kvstore.open(path) as store:
        assert store.get(b"n") == b"2"
