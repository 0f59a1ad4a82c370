"""A metric moves when the store does the work that the metric counts, and no other metric moves."""

from __future__ import annotations

import logging
import random
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rocksdict as rocks

import kvstore
from kvstore import ManualClock, Store, bulk
from kvstore.base.background import Failures
from kvstore.engine.api import DATA
from kvstore.errors import ConflictError, StorageError, UsageError
from kvstore.metrics import DEFINITIONS, Distribution
from kvstore.metrics.slow import warn_of_slow
from kvstore.upkeep import submit_gc
from tests.harness.bounds import bounds
from tests.harness.parts import data_family, parts_of

START = 1_700_000_000_000_000_000
SECOND = 10**9
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "db", clock=clock) as opened:
        opened.put(b"k", b"v")
        yield opened


def value(store: Store, name: str, *labels: str) -> Any:
    return store.metrics()[f"kvstore_{name}"].values[labels]


def staged(store: Store, name: str = "staged") -> Path:
    assert store.path is not None
    made = bulk.Import.create(store.path.parent / name)
    with made.writer() as writer:
        writer.put(b"imported", b"row")
    made.seal()
    return made.staging


def conflict(store: Store) -> None:
    transaction = store.transaction()
    transaction.get(b"k")
    store.put(b"k", b"other")
    transaction.put(b"k", b"mine")
    with pytest.raises(ConflictError):
        transaction.commit()


def revert(store: Store) -> None:
    bulk.ingest(store, staged(store))
    store.revert_import(store.imports.all()[-1].import_id)


def fail_in_the_background(store: Store) -> None:
    failed = threading.Event()

    def fail(_: object) -> None:
        failed.set()
        raise StorageError("no", "no")

    store.upkeep.start_gc(
        kvstore.GcPolicy(keep=timedelta(hours=1), every=timedelta(milliseconds=1)), after_run=fail
    )
    assert failed.wait(60)
    store.upkeep.stop_gc()


COUNTERS: Mapping[str, tuple[Callable[[Store], object], int]] = {
    "commits_total": (lambda store: [store.put(b"k", b"1"), store.delete(b"k")], 2),
    "changes_total": (lambda store: store.put_many([(b"a", b"1"), (b"b", b"2")]), 2),
    "conflicts_total": (conflict, 1),
    "imports_added_total": (lambda store: bulk.ingest(store, staged(store)), 1),
    "imports_reverted_total": (revert, 1),
    "clears_total": (lambda store: store.clear_range(b"a", b"b"), 1),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_counts_what_its_name_says(store: Store, name: str) -> None:
    act, count = COUNTERS[name]
    before = value(store, name)
    act(store)
    assert value(store, name) == before + count


def test_reads_move_the_counters_of_the_value_cache_alone(store: Store) -> None:
    def counted() -> dict[str, object]:
        found = [each for each in store.metrics().values() if "value_cache" not in each.name]
        return {each.name: dict(each.values) for each in found if each.definition.kind != "gauge"}

    before = counted()
    store.get(b"k")
    list(store.scan())
    store.get_many([b"k", b"none"])
    assert counted() == before


def test_the_value_cache_counts_the_reads_that_it_answers(tmp_path: Path) -> None:
    options = kvstore.Options(value_cache_bytes=1 << 20)
    with kvstore.open(tmp_path / "cached", options=options) as store:
        store.put(b"k", b"v")
        for _ in range(5):
            assert store.get(b"k") == b"v"
        assert value(store, "value_cache_hits_total") == 4
        assert value(store, "value_cache_misses_total") == 1
        assert value(store, "value_cache_bytes") > 0
        store.delete(b"k")
        assert value(store, "value_cache_bytes") == 0


def test_collections_count_the_entries_that_they_removed(store: Store, clock: ManualClock) -> None:
    store.put(b"k", b"newer")
    clock.advance(SECOND)
    store.gc(before=store.now())
    assert value(store, "collected_entries_total") > 0
    assert value(store, "collection_seconds").count == 1
    assert value(store, "history_seconds") < 1


def test_failures_in_the_background_are_counted(store: Store) -> None:
    fail_in_the_background(store)
    assert value(store, "background_failures_total", "gc") >= 1
    assert value(store, "background_failures_total", "tasks") == 0


def test_failures_of_work_that_another_package_does_are_counted(
    store: Store, clock: ManualClock
) -> None:
    failures = [Failures("kvstore.pull", clock) for _ in range(2)]
    for each in failures:
        store.upkeep.watch("pull", each)
        assert value(store, "background_failures_total", "pull") == 0
    for each in failures:
        each.note("pulling", StorageError("no", "no"))
    assert value(store, "background_failures_total", "pull") == 2
    known = weakref.ref(failures[0])
    del failures, each
    assert known() is None
    assert value(store, "background_failures_total", "pull") == 2


def test_tasks_are_told_by_queue_once_the_queues_are_open(store: Store) -> None:
    def told() -> Mapping[tuple[str, ...], Any]:
        return store.metrics()["kvstore_tasks"].values

    assert told() == {}
    submit_gc(store, keep=timedelta(days=1))
    assert told() == {("gc", "available"): 1, ("gc", "later"): 0}
    claimed = store.tasks.claim(["gc"])
    assert claimed is not None
    assert told() == {("gc", "available"): 0, ("gc", "later"): 1}


def test_fsyncs_are_counted_by_their_durations(store: Store) -> None:
    before: Distribution = value(store, "fsync_seconds")
    store.put(b"k", b"v", durability="sync")
    after: Distribution = value(store, "fsync_seconds")
    assert after.count == before.count + 1
    assert after.total > before.total
    assert [bound for bound, _ in after.buckets][-1] == float("inf")
    assert [count for _, count in after.buckets] == sorted(count for _, count in after.buckets)


def test_times_are_seconds(store: Store, clock: ManualClock) -> None:
    store.put(b"k", b"v", durability="async")
    assert value(store, "not_durable_seconds") >= 0
    clock.advance(10 * SECOND)
    assert value(store, "staleness_seconds") == pytest.approx(10, abs=0.01)
    store.put(b"k", b"v", durability="async")
    assert value(store, "not_durable_seconds") == pytest.approx(10, abs=0.01)
    assert value(store, "upper_timestamp_seconds") == pytest.approx(int(store.upper) / SECOND)
    assert value(store, "since_timestamp_seconds") == pytest.approx(int(store.since) / SECOND)
    store.sync()
    assert value(store, "not_durable_seconds") == 0
    assert value(store, "durable_timestamp_seconds") == pytest.approx(int(store.upper) / SECOND)


def test_claims_tell_who_keeps_history_and_how_far_a_feed_is_behind(
    store: Store, clock: ManualClock
) -> None:
    store.hold("report", max_age=timedelta(seconds=30))
    feed = store.feed("audit", start="now")
    clock.advance(20 * SECOND)
    store.put(b"k", b"later")
    assert value(store, "claim_age_seconds", "user", "report") == pytest.approx(20, abs=0.01)
    assert value(store, "oldest_claim_seconds", "user") == pytest.approx(20, abs=0.01)
    assert value(store, "claims", "user") == 1
    assert value(store, "feed_lag_seconds", "audit") == pytest.approx(20, abs=0.01)
    for batch in feed:
        feed.ack(batch.position)
    assert value(store, "feed_lag_seconds", "audit") < 1
    with store.snapshot():
        assert value(store, "claims", "snapshot") == 1
    clock.advance(20 * SECOND)
    store.gc(keep=timedelta(0))
    assert value(store, "lost_holds") == 1


def test_ages_count_from_the_first_commit_of_a_store(store: Store, clock: ManualClock) -> None:
    """A feed of all changes begins at 0, which is in 1970."""
    store.feed("audit", start=0)
    clock.advance(20 * SECOND)
    store.put(b"k", b"later")
    assert value(store, "history_seconds") == pytest.approx(20, abs=0.01)
    assert value(store, "feed_lag_seconds", "audit") == pytest.approx(20, abs=0.01)
    assert value(store, "oldest_claim_seconds", "feed") == pytest.approx(20, abs=0.01)
    assert value(store, "claim_age_seconds", "feed", "feed/audit") == pytest.approx(20, abs=0.01)
    with kvstore.open(None, engine="memory") as empty:
        assert value(empty, "history_seconds") < 60


def test_a_feed_is_behind_by_the_changes_of_a_bounded_number_of_commits(store: Store) -> None:
    slow, fast = store.feed("slow", start="now"), store.feed("fast", start="now")
    store.put_many([(b"a", b"1"), (b"b", b"2")])
    for batch in fast:
        fast.ack(batch.position)
    store.put(b"k", b"later")
    assert value(store, "feed_lag_changes", "slow") == 3
    assert value(store, "feed_lag_changes", "fast") == 1
    with bounds(LAG_COMMITS_MAX=1):
        assert value(store, "feed_lag_changes", "fast") == 1
        assert value(store, "feed_lag_changes", "slow") == 1
    for batch in slow:
        slow.ack(batch.position)
    assert value(store, "feed_lag_changes", "slow") == 0


def test_history_that_no_claim_keeps_is_free_to_be_collected(
    store: Store, clock: ManualClock
) -> None:
    clock.advance(5 * SECOND)
    store.hold("halfway", at="now")
    clock.advance(5 * SECOND)
    store.put(b"k", b"later")
    kept = value(store, "history_bytes", "kept")
    assert kept == pytest.approx(value(store, "history_bytes", "free"), rel=0.01)
    store.drop_hold("halfway")
    assert value(store, "history_bytes", "kept") == 0
    whole = value(store, "history_bytes", "free")
    assert whole > 0
    with store.snapshot(as_of=store.since):
        assert value(store, "history_bytes", "free") == 0
        assert value(store, "history_bytes", "kept") == whole


def test_slow_operations_are_logged_with_the_calls_in_between(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_slow(store, timedelta(hours=1))
    store.put(b"k", b"quick")
    assert not caplog.records
    with pytest.raises(UsageError, match="watched already"):
        warn_of_slow(store, timedelta(0))


def test_a_slow_operation_names_itself_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with kvstore.open(None, engine="memory") as store, bounds(WARNING_EVERY_S=0):
        warn_of_slow(store, timedelta(0))
        store.put(b"secret", b"value")
        with pytest.raises(UsageError):
            store.get("no bytes")  # type: ignore[call-overload]
    facts = [vars(record)["facts"] for record in caplog.records]
    assert [each["operation"] for each in facts] == ["put", "get"]
    assert "secret" not in caplog.text


def test_an_opening_tells_what_a_killed_process_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write = "import kvstore, os, sys; s = kvstore.open(sys.argv[1]); s.put(b'k', b'v'); os._exit(9)"
    subprocess.run([sys.executable, "-c", write, str(tmp_path / "killed")], check=False)
    caplog.set_level(logging.INFO, logger="kvstore.store")
    for _ in range(2):
        kvstore.open(tmp_path / "killed").close()
    (told,) = (each for each in caplog.records if vars(each).get("event") == "recovered")
    facts = vars(told)["facts"]
    assert (facts["processes"], facts["changes"]) == (1, 1)
    assert facts["seconds"] > 0


def test_imports_are_told_by_their_state(store: Store) -> None:
    bulk.ingest(store, staged(store))
    assert value(store, "imports", "added") == 1
    assert value(store, "imports", "adding") == 0
    assert value(store, "cleared_spans") == 0
    store.delete_range(b"x", b"z")
    assert value(store, "range_fragments") == 2
    store.clear_range(b"a", b"b")
    assert value(store, "cleared_spans") == 1


def test_files_are_told_by_family(store: Store, tmp_path: Path) -> None:
    assert value(store, "memtable_bytes", "data") > 0
    assert value(store, "entries", "data") >= 1
    store.checkpoint(tmp_path / "copy")  # flushes
    assert value(store, "files", "data") >= 1
    assert value(store, "disk_bytes", "data") > 0
    before = value(store, "cache_bytes")
    assert list(store.scan())
    assert value(store, "cache_bytes") > before


def test_writes_are_stopped_until_a_compaction_takes_the_files(store: Store) -> None:
    """One file stops the writes here, and no compaction begins by itself."""
    engine: Any = parts_of(store).engine
    data = data_family(store)
    refused = rocks.WriteOptions()
    refused.no_slowdown = True
    assert value(store, "writes_stopped") == value(store, "write_stops_total") == 0
    data.set_options(
        {
            "level0_file_num_compaction_trigger": "1000",
            "level0_slowdown_writes_trigger": "1",
            "level0_stop_writes_trigger": "1",
        }
    )
    assert value(store, "writes_stopped") == value(store, "write_stops_total") == 0
    try:
        data.flush()
        assert value(store, "write_stops_total") >= 1
        for _ in range(100):
            assert value(store, "writes_stopped") == 1
        with pytest.raises(Exception, match="Write stall"):
            data.put(b"refused", b"", refused)
    finally:
        engine.compact(DATA)
    assert value(store, "writes_stopped") == 0
    assert value(store, "write_stops_total") >= 1  # the counter keeps the stop that has ended
    store.put(b"k", b"later")


def test_work_of_rocksdb_is_told_while_it_is_done(tmp_path: Path) -> None:
    draw = random.Random(1)
    options = kvstore.Options(write_buffer_bytes=64 << 10, background_jobs=1)
    coming = {"flushes_running", "compactions_running", "pending_compaction_bytes"}
    with kvstore.open(tmp_path / "busy", durability="async", options=options) as store:
        for _ in range(20_000):  # far more than enough: the first compaction begins after 60
            store.put_many((draw.randbytes(8), draw.randbytes(500)) for _ in range(200))
            coming -= {name for name in coming if value(store, name) > 0}
            if not coming:
                break
    assert not coming


def test_health_falls_after_a_failed_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(store)
    assert value(store, "healthy") == 1
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise StorageError("the disk failed", "replace it")

        patch.setattr(parts.versions.engine, "write", fail)
        with pytest.raises(StorageError):
            store.put(b"k", b"v")
    assert value(store, "healthy") == 0


def test_a_store_in_memory_and_a_live_reader_have_all_metrics(store: Store, tmp_path: Path) -> None:
    names = {f"kvstore_{name}" for name in DEFINITIONS}
    assert set(store.metrics()) == names
    with kvstore.open(None, engine="memory") as other:
        assert set(other.metrics()) == names
    with kvstore.follow(tmp_path / "db") as reader:
        assert set(reader.metrics()) == names
        assert reader.metrics()["kvstore_background_failures_total"].values["follow",] == 0


def test_the_reference_has_each_metric() -> None:
    rows = re.findall(
        r"^\| `(kvstore_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$",
        REFERENCE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    told = [tuple(field.strip() for field in row) for row in rows]
    assert told == [
        (
            each.name,
            each.kind,
            each.unit,
            ", ".join(f"`{label}`" for label in each.labels),
            each.help,
        )
        for each in DEFINITIONS.values()
    ]
