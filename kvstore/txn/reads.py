"""The read set of a transaction: keys and spans that no other commit may write before it commits.

Invariants
1. The set covers everything that was read. If there is too much to remember, neighbours are joined
   into spans that cover more. A needless conflict is possible then, a missed one never.
2. The set holds at most `TXN_KEYS_MAX` keys and `TXN_SPANS_MAX` spans.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence

from kvstore.errors import printable
from kvstore.limits import TXN_KEYS_MAX, TXN_SPANS_MAX
from kvstore.span import Span, merge_spans


class ReadSet:
    """Keys and spans that were read."""

    __slots__ = ("_keys", "_keys_max", "_spans", "_spans_max")

    def __init__(self, *, keys_max: int | None = None, spans_max: int | None = None) -> None:
        self._keys: set[bytes] = set()
        self._spans: list[Span] = []
        self._keys_max = TXN_KEYS_MAX if keys_max is None else keys_max
        self._spans_max = TXN_SPANS_MAX if spans_max is None else spans_max

    def add_key(self, key: bytes) -> None:
        """Note a read of `key`, which may be absent."""
        self._keys.add(key)
        if len(self._keys) > self._keys_max:
            ordered = sorted(self._keys)
            width = -(-len(ordered) // max(1, self._spans_max // 2))
            groups = (ordered[i : i + width] for i in range(0, len(ordered), width))
            self._keys = set()
            for group in groups:
                self.add_span(Span(group[0], group[-1] + b"\x00"))

    def add_span(self, span: Span) -> None:
        """Note a read of all keys in `span`, including absent ones."""
        self._spans.append(span)
        if len(self._spans) > self._spans_max:
            self._spans = merge_spans(self._spans)
        if len(self._spans) > self._spans_max:
            firsts, lasts = self._spans[::2], [*self._spans[1::2], self._spans[-1]]
            pairs = zip(firsts, lasts, strict=False)
            self._spans = [Span(first.start, last.end) for first, last in pairs]

    def touched(
        self, keys: Collection[bytes], spans: Sequence[tuple[bytes, bytes | None]]
    ) -> str | None:
        """The first of `keys` and `spans` that was read, as text; None if none was.

        O(n log r) for n keys and spans against r reads, and O(r log r) once.
        """
        if not self._keys.isdisjoint(keys):
            return f"key {printable(min(self._keys.intersection(keys)))}"
        if self._spans:
            self._spans = merge_spans(self._spans)
            starts = [span.start for span in self._spans]
            for key in keys:
                if self._span_with(key, starts) is not None:
                    return f"key {printable(key)}"
        for start, end in spans:
            if self._meets(start, end):
                above = "the end" if end is None else printable(end)
                return f"[{printable(start)}, {above})"
        return None

    def points(self) -> Iterable[bytes]:
        """The keys that were read one by one, in no order."""
        return tuple(self._keys)

    def spans(self) -> Iterable[Span]:
        """The spans that cover the scans."""
        return tuple(self._spans)

    def _span_with(self, key: bytes, starts: list[bytes]) -> Span | None:
        index = bisect.bisect_right(starts, key) - 1
        return self._spans[index] if index >= 0 and key in self._spans[index] else None

    def _meets(self, start: bytes, end: bytes | None) -> bool:
        if any(span.intersect(start, end) is not None for span in self._spans):
            return True
        return any(start <= key and (end is None or key < end) for key in self._keys)
