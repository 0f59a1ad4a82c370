"""Scans: the live keys of a span as of a time, in chunks, both ways.

Entries come from the engine in key order, the versions of one key together: references first,
then newest first (descending passes: the other way round). Of each key the newest version at or
below the time of the read counts, and it is live if it is a value that no newer range tombstone
covers.

This loop is hot: it runs once per stored entry. It compares suffixes as bytes against a bound
computed once, and leaves the escaped key as it is until the chunk is handed out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import TypeAlias

from kvstore.codec.keys import FIRST_TIMED_SUFFIX, TAIL_BYTES, decode_suffix, encode_suffix
from kvstore.codec.ordered import TERMINATOR, escape, unescape
from kvstore.engine.api import Cursor
from kvstore.limits import SCAN_CHUNK
from kvstore.mvcc.fragments import Cover
from kvstore.mvcc.version import Stamps

Chunk: TypeAlias = "tuple[list[bytes], list[bytes]]"
"""User keys and values of some rows, in scan order."""

_FIRST_CHUNK = 64
"""Entries of the first chunk: a scan with a small limit should not read thousands."""

_STEM_CUT = TAIL_BYTES + len(TERMINATOR)


def live_rows(
    cursor: Cursor, *, as_of: int, stamps: Stamps, cover: Cover, reverse: bool = False
) -> Iterator[Chunk]:
    """Keys and values alive at `as_of`, chunk by chunk. Closes `cursor` when done or closed."""
    decide = _Backward(as_of, stamps, cover) if reverse else _Forward(as_of, stamps, cover)
    count = _FIRST_CHUNK
    try:
        while True:
            keys, values = cursor.take(count)
            chunk = decide.feed(keys, values) if keys else decide.finish()
            if chunk[0]:
                yield _unescaped(chunk[0]), chunk[1]
            if not keys:
                return
            count = min(count * 4, SCAN_CHUNK)
    finally:
        cursor.close()


def _unescaped(escaped: list[bytes]) -> list[bytes]:
    return [unescape(key) for key in escaped] if b"\x00" in b"".join(escaped) else escaped


def _deleted_at(cover: Cover) -> Callable[[bytes], int] | None:
    """Timestamp of the newest range tombstone over an escaped key; None where there is none.

    Escaping keeps the order, and a bound is never a framed key, so escaped bounds compare
    with escaped keys as the keys themselves do.
    """
    if not cover.starts:
        return None
    starts, newest = [escape(start) for start in cover.starts], [0, *cover.newest]
    return lambda key: newest[bisect.bisect_right(starts, key)]


class _Forward:
    """Ascending: of each key, references come first, then versions from new to old."""

    def __init__(self, as_of: int, stamps: Stamps, cover: Cover) -> None:
        self._as_of = as_of
        self._bound = encode_suffix(as_of)
        self._stamps = stamps
        self._deleted_at = _deleted_at(cover)
        self._decided = b""
        self._import: tuple[bytes, int, bytes, bytes] | None = None

    def feed(self, keys: list[bytes], values: list[bytes]) -> Chunk:
        bound, deleted_at = self._bound, self._deleted_at
        decided, pending = self._decided, self._import
        out: Chunk = ([], [])
        add_key, add_value = out[0].append, out[1].append
        for key, value in zip(keys, values, strict=True):
            stem = key[:-TAIL_BYTES]
            if stem == decided:
                continue
            tail = key[-TAIL_BYTES:]
            if tail < bound:
                if tail < FIRST_TIMED_SUFFIX:
                    pending = self._take_reference(stem, tail, value, pending, out)
                continue
            decided = stem
            if pending is not None:
                row, pending = pending, None
                imported_over = row[0] == stem and row[1] > decode_suffix(tail[:-1])
                if imported_over or row[0] != stem:
                    _emit(row, deleted_at, out)
                if imported_over:
                    continue
            if tail[8] and (
                deleted_at is None or deleted_at(stem[:-2]) <= decode_suffix(tail[:-1])
            ):
                add_key(key[:-_STEM_CUT])
                add_value(value)
        self._decided, self._import = decided, pending
        return out

    def finish(self) -> Chunk:
        out: Chunk = ([], [])
        if self._import is not None:
            _emit(self._import, self._deleted_at, out)
        return out

    def _take_reference(
        self,
        stem: bytes,
        tail: bytes,
        value: bytes,
        pending: tuple[bytes, int, bytes, bytes] | None,
        out: Chunk,
    ) -> tuple[bytes, int, bytes, bytes] | None:
        """Remember the newest visible import row of a key until its versions have been seen."""
        lifetime = self._stamps.get(tail[:-1])
        if lifetime is None or not lifetime.added <= self._as_of < lifetime.reverted:
            return pending
        if pending is not None and pending[0] != stem:
            _emit(pending, self._deleted_at, out)
            pending = None
        if pending is None or lifetime.added > pending[1]:
            return stem, lifetime.added, tail, value
        return pending


class _Backward:
    """Descending: of each key, versions come from old to new, then references."""

    def __init__(self, as_of: int, stamps: Stamps, cover: Cover) -> None:
        self._as_of = as_of
        self._bound = encode_suffix(as_of)
        self._stamps = stamps
        self._deleted_at = _deleted_at(cover)
        self._best: tuple[bytes, int, bytes, bytes] | None = None

    def feed(self, keys: list[bytes], values: list[bytes]) -> Chunk:
        out: Chunk = ([], [])
        best = self._best
        for key, value in zip(keys, values, strict=True):
            stem, tail = key[:-TAIL_BYTES], key[-TAIL_BYTES:]
            timestamp = self._visible_at(tail)
            if timestamp is None:
                continue
            if best is not None and best[0] != stem:
                _emit(best, self._deleted_at, out)
                best = None
            if best is None or timestamp > best[1]:
                best = (stem, timestamp, tail, value)
        self._best = best
        return out

    def finish(self) -> Chunk:
        out: Chunk = ([], [])
        if self._best is not None:
            _emit(self._best, self._deleted_at, out)
        return out

    def _visible_at(self, tail: bytes) -> int | None:
        if tail >= self._bound:
            return decode_suffix(tail[:-1])
        if tail >= FIRST_TIMED_SUFFIX:
            return None
        lifetime = self._stamps.get(tail[:-1])
        if lifetime is None or not lifetime.added <= self._as_of < lifetime.reverted:
            return None
        return lifetime.added


def _emit(
    row: tuple[bytes, int, bytes, bytes],
    deleted_at: Callable[[bytes], int] | None,
    out: Chunk,
) -> None:
    """Hand out the decided version of one key, if it is alive."""
    stem, timestamp, tail, value = row
    if tail[8] and (deleted_at is None or deleted_at(stem[:-2]) <= timestamp):
        out[0].append(stem[:-2])
        out[1].append(value)
