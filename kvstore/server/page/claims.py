"""Claims on history: the feeds with their lag, and the holds with their owners. As of now."""

from __future__ import annotations

from typing import Final

from kvstore.claims import FEED, HoldRecord
from kvstore.limits import BROWSE_ROWS_MAX
from kvstore.server.page.blocks import Cell, Grid, PageView
from kvstore.server.page.call import PageRequest
from kvstore.server.page.notation import duration, moment, shortened
from kvstore.server.page.section import Section
from kvstore.store import Store

_COUNTED: Final = 20
"""The feeds whose changes are counted: each reads some entries of the index."""


def feeds(call: PageRequest) -> PageView:
    """The consumers of changes, the slowest first."""
    store = call.store
    found = [hold for hold in store.holds.all() if hold.kind == FEED]
    found.sort(key=lambda hold: hold.timestamp)
    newest, oldest = int(store.upper) - 1, int(store.browsing.oldest())
    rows = []
    for number, hold in enumerate(found[:BROWSE_ROWS_MAX]):
        behind = _behind(store, hold) if number < _COUNTED else "not counted"
        rows.append(
            [
                Cell(_name(hold)),
                Cell(moment(hold.timestamp)),
                Cell("lost" if hold.lost else duration(newest - max(int(hold.timestamp), oldest))),
                Cell(behind),
                Cell(hold.owner or "-"),
                Cell(moment(hold.moved_at)),
            ]
        )
    grid = Grid(
        _caption("Feeds, the slowest first", len(found)),
        ("Feed", "Position (UTC)", "Lag", "Changes behind", "Owner", "Last moved (UTC)"),
        rows,
        empty="No feed has a position in this store.",
        numbers=frozenset({2, 3}),
    )
    return PageView("Feeds", [grid], is_timed=False)


def _behind(store: Store, hold: HoldRecord) -> str:
    """How many changes a feed has before it."""
    since = max(int(hold.timestamp), int(store.indexed_since), int(store.whole_since))
    if hold.lost or since >= store.upper - 1:
        return "-" if hold.lost else "0"
    found = store.browsing.count_changes(since)
    return f"{'' if found.is_exact else 'about '}{found.changes:,}"


def holds(call: PageRequest) -> PageView:
    """The holds that keep history, the oldest first."""
    now = call.store.now()
    found = sorted(call.store.holds.all(), key=lambda hold: hold.timestamp)
    rows = [
        [
            Cell(_name(hold)),
            Cell(hold.kind),
            Cell(moment(hold.timestamp), note="lost" if hold.lost else ""),
            Cell(duration(now - hold.timestamp)),
            Cell(hold.owner or "-"),
            Cell(shortened(hold.address, 200) or "-"),
            Cell(moment(hold.moved_at)),
            Cell("none" if hold.max_age_ns is None else duration(hold.max_age_ns)),
        ]
        for hold in found[:BROWSE_ROWS_MAX]
    ]
    grid = Grid(
        _caption("Holds, the oldest first", len(found)),
        ("Name", "Kind", "Keeps from (UTC)", "Age", "Owner", "For", "Last moved (UTC)", "Budget"),
        rows,
        empty="Nothing keeps history: a collection may give up as much as its caller asks for.",
        numbers=frozenset({3}),
    )
    return PageView("Holds", [grid], is_timed=False)


def _name(hold: HoldRecord) -> str:
    return shortened(hold.name, 120)


def _caption(text: str, count: int) -> str:
    return text if count <= BROWSE_ROWS_MAX else f"{text} ({BROWSE_ROWS_MAX} of {count:,})"


FEEDS: Final = Section("feeds", "Feeds", feeds)
HOLDS: Final = Section("holds", "Holds", holds)
