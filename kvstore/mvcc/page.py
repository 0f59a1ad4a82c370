"""Scans and differences taken in pages, by readers that cannot keep a pass open.

A page ends at a limit of rows or bytes and says which span is left; asking for that span goes on
exactly there, in another call or another process. Both directions.

Invariants
1. The pages of a span, one after the other, hold what one pass over it holds: each row once; a
   range tombstone that crosses the end of a page is cut there, and its pieces abut.
2. A page that is not the last holds something, so that readers get on; it exceeds the limits by
   the versions of one key at most.
3. `rest` is None if and only if nothing is left to be returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import UsageError
from kvstore.mvcc.diff import Difference
from kvstore.mvcc.fragments import RangeTombstone
from kvstore.span import Span

if TYPE_CHECKING:
    from kvstore.mvcc.versions import Versions


class RowPage(NamedTuple):
    """Live rows of a span, and the span that is left."""

    rows: list[tuple[bytes, bytes]]
    rest: Span | None


class DiffPage(NamedTuple):
    """Differences of a span, and the span that is left."""

    differences: list[Difference]
    rest: Span | None


def row_page(
    versions: Versions,
    span: Span,
    as_of: int,
    *,
    reverse: bool = False,
    rows_max: int | None = None,
    bytes_max: int | None = None,
) -> RowPage:
    """Live rows of `span` at `as_of`, at most `rows_max` of them and `bytes_max` bytes of keys and
    values (but one row at least). Costs what it passes, up to the first row it leaves."""
    _require_limits(rows_max, bytes_max)
    rows: list[tuple[bytes, bytes]] = []
    size = 0
    for keys, values in versions.scan(span, as_of, reverse=reverse):
        for key, value in zip(keys, values, strict=True):
            size += len(key) + len(value)
            too_many = rows_max is not None and len(rows) >= rows_max
            too_large = bytes_max is not None and size > bytes_max
            if rows and (too_many or too_large):
                rest = Span(span.start, key + b"\x00") if reverse else Span(key, span.end)
                return RowPage(rows, rest)
            rows.append((key, value))
    return RowPage(rows, None)


def diff_page(
    versions: Versions,
    span: Span,
    *,
    since: int,
    upto: int,
    latest: bool = False,
    reverse: bool = False,
    rows_max: int | None = None,
    bytes_max: int | None = None,
) -> DiffPage:
    """What happened to `span` in `(since, upto]`; ends before the first key that comes after
    `rows_max` differences or `bytes_max` bytes. Order and choice are those of `Versions.diff`."""
    _require_limits(rows_max, bytes_max)
    found: list[Difference] = []
    size, reached = 0, None
    passing = versions.diff(span, since=since, upto=upto, latest=latest, reverse=reverse)
    for difference in passing:
        here = _position(difference, reverse=reverse)
        full = (rows_max is not None and len(found) >= rows_max) or (
            bytes_max is not None and size >= bytes_max
        )
        if full and here != reached:
            rest = Span(span.start, here) if reverse else Span(here, span.end)
            return DiffPage(list(_cut(found, here, reverse=reverse)), rest)
        found.append(difference)
        size += _size(difference)
        reached = here
    return DiffPage(found, None)


def _position(difference: Difference, *, reverse: bool) -> bytes:
    """The bound between what a pass has brought before this difference and what follows."""
    if isinstance(difference, RangeTombstone):
        return difference.end if reverse else difference.start
    return difference.key + b"\x00" if reverse else difference.key


def _cut(found: list[Difference], bound: bytes, *, reverse: bool) -> Iterator[Difference]:
    """The differences of a page that ends at `bound`: the rest has the rest of the tombstones."""
    for difference in found:
        if not isinstance(difference, RangeTombstone):
            yield difference
        elif reverse:
            yield difference._replace(start=max(difference.start, bound))
        else:
            yield difference._replace(end=min(difference.end, bound))


def _size(difference: Difference) -> int:
    if isinstance(difference, RangeTombstone):
        return len(difference.start) + len(difference.end)
    return len(difference.key) + len(difference.value or b"")


def _require_limits(rows_max: int | None, bytes_max: int | None) -> None:
    for name, limit in (("rows_max", rows_max), ("bytes_max", bytes_max)):
        if limit is not None and limit < 1:
            raise UsageError(f"{name}={limit}", "pass at least 1, or None for no limit")
