"""A pass over sorted files by several threads: cuts of the key space, and the threads.

A thread that reads files itself holds the interpreter lock for a tenth of its time
(`kvstore.loops.files`), so threads share a pass where processes were needed before. RocksDB's
iterator keeps the lock, and gains nothing.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat, zip_longest
from typing import Final, NamedTuple

from kvstore.base.forks import own
from kvstore.base.span import Span
from kvstore.codec.keys import TAIL_BYTES, check_data_key, span_bounds, unframe
from kvstore.engine.api import FileSpan, HeldFiles
from kvstore.errors import ClosedError, CorruptionError
from kvstore.limits import (
    SCAN_AHEAD_BYTES_MAX,
    SCAN_PIECE_BYTES,
    SCAN_PIECES_MAX,
)
from kvstore.mvcc.scan import FilePass, Read, RowArrays

# --------------------------------------------------------------------------------------------------
# Cuts of the key space into pieces of about equal size in bytes.
#
# Cutting reads the bounds and sizes of the files and no row. It takes each file to be equally dense
# between its bounds. The pieces are even if there are many files, or if keys are spread evenly.
# They are disjoint and complete in every case.

_DIGITS: Final = 8
"""Bytes behind the common prefix that two bounds are interpolated over."""

_ALPHABETS: Final = (b"0123456789", b"0123456789abcdef", b"0123456789ABCDEF")
"""The digits of numbers in keys. Between bounds of digits all keys have digits, so most of 256 byte
values would be cuts where no key is."""

_BYTES: Final = bytes(range(256))


_SHARES: Final = 64
"""Steps of the way through a file, each of which lies in a span or not."""


def split_span(span: Span, files: Iterable[FileSpan], count: int) -> list[Span]:
    """Cut `span` into at most `count` pieces, ascending, from user keys that bound `files`."""
    pieces = sorted(_pieces(span, list(files), count))
    total = sum(size for _, size in pieces)
    cuts: list[bytes] = []
    passed = 0.0
    for start, size in pieces:
        due = passed + size / 2 >= total * (len(cuts) + 1) / count
        if due and start > (cuts[-1] if cuts else span.start):
            cuts.append(start)
        passed += size
    starts = [span.start, *cuts[: count - 1]]
    return [Span(a, b) for a, b in zip(starts, [*starts[1:], span.end], strict=True)]


def user_spans(files: Iterable[FileSpan]) -> Iterator[FileSpan]:
    """The files of `data`, with their bounds as user keys. Files of other families are left out."""
    for file in files:
        try:
            check_data_key(file.first)
            check_data_key(file.last)
        except CorruptionError:
            continue
        first, last = (unframe(key[:-TAIL_BYTES]) for key in (file.first, file.last))
        yield FileSpan(first, last, file.size_bytes)


def bytes_in(span: Span, files: Iterable[FileSpan]) -> int:
    """The bytes of `files` with keys of `span`, estimated: a file that lies there in part counts by
    the share of its way through the key space."""
    found = 0.0
    for first, last, size in files:
        if last < span.start or (span.end is not None and first >= span.end):
            continue
        if first in span and last in span:
            found += size
        else:
            steps = _ladder(first, last, _SHARES)
            found += size * sum(key in span for key in steps) / _SHARES
    return round(found)


def _pieces(span: Span, files: list[FileSpan], count: int) -> Iterator[tuple[bytes, float]]:
    """Start and bytes of stretches of the files inside `span`, none above a quarter share."""
    inside = [
        (max(first, span.start), last if span.end is None else min(last, span.end), size)
        for first, last, size in files
        if last >= span.start and (span.end is None or first < span.end)
    ]
    total = sum(size for *_, size in inside)
    for first, last, size in inside:
        steps = max(1, min(count * 4, -(-size * count * 4 // max(total, 1))))
        for start in _ladder(first, last, steps):
            yield start, size / steps


def _ladder(first: bytes, last: bytes, steps: int) -> Iterator[bytes]:
    """The keys 0, 1, ... `steps - 1` steps of the way from `first` to `last`, by their bytes."""
    yield first
    if first >= last:
        yield from repeat(first, steps - 1)
        return
    pairs = enumerate(zip(first, last, strict=False))
    common = next((at for at, (a, b) in pairs if a != b), len(first))
    lows = first[common : common + _DIGITS]
    highs = last[common : common + _DIGITS]
    alphabets = []
    low = high = 0
    for a, b in zip_longest(lows, highs, fillvalue=0):
        alphabets.append(alphabet := _alphabet(a, b))
        low = low * len(alphabet) + alphabet.index(a)
        high = high * len(alphabet) + alphabet.index(b)
    for step in range(1, steps):
        rest = low + (high - low) * step // steps
        digits = bytearray()
        for alphabet in reversed(alphabets):
            rest, digit = divmod(rest, len(alphabet))
            digits.append(alphabet[digit])
        digits.reverse()
        yield first[:common] + digits.rstrip(b"\0")


def _alphabet(low: int, high: int) -> bytes:
    """The bytes that keys have where one bound has `low` and the other `high`."""
    return next((each for each in _ALPHABETS if low in each and high in each), _BYTES)


# --------------------------------------------------------------------------------------------------
# The threads of a scan.
#
# Invariants
# 1. The pieces cover the span in key order and share no key. The rows come piece by piece.
# 2. Threads take the pieces in order. The thread of the piece that is being handed out never
#    waits, so the scan comes to its end; the others wait while `SCAN_AHEAD_BYTES_MAX` bytes for
#    each thread are ready.
# 3. An error comes where its rows would have come.
# 4. The end of a scan, whatever causes it, ends its threads behind the step that they are in, and
#    lets the files go. A thread refers to the work and not to the scan, so that a scan that nobody
#    refers to ends.


class _Piece(NamedTuple):
    """The rows of a stretch of keys, as far as they are read."""

    begin: bytes
    end: bytes | None
    ready: deque[RowArrays | BaseException | None]
    """Rows; behind the last ones None, or the error that ended the piece."""


class _Work:
    """What the threads of a scan share."""

    def __init__(self, held: HeldFiles, read: Read, pieces: Sequence[_Piece], chunk: int) -> None:
        self.held, self.read, self.pieces, self.chunk = held, read, pieces, chunk
        self.changed = threading.Condition()
        self.threads: list[threading.Thread] = []
        self.ahead = 0
        self.taken = 0
        self.current = 0
        self.is_over = False

    def begin(self, count: int) -> None:
        """Start the threads."""
        for _ in range(min(count, len(self.pieces))):
            thread = threading.Thread(target=self._run, name="kvstore-scan", daemon=True)
            self.threads.append(thread)
            thread.start()

    def rows(self) -> Iterator[RowArrays]:
        """All rows, in order."""
        for number, piece in enumerate(self.pieces):
            with self.changed:
                self.current = number
                self.changed.notify_all()
            while (found := self._next(piece)) is not None:
                yield found

    def end(self) -> None:
        """End the threads and let the files go. Repeatable."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
        if not sys.is_finalizing():  # else the threads do not run any more
            for thread in self.threads:
                thread.join()
        self.held.close()

    def _next(self, piece: _Piece) -> RowArrays | None:
        with self.changed:
            self.changed.wait_for(lambda: piece.ready or self.is_over)
            if not piece.ready or self.held.is_closed:
                raise ClosedError("the scan")
            found = piece.ready.popleft()
            if isinstance(found, RowArrays):
                self.ahead -= _size(found)
                self.changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def _run(self) -> None:
        while True:
            with self.changed:
                number = self.taken
                if number == len(self.pieces) or self.is_over:
                    return
                self.taken += 1
            piece = self.pieces[number]
            found: BaseException | None = None
            try:
                for rows in FilePass(
                    self.held, piece.begin, piece.end, self.read, keys_only=False, lets_go=False
                ).columns(self.chunk):
                    if not self._put(number, rows):
                        return
            except BaseException as error:  # noqa: BLE001  # raised again where the rows are taken
                found = error
            with self.changed:
                piece.ready.append(found)
                self.changed.notify_all()

    def _put(self, number: int, rows: RowArrays) -> bool:
        """Have rows ready. Waits while enough are. False once the scan is over."""
        most = SCAN_AHEAD_BYTES_MAX * len(self.threads)
        with self.changed:
            self.changed.wait_for(
                lambda: self.ahead < most or number == self.current or self.is_over
            )
            if not self.is_over:
                self.pieces[number].ready.append(rows)
                self.ahead += _size(rows)
                self.changed.notify_all()
            return not self.is_over


class ThreadedScan:
    """An iterator over rows. To end it early, close it or drop the last reference."""

    def __init__(
        self, held: HeldFiles, span: Span, read: Read, *, chunk: int, threads: int
    ) -> None:
        pieces = [
            _Piece(*span_bounds(piece.start, piece.end), deque())
            for piece in _pieces_of(span, held.spans, threads)
        ]
        self._work = _Work(held, read, pieces, chunk)
        self._rows = self._work.rows()
        own(self, "the scan")
        self._work.begin(threads)

    def __iter__(self) -> ThreadedScan:
        return self

    def __next__(self) -> RowArrays:
        try:
            return next(self._rows)
        except BaseException:
            self._work.end()
            raise

    def close(self) -> None:
        """End the scan. Repeatable; a scan that has come to its end stays at its end."""
        self._work.end()

    def __del__(self) -> None:
        self.close()  # which does nothing in a forked child


def _size(rows: RowArrays) -> int:
    return int(rows.keys.nbytes + rows.values.nbytes)


def _pieces_of(span: Span, spans: Iterable[FileSpan], threads: int) -> list[Span]:
    """Cut `span` into a few pieces for each thread, and into more if it is large."""
    files = [
        file
        for file in user_spans(spans)
        if file.last >= span.start and (span.end is None or file.first < span.end)
    ]
    wanted = max(4 * threads, sum(file.size_bytes for file in files) // SCAN_PIECE_BYTES)
    return split_span(span, files, min(wanted, SCAN_PIECES_MAX))
