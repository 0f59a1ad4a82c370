"""The handle: its whole life on every storage, opening, collection, scrub, the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import ObjectStore

from kvstore.backup.shard import blob_gc
from kvstore.backup.shard.rows.batch_writer import BatchDesc, part_names, write_batch
from kvstore.backup.shard.state.state import EMPTY
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.backup.testing.blobs import BlobContract
from kvstore.backup.testing.consensus import ConsensusContract
from kvstore.errors import (
    CorruptionError,
    HistoryGoneError,
    UpperMismatchError,
    UsageError,
)
from kvstore.limits import ROLLUP_EVERY
from kvstore.storage.contract import Blob, Consensus, Versioned
from kvstore.storage.local_files import FileBlob, FileConsensus
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus
from kvstore.storage.object_store import ObjectBlob, ObjectConsensus
from tests.harness.bounds import bounds
from tests.harness.storage_faults import FaultyBlob, FaultyConsensus, Weather
from tests.shard.rows import delete, put, versions
from tests.shard.world import World, open_shard, read, write


def memory(_: Path, __: Callable[[], ObjectStore]) -> tuple[Blob, Consensus]:
    return MemoryBlob(), MemoryConsensus()


def files(path: Path, _: Callable[[], ObjectStore]) -> tuple[Blob, Consensus]:
    return FileBlob(path / "blob"), FileConsensus(path / "consensus")


def s3(_: Path, bucket: Callable[[], ObjectStore]) -> tuple[Blob, Consensus]:
    return ObjectBlob(bucket(), "b"), ObjectConsensus(bucket(), "c")


@pytest.mark.parametrize("storage", [memory, files, s3])
def test_a_shard_lives_through_its_whole_life(
    storage: Callable[..., tuple[Blob, Consensus]],
    tmp_path: Path,
    s3_bucket: Callable[[], ObjectStore],
) -> None:
    blob, consensus = storage(tmp_path, s3_bucket)
    shard, other = open_shard(blob, consensus), open_shard(blob, consensus)
    write(shard, *range(10, 90, 10))
    assert read(other, 35) == {b"k": b"v30"}
    with other.reader() as reader:
        reader.downgrade_since(55)
    with pytest.raises(HistoryGoneError):
        read(other, 54)
    outcomes = list(shard.compact(full=True))
    assert {outcome.applied for outcome in outcomes} == {True}
    assert len(shard.gc().blobs) >= 8
    assert read(other, 55) == {b"k": b"v50"}
    assert read(open_shard(blob, consensus, create=False), 79) == {b"k": b"v80"}
    report = other.scrub(checksums=True)
    assert report.is_sound
    assert report.orphans == ()


def test_opening_a_missing_shard_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        world.open(create=False)


def test_a_shard_whose_rows_are_no_versions_is_refused(world: World) -> None:
    other = replace(world.open().state, rule="diffs")
    with pytest.raises(CorruptionError, match="its rule is 'diffs'"):
        world.open(known=other)


def test_many_versions_open_from_the_newest_rollup(world: World) -> None:
    shard = world.open()
    for upper in range(1, 3 * ROLLUP_EVERY):
        shard.writer("w").progress(upper)
    assert len(shard.state.rollups) >= 3
    opened = world.open().state
    assert opened == shard.state


def test_a_handle_left_behind_by_a_truncation_catches_up(world: World) -> None:
    stale, busy = world.open(), world.open()
    for upper in range(1, 2 * ROLLUP_EVERY):
        busy.writer("w").progress(upper)
    assert busy.gc().versions > ROLLUP_EVERY
    assert stale.refresh() == busy.state
    write(stale, 1000)


def test_collection_below_the_first_rollup_or_past_is_a_no_op(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    assert blob_gc.collect(shard.log, to=0) == blob_gc.Collected()
    shard.gc()
    assert blob_gc.collect(shard.log, to=1) == blob_gc.Collected()  # another append came first
    before = shard.refresh()
    assert shard.gc() == blob_gc.Collected()
    assert shard.refresh() == before  # a repeated append makes not even a version
    assert read(shard, 4) == {b"k": b"v5"}


def test_versions_that_go_between_two_pages_of_a_scan_are_no_damage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection truncates while another handle reads more versions than a page has."""
    shard = world.open()
    write(shard, *range(5, 45, 5))
    shard.log.write_rollup()
    rollup, state = shard.state.rollup[0], shard.state
    scan = world.consensus.scan
    pages: list[int] = []

    def scan_and_truncate(key: str, *, start: int, limit: int) -> list[Versioned]:
        page = scan(key, start=start, limit=limit)
        pages.append(len(page))
        if len(pages) == 1:
            world.consensus.truncate(key, rollup)
        return page

    other = world.open()
    monkeypatch.setattr(world.consensus, "scan", scan_and_truncate)
    with bounds(STATE_SCAN_VERSIONS=2):
        assert other.log.live_states()[-1] == state
    assert len(pages) > 1


def test_at_the_rollup_nothing_is_truncated_but_older_rollups_leave(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    shard.log.write_rollup()
    rollup = shard.state.rollup[0]
    world.consensus.truncate("s", rollup)  # as after a crash between two steps of a collection
    done = blob_gc.collect(shard.log, to=rollup)
    assert (done.versions, done.rollups) == (0, 1)
    assert list(shard.state.rollups) == [rollup]
    assert world.open().state == shard.state


@pytest.mark.parametrize("step", range(12))
def test_a_collection_cut_off_at_any_call_is_finished_by_the_next(world: World, step: int) -> None:
    write(world.open(), 5, 9, 12)
    world.open().compact(full=True)

    class PowerCutError(Exception):
        pass

    calls = [0]

    def cut() -> None:
        calls[0] += 1
        if calls[0] > step + 3:
            raise PowerCutError

    weather = Weather(0, on_call=cut)
    weather.is_calm = True
    shard = None
    try:
        shard = open_shard(
            FaultyBlob(world.blob, weather), FaultyConsensus(world.consensus, weather)
        )
        shard.gc()
    except PowerCutError:
        pass
    whole = world.open()
    whole.gc()
    whole.gc()
    assert read(whole, 11) == {b"k": b"v12"}
    report = whole.scrub(checksums=True)
    assert report.is_sound
    assert not [name for name in report.orphans if "/part/" in name]


def test_compaction_and_collection_take_deleted_data_out_of_storage(world: World) -> None:
    shard = world.open()
    write(shard, 5, key=b"secret")
    rows = versions([delete(b"secret", 7)])
    shard.writer().compare_and_append(shard.write_batch(BatchDesc(5, 9), rows))
    shard.critical("hold").downgrade(8)
    shard.compact(full=True)
    shard.gc()
    assert list(world.blob.list("s/part/")) == []
    assert read(shard, 8) == {}


def test_scrub_lists_orphans_and_deletes_only_old_ones_when_asked(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    names = part_names("s", world.clock)
    rows = versions([put(b"x", 1)])
    lost = write_batch(world.blob, BatchDesc(0, 5), rows, names=names)
    report = shard.scrub()
    assert report.is_sound
    assert report.orphans == (lost.parts[0].name,)
    too_young = shard.scrub(delete_orphans_before_ns=world.clock.wall_ns())
    assert too_young.deleted == ()
    world.clock.advance(1)
    old = shard.scrub(delete_orphans_before_ns=world.clock.wall_ns())
    assert old.deleted == (lost.parts[0].name,)
    assert shard.scrub().orphans == ()


def test_scrub_with_checksums_finds_altered_parts(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    name = shard.state.batches[0].parts[0].name
    data = world.blob.get(name)
    world.blob.delete(name)
    world.blob.put(name, (data or b"")[:-1] + b"!")
    assert shard.scrub().is_sound
    assert shard.scrub(checksums=True).altered == (name,)


def test_an_unfinished_shard_cannot_be_finalised(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    with pytest.raises(UsageError, match="not finished"):
        shard.finalise()


def test_a_finalised_shard_is_empty_and_says_so_for_ever(world: World) -> None:
    shard = world.open()
    write(shard, 5, 9)
    shard.writer().progress(EMPTY)
    with shard.reader() as reader:
        reader.downgrade_since(EMPTY)
        assert reader.since == EMPTY
    shard.finalise()
    assert list(world.blob.list("s/part/")) == []
    seqno = shard.refresh().seqno
    with pytest.raises(UpperMismatchError):
        shard.writer().compare_and_append(ShardBatch(0, 5))
    with pytest.raises(HistoryGoneError):
        shard.snapshot(3)
    shard.finalise()
    assert shard.refresh().seqno == seqno
    assert len(list(world.blob.list("s/"))) <= 2


def calm() -> Weather:
    weather = Weather(0)
    weather.calm()
    return weather


class TestFaultyBlobWhenCalm(BlobContract):
    @pytest.fixture
    def blob(self) -> Blob:
        return FaultyBlob(MemoryBlob(), calm())


class TestFaultyConsensusWhenCalm(ConsensusContract):
    @pytest.fixture
    def consensus(self) -> Consensus:
        return FaultyConsensus(MemoryConsensus(), calm())
