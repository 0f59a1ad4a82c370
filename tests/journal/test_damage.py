"""Damage: every cut of the live file, every flipped bit of a small journal, missing files."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptionError, JournalDamagedError
from kvstore.storage.journal import Journal, Sync, inspect, read
from kvstore.storage.journal.framing import PAIR, decode, encode
from tests.harness.disk import MemoryDisk
from tests.journal.folds import PATH, Payloads, live_file, open_journal, outcome_of, state_of

ITEMS = [b"one", b"\xfe\xfd", b"", b"x\xfe\xfdy", b"zeros\0\0\0", b"\0\0", b"end\xfe\xfd"]


def small_journal() -> tuple[MemoryDisk, list[bytes]]:
    """A snapshot, a sealed file and a live file, all synced. Some records hold the bytes of the
    framing."""
    disk = MemoryDisk()
    with open_journal(disk, file_records=3) as journal:
        journal.append_many(ITEMS[:2])
        journal.snapshot([(0, item) for item in ITEMS[:2]])
        for item in ITEMS[2:]:
            journal.append(item)
    names = sorted(path.rpartition("-")[2] for path in disk.inodes)
    assert names == ["final", "final", "journal"]
    return disk, ITEMS


def image_of(disk: MemoryDisk) -> dict[str, bytes]:
    return {path: inode.live for path, inode in disk.inodes.items()}


def test_cutting_the_live_file_at_every_byte_keeps_every_whole_record() -> None:
    disk, items = small_journal()
    path, image = live_file(disk), image_of(disk)
    data = image[path]
    ends = [*[match.start() for match in re.finditer(PAIR, data)][1:], len(data)]
    types = [decode(raw)[0].type for raw in data.split(PAIR)[1:]]
    records = sum(kind == 0 for kind in types)
    for size in range(ends[0], len(data)):
        cut = MemoryDisk({**image, path: data[:size]})
        whole = sum(kind == 0 for end, kind in zip(ends, types, strict=True) if end <= size)
        fold = Payloads()
        with open_journal(cut, fold) as journal:
            assert fold.items == items[: len(items) - records + whole]
            torn = journal.recovery.torn
        good = max(end for end in ends if end <= size)
        if size == good:
            assert torn is None
        else:
            assert torn is not None
            assert (torn.path, torn.offset, torn.size) == (path, good, size - good)
        assert state_of(cut) == fold.items


def test_a_live_file_cut_inside_its_opening_is_damaged_as_its_name_says_that_it_was_whole() -> None:
    disk, _ = small_journal()
    path, image = live_file(disk), image_of(disk)
    for size in range(image[path].index(PAIR, 2)):
        for rest in (b"", bytes(600)):
            error = outcome_of(MemoryDisk({**image, path: image[path][:size] + rest}))
            assert isinstance(error, JournalDamagedError)
            assert (error.path, error.first) == (path, 6)


def test_zeros_behind_the_last_record_are_a_torn_tail() -> None:
    disk, items = small_journal()
    path, image = live_file(disk), image_of(disk)
    for zeros in (1, 2, 3, 500):
        padded = MemoryDisk({**image, path: image[path] + bytes(zeros)})
        assert state_of(padded) == items
        assert padded.inodes[path].live == image[path]


def test_no_flipped_bit_loses_a_record_or_makes_one_up() -> None:
    disk, items = small_journal()
    image = image_of(disk)
    refused = 0
    for path, data in image.items():
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            error = outcome_of(MemoryDisk({**image, path: bytes(flipped)}))
            assert isinstance(error, JournalDamagedError), f"bit {bit} of {path}: {error}"
            assert error.path == path
            assert error.offset <= bit // 8
            assert error.first >= 1
            refused += 1
    assert refused == 8 * sum(map(len, image.values()))
    assert state_of(disk) == items


@given(st.data())
def test_any_damage_gives_a_prefix_or_a_definite_error(data: st.DataObject) -> None:
    disk, items = small_journal()
    image = image_of(disk)
    path = data.draw(st.sampled_from(sorted(image)))
    at = data.draw(st.integers(0, len(image[path])))
    size = data.draw(st.integers(0, 40))
    junk = data.draw(st.binary(max_size=40) | st.sampled_from([PAIR, PAIR * 2, bytes(8)]))
    image[path] = image[path][:at] + junk + image[path][at + size :]
    found = outcome_of(MemoryDisk(image))
    if isinstance(found, list):
        assert found == items[: len(found)]
    else:
        assert isinstance(found, CorruptionError)


def test_damage_names_file_offset_and_ordinals() -> None:
    disk = MemoryDisk()
    with open_journal(disk, sync=Sync.never()) as journal:
        journal.append_many([b"one", b"two", b"three"])
    path = live_file(disk)
    offset = disk.inodes[path].live.index(b"two")
    disk.inodes[path].live = disk.inodes[path].live.replace(b"two", b"owt")
    with pytest.raises(JournalDamagedError) as caught:
        state_of(disk)
    assert caught.value.path == path
    assert caught.value.offset == offset - 29 - 3
    assert (caught.value.first, caught.value.last) == (2, 2)
    assert "checksum" in str(caught.value)
    assert "salvage" in str(caught.value)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_file_is_noticed(lost: int) -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=2) as journal:
        for number in range(7):
            journal.append(b"%d" % number)
    path = sorted(disk.inodes)[lost]
    del disk.inodes[path]
    with pytest.raises(JournalDamagedError) as caught:
        state_of(disk)
    assert (caught.value.first, caught.value.last) == (2 * lost + 1, 2 * lost + 2)


def test_a_sealed_file_cut_at_a_record_is_noticed_by_its_missing_seal() -> None:
    disk = MemoryDisk()
    with open_journal(disk) as journal:
        journal.append_many([b"one", b"two"])
        journal.finalize()
    (path,) = disk.inodes
    data = disk.inodes[path].live
    disk.inodes[path].live = data[: data.rindex(PAIR)]
    with pytest.raises(JournalDamagedError, match="without its seal"):
        state_of(disk)


def test_a_file_of_another_journal_is_refused() -> None:
    disk, other = MemoryDisk(), MemoryDisk()
    with open_journal(disk, file_records=1) as journal:
        for item in (b"one", b"two"):
            journal.append(item)
    with Journal.open(PATH, files=other, identity=99, content="test", file_records=1) as journal:
        for item in (b"uno", b"due"):
            journal.append(item)
    path = sorted(disk.inodes)[1]
    disk.inodes[path] = other.inodes[path]
    with pytest.raises(JournalDamagedError, match="another journal"):
        state_of(disk)


def test_a_record_of_a_replaced_writer_behind_a_later_one_is_refused() -> None:
    disk = MemoryDisk()
    for item in (b"one", b"two"):
        with open_journal(disk) as journal:
            journal.append(item)
    path = live_file(disk)
    disk.inodes[path].live += encode(journal.incarnation - 1, 3, 0, b"stale")
    with pytest.raises(JournalDamagedError, match="earlier writer"):
        state_of(disk)


def test_two_live_files_are_refused() -> None:
    disk, _ = small_journal()
    disk.inodes[f"{PATH}/00000000000000ff-journal"] = disk.inodes[live_file(disk)]
    with pytest.raises(CorruptionError, match="more than one live"):
        state_of(disk)


def test_an_unfinished_snapshot_is_dropped_and_reported_by_inspect() -> None:
    disk, items = small_journal()
    path = f"{PATH}/0000000000000003-snapshot"
    disk.inodes[path] = disk.inodes[live_file(disk)]
    assert inspect(PATH, files=disk).sound
    assert state_of(disk) == items
    assert path not in disk.inodes


def test_a_reader_raises_the_damage_that_recovery_raises() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=3) as journal:
        for number in range(8):
            journal.append(b"item %d" % number)
    path = sorted(disk.inodes)[1]
    disk.inodes[path].live = disk.inodes[path].live.replace(b"item 4", b"item 9")
    errors = []
    for call in (lambda: list(read(PATH, files=disk)), lambda: open_journal(disk)):
        with pytest.raises(JournalDamagedError) as caught:
            call()
        errors.append((caught.value.path, caught.value.offset, caught.value.first))
    assert errors[0] == errors[1]
