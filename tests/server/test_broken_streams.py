"""Answers that fail behind their first piece: the caller gets the error and no rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import ClosedError, CorruptionError, HistoryGoneError, KVStoreError
from kvstore.remote.client import Client, connect
from kvstore.remote.protocol import ARROW_TYPE, JSON_TYPE
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.invocation import Answer, Invocation, ServedVerb
from kvstore.remote.server.verbs import SERVED
from kvstore.remote.verbs import READ, Verb
from tests.harness.bounds import bounds

LOCAL = ListenAddress("127.0.0.1", 0)
KEYS = [b"%05d" % number for number in range(2000)]
PIECE = 200_000


def write(store: kvstore.Store) -> kvstore.Timestamp:
    """The rows, of 2,000 random bytes each, in one commit: ten pieces, and more than one batch."""
    written = store.put_many({key: os.urandom(2000) for key in KEYS})
    assert written is not None
    return written


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Client]:
    """A client of a store whose rows lie in one file, with a flipped bit in its last quarter."""
    path = tmp_path / "damaged"
    for _ in range(2):  # the second opening finds the rows in a file
        with kvstore.open(path) as store:
            if not store.count():
                write(store)
            store.sync()
    largest = max(path.rglob("*.sst"), key=lambda file: file.stat().st_size)
    assert largest.stat().st_size > len(KEYS) * 2000
    content = bytearray(largest.read_bytes())
    content[len(content) * 7 // 8] ^= 1
    largest.write_bytes(content)
    with (
        kvstore.open(path) as store,
        bounds(ARROW_BYTES_MAX=PIECE),
        serving(app(store), LOCAL) as running,
        connect(running.url) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "read",
    [
        lambda client: client.get_many(KEYS),
        lambda client: client.get_many(KEYS, [client.upper - 1] * len(KEYS)),
        lambda client: client.floor_many(KEYS),
        lambda client: list(client.scan()),
        lambda client: client.call("scan"),
        lambda client: list(client.scan(reverse=True)),
        lambda client: list(client.changes(since=0)),
    ],
    ids=["get_many", "timed", "floor_many", "scan", "call", "reverse", "changes"],
)
@pytest.mark.damages_store
def test_damage_behind_the_first_piece_is_told(
    damaged: Client, read: Callable[[Client], Any]
) -> None:
    assert damaged.get_many(KEYS[:500])[0] is not None
    with pytest.raises(CorruptionError, match="checksum"):
        read(damaged)
    assert damaged.get(KEYS[0]) is not None


def broken_by(event: Callable[[], object]) -> ServedVerb:
    """The verb `get_many`, with an event behind the first piece of its answer."""

    def get_many(call: Invocation) -> Answer:
        answer = real.run(call)
        assert isinstance(answer, pa.RecordBatchReader)

        def batches() -> Iterator[pa.RecordBatch]:
            yield answer.read_next_batch()
            event()
            yield from answer

        return pa.RecordBatchReader.from_batches(answer.schema, batches())

    real = SERVED["get_many"]
    return ServedVerb(real.declared, get_many)


def answer_broken_by(store: kvstore.Store, event: Callable[[], object], times: Any) -> object:
    """The answer to a client whose `get_many` an event interrupts."""
    with (
        bounds(ARROW_BYTES_MAX=PIECE),
        serving(app(store, verbs=[broken_by(event)]), LOCAL) as running,
        connect(running.url) as client,
    ):
        return client.get_many(KEYS, times)


def test_history_that_goes_in_between_is_told(store: kvstore.Store) -> None:
    written = write(store)
    store.put(KEYS[-1], b"new")
    times = [written] * len(KEYS)
    with pytest.raises(HistoryGoneError):
        answer_broken_by(store, lambda: store.clear_range(KEYS[0], KEYS[-1]), times)
    for _ in range(2):
        written = write(store)
    with pytest.raises(HistoryGoneError, match="row 62, key b'00062', asks"):
        answer_broken_by(store, lambda: store.gc(written + 1), [written] * len(KEYS))
    newest = store.upper - 1
    assert answer_broken_by(store, lambda: None, newest) == store.get_many(KEYS, newest)


def test_a_store_that_closes_in_between_is_told(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "closed") as store:
        times = [write(store)] * len(KEYS)
        with pytest.raises(ClosedError):
            answer_broken_by(store, store.close, times)


def test_a_defect_in_between_is_told_without_its_details(store: kvstore.Store) -> None:
    written = write(store)

    def fail() -> None:
        raise RuntimeError("a secret")

    with pytest.raises(KVStoreError, match="the server has a defect") as found:
        answer_broken_by(store, fail, written)
    assert "secret" not in str(found.value)
    assert type(found.value) is KVStoreError


def fail() -> None:
    raise ConnectionResetError("a secret")


def failing(call: Invocation) -> Answer:
    fail()
    raise AssertionError


def failing_behind_a_row(call: Invocation) -> Answer:
    def batches() -> Iterator[pa.RecordBatch]:
        yield batch
        fail()

    batch = pa.RecordBatch.from_pydict({"n": [1]})
    return pa.RecordBatchReader.from_batches(batch.schema, batches())


@pytest.mark.parametrize(
    ("run", "kind"),
    [(failing, JSON_TYPE), (failing_behind_a_row, JSON_TYPE), (failing_behind_a_row, ARROW_TYPE)],
    ids=["at once", "in rows of JSON", "in a stream"],
)
def test_an_error_of_the_operating_system_in_a_verb_is_a_defect_and_no_departure(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture, run: Any, kind: str
) -> None:
    verb = ServedVerb(Verb("own", READ), run)
    with (
        serving(app(store, verbs=[verb]), LOCAL) as running,
        contextlib.closing(HTTPConnection(*running.address[:2])) as line,
    ):
        line.request("POST", "/v1/own", b"{}", {"accept": kind, "content-type": JSON_TYPE})
        try:
            told = line.getresponse().read()
        except IncompleteRead as error:
            told = error.partial
        assert b"the server has a defect" in told
        assert b"secret" not in told
        line.close()
        line.request("GET", "/metrics")
        assert b'requests_total{result="failed"} 1.0\n' in line.getresponse().read()
    assert "a secret" in caplog.text
