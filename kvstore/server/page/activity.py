"""Changes per minute, hour or day up to the time of the page, with the marks of large events."""

from __future__ import annotations

from typing import Final

from kvstore.browsing import Activity, Interval, Mark
from kvstore.server.page.blocks import Bar as BarBlock
from kvstore.server.page.blocks import (
    Bars,
    Cell,
    Field,
    Grid,
    PageBlock,
    PageView,
    SearchForm,
    Text,
)
from kvstore.server.page.call import PageRequest
from kvstore.server.page.notation import moment, shortened, to_notation
from kvstore.server.page.section import Section
from kvstore.timestamp import NS_PER_SECOND

_BARS: Final = 60
SCALES: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}


def activity(call: PageRequest) -> PageView:
    """The changes of the sixty intervals before the time of the page."""
    scale = call.choice("per", SCALES, "minute")
    upto = int(call.as_of)
    whole = _BARS * SCALES[scale] * NS_PER_SECOND
    oldest = max(int(call.store.indexed_since), int(call.store.whole_since))
    since = max(upto - whole, oldest, 0)
    count = max(-(-(upto - since) * _BARS // whole), 1)
    found = call.store.browsing.activity(since, upto, count=count)
    search = SearchForm(
        "activity",
        (Field("per", "Changes per", scale, [(name, name) for name in SCALES]),),
        "Show",
        {"at": call.at_text} if call.at_text else {},
    )
    blocks: list[PageBlock] = [search, _bars(call, found, scale), _marks(call, found)]
    if since > upto - whole:
        blocks.append(Text(f"The index of changes begins at {moment(since)}."))
    if not all(each.is_exact for each in found.intervals):
        blocks.append(Text("Pale bars are estimates: they have more commits than a page counts."))
    return PageView(f"Changes per {scale}", blocks)


def _bars(call: PageRequest, found: Activity, scale: str) -> Bars:
    most = max((each.changes for each in found.intervals), default=0)
    bars = []
    for each in found.intervals:
        marks = [_mark_text(mark) for mark in found.marks if each.since < mark.at <= each.upto]
        bars.append(
            BarBlock(
                each.changes * 1000 // max(most, 1),
                f"{moment(each.upto)[:19]}: {_count(each)}",
                call.link("activity", per=scale, at=str(each.upto)),
                each.is_exact,
                marks[:5],
            )
        )
    first = moment(found.intervals[0].since) if found.intervals else ""
    last = moment(found.intervals[-1].upto) if found.intervals else ""
    return Bars(f"Changes per {scale}, up to the time of the page", bars, first, last, f"{most:,}")


def _count(each: Interval) -> str:
    noun = "change" if each.changes == 1 else "changes"
    return f"{'' if each.is_exact else 'about '}{each.changes:,} {noun}"


def _mark_text(mark: Mark) -> str:
    return mark.kind


def _marks(call: PageRequest, found: Activity) -> Grid:
    rows = [
        [
            Cell(moment(mark.at), call.link("keys", at=str(mark.at))),
            Cell(_mark_text(mark)),
            Cell(_concern(mark), is_code=mark.span is not None),
        ]
        for mark in reversed(found.marks)
    ]
    caption = "Loads, reverts, range deletes, clears, collections and the begin of history"
    if found.has_more_marks:
        caption += " (the newest)"
    empty = "None in this window."
    return Grid(caption, ("At (UTC)", "Event", "Concerns"), rows, empty=empty)


def _concern(mark: Mark) -> str:
    if mark.kind == "collection":
        noun = "version" if mark.rows == 1 else "versions"
        return f"Garbage collection removed {mark.rows:,} {noun}."
    load = "" if mark.push is None else f"push {mark.push}, "
    if mark.import_id is not None:
        rows = "the rows" if mark.rows is None else f"{mark.rows:,} rows"
        return f"{rows} of {load}import {mark.import_id:016x}"
    if mark.span is None:
        return "Garbage collection gave up everything older."
    end = "the end" if mark.span.end is None else to_notation(mark.span.end[:100])
    return shortened(f"{to_notation(mark.span.start[:100])} to {end}", 160)


ACTIVITY: Final = Section("activity", "Changes", activity)
