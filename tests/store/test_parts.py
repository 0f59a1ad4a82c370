"""Each part of a store does its work without a store around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore import GcPolicy, ImportRecord, Span
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.part import SstFile
from kvstore.codec.keys import VALUE, frame
from kvstore.engine.api import DATA
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    FencedError,
    HistoryGoneError,
    HoldLostError,
    ImportRefusedError,
    UsageError,
)
from kvstore.feeds import Feeds
from kvstore.feeds.history import History
from kvstore.feeds.replica import Replication, SmallExport
from kvstore.mvcc.meta import INDEX_FLOOR, Meta
from kvstore.retention.gc import Collector
from kvstore.store import Layout, LazyTasks, Upkeep
from kvstore.timeline.changesets import Changesets
from kvstore.timeline.import_records import FoundKeys
from kvstore.timeline.parts import Parts
from kvstore.timeline.read_times import Clear
from kvstore.timeline.reserved import Reserve
from tests.commit.conftest import Bench, writes_of
from tests.harness.bounds import bounds


class Alone(NamedTuple):
    """Parts over an engine in memory, and the bench that they are built on."""

    bench: Bench
    parts: Parts
    history: History

    def put(self, **points: bytes) -> Timestamp:
        return self.parts.committer.commit(writes_of(**points))


@pytest.fixture
def alone() -> Iterator[Alone]:
    bench = Bench()
    parts = Parts.of(bench.versions, bench.index, bench.committer())
    yield Alone(bench, parts, History(parts))
    bench.engine.close()


# -- imports --------------------------------------------------------------------------------


def linked(alone: Alone, key: bytes, value: bytes) -> ImportRecord:
    """An import of one row that is in the engine and was not added."""
    record = ImportRecord(7, "digest", 1, 2, (Span(key, key + b"\0"),))
    alone.parts.imports.prepare(record)
    batch = alone.bench.engine.batch()
    batch.put(frame(key) + record.reference + VALUE, value, alone.bench.engine.families[DATA])
    alone.bench.engine.write(batch)
    return record


def test_imports_add_and_revert(alone: Alone) -> None:
    imports, reads = alone.parts.imports, alone.parts.reads
    record = linked(alone, b"k", b"v")
    assert imports.is_linked(record)
    assert alone.bench.versions.get(b"k", reads.at(None)) is None
    stamp = imports.add(7)
    assert alone.bench.versions.get(b"k", stamp) == b"v"
    assert imports.add(7) == stamp
    reverted = imports.revert(7)
    assert alone.bench.versions.get(b"k", reverted) is None
    assert [each.state for each in imports.all()] == ["reverted"]


def test_imports_abort_removes_the_rows(alone: Alone) -> None:
    imports = alone.parts.imports
    record = linked(alone, b"k", b"v")
    assert imports.abort(7)
    assert not imports.stored.has(record, b"k")
    assert imports.get(7) is None


@pytest.mark.parametrize(
    ("limit", "rows", "found"),
    [
        (1 << 20, 4, [b"k", b"l\x00", b"m"]),  # a row of another import is in the files
        (1 << 20, 3, None),  # more rows than the import should have
        (1 << 20, 1, None),
        (1, 4, None),  # longer keys than a list may have
        (1 << 20, 1 << 20, None),  # a large import
    ],
)
def test_the_keys_of_a_small_import_are_found_in_its_files(
    tmp_path: Path, limit: int, rows: int, found: list[bytes] | None
) -> None:
    ours, others = (ImportRecord(number, "", rows, 10, ()) for number in (7, 8))
    files = []
    for name, keys, record in (
        ("1.sst", [b"k"], ours),
        ("2.sst", [b"l\x00", b"m"], ours),
        ("3.sst", [b"n"], others),
    ):
        file = SstFile(tmp_path / name)
        file.add([frame(key) + record.reference + VALUE for key in keys], [b""] * len(keys))
        file.finish()
        files.append(tmp_path / name)
    with bounds(IMPORT_KEYS_BYTES_MAX=limit):
        keys_of_ours = FoundKeys(ours)
        for path in files:
            keys_of_ours.read(path)
    assert keys_of_ours.keys == found


def test_a_key_that_is_not_framed_is_refused(tmp_path: Path) -> None:
    """Its pieces would be taken for keys."""
    ours = ImportRecord(7, "", 3, 10, ())
    file = SstFile(tmp_path / "1.sst")
    file.add([b"k\x00\x01" + b"x\x00\x01" * 9 + ours.reference + VALUE], [b""])
    file.finish()
    with pytest.raises(CorruptionError, match="is not a framed key"):
        FoundKeys(ours).read(tmp_path / "1.sst")


def test_a_file_that_the_engine_does_not_take_refuses_the_import(
    alone: Alone, tmp_path: Path
) -> None:
    (tmp_path / "1.sst").write_bytes(b"no rows" * 100)
    with pytest.raises(ImportRefusedError, match="abort the import"):
        alone.parts.imports.link([tmp_path / "1.sst"])


# -- holds ----------------------------------------------------------------------------------


def test_holds_fence_and_are_dropped(alone: Alone) -> None:
    holds, stamp = alone.parts.holds, alone.put(k=b"v")
    former = holds.take("h", stamp)
    owner = holds.take("h", max_age=timedelta(seconds=1))
    with pytest.raises(FencedError):
        former.release()
    assert owner.timestamp == stamp
    alone.bench.clock.advance(5 * 10**9)
    now = alone.parts.committer.now()
    assert [each.name for each in holds.invalidate_overdue(now, alone.parts.oldest_lacking)] == [
        "h"
    ]
    with pytest.raises(HoldLostError):
        owner.move(stamp)
    assert holds.drop("h").lost
    with pytest.raises(UsageError, match="no hold"):
        holds.drop("h")


# -- reads and history ----------------------------------------------------------------------


def test_reads_of_the_newest_time_are_made_again_where_history_went(alone: Alone) -> None:
    parts, times = alone.parts, []
    alone.put(k=b"1")

    def read(at: int) -> bytes | None:
        times.append(at)
        if len(times) == 1:  # a clear comes between the choice of the time and the read
            stamp = alone.put(k=b"2")
            parts.clears.announce([Clear(Span(), stamp)])
            parts.committer.frontiers.raise_floor(stamp)
        return alone.bench.versions.get(b"k", at)

    assert parts.reads.read(None, Span(), read) == b"2"
    assert len(times) == 2
    with pytest.raises(HistoryGoneError):
        parts.reads.read(times[0], Span(), read)
    assert parts.reads.whole_since == times[1]


def test_reads_know_where_the_change_index_begins(alone: Alone) -> None:
    stamp = alone.put(k=b"v")
    meta, batch = Meta(alone.bench.engine), alone.bench.engine.batch()
    meta.stage_timestamp(batch, INDEX_FLOOR, stamp)
    alone.bench.engine.write(batch)
    parts = Parts.of(alone.bench.versions, alone.bench.index, alone.parts.committer)
    assert parts.reads.indexed_since == stamp
    with pytest.raises(HistoryGoneError):
        parts.reads.require_indexed(stamp - 1)
    parts.reads.raise_index_floor(stamp + 5)
    assert parts.reads.indexed_since == stamp + 5


def test_a_copy_lacks_all_from_its_time_on_where_the_change_index_begins_above_it(
    alone: Alone,
) -> None:
    parts, (first, second, last) = alone.parts, [alone.put(k=b"v") for _ in range(3)]
    assert parts.oldest_lacking(first, last) == second
    assert parts.oldest_lacking(first, second - 1) is None
    parts.reads.raise_index_floor(last)
    assert parts.oldest_lacking(first, last) == first
    assert parts.oldest_lacking(last, last + 9) is None


def test_a_copy_lacks_all_from_its_time_on_where_the_index_is_trimmed_meanwhile(
    alone: Alone,
) -> None:
    first, *_, last = (alone.put(k=b"v") for _ in range(3))

    class Trimmed:
        """The index, which is trimmed just before it is read."""

        def headers(self, *, since: int, upto: int) -> Iterator[object]:
            Collector(alone.parts, None).collect(before=last)
            return alone.bench.index.headers(since=since, upto=upto)

    trimmed: Any = Trimmed()
    assert replace(alone.parts, index=trimmed).oldest_lacking(first, last) == first


def test_history_pins_its_window_while_it_is_read(alone: Alone) -> None:
    first, last = alone.put(a=b"1"), alone.put(b=b"2")
    changes = alone.history.changes(0, span=Span(), order="time")
    assert next(changes).timestamp == first
    assert [claim.timestamp for claim in alone.parts.holds.needing()] == [0]
    assert [change.timestamp for change in changes] == [last]
    assert not alone.parts.holds.needing()


# -- feeds ----------------------------------------------------------------------------------


@pytest.fixture
def feeds(alone: Alone) -> Feeds:
    return Feeds(
        alone.parts, alone.history, Changesets(Meta(alone.bench.engine), alone.parts.committer)
    )


def test_feeds_deliver_resume_and_are_dropped(alone: Alone, feeds: Feeds) -> None:
    alone.put(a=b"1")
    with feeds.open("f", 0) as feed:
        (batch,) = feed
        feed.ack(batch)
    alone.put(b=b"2")
    with feeds.open("f") as feed:
        assert [event.key for batch in feed for event in batch.events] == [b"b"]
    feeds.drop("f")
    with pytest.raises(UsageError, match="no feed"):
        feeds.drop("f")


def test_feeds_follow_without_a_name(alone: Alone, feeds: Feeds) -> None:
    alone.put(a=b"1")
    following = feeds.follow(0)
    assert [event.key for event in next(following).events] == [b"a"]
    alone.put(b=b"2")
    assert [event.key for event in next(following).events] == [b"b"]
    following.close()  # type: ignore[attr-defined]
    assert not alone.parts.holds.needing()


def test_feeds_tell_quiescent_points(alone: Alone, feeds: Feeds) -> None:
    alone.put(a=b"1")
    alone.parts.committer.sync()
    (point,) = feeds.quiescent_points()
    assert [change.key for change in point.changes()] == [b"a"]


# -- replication ----------------------------------------------------------------------------


def test_replication_gives_what_copies_read(alone: Alone) -> None:
    replication, stamp = Replication(alone.parts, alone.history), alone.put(a=b"1")
    batch = writes_of(b=b"2")
    batch.delete_range(b"x", b"y")
    upto = alone.parts.committer.commit(batch)
    assert [each.key for each in replication.versions(since=stamp, upto=upto)] == [b"b", b"x"]
    assert [each.key for each in replication.versions(since=None, upto=upto)] == [b"a", b"b", b"x"]
    (deleted,) = replication.range_deletes(0, upto, Span())
    assert (deleted.key, deleted.end_key) == (b"x", b"y")
    assert replication.has_commit(stamp)
    assert replication.has_commit(upto + 1) is False
    small = replication.export(since=stamp, upto=upto)
    assert isinstance(small, SmallExport)
    (few,) = small.changes
    assert few.column("key").to_pylist() == [b"x", b"b"]
    assert not replication.is_replica
    with pytest.raises(UsageError, match="the bench is no replica"):
        replication.promote()


# -- layout, upkeep, tasks ------------------------------------------------------------------


def test_layout_cuts_all_keys_into_pieces(alone: Alone) -> None:
    alone.put(**{f"k{number:03d}": b"v" * 100 for number in range(500)})
    layout = Layout(alone.bench.engine, Reserve(alone.bench.engine))
    pieces = layout.splits(4)
    assert 1 < len(pieces) <= 4
    assert pieces[0].start == b""
    assert pieces[-1].end is None
    assert all(a.end == b.start for a, b in pairwise(pieces))
    assert min(file.first for file in layout.files()) == b"k000"


def test_upkeep_collects_in_the_background(alone: Alone) -> None:
    parts, first = alone.parts, alone.put(k=b"1")
    alone.put(k=b"2")
    collector = Collector(parts, None)
    upkeep = Upkeep(alone.bench.engine, parts.committer, collector, alone.bench.clock)
    alone.bench.clock.advance(10**9)
    policy = GcPolicy(keep=timedelta(0))
    done = threading.Event()
    upkeep.start_gc(policy, after_run=lambda report: done.set()).wake()
    assert done.wait(120)
    upkeep.stop_gc()
    assert parts.committer.since > first
    assert (upkeep.figures()["gc_runs"], upkeep.figures()["gc_failures"]) == (1, 0)
    collector.stop()
    with pytest.raises(ClosedError):
        upkeep.start_gc(policy)


def test_the_queue_of_tasks_is_opened_once_and_not_after_its_end(
    alone: Alone, tmp_path: Path
) -> None:
    queue = LazyTasks(tmp_path, alone.parts.committer, alone.bench.clock)
    assert not list(tmp_path.iterdir())
    tasks = queue.open()
    tasks.insert("q", b"work")
    assert queue.open() is tasks
    queue.close()
    with pytest.raises(ClosedError):
        queue.open()
    again = LazyTasks(tmp_path, alone.parts.committer, alone.bench.clock)
    assert [task.value for task in again.open().list("q")] == [b"work"]
    again.close()
