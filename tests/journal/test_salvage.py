"""Salvage: records that are kept, losses that are reported, and a source that is only read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.storage.journal import Journal, Record, inspect, read
from kvstore.storage.journal.repair import Keep, salvage
from tests.harness.disk import MemoryDisk, ProcessDied
from tests.journal.folds import open_journal

KEEPS: list[Keep] = ["prefix", "all"]
SOURCE, TARGET = "/journal", "/saved"


def damaged(*changes: tuple[bytes, bytes], snapshot: bool = False) -> MemoryDisk:
    disk = MemoryDisk()
    with open_journal(disk, file_records=3) as journal:
        for number in range(1, 9):
            journal.append(b"item %d" % number)
            if snapshot and number == 4:
                journal.snapshot([(0, b"item %d" % done) for done in range(1, 5)])
    for old, new in changes:
        for inode in disk.inodes.values():
            inode.live = inode.live.replace(old, new)
    return disk


def saved(disk: MemoryDisk) -> list[bytes]:
    kept: list[bytes] = []

    def take(record: Record) -> None:
        kept.append(record.payload)

    Journal.open(TARGET, apply=take, restore=take, content="test", files=disk).close()
    return kept


def items(*numbers: int) -> list[bytes]:
    return [b"item %d" % number for number in numbers]


def test_an_undamaged_journal_is_copied_whole() -> None:
    for snapshot in (False, True):
        disk = damaged(snapshot=snapshot)
        report = salvage(SOURCE, TARGET, files=disk)
        assert report.losses == ()
        assert (report.last, report.dropped) == (8, 0)
        assert saved(disk) == items(*range(1, 9))


def test_the_prefix_before_the_first_loss_is_kept_and_the_rest_counted() -> None:
    disk = damaged((b"item 5", b"item x"))
    report = salvage(SOURCE, TARGET, files=disk)
    assert saved(disk) == items(1, 2, 3, 4)
    assert (report.last, report.records, report.dropped) == (4, 4, 3)
    (loss,) = report.losses
    assert loss.path == f"{SOURCE}/0000000000000004-journal-final"
    assert (loss.first, loss.last) == (5, 5)
    assert loss.offset > 0


def test_keeping_all_renumbers_what_is_behind_a_loss() -> None:
    disk = damaged((b"item 2", b"item x"), (b"item 5", b"item y"), (b"item 6", b"item z"))
    report = salvage(SOURCE, TARGET, keep="all", files=disk)
    assert saved(disk) == items(1, 3, 4, 7, 8)
    assert [record.ordinal for record in read(TARGET, files=disk)] == [1, 2, 3, 4, 5]
    assert [(loss.first, loss.last) for loss in report.losses] == [(2, 2), (5, 5), (6, 6)]


def test_a_missing_file_is_reported_with_its_ordinals() -> None:
    disk = damaged()
    del disk.inodes[sorted(disk.inodes)[1]]
    report = salvage(SOURCE, TARGET, keep="all", files=disk)
    assert [(loss.first, loss.last) for loss in report.losses] == [(4, 6)]
    assert saved(disk) == items(1, 2, 3, 7, 8)


def test_a_damaged_snapshot_leaves_no_prefix_but_its_records_can_be_kept() -> None:
    disk = damaged((b"item 2", b"item x"), snapshot=True)
    report = salvage(SOURCE, TARGET, files=disk)
    assert saved(disk) == []
    assert report.losses[0].path.endswith("0000000000000004-snapshot-final")
    disk = damaged((b"item 2", b"item x"), snapshot=True)
    salvage(SOURCE, TARGET, keep="all", files=disk)
    assert saved(disk) == items(1, 3, 4, 5, 6, 7, 8)


def test_a_torn_tail_is_reported_apart_from_losses() -> None:
    disk = damaged()
    inode = disk.inodes[sorted(disk.inodes)[-1]]
    inode.live = inode.live[:-1]
    disk.notes.clear()  # the writer was not closed
    report = salvage(SOURCE, TARGET, files=disk)
    assert report.torn is not None
    assert report.losses == ()
    assert saved(disk) == items(*range(1, 8))


def test_where_no_file_says_what_the_records_mean_the_caller_must() -> None:
    disk = damaged()
    for inode in disk.inodes.values():
        inode.live = inode.live[1:]
    with pytest.raises(UsageError, match="what its records mean"):
        salvage(SOURCE, TARGET, keep="all", files=disk)
    assert salvage(SOURCE, TARGET, keep="all", content="test", files=disk).losses
    assert set(saved(disk)) <= set(items(*range(1, 9)))


@given(st.data())
def test_whatever_the_damage_a_salvage_keeps_a_prefix_and_changes_no_source(
    data: st.DataObject,
) -> None:
    disk = damaged(snapshot=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(0, 3))):
        inode = disk.inodes[data.draw(st.sampled_from(sorted(disk.inodes)))]
        at = data.draw(st.integers(0, len(inode.live)))
        size = data.draw(st.integers(0, 60))
        inode.live = inode.live[:at] + data.draw(st.binary(max_size=9)) + inode.live[at + size :]
    before = {path: inode.live for path, inode in disk.inodes.items()}
    keep = data.draw(st.sampled_from(KEEPS))
    report = salvage(SOURCE, TARGET, keep=keep, content="test", files=disk)
    assert before.items() <= {path: inode.live for path, inode in disk.inodes.items()}.items()
    kept = saved(disk)
    assert set(kept) <= set(items(*range(1, 9)))
    assert kept == sorted(kept)
    if keep == "prefix":
        assert kept == items(*range(1, len(kept) + 1))
    if len(kept) < 8:
        assert report.losses or report.torn or report.last == len(kept)


def test_the_command_refuses_a_target_that_holds_anything(tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal").close()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        salvage(tmp_path / "journal", tmp_path / "target")
    assert salvage(tmp_path / "journal", tmp_path / "new").records == 0


def test_records_that_no_file_has_are_named_by_inspect_and_salvage_where_the_note_tells() -> None:
    disk = damaged()
    del disk.inodes[sorted(disk.inodes)[-1]]
    found = inspect(SOURCE, files=disk)
    assert not found.sound
    assert [(loss.first, loss.last) for loss in found.missing] == [(7, 8)]
    report = salvage(SOURCE, TARGET, files=disk)
    assert [(loss.first, loss.last) for loss in report.losses] == [(7, 8)]
    assert saved(disk) == items(*range(1, 7))


def test_a_salvage_that_dies_at_any_step_leaves_no_journal_and_the_next_one_is_whole() -> None:
    steps = damaged()
    salvage(SOURCE, TARGET, files=steps)
    for step in range(len(damaged().steps), len(steps.steps)):
        disk = damaged()
        disk.die_before = step
        with pytest.raises(ProcessDied):
            salvage(SOURCE, TARGET, files=disk)
        again = MemoryDisk({path: inode.live for path, inode in disk.inodes.items()})
        if again.names(TARGET):
            assert saved(again) == items(*range(1, 9))
        else:
            assert salvage(SOURCE, TARGET, files=again).last == 8
            assert saved(again) == items(*range(1, 9))


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_power_cut_at_any_step_leaves_no_journal_or_a_whole_one(snapshot: bool) -> None:
    whole = damaged(snapshot=snapshot)
    begin = len(whole.steps)
    salvage(SOURCE, TARGET, files=whole)
    for step in range(begin, len(whole.steps) + 1):
        disk = damaged(snapshot=snapshot)
        disk.die_before = step
        with suppress(ProcessDied):
            salvage(SOURCE, TARGET, files=disk)
        for image in disk.power_cuts():
            if image.names(TARGET):
                note = image.notes.pop(f"{TARGET}.unfinished/LOCK", [b""])
                image.notes[f"{TARGET}/LOCK"] = note  # the file came along
            else:
                assert step < len(whole.steps)
                assert salvage(SOURCE, TARGET, files=image).last == 8
            assert saved(image) == items(*range(1, 9))
