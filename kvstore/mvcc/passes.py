"""What happened in a window `(since, upto]`, found by a pass over the versions: as differences, or
as all versions in columns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.codec.keys import (
    IMPORT_ID_MAX,
    TAIL_BYTES,
    TERMINATOR,
    VALUE,
    check_data_key,
    encode_reference,
    is_framed,
    unframe,
)
from kvstore.engine.api import Cursor, chunks
from kvstore.errors import CorruptionError, printable
from kvstore.limits import SCAN_CHUNK
from kvstore.mvcc.arrow import binary_array
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.key_history import Revision, Stamps, StoredEntry, Version, timeline

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    Bools = npt.NDArray[np.bool_]
    Numbers = npt.NDArray[np.int64]


# --------------------------------------------------------------------------------------------------
# A chunk of `data` keys as columns, so that an export decides about thousands of keys at a time.
#
# The keys lie joined in one Arrow buffer. NumPy gathers suffixes and kinds from it as numbers, and
# compares neighbouring user keys in words of eight bytes. No Python code runs per key: a key takes
# 45 ns, where the plainest loop takes 250.
#
#     joined  := | 8 zero bytes | key | key | ...        so that a word can end anywhere
#     key     := | stem (framed user key) | suffix u64 | kind u8 |
#
# Values stay a list; `of_chosen` picks from it.

_WORD: Final = 8
_PAD: Final = bytes(_WORD)
_CUT: Final = TAIL_BYTES + len(TERMINATOR)
"""Bytes of a key behind its escaped user key."""


@cache
def _low_bytes() -> npt.NDArray[np.uint64]:
    """Masks of the `n` low bytes of a word, for each `n` in turn."""
    return np.array([(1 << (8 * count)) - 1 for count in range(_WORD + 1)], np.uint64)


class KeyColumns:
    """The keys of one chunk, in the order of the engine, as columns."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        import pyarrow as pa

        # Arrow joins the keys and counts their bytes in 20 ns a key; `join` and `len` take 30.
        _, offsets, joined = pa.array([_PAD, *keys], pa.binary()).buffers()
        bounds = np.frombuffer(offsets, np.int32, len(keys) + 2)
        self._buffer = joined
        self._ends = bounds[2:]
        self._stem_ends = self._ends - TAIL_BYTES
        self._starts = bounds[1:-1]
        self._bytes = np.frombuffer(joined, np.uint8, bounds[-1])
        # Every eight bytes of the buffer as one big-endian number, at any offset.
        self._words = np.ndarray((int(bounds[-1]) - _WORD + 1,), ">u8", joined, strides=(1,))

        self._check(keys)

    def __len__(self) -> int:
        return len(self._ends)

    def _check(self, keys: Sequence[bytes]) -> None:
        """Raise `CorruptionError` unless each key ends with a terminator, a suffix and a kind."""
        wrong = (self._ends - self._starts) < _CUT
        if not wrong.any():
            wrong = self._bytes[self._ends - 1] > VALUE[0]
            wrong |= self._bytes[self._stem_ends - 2] != TERMINATOR[0]
            wrong |= self._bytes[self._stem_ends - 1] != TERMINATOR[1]
        if wrong.any():
            check_data_key(keys[int(np.argmax(wrong))])

    @cached_property
    def times(self) -> Numbers:
        """The timestamp of each key; for a stamp reference the complement of its id, below 0."""
        suffixes = self._words[self._stem_ends].astype(np.uint64)
        times: Numbers = (~suffixes).view(np.int64)
        return times

    @cached_property
    def is_value(self) -> Bools:
        """Whether each entry is a value. The others are tombstones."""
        kinds: Bools = self._bytes[self._ends - 1] != 0
        return kinds

    @cached_property
    def repeats(self) -> Bools:
        """Whether each entry has the user key of the entry before it. False for the first entry."""
        words, starts, stem_ends = self._words, self._starts, self._stem_ends
        stems = stem_ends - starts
        # The last word tells most neighbours apart. In a short stem only its own bytes count.
        last = words[stem_ends - _WORD].astype(np.uint64)
        apart = last[1:] ^ last[:-1]
        if stems.min() < _WORD:
            apart &= _low_bytes()[np.minimum(stems[1:], _WORD)]
        same = np.flatnonzero((apart == 0) & (stems[1:] == stems[:-1])) + 1
        at = 0
        while same.size:
            longer = stems[same] > at + _WORD
            if not longer.any():
                break
            looked = same[longer]
            equal = np.ones(same.size, np.bool_)
            equal[longer] = words[starts[looked] + at] == words[starts[looked - 1] + at]
            same = same[equal]
            at += _WORD
        repeats = np.zeros(len(stems), np.bool_)
        repeats[same] = True
        return repeats

    def user_keys(self, chosen: Bools) -> pa.Array:
        """The user keys of the chosen entries as an Arrow binary array. Raises `CorruptionError`
        where a key is not escaped."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # Each key is two items, its stem and its tail: one filter cuts the tails and chooses keys.
        count = len(self)
        bounds = np.empty(2 * count + 1, np.int32)
        bounds[:1] = _WORD
        bounds[1::2] = self._ends - _CUT
        bounds[2::2] = self._ends
        halves = pa.Array.from_buffers(
            pa.binary(), 2 * count, [None, pa.py_buffer(bounds), self._buffer]
        )
        wanted = np.zeros(2 * count, np.bool_)
        wanted[::2] = chosen
        escaped = halves.filter(pa.array(wanted))
        if not _has_zeros(escaped):
            return escaped
        user_keys = pc.replace_substring(escaped, pattern=b"\x00\xff", replacement=b"\x00")
        again = pc.replace_substring(user_keys, pattern=b"\x00", replacement=b"\x00\xff")
        if not again.equals(escaped):
            places = pc.indices_nonzero(pc.not_equal(again, escaped))
            key = escaped[places[0].as_py()].as_py()
            raise CorruptionError(f"data key {printable(key)}", "its user key is not escaped")
        return user_keys


def _has_zeros(items: pa.Array) -> bool:
    """Whether a byte of any item of a binary array is zero."""
    _, offsets, data = items.buffers()
    if not len(items) or data is None:
        return False
    bounds = np.frombuffer(offsets, np.int32)[items.offset : items.offset + len(items) + 1]
    return bool((np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] == 0).any())


def of_chosen(values: list[bytes], chosen: Bools) -> list[bytes]:
    """The values of the chosen entries. Usually all are chosen, or all but the last of a chunk: a
    slice costs 1 ns a value, a choice one by one 8 ns."""
    count = int(np.count_nonzero(chosen))
    if chosen[:count].all():
        return values[:count]
    return list(compress(values, chosen.tobytes()))


# --------------------------------------------------------------------------------------------------
# Differences: what happened to a span in a window `(since, upto]`, in key order.
#
# A difference takes one pass over all stored entries of the span, however few of them lie in the
# window. Large windows are read this way, and tests hold the change index to the same result.
#
# * All revisions: every version and every range tombstone in the window, each key oldest first.
# * Latest: the newest version of each key in the window, and the newest range tombstone of each
#   fragment. A version under a newer range tombstone of the window is left out, because the
#   tombstone deletes it.
# * Latest from the beginning of time (`since=0`) is the state: live values, no tombstones.
#
# A range tombstone comes at its start key, before that key's own versions, cut to the span.

Difference: TypeAlias = "Version | RangeTombstone"


def stored_keys(cursor: Cursor) -> Iterator[tuple[bytes, list[StoredEntry]]]:
    """Each user key of an ascending pass over `data`, with all its stored entries in their order.

    Raises `CorruptionError` on bytes that are no key of `data`.
    """
    return entries_by_key(chunks(cursor))


def entries_by_key(
    found: Iterable[tuple[Sequence[bytes], Sequence[bytes]]],
) -> Iterator[tuple[bytes, list[StoredEntry]]]:
    """As `stored_keys`, of stored keys and values that were read already, in ascending order."""
    current = b""
    entries: list[StoredEntry] = []
    for keys, values in found:
        for key, value in zip(keys, values, strict=True):
            stem = key[:-TAIL_BYTES]
            if stem != current or not stem:
                if entries:
                    yield unframe(current), entries
                current, entries = stem, []
                if not is_framed(stem):
                    check_data_key(key)
            if key[-1] > VALUE[0]:
                check_data_key(key)
            entries.append((key[-TAIL_BYTES:], value))
    if entries:
        yield unframe(current), entries


def differences(
    cursor: Cursor,
    span: Span,
    *,
    since: int,
    upto: int,
    latest: bool,
    fragments: Fragments,
    stamps: Stamps,
) -> Iterator[Difference]:
    """The versions and range tombstones of `(since, upto]`, in key order. `cursor` passes over
    `span`."""
    state = latest and since == 0
    ranges = [] if state else fragments.tombstones(span, since=since, upto=upto, latest=latest)
    versions = (
        Version(key, Timestamp(timestamp), value)
        for key, revisions, stack in _histories(cursor, fragments, stamps, since)
        for timestamp, value in choose(revisions, stack, since=since, upto=upto, latest=latest)
    )
    return _merged(ranges, versions)


def _histories(
    cursor: Cursor, fragments: Fragments, stamps: Stamps, since: int
) -> Iterator[tuple[bytes, list[Revision], tuple[int, ...]]]:
    """The keys that may have changed after `since`, with their revisions and range tombstones."""
    found = _changed(cursor, stamps, since) if since > 0 else chunks(cursor)
    for key, entries in entries_by_key(found):
        stack = fragments.stack(key) if fragments else ()
        yield key, timeline(entries, stamps, stack), stack


def _changed(
    cursor: Cursor, stamps: Stamps, since: int
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """All entries of the keys that have one with a time above `since`, or one of an import that was
    added or reverted above it. 0.2 us an entry; a history takes 3 us. A key that has more entries
    than a chunk is given in any case, and not looked at: its keys may be too large for one array.
    """
    long_one = b""
    for keys, values in _whole_keys(cursor, longest=SCAN_CHUNK):
        stem = keys[-1][:-TAIL_BYTES]
        if len(keys) > SCAN_CHUNK and keys[0][:-TAIL_BYTES] == stem:
            long_one = stem
            yield keys, values
            continue
        columns = KeyColumns(keys)
        is_new = columns.times > since
        if keys[0][:-TAIL_BYTES] == long_one:  # the rest of it
            is_new[0] = True
        references = columns.times < 0
        for negative in _distinct(columns.times[references]) if references.any() else ():
            lifetime = stamps.get(encode_reference(int(~negative) & IMPORT_ID_MAX))
            if lifetime is not None and (
                lifetime.added > since or since < lifetime.reverted <= TIMESTAMP_MAX
            ):
                is_new |= columns.times == negative
        if is_new.any():
            firsts = np.flatnonzero(~columns.repeats)
            has_new = np.logical_or.reduceat(is_new, firsts)
            chosen = np.repeat(has_new, np.diff(firsts, append=len(keys))).tolist()
            yield list(compress(keys, chosen)), list(compress(values, chosen))


def choose(
    revisions: list[Revision], stack: tuple[int, ...], *, since: int, upto: int, latest: bool
) -> list[Revision]:
    """The revisions of one key that a difference shows, oldest first; `revisions` has the newest
    first.

    A deletion by a range tombstone is left out: the difference shows the range tombstone itself.
    """
    if latest:
        newest = next((revision for revision in revisions if revision[0] <= upto), None)
        if newest is None or newest[0] <= since or (newest[1] is None and newest[0] in stack):
            return []
        return [] if since == 0 and newest[1] is None else [newest]
    deleted = set(stack)  # a search of the stack for each revision would be quadratic
    return [
        revision
        for revision in reversed(revisions)
        if since < revision[0] <= upto and not (revision[1] is None and revision[0] in deleted)
    ]


def _merged(ranges: list[RangeTombstone], versions: Iterable[Version]) -> Iterator[Difference]:
    waiting = iter(ranges)
    tombstone = next(waiting, None)
    for version in versions:
        while tombstone is not None and tombstone.start <= version.key:
            yield tombstone
            tombstone = next(waiting, None)
        yield version
    while tombstone is not None:
        yield tombstone
        tombstone = next(waiting, None)


# --------------------------------------------------------------------------------------------------
# Exports: every version of a window `(since, upto]` in columns, for copies of a store's history.
#
# An export passes once over the entries and decides about a chunk of columns at a time. Where
# no import touched a key, each entry of the key is a version and stands in the order of an export:
# by key, newest first. In rows of imports the stamp replaces the reference, and a key that has such
# rows beside others is sorted again. A key goes through `timeline` only where an import was
# reverted.
#
# The columns hold no range tombstones: these come whole, from the fragments.


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


def _whole_keys(
    cursor: Cursor, *, longest: int = sys.maxsize
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Chunks in which the entries of a key stay together, unless it has more than `longest`."""
    keys: list[bytes] = []
    values: list[bytes] = []
    for more_keys, more_values in chunks(cursor):
        keys += more_keys
        values += more_values
        stem = keys[-1][:-TAIL_BYTES]
        if keys[0][:-TAIL_BYTES] == stem:  # one key has all of them, and perhaps more
            if len(keys) > longest:
                yield keys, values
                keys, values = [], []
            continue
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
