"""One key: its value at the time of the page, and its versions with their differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Final

from kvstore.browsing import VersionPage, VersionRow
from kvstore.server.page.blocks import (
    Cell,
    Grid,
    Lane,
    Lanes,
    Lines,
    PageBlock,
    PageView,
    Stretch,
    Text,
)
from kvstore.server.page.call import PageRequest
from kvstore.server.page.differences import differences, value_lines
from kvstore.server.page.keys import preview
from kvstore.server.page.notation import moment, shortened, size, to_notation
from kvstore.server.page.section import Section

VERSIONS_SHOWN: Final = 20
DIFFERENCES_SHOWN: Final = 5
"""The versions whose differences a page shows: each compares two values."""


def key_page(call: PageRequest) -> PageView:
    """The value of a key at the time of the page, and its versions from then back."""
    key = call.key()
    upto = call.number("upto")
    as_of = int(call.as_of)
    found = call.store.browsing.versions(
        key, as_of if upto is None else min(upto, as_of), limit=VERSIONS_SHOWN
    )
    title = f"Key {shortened(to_notation(key), 300)}"
    if not found.rows:
        gone = Text("The key has no version at this time that is kept.")
        return PageView(title, [gone, _later(call, key)])
    blocks: list[PageBlock] = []
    if upto is None:
        blocks += _value(found.rows[0])
    blocks += [_timeline(found.rows), _grid(call, key, found), *_differences(found.rows)]
    if found.is_cut:
        blocks.append(Text("The key has rows of more imports than a page reads.", is_warning=True))
    return PageView(title, blocks)


def _value(newest: VersionRow) -> Iterator[PageBlock]:
    if newest.value is None:
        yield Text(f"Deleted at {moment(newest.timestamp)} by {_origin(newest)}.")
        return
    yield Text(f"{size(newest.value.size)}, written at {moment(newest.timestamp)}.")
    yield Lines("Value", value_lines(newest.value))


def _grid(call: PageRequest, key: bytes, found: VersionPage) -> Grid:
    rows = []
    for version in found.rows:
        shown = Cell("deleted") if version.value is None else preview(version.value)
        then = Cell(moment(version.timestamp), call.link("key", key=key, at=str(version.timestamp)))
        count = "" if version.value is None else size(version.value.size)
        rows.append([then, Cell(_origin(version)), shown, Cell(count)])
    more = "" if found.next is None else call.link("key", key=key, upto=found.next)
    return Grid(
        "Versions, newest first",
        ("Written at (UTC)", "By", "Value", "Size"),
        rows,
        more=more,
        more_text="Older versions",
        numbers=frozenset({3}),
    )


def _later(call: PageRequest, key: bytes) -> Grid:
    """The versions that are newer than the time of the page."""
    found = call.store.browsing.versions(key, limit=VERSIONS_SHOWN)
    return _grid(call, key, found)


def _timeline(rows: Sequence[VersionRow]) -> Lanes:
    """The versions of a page as stretches of time: each lasts until the next one."""
    first, last = int(rows[-1].timestamp), int(rows[0].timestamp)
    length = max(last - first, 1)
    stretches = []
    for at, version in enumerate(reversed(rows)):
        begins = (int(version.timestamp) - first) * 960 // length
        later = rows[-at - 2].timestamp if at + 1 < len(rows) else None
        ends = 1000 if later is None else (int(later) - first) * 960 // length
        tone = "gap" if version.value is None else "good"
        text = f"{moment(version.timestamp)}: {_origin(version)}"
        stretches.append(Stretch(begins, max(ends - 2, begins + 1), text, tone))
    lane = Lane("Live", stretches)
    return Lanes("Timeline of these versions", [lane], moment(first), moment(last))


def _differences(rows: Sequence[VersionRow]) -> Iterator[Lines]:
    for newer, older in islice(pairwise(rows), DIFFERENCES_SHOWN):
        lines = differences(older.value, newer.value)
        if lines:
            yield Lines(f"Difference made at {moment(newer.timestamp)}", lines, is_difference=True)


def _origin(version: VersionRow) -> str:
    if version.import_id is None:
        return version.origin
    return f"{version.origin} {version.import_id:016x}"


KEY: Final = Section("key", "Key", key_page, in_navigation=False, is_whole=False)
