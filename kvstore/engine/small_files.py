"""Small sorted files: the groups of a family's files that are worth a merge.

RocksDB merges files whose spans of keys overlap. It moves files whose keys follow one another, such
as files of the change index, down its levels as they are. Each checkpoint, parallel scan and
opening flushes the memtables into files of their own. Without a merge a store would therefore have
more files with each of them, and RocksDB has no option against it.

Invariants
1. A group is a stretch of small neighbours on one level, of at least `SMALL_FILES_MAX` files. So a
   family has at most one file per `SMALL_FILE_BYTES`, and fewer than `SMALL_FILES_MAX` small files
   between two others.
2. A group never costs more than `SORTED_MERGE_BYTES_MAX`. The cost includes files of other levels
   that RocksDB rewrites as well. A costlier group is left to RocksDB, whose levels overlap there.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from kvstore.limits import (
    NEWEST_MERGE_FACTOR,
    SMALL_FILE_BYTES,
    SMALL_FILES_MAX,
    SORTED_MERGE_BYTES_MAX,
    SORTED_MERGE_FILE_BYTES,
)


class SortedFile(NamedTuple):
    """One sorted file of a family."""

    level: int
    first: bytes
    last: bytes
    size_bytes: int

    @property
    def cost(self) -> int:
        """The cost of merging it, in bytes."""
        return self.size_bytes + SORTED_MERGE_FILE_BYTES

    @property
    def is_small(self) -> bool:
        return self.level > 0 and self.size_bytes < SMALL_FILE_BYTES


class FileGroup(NamedTuple):
    """The first and the last key of small files to merge."""

    first: bytes
    last: bytes


def sorted_files(table: str) -> list[SortedFile]:
    """The files of a family, from RocksDB's property `rocksdb.sstables`:

        --- level 6 --- version# 16 ---
         9:1048[1 .. 1]['6B30' seq:1, type:1 .. '6B31' seq:1, type:1](0)

    Levels ascend. The files of a level below the first ascend by key, and do not overlap.
    """
    files, level = [], 0
    for line in table.splitlines():
        if found := _LEVEL.match(line):
            level = int(found[1])
        elif found := _FILE.match(line):
            first, last = bytes.fromhex(found[2]), bytes.fromhex(found[3])
            files.append(SortedFile(level, first, last, int(found[1])))
    return files


_LEVEL: Final = re.compile(r"--- level (\d+) ---")
_FILE: Final = re.compile(r" \d+:(\d+)\[[^]]*\]\['([0-9A-F]*)' .* \.\. '([0-9A-F]*)' ")


def groups(files: Sequence[SortedFile]) -> Iterator[FileGroup]:
    """The groups of small files. `files`, and so the groups, are in the order of `sorted_files`."""
    levels = _by_level(files)
    for level in levels:
        for is_small, run in groupby(level, key=attrgetter("is_small")):
            if not is_small:
                continue
            found = list(run)
            if len(found) >= SMALL_FILES_MAX:
                yield from _affordable(found, levels)


def is_worth_a_merge(files: Sequence[SortedFile], group: FileGroup, waiting_bytes: int) -> bool:
    """Whether the newest files in the span of `group` should be merged with the older ones there.

    `waiting_bytes` of entries are in no file yet. A look-up seeks in each new file and in each
    level, so a store in one level answers twice as fast as one with three new files.
    """
    new = [file for file in files if file.level == 0 and _meets(file, group)]
    fresh = sum(file.cost for file in new) + waiting_bytes
    cost = _cost(group, _by_level(files)) + waiting_bytes
    are_many = cost > fresh or len(new) + bool(waiting_bytes) > 1
    return are_many and cost <= min(SORTED_MERGE_BYTES_MAX, fresh * NEWEST_MERGE_FACTOR)


def _meets(file: SortedFile, group: FileGroup) -> bool:
    return file.first <= group.last and file.last >= group.first


def _by_level(files: Sequence[SortedFile]) -> list[list[SortedFile]]:
    return [list(level) for _, level in groupby(files, key=attrgetter("level"))]


def _affordable(
    run: Sequence[SortedFile], levels: Sequence[Sequence[SortedFile]]
) -> Iterator[FileGroup]:
    """Cut a run of neighbours into groups that may be merged."""
    start = 0
    while start < len(run):
        end, cost = start, 0
        while end < len(run) and cost + run[end].cost <= SORTED_MERGE_BYTES_MAX:
            cost += run[end].cost
            end += 1
        group = FileGroup(run[start].first, run[end - 1].last)
        if end - start > 1 and _cost(group, levels) <= SORTED_MERGE_BYTES_MAX:
            yield group
        start = end


def _cost(group: FileGroup, levels: Sequence[Sequence[SortedFile]]) -> int:
    """The cost of all files that RocksDB rewrites when it merges `group`."""
    cost, (first, last) = 0, group
    for level in levels:
        # its files overlap each other: RocksDB takes every file that touches one
        if level[0].level == 0:
            touched = [file for file in level if file.first <= last and file.last >= first]
            first = min([first, *(file.first for file in touched)])
            last = max([last, *(file.last for file in touched)])
        else:
            begin = bisect_left(level, first, key=attrgetter("last"))
            touched = list(level[begin : bisect_right(level, last, key=attrgetter("first"))])
        cost += sum(file.cost for file in touched)
    return cost
