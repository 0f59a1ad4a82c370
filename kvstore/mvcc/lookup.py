"""Look-ups: the value of one key, or of many, at one time.

A read sees the newest version of a key at or below its time, if that version is a value and no
newer range tombstone covers it. Versions are stored newest first, so the read takes the first
entry of a stretch of stored keys. The stretch has these bounds:

    escaped key | 00 01 | suffix of the time ...      where the read's time begins, `rest_of`
    escaped key | 00 01 | suffix of the tombstone ff  where the tombstone takes over, `limit_of`
    escaped key | 00 02                               where the next key begins, `UNLIMITED`

So range tombstones cost a look-up one binary search for the limit, and nothing is decoded.

Labels that lie closely are answered by a pass over the sorted files (`columns_of_files`), which
reads all entries of the blocks that have labels.

Invariants
1. Without imports the versions of a key, newest first, are all its entries.
2. With imports the stamp references of a key sort first, and each may be newer than any version.
3. A tombstone above the time of the read makes the stretch empty. A look-up that finds nothing
   therefore looks again, below the newest tombstone that the read sees.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Buffer

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.codec.keys import (
    ESCAPED_ZERO,
    TERMINATOR,
    UNLIMITED,
    ZERO,
    encode_suffix,
    escape,
    span_bounds,
)
from kvstore.engine.api import Engine, HeldFiles
from kvstore.limits import STEP_ENTRIES, STEPS_BEFORE_SEEK
from kvstore.loops.files import Answers
from kvstore.loops.lookup import (
    find_among,
    find_floors,
    find_following,
    find_many,
    find_ordered,
    find_timed,
)
from kvstore.loops.shapes import ABSENT, Keys
from kvstore.mvcc.arrow import array_of, buffers_of
from kvstore.mvcc.fragments import Fragments, limit_of
from kvstore.mvcc.key_history import Stamps

LiveRow: TypeAlias = "tuple[bytes, bytes]"
"""A live key and its value."""


def rest_of(as_of: int) -> bytes:
    """The bytes behind the escaped key at which the versions at or below `as_of` begin."""
    return TERMINATOR + encode_suffix(as_of)


def value_below(engine: Engine, key: bytes, as_of: int, fragments: Fragments) -> bytes | None:
    """The value of `key` at `as_of` in a store without imports. Called where the stretch was empty,
    perhaps because of a tombstone newer than `as_of`. One search in memory, and one seek if there
    is such a tombstone."""
    newest = fragments.newest(key, as_of)
    if fragments.stack(key)[:1] == (newest,):
        return None
    value = engine.find(key, rest_of(as_of), limit_of(newest))
    return None if value is ABSENT else value


def values_at(
    engine: Engine, keys: Sequence[bytes], as_of: int, fragments: Fragments
) -> list[bytes | None]:
    """The values of `keys` at `as_of` in a store without imports. One seek a key."""
    ticket, reader = engine.borrow()
    rest, (limits, depth) = rest_of(as_of), fragments.tree
    absent = ABSENT if limits.keys else None
    found = find_many(reader, engine.check, keys, rest, limits, depth, absent)
    engine.give_back(ticket, reader)
    if absent is not None:
        for at, value in enumerate(found):
            if value is ABSENT:
                found[at] = value_below(engine, keys[at], as_of, fragments)
    return cast("list[bytes | None]", found)


def values_among_imports(
    engine: Engine, keys: Sequence[bytes], as_of: int, fragments: Fragments, stamps: Stamps
) -> list[bytes | None]:
    """The values of `keys` at `as_of` in a store with imports. Usually a seek and a step a key."""
    ticket, reader = engine.borrow()
    found, times = find_among(reader, engine.check, keys, as_of, rest_of(as_of), stamps)
    engine.give_back(ticket, reader)
    if not fragments:
        return found
    return [
        None if fragments.newest(key, as_of) > time else value
        for key, time, value in zip(keys, memoryview(times).cast("q"), found, strict=True)
    ]


class TimedValues(NamedTuple):
    """Values of some keys, each with the time of its version: None and -1 where there is none."""

    values: list[bytes | None]
    times: npt.NDArray[np.int64]


class LabelColumns(NamedTuple):
    """Labels in order: the buffers of their distinct `keys`, which ascend; where the labels of each
    key start, and end; their times, newest first for each key."""

    keys: tuple[int, Buffer, Buffer]
    starts: Buffer
    times: Buffer


class SearchBounds(NamedTuple):
    """The bounds of a search for versions. A version that is older than `age_max` at the time of
    its read is left out. The search is given up once the values of several keys have more than
    `bytes_max` bytes. It passes `steps` entries one by one before it seeks, `STEPS_BEFORE_SEEK`
    where this is None."""

    age_max: int = TIMESTAMP_MAX
    bytes_max: int = sys.maxsize
    steps: int | None = None


EVERYTHING: Final = SearchBounds()


def versions_at(
    engine: Engine,
    keys: list[bytes],
    times: Buffer,
    fragments: Fragments,
    stamps: Stamps,
    bounds: SearchBounds = EVERYTHING,
) -> TimedValues | None:
    """The version that each of `keys` has at its own time of `times`, integers of 64 bits. None
    where the values together have too many bytes. At most a seek for each version."""
    ticket, reader = engine.borrow()
    limits, depth = fragments.tree
    steps = STEPS_BEFORE_SEEK if bounds.steps is None else bounds.steps
    age_max, bytes_max = bounds.age_max, bounds.bytes_max
    found = find_timed(
        reader, engine.check, keys, times, limits, depth, stamps, age_max, steps, bytes_max
    )
    engine.give_back(ticket, reader)
    return None if found is None else TimedValues(found[0], np.frombuffer(found[1], np.int64))


class TimedColumns(NamedTuple):
    """The values of labels in order, and the times of their versions: null and -1 where there is
    none."""

    values: pa.Array
    times: npt.NDArray[np.int64]


def columns_at(
    engine: Engine,
    labels: LabelColumns,
    fragments: Fragments,
    stamps: Stamps,
    bounds: SearchBounds,
) -> TimedColumns | None:
    """As `versions_at`, for labels in order, as columns. No object is made for a label."""
    ticket, reader = engine.borrow()
    limits, depth = fragments.tree
    steps = STEPS_BEFORE_SEEK if bounds.steps is None else bounds.steps
    age_max, bytes_max = bounds.age_max, bounds.bytes_max
    found = find_ordered(
        reader, engine.check, *labels, limits, depth, stamps, age_max, steps, bytes_max
    )
    engine.give_back(ticket, reader)
    if found is None:
        return None
    offsets, data, stored = found
    times = np.frombuffer(stored, np.int64)
    return TimedColumns(array_of(len(times), offsets, data, times >= 0), times)


def columns_of_files(
    held: HeldFiles,
    labels: LabelColumns,
    fragments: Fragments,
    stamps: Stamps,
    bounds: SearchBounds,
) -> TimedColumns | None:
    """As `columns_at`, by a pass over files that are held open, without the interpreter lock. Costs
    the blocks that have entries of labels, 30 ns an entry."""
    keys = escaped_keys(labels.keys)
    answers = Answers(
        keys,
        labels.starts,
        labels.times,
        bounds.age_max,
        bounds.bytes_max,
        fragments.stretch if fragments else None,
    )
    begin, end = span_of(labels.keys)
    one = held.begin(*span_bounds(begin, end), (0, stamps, None), answers=answers)
    while held.take(one, sys.maxsize, sys.maxsize, STEP_ENTRIES):
        pass
    if answers.is_given_up:
        return None
    offsets, data, stored = answers.columns()
    times = np.frombuffer(memoryview(stored), np.int64)
    return TimedColumns(array_of(len(times), offsets, data, times >= 0), times)


def span_of(keys: Keys) -> tuple[bytes, bytes]:
    """The least of some ascending keys, and what lies right behind the greatest."""
    count, offsets, data = keys
    ends, joined = np.frombuffer(memoryview(offsets), np.int32), memoryview(data)
    return bytes(joined[ends[0] : ends[1]]), bytes(joined[ends[count - 1] : ends[count]]) + b"\0"


def escaped_keys(keys: Keys) -> Keys:
    """The buffers of keys, escaped."""
    import pyarrow.compute as pc

    count, offsets, data = keys
    if not (np.frombuffer(memoryview(data), np.uint8) == 0).any():
        return keys
    found = pc.replace_substring(array_of(count, offsets, data), ZERO, ESCAPED_ZERO)
    return buffers_of(found)


def following_at(
    engine: Engine,
    keys: Sequence[bytes],
    times: Buffer,
    upto: int,
    fragments: Fragments,
    stamps: Stamps,
) -> npt.NDArray[np.int64]:
    """For each of `keys`: the time of its oldest version at or above its own time of `times`,
    integers of 64 bits, and at or below `upto`; -1 where there is none. Deletions and reverts are
    versions. A seek for each key."""
    ticket, reader = engine.borrow()
    limits, depth = fragments.tree
    found = find_following(reader, engine.check, keys, times, limits, depth, stamps, upto)
    engine.give_back(ticket, reader)
    return np.frombuffer(found, np.int64)


def floors_at(
    engine: Engine,
    keys: Sequence[bytes],
    times: Sequence[int],
    span: Span,
    fragments: Fragments,
    stamps: Stamps,
    bytes_max: int = sys.maxsize,
) -> list[LiveRow | None] | None:
    """For each of `keys` at its own time of `times`: the greatest live key in `span` that is not
    above it, with its value. None where the rows of several keys have more than `bytes_max`
    bytes."""
    least, end = span_bounds(span.start, span.end)
    places = [escape(key) + UNLIMITED for key in keys]
    if end is not None:
        places = [min(place, end) for place in places]
    ticket, reader = engine.borrow()
    limits, depth = fragments.tree
    steps = STEPS_BEFORE_SEEK
    found = find_floors(
        reader, engine.check, places, times, least, limits, depth, stamps, steps, bytes_max
    )
    engine.give_back(ticket, reader)
    return found
