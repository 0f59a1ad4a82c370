"""One key, or one row of a table, on the page: its value, and what each of its versions changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

from kvstore.base.span import RESERVED, Span
from kvstore.browsing import Excerpt, VersionPage, VersionRow
from kvstore.errors import KVStoreError, NotFoundError, UsageError
from kvstore.limits import BROWSE_BYTES_MAX, BROWSE_ROWS_MAX, BROWSE_VALUE_BYTES
from kvstore.remote.server.page.html import (
    SHOWN_CHARS,
    Cell,
    DataRow,
    Facts,
    Grid,
    Lane,
    Lanes,
    Lines,
    Links,
    PageBlock,
    PageData,
    PageView,
    Stretch,
    Text,
    differences,
    moment,
    preview,
    shortened,
    size,
    to_notation,
    value_lines,
)
from kvstore.remote.server.page.request import PageRequest, Section
from kvstore.remote.server.page.tables import (
    cell_of,
    codec_of,
    data_row,
    data_text,
    definition,
    row_link,
    row_name,
    shown_text,
)
from kvstore.tables.definition import Column, is_entry, name_of
from kvstore.tables.row_codec import TableCodec
from kvstore.timeline.reserved import CATALOGUE

# --------------------------------------------------------------------------------------------------
# One key: its value at the time of the page, and its versions with their differences.

VERSIONS_SHOWN: Final = 20
DIFFERENCES_SHOWN: Final = 5
"""The versions whose differences a page shows: each compares two values."""


def key_page(call: PageRequest) -> PageView:
    """The value of a key at the time of the page, and its versions from then back."""
    key = call.key()
    if key >= RESERVED:
        typed = _typed(call, key)
        if typed is not None:
            return typed
    found = _versions(call, key)
    title = f"Key {shortened(to_notation(key), 300)}"
    if not found.rows:
        gone = Text("The key has no version at this time that is kept.")
        return PageView(title, [gone, _later(call, key)])
    blocks: list[PageBlock] = []
    if call.number("upto") is None:
        blocks += _value(found.rows[0])
    blocks += [_timeline(found.rows), _version_grid(call, key, found), *_differences(found.rows)]
    if found.is_cut:
        blocks.append(Text("The key has rows of more imports than a page reads.", is_warning=True))
    return PageView(title, blocks)


def _versions(call: PageRequest, key: bytes, more: int = 0) -> VersionPage:
    """The versions of a page, and `more` behind them."""
    upto, as_of = call.number("upto"), int(call.as_of)
    last = as_of if upto is None else min(upto, as_of)
    return call.store.browsing.versions(key, last, limit=VERSIONS_SHOWN + more)


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
# One row of a table: its values at the time of the page, and its versions with the columns that
# each of them changed. Each version is read by the definition of its time.


def row(call: PageRequest) -> PageView:
    """A row, by the name of its table and its stored key."""
    return _row(call, call.text("name"), call.raw("key"))


def _row(call: PageRequest, name: str, key: bytes) -> PageView:
    codec = codec_of(call, name)
    if not key.startswith(codec.key.prefix):
        raise UsageError(f"the key is none of table {name!r}", "choose a row of the table")
    found = _versions(call, key, more=1)
    title = f"Row {row_name(codec, key)}"
    more = Links("Table", [Cell(shown_text(name), call.link("table", name=name))])
    if not found.rows:
        return PageView(title, [more, Text("The row has no version at this time that is kept.")])
    rows = _RowVersions(call, name, codec, key).read(found.rows)
    shown, is_last = rows[:VERSIONS_SHOWN], len(rows) <= VERSIONS_SHOWN
    blocks: list[PageBlock] = [more]
    if call.number("upto") is None:
        blocks += _values(codec, shown[0])
    blocks.append(_timeline([each.version for each in shown]))
    upto = None if is_last else int(rows[VERSIONS_SHOWN].version.timestamp)
    blocks.append(_changes(call, name, key, rows, upto))
    if found.is_cut:
        blocks.append(Text("The row is in more imports than a page reads.", is_warning=True))
    columns = [shown_text(each) for each in codec.definition.schema.names]
    data = PageData(
        f"{name}-row",
        ["written_at", "by", *columns],
        lambda: (each.data(codec) for each in shown),
        "the versions of this page",
    )
    return PageView(title, blocks, data=data)


class _RowVersion(NamedTuple):
    """A version of a row: its values by column, or why they cannot be read; None if deleted."""

    version: VersionRow
    columns: Mapping[str, Column]
    values: Mapping[str, Any] | None
    problem: str = ""

    def data(self, codec: TableCodec) -> DataRow:
        """The version as data, with the columns at the time of the page."""
        at, by = str(self.version.timestamp), _origin(self.version)
        head = {"written_at": f"{self.version.timestamp}", "by": by}
        if self.values is None:
            return DataRow([at, by], {**head, "row": None, "problem": self.problem or None})
        values = {name: self.values.get(name) for name in codec.definition.schema.names}
        found = data_row(codec.definition.schema, values)
        return DataRow([at, by, *found.texts], {**head, "row": found.fields})


class _RowVersions:
    """Reads the versions of one row."""

    def __init__(self, call: PageRequest, name: str, codec: TableCodec, key: bytes) -> None:
        self._call, self._name, self._codec, self._key = call, name, codec, key
        self._room = BROWSE_BYTES_MAX

    def read(self, versions: Sequence[VersionRow]) -> list[_RowVersion]:
        """The versions with their values, newest first."""
        return [self._read(version) for version in versions]

    def _read(self, version: VersionRow) -> _RowVersion:
        codec = self._codec_at(version)
        columns = codec.definition.by_name
        if version.value is None:
            return _RowVersion(version, columns, None)
        try:
            values = codec.to_dict(self._key, self._stored(version, version.value))
        except KVStoreError as error:
            return _RowVersion(version, columns, None, shown_text(str(error)))
        return _RowVersion(version, columns, values)

    def _codec_at(self, version: VersionRow) -> TableCodec:
        try:
            return self._call.store.table(self._name).codec(version.timestamp)
        except NotFoundError:  # it was dropped since
            return self._codec

    def _stored(self, version: VersionRow, value: Excerpt) -> bytes:
        """The whole value of a version, which a page of large ones does not read."""
        if value.is_whole:
            return value.head
        self._room -= value.size
        stored = None
        if self._room >= 0:
            stored = self._call.store.get(self._key, as_of=version.timestamp)
        if stored is None:
            raise UsageError(f"a row of {size(value.size)}", "read it by `Table.history`")
        return stored


def _values(codec: TableCodec, newest: _RowVersion) -> Iterator[PageBlock]:
    version = newest.version
    told = f"written at {moment(version.timestamp)} by {_origin(version)}"
    if newest.problem:
        yield Text(f"The row cannot be read, {told}: {newest.problem}", is_warning=True)
        return
    if newest.values is None:
        yield Text(f"Deleted at {moment(version.timestamp)} by {_origin(version)}.")
        return
    facts, long = [], []
    for name, column in newest.columns.items():
        value = newest.values[name]
        cell = cell_of(column, value)
        facts.append((shown_text(name), replace(cell, note=cell.note or str(column.type))))
        raw = value.encode() if isinstance(value, str) else value
        if isinstance(raw, bytes) and len(raw) > SHOWN_CHARS:
            excerpt = Excerpt.of(raw, BROWSE_VALUE_BYTES)
            long.append(Lines(f"Column {shown_text(name)}, whole", value_lines(excerpt)))
    yield Facts(f"Row at this time, {told}", facts)
    yield from long


def _changes(
    call: PageRequest, name: str, key: bytes, rows: Sequence[_RowVersion], upto: int | None
) -> Grid:
    """The versions of a page, each with the columns that it changed."""
    found = []
    shown = rows[:VERSIONS_SHOWN]
    for at, newer in enumerate(shown):
        older = rows[at + 1] if at + 1 < len(rows) else None
        when = Cell(
            moment(newer.version.timestamp),
            call.link("row", name=name, key=key, at=str(newer.version.timestamp)),
        )
        by = Cell(_origin(newer.version))
        for column, change in _changed(older, newer):
            found.append([when, by, Cell(column), change])
            when = by = Cell("")
    more = "" if upto is None else call.link("row", name=name, key=key, upto=upto)
    return Grid(
        "Versions, newest first, with what each of them changed",
        ("Written at (UTC)", "By", "Column", "Value"),
        found,
        more=more,
        more_text="Older versions",
    )


def _changed(older: _RowVersion | None, newer: _RowVersion) -> Iterator[tuple[str, Cell]]:
    """The columns that a version changed, each with its values before and since."""
    if newer.problem:
        yield "", Cell(newer.problem)
    elif newer.values is None:
        yield "", Cell("row deleted")
    elif older is None or older.values is None:
        yield "", Cell("row made" if older is None or not older.problem else "row put anew")
    else:
        found = list(columns_changed(older.columns, older.values, newer.columns, newer.values))
        yield from found or [("", Cell("the same values"))]


def columns_changed(
    old_columns: Mapping[str, Column],
    old: Mapping[str, Any],
    new_columns: Mapping[str, Column],
    new: Mapping[str, Any],
) -> Iterator[tuple[str, Cell]]:
    """The columns in which two states of a row differ, each with both values."""
    for name in dict.fromkeys([*new_columns, *old_columns]):
        before = _text(old_columns.get(name), old.get(name))
        after = _text(new_columns.get(name), new.get(name))
        if before != after:
            yield shown_text(name), Cell(_short(after), old=_short(before))


def _text(column: Column | None, value: Any) -> str:
    """A value, whole, so that two values with one text are the same."""
    return "no such column" if column is None else data_text(column, value)


def _short(text: str) -> str:
    return shown_text(text) or _EMPTY


_EMPTY: Final = "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"


def _typed(call: PageRequest, key: bytes) -> PageView | None:
    """The page of a key of tables as what it is there: a row, an entry of an index, a definition.
    None for a key of no table."""
    call.access.require_whole("the keys of tables")
    if key.startswith(CATALOGUE):
        return definition(call, name_of(key))
    names = call.store.browsing.keys(Span.of_prefix(CATALOGUE), call.as_of, limit=BROWSE_ROWS_MAX)
    for found in names.rows:
        name = name_of(found.key)
        codec = codec_of(call, name)
        if key.startswith(codec.key.prefix):
            return _row(call, name, key)
        for index in codec.definition.indexes if is_entry(key) else ():
            if key.startswith(codec.index_codec(index).prefix):
                [row_key] = codec.row_keys(index, [key])
                link = Cell(row_name(codec, row_key), row_link(call, name, row_key))
                told = f"An entry of index {shown_text(index.name)} of table {shown_text(name)}."
                return PageView("Entry of an index", [Text(told), Links("Row", [link])])
    return None


ROW: Final = Section("row", "Row", row, in_navigation=False)
