"""The verbs of a shared store: the same ones, with the same answers, whoever owns it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.errors import (
    ClosedError,
    ConflictError,
    HistoryGoneError,
    KeyConflictError,
    NotYetWrittenError,
    PreconditionError,
    UsageError,
)
from kvstore.remote.client import Client
from kvstore.remote.shared import MADE_OF_PARTS, PARTS, READS, WRITES, SharedStore
from kvstore.store import Store

OWN = {"snapshot", "wait_beyond", "stats", "metrics", "close"}
"""Verbs that the handle has of its own."""

ONLY_SHARED = {"role", "refresh", "reached", "side_at", "answer"}

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


@pytest.fixture(params=["owner", "guest", "a guest that took over"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A shared store that is empty, in each role."""
    path = tmp_path / "store"
    first = kvstore.open(path, shared=True)
    if request.param == "owner":
        with first:
            yield first
        return
    with kvstore.open(path, shared=True) as second:
        if request.param != "guest":
            first.close()
            second.sync()
        expected = "guest" if request.param == "guest" else "owner"
        assert isinstance(second, SharedStore)
        assert second.role == expected
        yield second
        assert second.role == expected
    first.close()


def public(kind: type) -> set[str]:
    """The public names of a class."""
    return {name for name in dir(kind) if not name.startswith("_")}


def test_each_verb_and_part_of_a_store_is_declared_for_both_roles(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as plain:
        named = public(Store) | {name for name in vars(plain) if not name.startswith("_")}
    declared = {*READS, *WRITES, *PARTS}
    assert named - {"path"} == declared | OWN | {*MADE_OF_PARTS}
    assert public(SharedStore) - public(Store) - declared == ONLY_SHARED
    assert not declared & OWN
    for name in (*READS, *WRITES):
        signature = inspect.signature(getattr(SharedStore, name))
        assert signature == inspect.signature(getattr(Store, name))
    for name in WRITES:
        asked = inspect.signature(getattr(Client, name)).parameters
        assert [*asked] == [*inspect.signature(getattr(Store, name)).parameters], name


def expect(error: type[Exception], call: Callable[..., Any], *args: Any, **how: Any) -> None:
    """Check that a call raises."""
    with pytest.raises(error):
        call(*args, **how)


def test_reads(store: Any) -> None:
    first = store.put_many({b"a/1": b"1", b"a/2": b"2", b"b": b"3"})
    second = store.put(b"a/1", b"4")
    assert store.get(b"a/1") == b"4"
    assert store.get(b"a/1", as_of=first) == b"1"
    assert store.get(b"none", default=b"-") == b"-"
    assert store.get_many([b"b", b"none"]) == [b"3", None]
    assert store.floor(b"a/9") == (b"a/2", b"2")
    assert store.floor_many([b"a/1"], prefix=b"a/") == [(b"a/1", b"4")]
    assert list(store.scan(prefix=b"a/")) == [(b"a/1", b"4"), (b"a/2", b"2")]
    assert list(store.keys(reverse=True, limit=1)) == [b"b"]
    assert store.count() == 3
    assert store.scan_batches(limit=2).read_all().num_rows == 2
    assert [version.value for version in store.history(b"a/1")] == [b"4", b"1"]
    assert [change.value for change in store.changes(first)] == [b"4"]
    assert [event.timestamp for event in store.events(first)] == [second]
    assert store.changes_batches(first).read_all().num_rows == 1
    assert store.since < first < second < store.upper
    assert store.whole_since <= store.upper
    assert store.indexed_since <= store.upper
    assert store.now() > second
    assert store.to_time(second) == second
    assert store.sync() > second
    assert store.durable > second
    assert len(store.store_id) == 16
    assert store.generations()
    assert list(store.epochs()) is not None
    assert store.metrics()
    assert store.verify().problems == ()
    labels = pa.table({"id": ["b"], "ts": [int(second)]})
    assert store.join(labels).read_all()["value"].to_pylist() == [b"3"]
    assert dict(store.mapping("text", prefix=b"a/")) == {"1": "4", "2": "2"}
    assert store.get(b"b", as_of="now") == b"3"
    expect(NotYetWrittenError, store.get, b"b", as_of=store.now() + 10**12)
    expect(NotYetWrittenError, store.scan, as_of=store.now() + 10**12)
    assert store.tables() == []
    assert store.layout.splits(2)
    assert store.browsing is not None
    assert store.stats()["role"] == store.role
    assert store.stats()["guests"] in (0, 1)


def test_writes(store: Any) -> None:
    stamp = store.put(b"k", b"1")
    expect(PreconditionError, store.put_if, b"k", b"2", b"-")
    store.put_if(b"k", b"2", b"1")
    assert store.get(b"k") == b"2"
    store.delete_if(b"k", b"2")
    assert store.get(b"k") is None
    assert store.increment(b"n", 2) == 2
    assert store.get(b"n") == b"2"
    assert store.update(b"n", lambda value: value + b"!") == b"2!"
    assert store.pop(b"n") == b"2!"
    assert store.get(b"n") is None
    store.put(b"e", b"soon", expires=timedelta(hours=1))
    assert timedelta(0) < store.ttl(b"e") <= timedelta(hours=1)
    store.persist(b"e")
    assert store.ttl(b"e") is None
    store.delete(b"e")
    with store.batch() as batch:
        batch.put(b"x", b"1")
        batch.delete_range(b"k", b"l")
    assert store.history(b"x")[0].timestamp == batch.timestamp
    assert store.transact(lambda txn: txn.get(b"x")) == b"1"
    read = store.transaction()
    read.put(b"y", read.get(b"x"))
    store.put(b"x", b"2")
    expect(ConflictError, read.commit)
    store.put_many([(b"l/%d" % n, b"") for n in range(4)])
    store.trim(b"l/", 1)
    assert list(store.keys(prefix=b"l/")) == [b"l/3"]
    store.delete_range(prefix=b"l/")
    assert store.count(prefix=b"l/") == 0
    store.revert_range(b"x", b"y", to=batch.timestamp)
    assert store.get(b"x") == b"1"
    with store.changeset() as changeset:
        store.put(b"c", b"1")
    assert changeset.id is not None
    assert [change.value for change in store.changes(stamp, prefix=b"c")] == [b"1"]


def test_claims_on_history_and_its_end(store: Any, tmp_path: Path) -> None:
    first = store.put(b"k", b"1")
    store.put(b"k", b"2")
    hold = store.hold("mine", at=first)
    snapshot = store.snapshot(as_of=first)
    store.gc(before=store.upper - 1)
    assert store.get(b"k", as_of=first) == b"1"
    hold.release()
    store.gc(before=store.upper - 1)
    assert snapshot.get(b"k") == b"1"
    assert list(snapshot.scan()) == [(b"k", b"1")]
    assert snapshot.get_many([b"k"]) == [b"1"]
    labels = pa.table({"id": ["k"]})
    assert snapshot.join(labels, at=None).read_all()["value"].to_pylist() == [b"1"]
    snapshot.close()
    expect(ClosedError, snapshot.get, b"k")
    store.gc(before=store.upper - 1)
    expect(HistoryGoneError, store.get, b"k", as_of=first)
    store.hold("other")
    assert [each.name for each in store.holds.all() if each.name == "other"]
    store.drop_hold("other")
    store.clear_range(b"k", b"l")
    assert store.checkpoint(tmp_path / "copy") < store.upper
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        assert copy.get(b"k") == store.get(b"k")


def test_feeds_tables_and_streams(store: Any) -> None:
    store.put(b"k", b"1")
    with store.feed("lines", start=0) as feed:
        (batch,) = [each for each in feed.batches() if each.events]
        assert [event.value for event in batch.events] == [b"1"]
        feed.ack(batch)
    store.feeds.drop("lines")
    table = store.table("rows", SCHEMA, key="id")
    table.put({"id": "a", "n": 1})
    assert table.get("a") == {"id": "a", "n": 1}
    assert store.tables() == ["rows"]
    assert len(store.reshard(2).streams) == 2
    assert store.force_quiescence() <= store.upper
    assert store.positions is not None
    assert store.replication is not None
    assert store.requests is not None
    assert store.upkeep.figures()
    store.tasks.insert("queue", b"work")


def test_figures_and_metrics_tell_who_shares_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    owner = kvstore.open(path, shared=True)
    with kvstore.open(path, shared=True) as guest:
        for store, owned in ((owner, 1), (guest, 0)):
            metrics = store.metrics()
            assert metrics["kvstore_owned"].value == owned
            assert metrics["kvstore_guests"].value == 1
            assert metrics["kvstore_takeovers_total"].value == 0
        with kvstore.connect(path) as client:
            assert client.stats()["guests"] == 1
        before = owner.stats()["role_age_s"]
        assert guest.metrics()["kvstore_owner_age_seconds"].value >= before
        owner.close()
        guest.put(b"k", b"v")
        metrics = guest.metrics()
        assert metrics["kvstore_owned"].value == metrics["kvstore_takeovers_total"].value == 1
        assert metrics["kvstore_guests"].value == 0


def test_what_differs_for_a_guest_is_refused(tmp_path: Path) -> None:
    with (
        kvstore.open(tmp_path / "store", shared=True),
        kvstore.open(tmp_path / "store", shared=True) as guest,
    ):
        guest.put(b"k", b"1")
        expect(UsageError, guest.tasks.claim, "queue")
        expect(UsageError, guest.upkeep.compact)
        expect(UsageError, guest.upkeep.start_gc, kvstore.GcPolicy(keep=timedelta(days=1)))


def test_backups_and_imports_take_the_handle(store: Any, tmp_path: Path) -> None:
    store.put(b"k", b"1")
    collection = backup.Collection(tmp_path / "backups")
    assert collection.backup(store).rows == 1
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"i", b"2")
    staged.seal()
    bulk.ingest(store, tmp_path / "staged")
    assert store.get(b"i") == b"2"
    assert [record.import_id for record in store.imports.all()] == [staged.import_id]
    store.revert_import(staged.import_id)
    assert store.get(b"i") is None
    with kvstore.connect(store.path) as client:
        assert client.get(b"k") == b"1"


def test_a_put_behind_the_look_ups_of_an_import_is_a_conflict(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest follows its owner while it looks: the put may show by then."""
    ingest = sys.modules["kvstore.bulk.ingest"]  # the package has a function of this name
    look = ingest.require_no_live_keys

    def look_and_put(*given: Any) -> None:
        look(*given)
        at = store.put(b"i", b"put")
        while store.upper <= at:
            store.wait_beyond(store.upper, timeout=1)

    monkeypatch.setattr(ingest, "require_no_live_keys", look_and_put)
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"i", b"2")
    staged.seal()
    with pytest.raises(KeyConflictError):
        bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert store.get(b"i") == b"put"


def test_an_import_is_called_off_by_a_put_since_the_caller_looked(
    store: Any, tmp_path: Path
) -> None:
    looked = store.now()
    store.put(b"i", b"pushed")
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"i", b"2")
    staged.seal()
    with pytest.raises(KeyConflictError):
        bulk.ingest(store, tmp_path / "staged", none_since=looked)
    assert store.get(b"i") == b"pushed"
    bulk.ingest(store, tmp_path / "staged", none_since=store.now())
    assert store.get(b"i") == b"2"


def test_a_key_that_has_expired_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, shared=True), kvstore.open(path, shared=True) as guest:
        guest.put(b"k", b"1", expires=timedelta(milliseconds=30))
        due = guest.now() + 30 * 10**6
        while guest.now() <= due:
            pass
        assert guest.get(b"k") is None
        assert list(guest.scan()) == []
        assert guest.get_many([b"k"]) == [None]
