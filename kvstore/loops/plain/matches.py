"""The rows that answer labels: two sorted lists, of versions and of labels, meet in one pass.

Both lists are columns: keys as the offsets and bytes of an Arrow array, times as integers of 64
bits. Rows are sorted by key and then newest first, and so are labels. The pass leaps: in the list
whose key is less it searches for the other key by steps that double. So few labels cost few
comparisons among many rows, and few rows cost few among many labels.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from typing_extensions import Buffer

from kvstore.loops.plain.labels import Keys, listed, require_starts


def match(
    keys: Keys,
    times: Buffer,
    ops: Buffer,
    passed_op: int,
    label_keys: Keys,
    label_starts: Buffer,
    label_times: Buffer,
) -> tuple[array[int], array[int]]:
    """Labels and the rows that answer them: the newest row of the label's key at or below the
    label's time, except rows of `ops` (one byte each) that are `passed_op`.

    `label_keys` are distinct and ascend. Key i has the labels from `label_starts[i]` on and below
    `label_starts[i + 1]`, with `label_times`. Returns the numbers of the labels that have a row,
    ascending, and the numbers of their rows.
    """
    row_keys, versions = listed(keys), memoryview(times).tolist()
    asked, starts = listed(label_keys), memoryview(label_starts).tolist()
    asked_at, kinds = memoryview(label_times).tolist(), memoryview(ops).tolist()
    _require_sizes(len(row_keys), versions, kinds, len(asked), starts, asked_at)
    labels, rows = array("q"), array("q")
    row = group = 0
    while row < len(row_keys) and group < len(asked):
        key = asked[group]
        if row_keys[row] < key:
            row = bisect_left(row_keys, key, row)
        elif row_keys[row] > key:
            group = bisect_left(asked, row_keys[row], group)
        else:
            for label in range(starts[group], starts[group + 1]):
                while (
                    row < len(row_keys) and row_keys[row] == key and versions[row] > asked_at[label]
                ):
                    row += 1
                here = row
                while here < len(row_keys) and row_keys[here] == key and kinds[here] == passed_op:
                    here += 1
                if here < len(row_keys) and row_keys[here] == key:
                    labels.append(label)
                    rows.append(here)
            group += 1
    return labels, rows


def _require_sizes(
    rows: int,
    times: list[int],
    ops: list[int],
    groups: int,
    starts: list[int],
    label_times: list[int],
) -> None:
    if len(times) != rows or len(ops) != rows:
        raise ValueError("a row has one time and one operation")
    require_starts(starts, groups, len(label_times))
