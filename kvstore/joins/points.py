"""Values and floors of many keys, each at a time of its own.

GC and clears may take history away during a read. They announce each removal first, so the look
after the read tells whether the read was whole (`kvstore.reads`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np

from kvstore.arguments import is_many
from kvstore.joins.labels import (
    Labels,
    require_complete,
    require_kept,
    require_span_kept,
    times_of,
)
from kvstore.mvcc.lookup import EVERYTHING, SearchBounds
from kvstore.parts import Parts
from kvstore.span import Span, require_key
from kvstore.timestamp import TimeLike

LiveRow = tuple[bytes, bytes]


def values(
    parts: Parts,
    keys: list[bytes],
    as_of: Sequence[TimeLike],
    bounds: SearchBounds = EVERYTHING,
    first: int = 0,
) -> list[bytes | None] | None:
    """The value of each key at its own time; None where the values are beyond `bounds`. Errors
    number the keys from `first` on. At most a seek for each version."""
    labels = Labels(keys, times_of(parts, as_of, len(keys)), first)
    labels = require_complete(parts, labels)
    require_kept(parts, labels)
    found = parts.versions.get_timed(keys, labels.times.data, bounds)
    if _was_below_floor(parts, labels):
        require_kept(parts, labels)
    return None if found is None else found.values


def floors(
    parts: Parts,
    keys: Sequence[bytes],
    as_of: TimeLike | Sequence[TimeLike] | None,
    prefix: bytes | None,
    bytes_max: int = sys.maxsize,
    first: int = 0,
) -> list[LiveRow | None] | None:
    """For each key, at one time or at its own: the greatest live key with `prefix` that is not
    above it, with its value. Keys of tables are left out, as scans leave them out. None where the
    rows of several keys have more than `bytes_max` bytes. Errors number the keys from `first`
    on."""
    keys = [require_key(key) for key in keys]
    span = parts.reserve.narrow(Span() if prefix is None else Span.of_prefix(prefix))
    if as_of is None:
        hull = Span(span.start, max([span.start, *keys]) + b"\0")
        read = partial(_floors_at_once, parts, keys, span, bytes_max)
        return parts.reads.read(None, hull, read)
    if is_many(as_of):
        labels = Labels(keys, times_of(parts, as_of, len(keys)), first)
        labels = require_complete(parts, labels)
        if len(keys) and int(labels.times.min()) < parts.committer.since:
            require_kept(parts, labels)
    else:
        at = parts.reads.at(as_of)
        labels = Labels(keys, np.full(len(keys), at, np.int64))
    found = parts.versions.floors(keys, labels.times.tolist(), span, bytes_max)
    if found is not None and _was_below_floor(parts, labels):
        for at, (key, row) in enumerate(zip(keys, found, strict=True)):
            # The search went from the key down to the floor, or to the first key of all.
            searched = span.intersect(b"" if row is None else row[0], key + b"\0")
            if searched is not None:
                require_span_kept(parts, labels, at, searched)
    return found


def _floors_at_once(
    parts: Parts, keys: list[bytes], span: Span, bytes_max: int, at: int
) -> list[LiveRow | None] | None:
    return parts.versions.floors(keys, [at] * len(keys), span, bytes_max)


def _was_below_floor(parts: Parts, labels: Labels) -> bool:
    """Whether GC or a clear may have taken away history that was read."""
    times = labels.times
    return bool(len(times)) and int(times.min()) < parts.committer.frontiers.floor
