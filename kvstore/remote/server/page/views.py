"""The views of a store: keys, versions, activity, imports, claims and figures, by section."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from kvstore.base.span import prefix_end
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.browsing import Activity, Interval, KeyPage, Mark
from kvstore.codec.json import bytes_json
from kvstore.errors import UsageError
from kvstore.limits import BROWSE_KEY_BYTES_MAX, BROWSE_ROWS_MAX, BROWSE_VALUE_BYTES
from kvstore.metrics import Distribution, Metric
from kvstore.remote.live import LiveReader
from kvstore.remote.server.added import PAGES, added
from kvstore.remote.server.page.html import (
    Axes,
    Bar,
    Bars,
    Button,
    Cell,
    DataRow,
    Field,
    Grid,
    Links,
    PageBlock,
    PageData,
    PageView,
    SearchForm,
    Text,
    count_axis,
    duration,
    moment,
    preview,
    shortened,
    size,
    time_ticks,
    to_notation,
)
from kvstore.remote.server.page.request import PageRequest, Section
from kvstore.remote.server.page.tables import shown_text, tables_grid
from kvstore.remote.server.watch import owners_metrics
from kvstore.remote.verbs import ADMIN
from kvstore.store import Store
from kvstore.timeline.holds import FEED, HoldRecord
from kvstore.timeline.import_records import ImportRecord
from kvstore.timeline.reserved import PushLogTold

# --------------------------------------------------------------------------------------------------
# The keys of a store by prefix, a page at a time, as folders or as a plain list.

FOLDS: Final = {"/": b"/", ":": b":", "none": None}
_FOLD_TEXTS: Final = (("/", "folders at /"), ("\N{COLON}", "folders at :"), ("none", "plain list"))


def keys(call: PageRequest) -> PageView:
    """The live keys below a prefix, at the time of the page."""
    prefix, after = call.raw("prefix"), call.raw("after")
    fold = call.choice("fold", FOLDS, "/")
    page = call.store.browsing.keys(
        call.span(prefix, after),
        call.as_of,
        limit=BROWSE_ROWS_MAX,
        below=call.access.prefix if len(call.access.prefix) > len(prefix) else prefix,
        delimiter=FOLDS[fold],
    )
    search = SearchForm(
        "keys",
        (
            Field("prefix", "Keys that begin with", to_notation(prefix)),
            Field("fold", "Shown as", fold, _FOLD_TEXTS),
        ),
        "Browse",
        {"at": call.at_text} if call.at_text else {},
    )
    shown = to_notation(prefix[:200]) if prefix else ""
    title = f"Keys below {shown}" if shown else "Keys"
    link = call.link("changed", prefix=prefix)
    blocks: list[PageBlock] = [search, Links("", [Cell("What changed here", link)])]
    if not (page.rows or page.is_cut or prefix or after or call.access.prefix):
        tables = list(tables_grid(call))
        if isinstance(tables[0], Grid) and tables[0].rows:
            told = "All that this store has at this time lies in tables: it has no plain keys."
            return PageView(title, [Text(told), *tables])
    blocks += _grid(call, page, prefix, fold)
    data = PageData(
        "keys",
        ("key", "value", "size"),
        lambda: _data(page),
        f"the rows of this page, values of {size(BROWSE_VALUE_BYTES)} at most",
    )
    return PageView(title, blocks, data=data)


def _data(page: KeyPage) -> Iterator[DataRow]:
    """The rows of a page as data. A group has no value."""
    for key, value in page.rows:
        name = to_notation(key)
        if value is None:
            yield DataRow([name, "", ""], {"key": bytes_json(key), "value": None, "size": None})
        else:
            fields = {"key": bytes_json(key), "value": bytes_json(value.head), "size": value.size}
            yield DataRow([name, to_notation(value.head), str(value.size)], fields)


def _grid(call: PageRequest, page: KeyPage, prefix: bytes, fold: str) -> Iterator[PageBlock]:
    rows = []
    for key, value in page.rows:
        if value is None:
            folder = call.key_cell(key, "keys", prefix=key, fold=fold.encode())
            rows.append([folder, Cell("folder"), Cell("")])
        else:
            rows.append([call.key_cell(key), preview(value), Cell(size(value.size))])
    yield Grid(
        "Rows at this time",
        ("Key", "Value", "Size"),
        rows,
        empty="No key at this time. Another prefix, or a later time, may have some.",
        more=_more(call, page.next, prefix, fold),
        numbers=frozenset({2}),
    )
    if page.is_cut:
        yield Text(
            "Many deleted keys, or large values, lie here. The page stopped at its bound and the "
            "next page continues behind it.",
            is_warning=True,
        )


def _more(call: PageRequest, following: bytes | None, prefix: bytes, fold: str) -> str:
    if following is not None and len(following) > BROWSE_KEY_BYTES_MAX:
        # An address cannot carry it: the next page begins behind all keys that share its beginning.
        following = prefix_end(following[:BROWSE_KEY_BYTES_MAX])
    if following is None:
        return ""
    return call.link("keys", prefix=prefix, after=following, fold=fold)


KEYS: Final = Section("keys", "Keys", keys, is_whole=False)


# --------------------------------------------------------------------------------------------------
# Changes per minute, hour or day up to the time of the page, with the marks of large events.

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
    blocks: list[PageBlock] = [search, _bars(call, found, scale), *_loads(call, found, scale)]
    blocks.append(_marks(call, found))
    if since > upto - whole:
        blocks.append(Text(f"The index of changes begins at {moment(since)}."))
    if not all(each.is_exact for each in found.intervals):
        blocks.append(Text("Pale bars are estimates: they have more commits than a page counts."))
    return PageView(f"Changes per {scale}", blocks)


def _bars(call: PageRequest, found: Activity, scale: str) -> Bars:
    most = max((each.changes for each in found.intervals), default=0)
    top, values = count_axis(most)
    bars = []
    for each in found.intervals:
        marks = [_mark_text(mark) for mark in found.marks if each.since < mark.at <= each.upto]
        bars.append(
            Bar(
                round(each.changes * 1000 / top),
                f"{moment(each.upto)[:19]}: {_count(each)}",
                call.link("activity", per=scale, at=str(each.upto)),
                each.is_exact,
                marks[:5],
            )
        )
    caption = f"Changes by commits per {scale}, up to the time of the page"
    return Bars(caption, bars, Axes(values, _times(found)))


def _loads(call: PageRequest, found: Activity, scale: str) -> Iterator[Bars]:
    """The rows of the imports and pushes of the window, if it has any. A load would dwarf the
    changes of commits, so its bars have an axis of their own."""
    pushes = {mark.import_id: mark.push for mark in found.marks if mark.push is not None}
    if not found.intervals:
        return
    since, upto = found.intervals[0].since, found.intervals[-1].upto
    known = [each for each in call.store.imports.every() if since < (each.added or 0) <= upto]
    loaded = []
    for each in found.intervals:
        inside = [load for load in known if each.since < (load.added or 0) <= each.upto]
        names = [pushes.get(load.import_id) for load in inside]
        told = [f"push {name}" if name else "import" for name in names]
        loaded.append((each, sum(load.rows for load in inside), told))
    if not any(rows for _, rows, _ in loaded):
        return
    top, values = count_axis(max(rows for _, rows, _ in loaded))
    bars = [
        Bar(
            round(rows * 1000 / top),
            f"{moment(each.upto)[:19]}: {rows:,} rows",
            call.link("imports", at=str(each.upto)),
            marks=told[:5],
        )
        for each, rows, told in loaded
    ]
    caption = f"Rows loaded by imports and pushes per {scale}"
    yield Bars(caption, bars, Axes(values, _times(found)), "load")


def _times(found: Activity) -> list[str]:
    if not found.intervals:
        return []
    return time_ticks(found.intervals[0].since, found.intervals[-1].upto)


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


# --------------------------------------------------------------------------------------------------
# Imports: the bulk loads of a store at the time of the page, and the undoing of one.

_IMPORT_ID: Final = re.compile(r"[0-9a-f]{16}")


def imports(call: PageRequest) -> PageView:
    """The newest imports that have rows of their own, and the logs of pushes that bring some."""
    as_of = int(call.as_of)
    known = call.store.imports.every()
    logs = call.store.browsing.push_logs()
    pushes = {push.import_id: push.number for log in logs for push in log.pushes}
    newest = nlargest(BROWSE_ROWS_MAX, known, key=lambda each: each.added or each.prepared or 0)
    most = max((record.rows for record in newest), default=0)
    rows = [_row(call, record, as_of, pushes.get(record.import_id), most) for record in newest]
    grid = Grid(
        f"The newest of {len(known):,} imports" if len(known) > len(rows) else "Imports",
        (
            "Import",
            "Decimal id",
            "By",
            "State",
            "Added at (UTC)",
            "Reverted at (UTC)",
            "Rows and entries",
            "Bytes",
            "Undo",
        ),
        rows,
        empty="No import has rows of its own. Small ones become plain versions at a collection.",
        numbers=frozenset({1, 6, 7}),
    )
    return PageView("Imports", [*_push_logs(call, logs), grid])


def _row(
    call: PageRequest, record: ImportRecord, as_of: int, push: str | None, most: int
) -> list[Cell | Button]:
    name = f"{record.import_id:016x}"
    undo: Cell | Button = Cell("")
    if record.state == "added":
        if ADMIN in call.access.rights:
            undo = Cell("Revert", call.link("revert", import_id=name))
        else:
            undo = Cell("", note="needs an admin token")
    added = Cell(moment(record.added))
    if record.added is not None:
        added = Cell(added.text, call.link("keys", at=str(record.added)))
    return [
        Cell(name, is_code=True),
        Cell(str(record.import_id)),
        Cell("an import" if push is None else f"push {push}"),
        Cell(_state(record, as_of)),
        added,
        Cell(moment(record.reverted)),
        Cell(f"{record.rows:,}", share=(record.rows, most) if most else None),
        Cell(size(record.size_bytes)),
        undo,
    ]


def _push_logs(call: PageRequest, logs: Sequence[PushLogTold]) -> Iterator[Grid]:
    """The logs of pushes, each with a bar: what was taken of what waits, as far as this process
    knows it. The worker that pulls is often another one."""
    if not logs:
        return
    waiting: dict[str, Any] = {
        labels[0]: count
        for labels, count in call.store.metrics()["kvstore_pushes_pending"].values.items()
    }
    rows = []
    for log in logs[:BROWSE_ROWS_MAX]:
        states = Counter(push.state for push in log.pushes)
        pending = next(iter(waiting.values())) if len(waiting) == len(logs) == 1 else None
        share, told = None, "unknown here"
        if pending is not None:
            whole = log.passed + pending
            share, told = (log.passed, max(whole, 1)), f"{pending:,}"
        rows.append(
            [
                Cell(shown_text(log.name)),
                Cell(f"{log.passed:,}", share=share),
                Cell(told),
                Cell(
                    ", ".join(f"{count:,} {shown_text(state)}" for state, count in states.items())
                ),
            ]
        )
    heads = ("Log", "Events taken", "Events waiting", "The last pushes")
    yield Grid("Pushes", heads, rows)
    if len(waiting) > 1:
        told_ = [[Cell(shown_text(each)), Cell(f"{count:,}")] for each, count in waiting.items()]
        yield Grid("Events waiting, by the address of the log", ("Log", "Events"), told_)


def _state(record: ImportRecord, as_of: int) -> str:
    """The state of an import at a time."""
    if record.added is None:
        return "being added"
    if record.added > as_of:
        return "not yet added"
    if record.reverted is None or record.reverted > as_of:
        return "visible"
    return "reverted"


def confirm(call: PageRequest) -> PageView:
    """The question before an import is reverted."""
    record = _record(call)
    name = f"{record.import_id:016x}"
    return PageView(
        f"Revert import {name}",
        [
            Text(
                f"It was added at {moment(record.added)} with {record.rows:,} rows. Its decimal id "
                f"is {record.import_id}. A revert hides its rows from now on, and each key shows "
                "again the value that it would have without them. Reads of earlier times still see "
                "the import. It cannot be added again under this id."
            ),
            Button("revert", "Revert it now", {"import_id": name}, is_danger=True),
        ],
        is_timed=False,
        refreshes=False,
    )


def revert(call: PageRequest) -> PageView:
    """Revert an import, and say at which time."""
    record = _record(call)
    with call.owned() as store:
        at = store.revert_import(record.import_id)
    text = f"Import {record.import_id:016x} is reverted as of {moment(at)}."
    return PageView("Import reverted", [Text(text)], is_timed=False, refreshes=False)


def _record(call: PageRequest) -> ImportRecord:
    text = call.text("import_id")
    if not _IMPORT_ID.fullmatch(text):
        raise UsageError(f"import_id={text[:100]!r}", "pass 16 hex digits")
    found = call.store.imports.get(int(text, 16))
    if found is None or found.added is None:
        raise UsageError(f"import {text[:100]!r} is not one of the store", "choose one of the list")
    return found


IMPORTS: Final = Section("imports", "Imports", imports)
REVERT: Final = Section(
    "revert",
    "Revert",
    confirm,
    act=revert,
    right=ADMIN,
    act_right=ADMIN,
    in_navigation=False,
)


# --------------------------------------------------------------------------------------------------
# Claims on history: the feeds with their lag, and the holds with their owners. As of now.

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


# --------------------------------------------------------------------------------------------------
# The metrics of a store, as of now, with their meaning.

_VALUES_MAX: Final = 20
"""The values of one metric that a page shows."""


def metrics(call: PageRequest) -> PageView:
    """Every metric of the process that owns the store; of this one, if the owner does not
    listen."""
    asked = owners_metrics(call.store)
    found = asked or call.store.metrics()
    rows = [row for metric in islice(found.values(), BROWSE_ROWS_MAX * 5) for row in _rows(metric)]
    columns = ("Metric", "Labels", "Value", "Meaning")
    grid = Grid("Metrics", columns, rows, numbers=frozenset({2}))
    whose = "These are the figures of the process that owns the store. " if asked else ""
    if not asked and isinstance(call.store, LiveReader):
        whose = (
            "These are the figures of this process, which follows the store: its owner does not "
            "listen (kvstore.open(path, control=True), or kvstore serve). "
        )
    told = Text(
        f"{whose}Counters begin at 0 in each process that opens the store. Prometheus reads the "
        "same values at /metrics of a server."
    )
    return PageView("Metrics", [told, grid], is_timed=False)


def _rows(metric: Metric) -> Iterator[list[Cell]]:
    definition = metric.definition
    for labels, value in islice(metric.values.items(), _VALUES_MAX):
        pairs = zip(definition.labels, labels, strict=True)
        yield [
            Cell(metric.name, is_name=True),
            Cell(", ".join(f"{name}={text}" for name, text in pairs)),
            Cell(_shown_figure(value, definition.name, definition.unit)),
            Cell(definition.help),
        ]


def _shown_figure(value: float | Distribution, name: str, unit: str) -> str:
    if isinstance(value, Distribution):
        mean = value.total / value.count if value.count else 0.0
        return f"{value.count:,} times, {duration(mean * NS_PER_SECOND)} on average"
    if name.endswith("_timestamp_seconds"):
        return moment(int(value * NS_PER_SECOND))
    if unit == "seconds":
        return duration(value * NS_PER_SECOND)
    if unit == "bytes":
        return size(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"


METRICS: Final = Section("metrics", "Metrics", metrics)


# --------------------------------------------------------------------------------------------------
# The sections that packages above bring: functions that take what a person named on the command
# line, and return a `Section`.


def added_section(name: str, places: Sequence[str]) -> Section:
    """The section `name` of a package above, about `places`."""
    section: Section = added(PAGES, name)(places)
    return section
