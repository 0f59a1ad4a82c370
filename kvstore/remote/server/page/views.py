"""The views of a store: keys, versions, tables, activity, imports, claims and figures, by
section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice, pairwise
from typing import Any, Final, TypeAlias

from kvstore.base.span import Span, prefix_end
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.browsing import (
    Activity,
    Excerpt,
    Interval,
    KeyPage,
    KeyRow,
    Mark,
    VersionPage,
    VersionRow,
)
from kvstore.errors import KVStoreError, UsageError
from kvstore.limits import BROWSE_KEY_BYTES_MAX, BROWSE_ROWS_MAX
from kvstore.metrics import Distribution, Metric
from kvstore.remote.server.invocation import PAGES, added
from kvstore.remote.server.page.html import Bar as BarBlock
from kvstore.remote.server.page.html import (
    Bars,
    Button,
    Cell,
    Field,
    Grid,
    Lane,
    Lanes,
    Lines,
    PageBlock,
    PageView,
    SearchForm,
    Stretch,
    Text,
    differences,
    duration,
    hex_lines,
    is_text,
    moment,
    shortened,
    size,
    to_notation,
    value_lines,
)
from kvstore.remote.server.page.request import SHOWN_CHARS, PageRequest
from kvstore.remote.verbs import ADMIN, READ
from kvstore.store import Store
from kvstore.tables.codec import TableCodec
from kvstore.timeline.holds import FEED, HoldRecord
from kvstore.timeline.import_records import ImportRecord

# --------------------------------------------------------------------------------------------------
# A section of the page: a name in its navigation, and the functions that make its views.

Look: TypeAlias = "Callable[[PageRequest], PageView]"


@dataclass(frozen=True, slots=True)
class Section:
    """A section at `/ui/<name>`.

    `view` answers GET. A section with `act` answers POST with it, for callers with `act_right`; its
    view is shown afterwards. A section without `in_navigation` is reached by links. A section that
    `is_whole` concerns all keys: a token with a prefix cannot see it.
    """

    name: str
    title: str
    view: Look
    act: Look | None = None
    right: str = READ
    act_right: str = READ
    in_navigation: bool = True
    is_whole: bool = True


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
    return PageView(title, [search, *_grid(call, page, prefix, fold)])


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


def preview(value: Excerpt) -> Cell:
    """The beginning of a value, on one line."""
    head = value.head[: SHOWN_CHARS * 4]
    if is_text(head):
        return Cell(shortened(to_notation(head), SHOWN_CHARS), is_code=True)
    return Cell(hex_lines(head[:16])[0][10:57].strip(), note="not text", is_code=True)


KEYS: Final = Section("keys", "Keys", keys, is_whole=False)


# --------------------------------------------------------------------------------------------------
# One key: its value at the time of the page, and its versions with their differences.

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
    blocks += [_timeline(found.rows), _version_grid(call, key, found), *_differences(found.rows)]
    if found.is_cut:
        blocks.append(Text("The key has rows of more imports than a page reads.", is_warning=True))
    return PageView(title, blocks)


def _value(newest: VersionRow) -> Iterator[PageBlock]:
    if newest.value is None:
        yield Text(f"Deleted at {moment(newest.timestamp)} by {_origin(newest)}.")
        return
    yield Text(f"{size(newest.value.size)}, written at {moment(newest.timestamp)}.")
    yield Lines("Value", value_lines(newest.value))


def _version_grid(call: PageRequest, key: bytes, found: VersionPage) -> Grid:
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
    return _version_grid(call, key, found)


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


# --------------------------------------------------------------------------------------------------
# Tables: their names, and their rows with typed columns at the time of the page.

_TABLES_MAX: Final = 500


def tables(call: PageRequest) -> PageView:
    """The names of the tables that are there at the time of the page."""
    with call.store.snapshot(call.as_of) as snapshot:
        rows = []
        for name in islice(call.store.tables(), _TABLES_MAX):
            try:
                table = snapshot.table(name)
            except UsageError:
                continue  # made later than the time of the page
            columns = ", ".join(f"{field.name} {field.type}" for field in table.schema)
            key = ", ".join(str(part) for part in table.key)
            link = call.link("table", name=name)
            rows.append([Cell(name, link), Cell(key), Cell(shortened(columns, 300))])
    empty = "The store has no tables at this time: its keys and values are bytes."
    return PageView("Tables", [Grid("Tables", ("Name", "Key", "Columns"), rows, empty=empty)])


def table(call: PageRequest) -> PageView:
    """The rows of a table at the time of the page."""
    name, after = call.text("name"), call.raw("after")
    codec = call.store.table(name).codec(call.as_of)
    space = Span.of_prefix(codec.key.prefix)
    span = Span(max(space.start, after), space.end)
    page = call.store.browsing.keys(span, call.as_of, limit=BROWSE_ROWS_MAX)
    columns = codec.schema_of(None).names
    rows = [_cells(call, codec, row, columns) for row in page.rows]
    more = ""
    if page.next is not None and len(page.next) <= BROWSE_KEY_BYTES_MAX:
        more = call.link("table", name=name, after=page.next)
    blocks: list[PageBlock] = [
        Grid("Rows at this time", columns, rows, empty="No rows at this time.", more=more)
    ]
    if page.is_cut:
        text = "Many deleted rows lie here. The page stopped at its bound; the next continues."
        blocks.append(Text(text, is_warning=True))
    return PageView(f"Table {shortened(name, 200)}", blocks)


def _cells(call: PageRequest, codec: TableCodec, row: KeyRow, columns: Sequence[str]) -> list[Cell]:
    assert row.value is not None, "a page without a delimiter has no groups"
    link = call.key_cell(row.key).href
    if not row.value.is_whole:
        found = [Cell(f"a row of {size(row.value.size)}", link)]
    else:
        try:
            values = codec.to_dicts([row.key], [row.value.head])[0] or {}
        except KVStoreError as error:
            found = [Cell(shortened(str(error), SHOWN_CHARS), link)]
        else:
            found = [Cell(_shown(values.get(name))) for name in columns]
            found[0] = Cell(found[0].text, link)
    return [*found, *[Cell("")] * (len(columns) - len(found))]


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return shortened(to_notation(value[: SHOWN_CHARS * 4]), SHOWN_CHARS)
    if value is None:
        return "-"
    text = shortened(str(value), SHOWN_CHARS)
    return to_notation(text.encode("utf-8", "surrogatepass"), keeps="\\")


TABLES: Final = Section("tables", "Tables", tables)
TABLE: Final = Section("table", "Table", table, in_navigation=False)


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


# --------------------------------------------------------------------------------------------------
# Imports: the bulk loads of a store at the time of the page, and the undoing of one.


def imports(call: PageRequest) -> PageView:
    """The newest imports that have rows of their own."""
    as_of = int(call.as_of)
    known = call.store.imports.every()
    newest = nlargest(BROWSE_ROWS_MAX, known, key=lambda each: each.added or each.prepared or 0)
    rows = [_row(call, record, as_of) for record in newest]
    grid = Grid(
        f"The newest of {len(known):,} imports" if len(known) > len(rows) else "Imports",
        ("Import", "State", "Added at (UTC)", "Reverted at (UTC)", "Rows", "Bytes", "Undo"),
        rows,
        empty="No import has rows of its own. Small ones become plain versions at a collection.",
        numbers=frozenset({4, 5}),
    )
    return PageView("Imports", [grid])


def _row(call: PageRequest, record: ImportRecord, as_of: int) -> list[Cell | Button]:
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
        Cell(_state(record, as_of)),
        added,
        Cell(moment(record.reverted)),
        Cell(f"{record.rows:,}"),
        Cell(size(record.size_bytes)),
        undo,
    ]


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
                f"It was added at {moment(record.added)} with {record.rows:,} rows. A revert hides "
                "them from now on, and each key shows again the value that it would have without "
                "them. Reads of earlier times still see the import. It cannot be added again under "
                "this id."
            ),
            Button("revert", "Revert it now", {"import_id": name}, is_danger=True),
        ],
        is_timed=False,
    )


def revert(call: PageRequest) -> PageView:
    """Revert an import, and say at which time."""
    record = _record(call)
    with call.owned() as store:
        at = store.revert_import(record.import_id)
    text = f"Import {record.import_id:016x} is reverted as of {moment(at)}."
    return PageView("Import reverted", [Text(text)], is_timed=False)


def _record(call: PageRequest) -> ImportRecord:
    text = call.text("import_id")
    try:
        found = call.store.imports.get(int(text, 16))
    except ValueError:
        raise UsageError(f"import_id={text[:100]!r}", "pass 16 hex digits") from None
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
    """Every metric of the process that shows this page."""
    found = call.store.metrics()
    rows = [row for metric in islice(found.values(), BROWSE_ROWS_MAX * 5) for row in _rows(metric)]
    columns = ("Metric", "Labels", "Value", "Meaning")
    grid = Grid("Metrics", columns, rows, numbers=frozenset({2}))
    told = Text(
        "Counters begin at 0 in each process that opens the store. Prometheus reads the "
        "same values at /metrics of a server."
    )
    return PageView("Metrics", [told, grid], is_timed=False)


def _rows(metric: Metric) -> Iterator[list[Cell]]:
    definition = metric.definition
    for labels, value in islice(metric.values.items(), _VALUES_MAX):
        pairs = zip(definition.labels, labels, strict=True)
        yield [
            Cell(metric.name, is_code=True),
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
# The sections that every store has, and the sections that packages above bring: functions that take
# what a person named on the command line, and return a `Section`.

SECTIONS: Final = (KEYS, KEY, ACTIVITY, TABLES, TABLE, IMPORTS, REVERT, FEEDS, HOLDS, METRICS)


def added_section(name: str, places: Sequence[str]) -> Section:
    """The section `name` of a package above, about `places`."""
    section: Section = added(PAGES, name)(places)
    return section
