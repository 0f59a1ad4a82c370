"""The trends of the last hour as curves, and who is connected, from what the server watches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.limits import BROWSE_ROWS_MAX, CALLERS_MAX, TRENDS_EVERY_S
from kvstore.remote.live import LiveReader
from kvstore.remote.server.page.html import (
    Axes,
    Cell,
    Curve,
    Grid,
    PageBlock,
    PageView,
    Text,
    axis,
    duration,
    moment,
    seconds_axis,
    shortened,
    size,
    time_ticks,
    to_notation,
)
from kvstore.remote.server.page.request import PageRequest, Section
from kvstore.remote.server.watch import Sample
from kvstore.timeline.holds import FEED

# --------------------------------------------------------------------------------------------------
# The trends as curves.

_HOUR_NS: Final = 3600 * NS_PER_SECOND
_TOLD: Final = 6
"""The values of a curve that a screen reader reads."""

_Point = tuple[int, float]


def trends(call: PageRequest) -> PageView:
    """The last hour of the store, as this process has measured it."""
    watch = call.watch
    samples = [] if watch is None else watch.trends.samples
    if watch is None or len(samples) < 2:  # a rate needs two
        told = (
            f"The first curves come within {2 * TRENDS_EVERY_S:.0f} s of the start of the server."
        )
        if watch is None:
            told = "This page belongs to no server, so nothing is measured."
        return PageView("Trends of the last hour", [Text(told)], is_timed=False)
    upto = samples[-1].at
    follower = watch.trends.is_follower
    slow = [
        (newer.at, (newer.fsync_seconds - older.fsync_seconds) / (newer.fsyncs - older.fsyncs))
        for older, newer in pairwise(samples)
        if newer.fsyncs > older.fsyncs
    ]
    of_rate = partial(axis, show=_per_second)
    of_size = partial(axis, show=size, base=1024)
    no_latency = "the owner does not listen" if follower else "no fsync yet"
    curves: list[PageBlock] = [
        _curve(caption, points, upto, show, scale, none)
        for caption, points, show, scale, none in (
            ("Commits", _rates(samples, lambda each: each.commits), _per_second, of_rate, ""),
            ("Changes", _rates(samples, lambda each: each.changes), _per_second, of_rate, ""),
            ("Latency of an fsync", slow, _seconds, seconds_axis, no_latency),
            ("Requests", _rates(samples, lambda each: each.requests), _per_second, of_rate, ""),
            ("Lag of the slowest feed", _of(samples, "feed_lag"), _seconds, seconds_axis, ""),
            ("Lag of the backups", _of(samples, "backup_behind"), _seconds, seconds_axis, ""),
            ("Bytes in files", _of(samples, "disk_bytes"), size, of_size, ""),
            ("Bytes not flushed", _of(samples, "memory_bytes"), size, of_size, ""),
        )
    ]
    told = (
        f"Measured every {TRENDS_EVERY_S:.0f} s since {moment(samples[0].at)}, in the memory of "
        f"process {os.getpid()}. Times are UTC."
    )
    if follower:
        told += (
            " Another process owns the store: its commits are counted in the change index, and it "
            "is asked for its other figures if it listens."
        )
    return PageView("Trends of the last hour", [Text(told), *curves], is_timed=False)


def _per_second(value: float) -> str:
    return f"{value:,.3g}/s" if value < 100 else f"{value:,.0f}/s"


def _seconds(value: float) -> str:
    return duration(value * NS_PER_SECOND)


def _rates(samples: Sequence[Sample], of: Callable[[Sample], int]) -> list[_Point]:
    return [
        (newer.at, max(of(newer) - of(older), 0) * NS_PER_SECOND / max(newer.at - older.at, 1))
        for older, newer in pairwise(samples)
    ]


def _of(samples: Sequence[Sample], figure: str) -> list[_Point]:
    return [(each.at, getattr(each, figure)) for each in samples]


def _curve(
    caption: str,
    points: Sequence[_Point],
    upto: int,
    show: Callable[[float], str],
    scale: Callable[[float], tuple[float, list[str]]],
    none: str = "",
) -> Curve:
    """The values of the hour before `upto`."""
    since = upto - _HOUR_NS
    points = [(at, value) for at, value in points if at >= since]
    top, values = scale(max((value for _, value in points), default=0.0))
    placed = [
        ((at - since) * 1000 // _HOUR_NS, round(min(value / top, 1.0) * 1000))
        for at, value in points
    ]
    step = max(len(points) // _TOLD, 1)
    told = [f"{moment(at)}: {show(value)}" for at, value in points[::step]]
    newest = show(points[-1][1]) if points else none
    return Curve(caption, placed, newest, Axes(values, time_ticks(since, upto)), told)


TRENDS: Final = Section("trends", "Trends", trends)


# --------------------------------------------------------------------------------------------------
# Who is connected: the callers of this server, and the consumers that hold a position.


def callers(call: PageRequest) -> PageView:
    """The callers of this server, and the consumers of changes. As of now."""
    watch = call.watch
    known = [] if watch is None else watch.callers.all()
    rows = [
        [
            Cell(_text(each.address)),
            Cell(_text(each.agent) or "-"),
            Cell(_text(each.last)),
            Cell(moment(each.last_at), note="under way" if each.under_way else ""),
            Cell(moment(each.first_at)),
            Cell(f"{each.requests:,}"),
        ]
        for each in known[:BROWSE_ROWS_MAX]
    ]
    heads = ("Address", "Program", "Last call", "Last call at (UTC)", "First seen (UTC)", "Calls")
    grid = Grid(
        "Callers of this server, the newest call first",
        heads,
        rows,
        empty="Nobody has called this server.",
        numbers=frozenset({5}),
    )
    blocks: list[PageBlock] = [grid]
    told = f"Process {os.getpid()} answers. It remembers {CALLERS_MAX} connections."
    if isinstance(call.store, LiveReader):
        told += (
            " Another process owns the store: if that is a server, its own page shows its callers."
        )
    else:
        told += " Readers of the files (kvstore.follow) and reader processes leave no trace here."
    blocks.append(Text(told))
    held = [hold for hold in call.store.holds.all() if hold.kind == FEED and hold.owner]
    held.sort(key=lambda hold: -(hold.moved_at or 0))
    consumers = [
        [
            Cell(shortened(hold.name, 120), call.link("feeds")),
            Cell(hold.owner or "-"),
            Cell(moment(hold.moved_at)),
        ]
        for hold in held[:BROWSE_ROWS_MAX]
    ]
    blocks.append(
        Grid(
            "Consumers of changes",
            ("Feed", "Owner", "Last moved (UTC)"),
            consumers,
            empty="No feed has an owner.",
        )
    )
    return PageView("Who is connected", blocks, is_timed=False)


def _text(text: str) -> str:
    return to_notation(text.encode("utf-8", "surrogatepass"))


CALLERS: Final = Section("connected", "Connected", callers)
