"""A client refuses arguments of wrong types as its store does, with an error of the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvstore
from kvstore import Client
from kvstore.errors import UsageError
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app

WRONG: dict[str, Callable[[Any], Any]] = {
    "scan reverse": lambda c: list(c.scan(reverse=b"yes")),
    "scan reverse text": lambda c: list(c.scan(reverse="yes")),
    "keys reverse": lambda c: list(c.keys(reverse=5)),
    "changes revisions": lambda c: list(c.changes(0, revisions=b"all")),
    "changes order": lambda c: list(c.changes(0, order=b"key")),
    "events images": lambda c: list(c.events(0, images=b"pre")),
    "events span": lambda c: list(c.events(0, span=5)),
    "changes_batches span": lambda c: c.changes_batches(0, span=b"k").read_all(),
    "delete durability": lambda c: c.delete(b"k", durability=b"sync"),
    "put_if durability": lambda c: c.put_if(b"k", b"v", durability=b"sync"),
    "delete_range idempotent": lambda c: c.delete_range(b"a", b"b", idempotent=b"yes"),
    "wait_beyond none": lambda c: c.wait_beyond(None, timeout=0),
    "wait_beyond text": lambda c: c.wait_beyond("now", timeout=0),
    "revert_import text": lambda c: c.revert_import("7"),
    "revert_import none": lambda c: c.revert_import(None),
    "feed name": lambda c: c.feed(b"f", start=0),
    "feed streams": lambda c: c.feed("f", start=0, streams=5),
    "feed streams text": lambda c: c.feed("f", start=0, streams="2"),
    "feed max_age": lambda c: c.feed("f", start=0, max_age=60),
    "feed batch_rows": lambda c: c.feed("f", start=0, batch_rows=b"1"),
    "hold name": lambda c: c.hold(b"h"),
    "hold max_age": lambda c: c.hold("h", max_age=60),
    "drop_hold name": lambda c: c.drop_hold(b"h"),
    "gc keep": lambda c: c.gc(keep=5),
    "gc compact": lambda c: c.gc(before=0, compact=b"yes"),
    "clear_range start": lambda c: c.clear_range(5, b"b"),
    "clear_range end": lambda c: c.clear_range(b"a", 5),
    "clear_range inverted": lambda c: c.clear_range(b"b", b"a"),
    "force_quiescence timeout": lambda c: c.force_quiescence(timeout=b"1"),
    "transact of nothing": lambda c: c.transact(None),
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        kvstore.open(None, engine="memory") as store,
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        connect(running.url) as connected,
    ):
        store.put(b"k", b"v")
        yield connected


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_a_wrong_type_is_refused(client: Client, case: str) -> None:
    before = client.history(b"k")
    with pytest.raises(UsageError):
        WRONG[case](client)
    assert client.history(b"k") == before


def test_the_error_names_the_argument(client: Client) -> None:
    with pytest.raises(UsageError, match="revisions=b'all'"):
        list(client.changes(0, revisions=b"all"))  # type: ignore[arg-type]
