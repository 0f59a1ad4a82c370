"""Exports: every version of a window `(since, upto]` in columns, for copies of a store's history.

An export passes once over the entries and decides about a chunk at a time (`mvcc.columns`). Where
no import touched a key, each entry of the key is a version and stands in the order of an export:
by key, newest first. In rows of imports the stamp replaces the reference, and a key that has such
rows beside others is sorted again. A key goes through `timeline` only where an import was reverted.

The columns hold no range tombstones: these come whole, from the fragments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.arrow import binary_array
from kvstore.codec.keys import IMPORT_ID_MAX, TAIL_BYTES, check_data_key, encode_reference
from kvstore.codec.ordered import is_framed, unframe
from kvstore.engine.api import Cursor, chunks
from kvstore.mvcc.columns import KeyColumns, of_chosen
from kvstore.mvcc.diff import choose
from kvstore.mvcc.fragments import Fragments
from kvstore.mvcc.version import Stamps, timeline
from kvstore.timestamp import TIMESTAMP_MAX

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa


class VersionColumns(NamedTuple):
    """Point versions by key, newest first. The value of a tombstone is empty."""

    keys: pa.Array
    timestamps: npt.NDArray[np.int64]
    is_value: npt.NDArray[np.bool_]
    values: list[bytes]


def version_columns(
    cursor: Cursor, *, since: int, upto: int, stamps: Stamps, fragments: Fragments
) -> Iterator[VersionColumns]:
    """All point versions in `(since, upto]`; `cursor` passes forward over a span of `data`.

    Holds one chunk in memory, or the entries of one key where a key has more.
    """
    for keys, values in _whole_keys(cursor):
        columns = KeyColumns(keys)
        references = columns.times < 0
        if references.any():
            found = _with_imports(keys, values, columns, stamps, fragments, since, upto)
        else:
            chosen = (columns.times > since) & (columns.times <= upto)
            found = _chosen(columns, columns.times, values, chosen)
        if found.values:
            yield found


def _whole_keys(cursor: Cursor) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Chunks in which the entries of a key stay together."""
    keys: list[bytes] = []
    values: list[bytes] = []
    for more_keys, more_values in chunks(cursor):
        keys += more_keys
        values += more_values
        stem = keys[-1][:-TAIL_BYTES]
        cut = len(keys) - 1
        while cut and keys[cut - 1][:-TAIL_BYTES] == stem:
            cut -= 1
        if cut:
            yield keys[:cut], values[:cut]
            del keys[:cut], values[:cut]
    if keys:
        yield keys, values


def _chosen(
    columns: KeyColumns,
    times: npt.NDArray[np.int64],
    values: list[bytes],
    chosen: npt.NDArray[np.bool_],
) -> VersionColumns:
    return VersionColumns(
        columns.user_keys(chosen),
        times[chosen],
        columns.is_value[chosen],
        of_chosen(values, chosen),
    )


def _with_imports(
    keys: list[bytes],
    values: list[bytes],
    columns: KeyColumns,
    stamps: Stamps,
    fragments: Fragments,
    since: int,
    upto: int,
) -> VersionColumns:
    """A chunk in which imports have rows."""
    times = columns.times.copy()
    references = times < 0
    added = np.full(len(times), -1, np.int64)
    for negative in _distinct(times[references]):
        lifetime = stamps.get(encode_reference(int(~negative) & IMPORT_ID_MAX))
        if lifetime is None:
            continue
        if lifetime.reverted <= TIMESTAMP_MAX:
            return _by_timeline(keys, values, stamps, fragments, since, upto)
        added[times == negative] = lifetime.added
    times[references] = added[references]
    found = _chosen(columns, times, values, (times > since) & (times <= upto))
    beside = columns.repeats & (references | np.roll(references, 1))
    return _sorted(found) if beside.any() else found


def _distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`numbers` without repeats. Usually all are the same, which costs a look; otherwise a sort."""
    return numbers[:1] if (numbers == numbers[0]).all() else np.unique(numbers)


def _sorted(found: VersionColumns) -> VersionColumns:
    """`found` by key, newest first. Only the stamps of imports can be out of order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.table({"key": found.keys, "timestamp": found.timestamps})
    order = pc.sort_indices(table, [("key", "ascending"), ("timestamp", "descending")])
    places = order.to_numpy()
    return VersionColumns(
        found.keys.take(order),
        found.timestamps[places],
        found.is_value[places],
        [found.values[place] for place in places],
    )


def _by_timeline(
    keys: list[bytes],
    values: list[bytes],
    stamps: Stamps,
    fragments: Fragments,
    since: int,
    upto: int,
) -> VersionColumns:
    """A chunk with rows of a reverted import, key by key."""
    found_keys: list[bytes] = []
    found: list[tuple[int, bytes | None]] = []
    start = 0
    for end in range(1, len(keys) + 1):
        stem = keys[start][:-TAIL_BYTES]
        if end < len(keys) and keys[end][:-TAIL_BYTES] == stem:
            continue
        if not is_framed(stem):
            check_data_key(keys[start])
        key = unframe(stem)
        stack = fragments.stack(key)
        tails = (stored[-TAIL_BYTES:] for stored in keys[start:end])
        revisions = timeline(list(zip(tails, values[start:end], strict=True)), stamps, stack)
        chosen = choose(revisions, stack, since=since, upto=upto, latest=False)
        found.extend(reversed(chosen))
        found_keys.extend([key] * len(chosen))
        start = end
    return VersionColumns(
        binary_array(found_keys),
        np.fromiter((timestamp for timestamp, _ in found), np.int64, len(found)),
        np.fromiter((value is not None for _, value in found), np.bool_, len(found)),
        [value or b"" for _, value in found],
    )
