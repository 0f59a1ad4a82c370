"""Cuts of the key space into pieces of about equal size in bytes.

Cutting reads the bounds and sizes of the files and no row. It takes each file to be equally dense
between its bounds. The pieces are even if there are many files, or if keys are spread evenly. They
are disjoint and complete in every case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat, zip_longest
from typing import Final

from kvstore.codec.keys import TAIL_BYTES, check_data_key
from kvstore.codec.ordered import unframe
from kvstore.engine.api import FileSpan
from kvstore.errors import CorruptionError
from kvstore.span import Span

_DIGITS: Final = 8
"""Bytes behind the common prefix that two bounds are interpolated over."""

_ALPHABETS: Final = (b"0123456789", b"0123456789abcdef", b"0123456789ABCDEF")
"""The digits of numbers in keys. Between bounds of digits all keys have digits, so most of 256 byte
values would be cuts where no key is."""

_BYTES: Final = bytes(range(256))


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
