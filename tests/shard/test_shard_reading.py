"""The handle: snapshots, leases and critical holds."""

from __future__ import annotations

import pytest

from kvstore.backup.shard.rows.batch_writer import BatchDesc
from kvstore.backup.shard.rows.rules import Window
from kvstore.backup.shard.shard_snapshot import Split
from kvstore.errors import (
    CorruptionError,
    HistoryGoneError,
    LeaseExpiredError,
    NotYetWrittenError,
    OpaqueMismatchError,
)
from tests.shard.rows import put, rows_of, state_of, versions
from tests.shard.world import World, read, write


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
    other.expire_lapsed()
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
            shard.expire_lapsed()
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
            other.refresh()
            other.expire_lapsed()
            assert reader.name in other.state.leased
            if taken == 200_000:
                world.consensus.script = ["refused"] * 1_000  # the renewal fails
        assert 0 < len(world.consensus.script) < 1_000
        world.consensus.script = []
    assert taken == 200_000
    assert world.clock.wall_ns() > 20


def test_a_part_that_is_gone_under_a_good_lease_is_damage(world: World) -> None:
    shard = world.open()
    write(shard, 5)
    world.blob.delete(shard.state.batches[0].parts[0].name)
    with pytest.raises(CorruptionError):
        read(shard, 4)
    assert shard.scrub().missing == (shard.state.batches[0].parts[0].name,)


def test_a_snapshot_gives_history_too(world: World) -> None:
    shard = world.open()
    write(shard, 5, 9)
    with shard.snapshot(8) as snapshot:
        history = rows_of(snapshot.view(Window(-1, 8)))
    assert [row.timestamp for row in history] == [8, 4]


def test_a_critical_hold_outlives_its_process_and_keeps_since(world: World) -> None:
    shard = world.open()
    write(shard, 9)
    shard.critical("backup").downgrade(3)
    world.clock.advance(1 << 62)
    world.open().expire_lapsed()
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
    new.downgrade(0, opaque=b"owner--2")
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
