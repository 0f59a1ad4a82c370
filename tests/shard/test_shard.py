"""The handle: retries by class of error, readers and leases, fencing, collection, the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import ObjectStore

from backup.shard import commands as c
from backup.shard import gc
from backup.shard.batch import BatchDesc, part_names, write_batch
from backup.shard.blob import Blob, FileBlob, MemoryBlob
from backup.shard.consensus import Cas, Consensus, MemoryConsensus, Versioned
from backup.shard.faults import FaultyBlob, FaultyConsensus, Weather
from backup.shard.file_consensus import FileConsensus
from backup.shard.frontier import EMPTY
from backup.shard.object_store import ObjectBlob, ObjectConsensus
from backup.shard.read import Split
from backup.shard.rules import DIFFS, VERSIONS, Window
from backup.shard.shard import Shard
from backup.shard.state import Batch
from kvstore.clock import ManualClock
from kvstore.errors import (
    CorruptionError,
    DeterminateError,
    HistoryGoneError,
    IndeterminateError,
    LeaseExpiredError,
    NotYetWrittenError,
    OpaqueMismatchError,
    UpperMismatchError,
    UsageError,
)
from kvstore.limits import ATTEMPTS_MAX, INLINE_BYTES_MAX, ROLLUP_EVERY
from tests.shard.contracts import BlobContract, ConsensusContract
from tests.shard.rows import delete, put, rows_of, state_of, versions


class ScriptedConsensus:
    """Real consensus, but each compare-and-set suffers what the script says next."""

    def __init__(self, inner: Consensus) -> None:
        self.inner = inner
        self.script: list[str] = []
        self.between: Callable[[], None] = lambda: None

    def head(self, key: str) -> Versioned | None:
        return self.inner.head(key)

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        fault = self.script.pop(0) if self.script else "fine"
        if fault == "refused":
            raise DeterminateError("compare-and-set", "refused")
        if fault == "unsent":
            self.between()
            raise IndeterminateError("compare-and-set", "timed out")
        cas = self.inner.compare_and_set(key, expected=expected, new=new)
        if fault == "lost":
            self.between()
            raise IndeterminateError("compare-and-set", "its reply was lost")
        return cas

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        return self.inner.scan(key, start=start, limit=limit)

    def truncate(self, key: str, seqno: int) -> int | None:
        return self.inner.truncate(key, seqno)

    def list_keys(self) -> list[str]:
        return self.inner.list_keys()


class World:
    """One memory shard, its clock and its script."""

    def __init__(self) -> None:
        self.blob = MemoryBlob()
        self.consensus = ScriptedConsensus(MemoryConsensus())
        self.clock = ManualClock()

    def open(self, **options: object) -> Shard:
        return open_shard(self.blob, self.consensus, clock=self.clock, **options)


def open_shard(blob: Blob, consensus: Consensus, **options: object) -> Shard:
    return Shard.open(blob, consensus, "s", pause=lambda attempt: None, **options)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def batch_of(shard: Shard, upper: int, key: bytes = b"k", value: bytes = b"v") -> Batch:
    rows = versions([put(key, upper - 1, value)])
    return shard.write_batch(BatchDesc(shard.refresh().upper, upper), rows)


def write(shard: Shard, *uppers: int, key: bytes = b"k") -> None:
    for upper in uppers:
        value = f"v{upper}".encode()
        shard.writer().compare_and_append(batch_of(shard, upper, key, value))


def read(shard: Shard, as_of: int) -> dict[bytes, bytes | None]:
    with shard.snapshot(as_of) as snapshot:
        return state_of(snapshot.read())


# -- on every storage ------------------------------------------------------------------------


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
    assert all(outcome.applied for outcome in shard.compact(full=True))
    assert len(shard.gc().blobs) >= 8
    assert read(other, 55) == {b"k": b"v50"}
    assert read(open_shard(blob, consensus, create=False), 79) == {b"k": b"v80"}
    report = other.scrub(checksums=True)
    assert report.is_sound
    assert report.orphans == ()


# -- retry rules -----------------------------------------------------------------------------


def test_a_determinate_failure_is_tried_again(world: World) -> None:
    shard = world.open()
    world.consensus.script = ["refused", "refused"]
    assert shard.writer().compare_and_append(batch_of(shard, 5)).upper == 5
    assert [b.upper for b in shard.state.batches] == [5]


@pytest.mark.parametrize("fault", ["lost", "unsent"])
def test_after_an_unknown_outcome_an_append_is_done_once(world: World, fault: str) -> None:
    shard = world.open()
    world.consensus.script = [fault]
    assert shard.writer().compare_and_append(batch_of(shard, 5)).upper == 5
    assert len(world.open().state.batches) == 1


def test_a_retry_that_finds_its_append_reports_the_current_upper(world: World) -> None:
    shard, other = world.open(), world.open()
    world.consensus.script = ["lost"]
    world.consensus.between = lambda: write(other, 9)
    assert shard.writer().compare_and_append(batch_of(shard, 5)).upper == 9


def test_after_an_unknown_outcome_another_writers_batch_is_a_sure_mismatch(world: World) -> None:
    shard, other = world.open(), world.open()
    batch = batch_of(shard, 5)
    world.consensus.script = ["unsent"]
    world.consensus.between = lambda: write(other, 9)
    with pytest.raises(UpperMismatchError) as error:
        shard.writer().compare_and_append(batch)
    assert (error.value.expected, error.value.upper, error.value.writer_upper) == (0, 9, None)


def test_where_a_newer_append_hides_the_token_the_outcome_stays_unknown(world: World) -> None:
    shard, twin = world.open(), world.open()
    batch = batch_of(shard, 5)

    def same_writer_goes_on() -> None:
        twin.refresh()
        twin.writer("w").compare_and_append(batch_of(twin, 9), token="newer")

    world.consensus.script = ["lost"]
    world.consensus.between = same_writer_goes_on
    with pytest.raises(IndeterminateError):
        shard.writer("w").compare_and_append(batch, token="older")


def test_a_token_used_twice_without_an_unknown_outcome_is_a_callers_mistake(world: World) -> None:
    shard = world.open()
    writer = shard.writer("w")
    batch = batch_of(shard, 5)
    writer.compare_and_append(batch, token="t")
    with pytest.raises(UsageError, match="token"):
        writer.compare_and_append(batch, token="t")


def test_after_a_crash_the_same_token_is_answered_by_what_was_done(world: World) -> None:
    shard = world.open()
    shard.writer("w").compare_and_append(batch_of(shard, 5), token="t")
    again = world.open()
    rows = versions([put(b"k", 4)])
    batch = again.write_batch(BatchDesc(0, 5), rows)
    assert again.writer("w").compare_and_append(batch, token="t", retrying=True).upper == 5
    assert len(world.open().state.batches) == 1


def test_an_expired_writers_retry_is_a_mismatch(world: World) -> None:
    shard = world.open()
    batch = batch_of(shard, 5)
    shard.writer("w").compare_and_append(batch, token="t")
    shard.writer("w").expire()
    with pytest.raises(UpperMismatchError):
        shard.writer("w").compare_and_append(batch, token="t", retrying=True)


def test_a_merge_whose_reply_was_lost_keeps_its_parts(world: World) -> None:
    shard = world.open()
    write(shard, 5, 9)
    c_request = shard.log.apply(c.RequestMerge(0, 9))
    assert c_request.outcome.slot == (0, 9)
    world.consensus.script = ["lost"]
    (outcome,) = shard.compact()
    assert outcome.applied
    assert shard.scrub().is_sound
    assert read(shard, 8) == {b"k": b"v9"}


def test_expected_upper_must_be_where_the_batch_begins(world: World) -> None:
    shard = world.open()
    with pytest.raises(UsageError):
        shard.writer().compare_and_append(batch_of(shard, 5), expected_upper=3)


@pytest.mark.parametrize("lower", [3, 5])
def test_bounds_that_make_no_sense_are_a_callers_mistake(world: World, lower: int) -> None:
    shard = world.open()
    rows = batch_of(shard, 3)
    with pytest.raises(UsageError):
        shard.writer().compare_and_append(Batch(lower, 3, parts=rows.parts))
    with pytest.raises(UsageError):
        shard.writer().append(Batch(lower, 3, parts=rows.parts))


def test_inline_parts_over_the_budget_are_uploaded_after_all(world: World) -> None:
    shard = world.open(inline_bytes_max=INLINE_BYTES_MAX)
    for upper in range(1, 2 * INLINE_BYTES_MAX // (100 << 10) + 2):
        noise = random.Random(upper).randbytes(100 << 10)
        shard.writer().compare_and_append(batch_of(shard, upper, b"%02d" % upper, noise))
    parts = [part for batch in shard.state.batches for part in batch.parts]
    assert any(part.inline is not None for part in parts)
    assert any(part.inline is None for part in parts)
    assert shard.state.inline_bytes() <= INLINE_BYTES_MAX
    assert len(read(shard, shard.upper - 1)) == len(parts)


# -- opening ---------------------------------------------------------------------------------


def test_opening_a_missing_shard_or_one_of_another_rule_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        world.open(create=False)
    world.open()
    with pytest.raises(UsageError, match="versions"):
        world.open(rule=DIFFS)


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


# -- reading ---------------------------------------------------------------------------------


def test_a_snapshot_waits_for_upper_and_refuses_what_is_gone(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    with pytest.raises(NotYetWrittenError):
        shard.snapshot(5)
    assert shard.refresh().leased == {}  # the failed snapshot's reader is gone
    with shard.reader() as reader:
        reader.downgrade_since(3)
    with pytest.raises(HistoryGoneError):
        shard.snapshot(2)


def test_splits_cover_the_snapshot_once_and_travel_as_text(world: World) -> None:
    shard = world.open()
    for upper in range(1, 7):
        rows = versions([put(f"{upper}{i:03}".encode(), upper - 1) for i in range(50)])
        shard.writer().compare_and_append(shard.write_batch(BatchDesc(upper - 1, upper), rows))
    with shard.snapshot(5) as snapshot:
        splits = snapshot.splits(4)
        assert len(splits) == 4
        texts = [split.to_json() for split in splits]
        pieces = [list(state_of(Split.from_json(text).read(world.blob))) for text in texts]
        whole = list(state_of(snapshot.read()))
    assert [key for piece in pieces for key in piece] == whole
    assert max(map(len, pieces)) <= 2 * min(map(len, pieces))


def test_a_single_large_part_is_split_by_its_row_groups(world: World) -> None:
    shard = world.open()
    rows = versions([put(f"{i:06}".encode(), 1) for i in range(200_000)], size=50_000)
    shard.writer().compare_and_append(shard.write_batch(BatchDesc(0, 5), rows))
    with shard.snapshot(4) as snapshot:
        counts = [sum(b.num_rows for b in split.read(world.blob)) for split in snapshot.splits(3)]
    assert len(counts) == 3
    assert sum(counts) == 200_000


def test_a_lease_holds_the_parts_of_a_snapshot_until_it_is_released(world: World) -> None:
    shard, other = world.open(), world.open()
    write(shard, 5, 9)
    snapshot = shard.snapshot(8)
    other.compact(full=True)
    assert other.gc().blobs == ()
    assert state_of(snapshot.read()) == {b"k": b"v9"}
    snapshot.close()
    snapshot.close()
    assert len([name for name in other.gc().blobs if "part" in name]) == 2


def test_a_reader_keeps_what_its_open_snapshots_use_when_it_downgrades(world: World) -> None:
    shard, other = world.open(), world.open()
    write(shard, 5, 9)
    with shard.reader() as reader:
        snapshot = reader.snapshot(8)
        other.compact(full=True)
        reader.downgrade_since(4)
        assert other.gc().blobs == ()
        assert state_of(snapshot.read()) == {b"k": b"v9"}
        snapshot.close()
        reader.downgrade_since(4)
        assert len([name for name in other.gc().blobs if "part" in name]) == 2


def test_a_reader_whose_lease_ran_out_is_told_so_not_that_data_is_damaged(world: World) -> None:
    shard, other = world.open(), world.open()
    write(shard, 5, 9)
    reader = shard.reader(lease_ns=10)
    snapshot = reader.snapshot(8)
    world.clock.advance(11)
    other.maintain()
    other.compact(full=True)
    assert other.gc().blobs
    with pytest.raises(LeaseExpiredError):
        state_of(snapshot.read())
    with pytest.raises(LeaseExpiredError):
        reader.downgrade_since(5)
    with pytest.raises(LeaseExpiredError):
        reader.heartbeat()


def test_a_heartbeat_keeps_the_lease(world: World) -> None:
    shard = world.open()
    with shard.reader(lease_ns=10) as reader:
        for _ in range(5):
            world.clock.advance(9)
            reader.heartbeat()
            shard.maintain()
        assert reader.name in shard.state.leased


def test_reading_a_snapshot_keeps_the_lease_however_long_it_takes(world: World) -> None:
    shard, other = world.open(), world.open()
    rows = versions([put(b"%06d" % number, 4) for number in range(200_000)])
    shard.writer().compare_and_append(shard.write_batch(BatchDesc(0, 5), rows))
    with shard.reader(lease_ns=10) as reader, reader.snapshot(4) as snapshot:
        taken = 0
        for batch in snapshot.read():
            taken += batch.num_rows
            world.clock.advance(9)
            other.maintain()
            assert reader.name in other.state.leased
            if taken == 200_000:
                world.consensus.script = ["refused"] * ATTEMPTS_MAX  # the renewal fails
    assert taken == 200_000
    assert world.clock.wall_ns() > 20


def test_a_part_that_is_gone_under_a_good_lease_is_damage(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    world.blob.delete(shard.state.batches[0].parts[0].name)
    with pytest.raises(CorruptionError):
        read(shard, 4)
    assert shard.scrub().missing == (shard.state.batches[0].parts[0].name,)


def test_a_listener_waits_at_the_upper_and_ends_with_the_shard(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    with shard.reader() as reader:
        listening = reader.listen(-1)
        first = listening.poll()
        assert first is not None
        assert (first.lower, first.upper, rows_of(first.rows)) == (0, 5, [put(b"k", 4, b"v5")])
        assert listening.poll() is None
        shard.writer().progress(EMPTY)
        rest = list(listening.follow(lambda: False))
        assert [(b.lower, b.upper, rows_of(b.rows)) for b in rest] == [(5, EMPTY, [])]
        assert listening.poll() is None


def test_a_listener_in_the_middle_of_a_merged_batch_gets_only_the_rest(world: World) -> None:
    shard = world.open()
    write(shard, 5, 9, 12)
    with shard.reader() as reader:
        listening = reader.listen(6)
        shard.compact(full=True)
        stretch = listening.poll()
        assert stretch is not None
        assert (stretch.lower, stretch.upper) == (7, 12)
        assert [row.timestamp for row in rows_of(stretch.rows)] == [11, 8]


def test_listening_from_where_history_is_gone_is_refused(world: World) -> None:
    shard = world.open()
    write(shard, 9)
    with shard.reader() as reader:
        reader.downgrade_since(5)
        with pytest.raises(HistoryGoneError):
            reader.listen(4)
        assert reader.listen(5).frontier == 6


def test_a_snapshot_gives_history_too(world: World) -> None:
    shard = world.open()
    write(shard, 5, 9)
    with shard.snapshot(8) as snapshot:
        history = rows_of(snapshot.view(Window(-1, 8)))
    assert [row.timestamp for row in history] == [8, 4]


# -- critical holds --------------------------------------------------------------------------


def test_a_critical_hold_outlives_its_process_and_keeps_since(world: World) -> None:
    shard = world.open()
    write(shard, 9)
    shard.critical("backup").downgrade(3)
    world.clock.advance(1 << 62)
    world.open().maintain()
    with world.open().reader() as reader:
        reader.downgrade_since(8)
    again = world.open().critical("backup")
    assert (again.since, world.open().since) == (3, 3)


def test_a_fenced_owner_cannot_move_the_hold(world: World) -> None:
    shard = world.open()
    write(shard, 9)
    old = shard.critical("backup")
    old.downgrade(2, opaque=b"owner--1")
    new = world.open().critical("backup")
    new.take_over()
    assert new.downgrade(4) == 4
    with pytest.raises(OpaqueMismatchError) as fenced:
        old.downgrade(6)
    assert (fenced.value.opaque, fenced.value.since) == (new.opaque, 4)


def test_a_move_whose_reply_was_lost_is_known_by_its_token(world: World) -> None:
    shard = world.open()
    write(shard, 9)
    hold = shard.critical("backup")
    world.consensus.script = ["lost"]
    assert hold.downgrade(4, opaque=b"owner--1") == 4
    assert hold.downgrade(5) == 5


def test_a_reader_may_start_from_the_least_critical_hold(world: World) -> None:
    shard = world.open()
    write(shard, 9)
    shard.critical("backup").downgrade(4)
    with shard.reader(from_critical=True) as reader:
        assert reader.since == 4


# -- collection ------------------------------------------------------------------------------


def test_collection_below_the_first_rollup_or_past_is_a_no_op(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    assert gc.collect(shard.log, to=0) == gc.Collected()
    shard.gc()
    assert gc.collect(shard.log, to=1) == gc.Collected()  # overtaken
    before = shard.refresh()
    assert shard.gc() == gc.Collected()
    assert shard.refresh() == before  # repeated: not even a version
    assert read(shard, 4) == {b"k": b"v5"}


def test_at_the_rollup_nothing_is_truncated_but_older_rollups_leave(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    shard.log.write_rollup()
    rollup = shard.state.rollup[0]
    world.consensus.truncate("s", rollup)  # as after a crash between two steps of a collection
    done = gc.collect(shard.log, to=rollup)
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


# -- scrub -----------------------------------------------------------------------------------


def test_scrub_lists_orphans_and_deletes_only_old_ones_when_asked(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    names = part_names("s", world.clock)
    rows = versions([put(b"x", 1)])
    lost = write_batch(world.blob, BatchDesc(0, 5), rows, rule=VERSIONS, names=names)
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


# -- the end ---------------------------------------------------------------------------------


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
        shard.writer().compare_and_append(Batch(0, 5))
    with pytest.raises(HistoryGoneError):
        shard.snapshot(3)
    shard.finalise()
    assert shard.refresh().seqno == seqno
    assert len(list(world.blob.list("s/"))) <= 2


# -- the faulty wrappers, when calm, are as good as what they wrap -----------------------------


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
