"""The log of a store: an event that an operator wants to see is logged once, with its facts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.base.notices import Burst
from kvstore.errors import ConflictError, StorageError
from tests.harness.parts import parts_of


@pytest.fixture
def store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[kvstore.Store]:
    with caplog.at_level(logging.INFO, "kvstore"), kvstore.open(tmp_path / "s") as opened:
        yield opened


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The facts of each record of an event. Each names its store, and its message has the facts."""
    found = [each for each in caplog.records if getattr(each, "event", "") == event]
    for record in found:
        assert record.name.startswith("kvstore.")
        assert "store" in record.facts
        assert all(f"{name} {fact}" in record.message for name, fact in record.facts.items())
    return [record.facts for record in found]


def test_opening_and_closing_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvstore"):
        with kvstore.open(tmp_path / "s") as store:
            (opened,) = told(caplog, "opened")
            assert opened["store"] == str(tmp_path / "s")
            assert opened["upper"] == str(store.upper)
            assert told(caplog, "closed") == []
        assert len(told(caplog, "closed")) == 1
        store.close()
        assert len(told(caplog, "closed")) == 1


def test_collections_clears_and_imports_are_logged(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store.put(b"k", b"secret")
    store.put(b"k", b"hidden")
    store.gc(keep=timedelta(0))
    (collected,) = told(caplog, "collected")
    assert (collected["versions"], collected["lost_holds"]) == (1, [])
    store.clear_range(b"x", b"y")
    (cleared,) = told(caplog, "span cleared")
    assert (cleared["start"], cleared["end"]) == ("b'x'", "b'y'")
    made = bulk.Import.create(tmp_path / "staged")
    with made.writer() as writer:
        writer.put(b"i", b"secret")
    made.seal()
    for _ in range(2):  # the second is done already
        bulk.ingest(store, made.staging)
    for _ in range(2):
        store.revert_import(made.import_id)
    (added,), (reverted,) = told(caplog, "import added"), told(caplog, "import reverted")
    assert added["import_id"] == reverted["import_id"] == f"{made.import_id:016x}"
    assert (added["rows"], added["timestamp"] < reverted["timestamp"]) == (1, True)
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text


def test_conflicts_are_warned_of_once_when_they_are_many(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters = parts_of(store).committer.meters
    meters.conflict_burst = Burst("kvstore.store", "many conflicts", 3)
    for _ in range(5):
        transaction = store.transaction()
        transaction.get(b"k")
        store.put(b"k", b"v")
        transaction.put(b"k", b"w")
        with pytest.raises(ConflictError):
            transaction.commit()
    (warned,) = told(caplog, "many conflicts")
    assert warned["count"] == 3
    monkeypatch.setattr(
        "kvstore.base.notices.WARNING_EVERY_S", -1.0
    )  # each event begins a new window
    for _ in range(3):
        meters.conflict_burst.count(store="s")
    assert len(told(caplog, "many conflicts")) == 1


def test_a_slow_fsync_is_warned_of(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"k", b"v", durability="sync")
    assert [each for each in caplog.records if each.levelno == logging.WARNING] == []
    monkeypatch.setattr("kvstore.timeline.durability.FSYNC_WARNED_S", 0.0)
    store.put(b"k", b"v", durability="sync")
    store.put(b"k", b"v", durability="sync")
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.event for each in warnings] == ["fsync longer than 1 s"]  # type: ignore[attr-defined]


def test_a_collection_that_fails_is_logged_counted_and_tried_again(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = parts_of(store).versions.engine
    whole, done = engine.cursor, threading.Event()
    failures = iter([StorageError("the disk was busy", "try again")])

    def cursor(*words: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return whole(*words, **options)

    for number in range(3):
        store.put(b"k", b"%d" % number)
    monkeypatch.setattr(engine, "cursor", cursor)
    every = timedelta(milliseconds=1)
    store.upkeep.start_gc(
        kvstore.GcPolicy(keep=timedelta(0), every=every), after_run=lambda report: done.set()
    )
    assert done.wait(120)
    store.upkeep.stop_gc()
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.name for each in errors] == ["kvstore.retention.gc"]
    assert "the disk was busy" in errors[0].getMessage()
    assert errors[0].exc_info is not None
    stats = store.stats()
    assert (stats["gc_failures"], stats["gc_runs"] >= 1) == (1, True)
    assert "the disk was busy" in stats["gc_last_error"]
    assert store.metrics()["kvstore_background_failures_total"].values["gc",] == 1


def test_backups_are_logged(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store.put(b"k", b"secret")
    collection = backup.Collection(tmp_path / "backups")
    collection.backup(store)
    collection.compact()
    since = collection.expire(keep=timedelta(days=1))
    records = [each for each in caplog.records if each.name == "kvstore.backup"]
    events = {each.event: each.facts for each in records}  # type: ignore[attr-defined]
    assert set(events) == {"backed up", "compacted", "expired"}
    assert events["backed up"]["rows"] == 1
    assert events["expired"]["since"] == since
    assert str(tmp_path / "backups") in caplog.text
    assert "secret" not in caplog.text
