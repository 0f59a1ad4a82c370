"""Changes, epochs, waits, verification and metrics through a server, as the store has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.base.span import Span
from kvstore.changes.events import EXPAND, IMAGES
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.remote.client import Client, connect
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from tests.harness.bounds import bounds


@pytest.fixture
def client(store: kvstore.Store, tmp_path: Path) -> Iterator[Client]:
    """A client of `store`."""
    address = ListenAddress(path=str(tmp_path / "s"))
    with serving(app(store), address) as running, connect(running.url) as connected:
        yield connected


def test_changes_events_and_epochs_are_the_ones_of_the_store(
    client: Client, store: kvstore.Store
) -> None:
    with bounds(SERVER_STREAM_ROWS=3):
        _make_changes(client, store)
        for order in ("key", "time"):
            for revisions in ("all", "latest"):
                for prefix in (None, b"1"):
                    how: Any = {"order": order, "revisions": revisions, "prefix": prefix}
                    assert list(client.changes(0, **how)) == list(store.changes(0, **how))
        for images in IMAGES:
            for expand in EXPAND:
                wanted: Any = {"images": images, "expand": expand}
                assert list(client.events(0, **wanted)) == list(store.events(0, **wanted))
        span = Span(b"1", b"3")
        assert list(client.events(0, span=span)) == list(store.events(0, span=span))
        epochs = list(store.epochs())
        assert list(client.epochs()) == epochs
        assert list(client.epochs(epochs[-2].closed_at)) == list(store.epochs(epochs[-2].closed_at))
    assert client.generations() == store.generations()
    assert [len(each.streams) for each in client.generations()] == [1, 3]
    store.gc(before=store.upper - 1)
    with pytest.raises(HistoryGoneError):
        client.events(0)
    with pytest.raises(UsageError, match="revisions"):
        client.changes(0, revisions="none")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="streams"):
        client.reshard(0)


def _make_changes(client: Client, store: kvstore.Store) -> None:
    client.put_many({b"%d" % number: b"v" for number in range(20)})
    client.delete_range(b"3", b"7")
    with store.changeset():
        store.put(b"x", b"1")
        store.delete(b"12")
    assert client.reshard(3) == store.generations()[-1]
    with client.batch() as batch:
        batch.put(b"a", b"1")
        batch.put(b"zz", b"9")
        batch.delete_range(b"1", b"12")


def test_a_client_waits_for_a_commit(client: Client, store: kvstore.Store) -> None:
    written = store.put(b"k", b"1")
    client.wait_beyond(written - 1)
    client.wait_beyond(written + 10**15, timeout=0.0)
    client.wait_beyond(written + 10**15, stop=lambda: True)
    waiting = threading.Thread(target=client.wait_beyond, args=(store.upper,))
    waiting.start()
    client.put(b"k", b"2")
    waiting.join()
    assert client.force_quiescence() == store.upper - 1
    assert client.force_quiescence(timedelta(hours=1), timeout=1.0) <= store.upper - 1


def test_a_client_verifies_measures_and_tells_times(client: Client, store: kvstore.Store) -> None:
    client.put(b"k", b"v")
    told: list[int] = []
    report = client.verify(progress=told.append)
    assert (report.ok, report.complete, report.keys) == (True, True, 1)
    mine, theirs = client.metrics(), store.metrics()
    assert mine.keys() == theirs.keys()
    assert mine["kvstore_commits_total"] == theirs["kvstore_commits_total"]
    assert mine["kvstore_fsync_seconds"].value == theirs["kvstore_fsync_seconds"].value
    assert client.to_time("2013-01-31T00:00:00Z") == store.to_time("2013-01-31T00:00:00Z")
    assert store.now() - 3600 * 10**9 <= (ago := client.to_time("-1h")) < client.to_time("now")
    assert ago > store.now() - 2 * 3600 * 10**9
    with pytest.raises(UsageError, match="since="):
        client.to_time(timedelta(-1), name="since")
