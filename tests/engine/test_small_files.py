"""The number of a store's files follows its data, not how often memtables were flushed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.engine.rocks import FileGroup, SortedFile, groups, is_worth_a_merge, sorted_files
from kvstore.errors import CorruptionError, OutOfSpaceError
from kvstore.limits import (
    NEWEST_MERGE_FACTOR,
    SMALL_FILE_BYTES,
    SMALL_FILES_MAX,
    SORTED_MERGE_BYTES_MAX,
    SORTED_MERGE_FILE_BYTES,
)
from kvstore.store import Upkeep
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

FLUSHES = 3 * SMALL_FILES_MAX
FAMILY_FILES_MAX = 2 * SMALL_FILES_MAX
"""The files of one family: small files, files that came after the last count, and three files that
RocksDB leaves on the first level."""

FILES_MAX = 3 * FAMILY_FILES_MAX


def sorted_file_names(path: Path) -> set[str]:
    return {file.name for file in path.glob("*.sst")}


def few_files(path: Path) -> bool:
    assert len(sorted_file_names(path)) <= FILES_MAX
    return True


def rows(count: int) -> list[tuple[bytes, bytes]]:
    return [(key(number), b"v") for number in range(count)]


def key(number: int) -> bytes:
    return b"k%06d" % number


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of a release that merged nothing."""
    path = tmp_path / "crowded"
    with monkeypatch.context() as before, kvstore.open(path) as store:
        before.setattr(Upkeep, "merge_files", lambda self: None)
        for number in range(FLUSHES):
            store.put(key(number), b"v")
            store.checkpoint(tmp_path / "copy")
            shutil.rmtree(tmp_path / "copy")
    assert len(sorted_file_names(path)) >= 2 * FLUSHES
    return path


def test_checkpoints_leave_few_files(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        for number in range(FLUSHES):
            store.put(key(number), b"v")
            store.checkpoint(tmp_path / f"copy-{number % 2}")
            assert few_files(tmp_path / "s")
            shutil.rmtree(tmp_path / f"copy-{number % 2}")
        assert list(store.scan()) == rows(FLUSHES)
        assert not store.verify().problems


def test_reopenings_leave_few_files(tmp_path: Path) -> None:
    for number in range(FLUSHES):
        with kvstore.open(tmp_path / "s") as store:
            store.put(key(number), b"v")
    with kvstore.open(tmp_path / "s") as store:
        assert few_files(tmp_path / "s")
        assert list(store.scan()) == rows(FLUSHES)


def put_and_die(path: Path, number: int) -> None:
    kvstore.open(path).put(key(number), b"v", durability="sync")
    os.kill(os.getpid(), signal.SIGKILL)


def test_kills_leave_few_files(tmp_path: Path, spawn: Any) -> None:
    for number in range(FLUSHES):
        child = spawn.Process(target=put_and_die, args=(tmp_path / "s", number))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    with kvstore.open(tmp_path / "s") as store:
        assert few_files(tmp_path / "s")
        assert list(store.scan()) == rows(FLUSHES)


def test_passes_that_flush_leave_few_files(tmp_path: Path) -> None:
    with bounds(COLUMNS_FLUSH_BYTES_MIN=0), kvstore.open(tmp_path / "s") as store:
        for number in range(FLUSHES):
            store.put(key(number), b"v")
            assert store.scan_batches(workers=2).read_all().num_rows == number + 1
        assert few_files(tmp_path / "s")


def test_a_crowded_store_shrinks_with_its_openings(crowded: Path) -> None:
    before = len(sorted_file_names(crowded))
    kvstore.open(crowded).close()
    assert len(sorted_file_names(crowded)) <= before - FLUSHES // 2
    kvstore.open(crowded).close()
    with kvstore.open(crowded) as store:
        assert few_files(crowded)
        assert list(store.scan()) == rows(FLUSHES)
        assert [change.key for change in store.changes(0)] == [key for key, _ in rows(FLUSHES)]


def test_collection_merges_all_files_of_a_crowded_store(
    crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upkeep, "merge_files", lambda self: None)
    with kvstore.open(crowded) as store:
        assert not few_groups(store)
        store.gc(before=0)
        assert few_groups(store)
        assert few_files(crowded)


def few_groups(store: kvstore.Store) -> bool:
    stats = store.stats()
    return max(stats["data_files"], stats["changes_files"]) < FAMILY_FILES_MAX


def test_a_reader_of_a_crowded_store_merges_nothing(crowded: Path) -> None:
    before = sorted_file_names(crowded)
    with kvstore.open_read_only(crowded) as store:
        assert list(store.scan()) == rows(FLUSHES)
    assert sorted_file_names(crowded) == before


def test_a_reader_keeps_its_files_while_they_are_merged(crowded: Path) -> None:
    with kvstore.open_read_only(crowded) as reader:
        kvstore.open(crowded).close()
        assert list(reader.scan()) == rows(FLUSHES)


@pytest.mark.damages_store
def test_a_damaged_file_is_left_and_the_store_goes_on(crowded: Path, tmp_path: Path) -> None:
    middle = sorted(crowded.glob("*.sst"))[FLUSHES]
    content = bytearray(middle.read_bytes())
    content[10] ^= 0xFF  # in its only block
    middle.write_bytes(content)
    with kvstore.open(crowded) as store:
        for number in range(3 * SMALL_FILES_MAX):
            store.put(key(FLUSHES + number), b"v")
            store.checkpoint(tmp_path / str(number))
        store.gc(before=0)
        assert middle.exists()
        assert store.stats()["gc_failures"] == 0
        with pytest.raises(CorruptionError):
            print(*store.scan(), *store.changes(0))


def test_a_merge_that_fails_fails_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise OutOfSpaceError("the store")

    monkeypatch.setattr("kvstore.engine.rocks.groups", fail)
    with kvstore.open(tmp_path / "s") as store:
        for number in range(SMALL_FILES_MAX + 4):
            store.put(key(number), b"v")
            store.checkpoint(tmp_path / str(number))
        assert store.stats()["gc_failures"] > 0
        assert "OutOfSpaceError" in store.stats()["gc_last_error"]


def test_what_rocksdb_tells_of_itself_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engine.rocks.INFO_LOG_BYTES_MAX", 128 << 10)
    monkeypatch.setattr("kvstore.engine.rocks.MANIFEST_BYTES_MAX", 16 << 10)
    with kvstore.open(tmp_path / "s") as store:
        for number in range(FLUSHES):
            store.put(key(number), b"v")
            store.checkpoint(tmp_path / "copy")
            shutil.rmtree(tmp_path / "copy")
        told = [file.stat().st_size for file in (tmp_path / "s").glob("LOG*")]
        (manifest,) = (tmp_path / "s").glob("MANIFEST-*")
        assert len(told) <= 4
        assert max(told) < 2 * (128 << 10)
        assert manifest.stat().st_size < 2 * (16 << 10)
        assert list(store.scan()) == rows(FLUSHES)


# -- which files are merged ----------------------------------------------------------------------


def files(*sizes: int, level: int = 6, first: int = 0) -> list[SortedFile]:
    return [
        SortedFile(level, key(2 * number), key(2 * number + 1), size)
        for number, size in enumerate(sizes, first)
    ]


def all_of(found: list[SortedFile]) -> FileGroup:
    return FileGroup(found[0].first, found[-1].last)


def test_fewer_small_files_than_the_limit_stay() -> None:
    assert not list(groups(files(*[1] * (SMALL_FILES_MAX - 1))))
    enough = files(*[1] * SMALL_FILES_MAX)
    assert list(groups(enough)) == [all_of(enough)]


def test_large_files_stay_and_part_the_small_ones() -> None:
    small, large = [1] * (SMALL_FILES_MAX - 1), SMALL_FILE_BYTES
    assert not list(groups(files(*small, large, *small)))
    found = files(*small, 1, large, *small, 1)
    assert list(groups(found)) == [
        all_of(found[:SMALL_FILES_MAX]),
        all_of(found[SMALL_FILES_MAX + 1 :]),
    ]


def test_files_of_the_first_level_are_left_to_rocksdb() -> None:
    assert not list(groups(files(*[1] * 100, level=0)))


def test_a_group_with_a_costly_file_below_it_stays() -> None:
    small = files(*[1] * SMALL_FILES_MAX, level=5)
    below = SortedFile(6, small[0].first, small[0].first, SORTED_MERGE_BYTES_MAX)
    assert not list(groups([*small, below]))
    beside = SortedFile(6, b"a", b"b", SORTED_MERGE_BYTES_MAX)
    assert list(groups([*small, beside])) == [all_of(small)]


def test_a_file_of_the_first_level_takes_what_it_touches_with_it() -> None:
    small = files(*[1] * SMALL_FILES_MAX)
    far = SortedFile(6, b"z", b"zz", SORTED_MERGE_BYTES_MAX)
    across = SortedFile(0, small[3].first, b"z", 1)
    assert list(groups([*small, far])) == [all_of(small)]
    assert not list(groups([across, *small, far]))


def test_merging_again_and_again_bounds_files_by_bytes() -> None:
    """Files of any size in any order: merges as planned leave few files, and rewrite no file
    often."""
    rng, found = seeded(), list[SortedFile]()
    total = rewritten = 0
    for number in range(3000):
        size = int(2 ** rng.uniform(8, 23))
        total += size
        found += files(size, first=number)
        for group in list(groups(found)):
            inside = [each for each in found if group.first <= each.first <= group.last]
            merged = SortedFile(6, *group, sum(each.size_bytes for each in inside))
            assert sum(each.cost for each in inside) <= SORTED_MERGE_BYTES_MAX
            found = sorted([*(each for each in found if each not in inside), merged])
            rewritten += merged.size_bytes
    assert len(found) <= SMALL_FILES_MAX * (total // SMALL_FILE_BYTES + 1)
    assert rewritten <= 4 * total


def test_the_files_that_rocksdb_tells_are_read() -> None:
    table = (
        "--- level 0 --- version# 16 ---\n"
        " 12:7[1 .. 1]['' seq:1, type:1 .. '6B' seq:1, type:1](0)\n"
        "--- level 6 --- version# 16 ---\n"
        " 9:1048[1 .. 1]['6B30' seq:1, type:1 .. '6BFF' seq:72057594037927935, type:15](0)\n"
    )
    assert sorted_files(table) == [
        SortedFile(0, b"", b"k", 7),
        SortedFile(6, b"k0", b"k\xff", 1048),
    ]


def test_new_files_are_merged_where_they_are_a_fair_share_of_what_is_rewritten() -> None:
    large = SORTED_MERGE_FILE_BYTES * NEWEST_MERGE_FACTOR
    old, new = files(large // 2), files(1, level=0)
    everything = all_of(old)
    assert is_worth_a_merge([*new, *old], everything, 0)
    assert is_worth_a_merge(old, everything, large)
    assert not is_worth_a_merge(old, everything, 0)
    assert not is_worth_a_merge([*new, *files(large)], everything, 0)
    assert not is_worth_a_merge([*new, *old], everything, SORTED_MERGE_BYTES_MAX)


def test_one_new_file_alone_stays() -> None:
    new = files(1, 1, level=0)
    assert not is_worth_a_merge(new[:1], all_of(new), 0)
    assert is_worth_a_merge(new, all_of(new), 0)
    assert is_worth_a_merge(new[:1], all_of(new), 1)
    assert not is_worth_a_merge([], all_of(new), 1)
    assert not is_worth_a_merge(new, FileGroup(b"a", b"b"), 0)
