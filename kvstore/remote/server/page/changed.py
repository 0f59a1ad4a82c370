"""What changed here: the keys below a prefix, or the rows of a table, that two times differ in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvstore.base.span import Span, prefix_end
from kvstore.base.timestamp import Timestamp, is_oldest
from kvstore.browsing import ChangedKey, ChangedPage, Excerpt
from kvstore.codec.json import bytes_json
from kvstore.errors import KVStoreError, UsageError
from kvstore.limits import BROWSE_ENTRIES_MAX, BROWSE_KEY_BYTES_MAX, BROWSE_VALUE_BYTES
from kvstore.remote.server.page.html import (
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
    moment,
    preview,
    to_notation,
)
from kvstore.remote.server.page.one_key import columns_changed
from kvstore.remote.server.page.request import PageRequest, Section
from kvstore.remote.server.page.tables import codec_of, data_text, row_link, row_name, shown_text
from kvstore.tables.definition import name_of
from kvstore.tables.row_codec import TableCodec
from kvstore.tables.words import json_row
from kvstore.timeline.reserved import CATALOGUE

_SINCE: Final = "1 hour ago"
_TABLES_SHOWN: Final = 20


def changed(call: PageRequest) -> PageView:
    """The differences between `since` and the time of the page."""
    name, prefix, after = call.text("table"), call.raw("prefix"), call.raw("after")
    since, upto = _since(call), call.as_of
    if since > upto:
        raise UsageError(
            f"since {moment(since)} is behind the time of the page, {moment(upto)}",
            "choose an earlier time to compare with",
        )
    codec = None
    if name:
        call.access.require_whole("tables")
        codec = codec_of(call, name)
        space = Span.of_prefix(codec.key.prefix)
        span = Span(max(space.start, after), space.end)
    else:
        span = call.span(prefix, after)
    page = call.store.browsing.changed(since, upto, span)
    title = "What changed"
    if name:
        title += f" in table {shown_text(name)}"
    elif prefix:
        title += f" below {to_notation(prefix[:200])}"
    blocks: list[PageBlock] = [_form(call, name, prefix), *_leads(call, name, prefix)]
    blocks.append(Text(_summary(since, upto, page)))
    blocks.append(_grid(call, name, codec, page))
    data = PageData(
        f"changed-{name}" if name else "changed",
        ["key", "change", "before", "after"],
        lambda: _data(codec, page.rows),
        "the differences of this page",
    )
    return PageView(title, blocks, data=data)


def _since(call: PageRequest) -> Timestamp:
    """The earlier time; an hour ago, or the beginning of history, where the caller names none."""
    text = call.text("since")
    oldest = int(call.store.browsing.oldest())
    if is_oldest(text):
        return Timestamp(oldest)
    if text:
        return call.store.to_time(text, name="since")
    hour_ago = call.store.to_time(_SINCE, name="since")
    return Timestamp(min(max(int(hour_ago), oldest), int(call.as_of)))


def _form(call: PageRequest, name: str, prefix: bytes) -> SearchForm:
    fields = [
        Field("since", "Between this time and that of the page", call.text("since") or _SINCE)
    ]
    hidden = {"at": call.at_text} if call.at_text else {}
    if name:
        hidden["table"] = name
    else:
        fields.append(Field("prefix", "Keys that begin with", to_notation(prefix)))
    return SearchForm("changed", fields, "Compare", hidden)


def _leads(call: PageRequest, name: str, prefix: bytes) -> Iterator[Links]:
    """Where else to look."""
    if name:
        rows = Cell("rows", call.link("table", name=name))
        yield Links("Table", [Cell(shown_text(name), rows.href)])
        return
    yield Links("", [Cell("The keys here", call.link("keys", prefix=prefix))])
    if call.access.prefix or prefix:
        return
    found = call.store.browsing.keys(Span.of_prefix(CATALOGUE), call.as_of, limit=_TABLES_SHOWN)
    names = [name_of(row.key) for row in found.rows]
    since = call.text("since")
    links = [
        Cell(shown_text(each), call.link("changed", table=each, since=since)) for each in names
    ]
    if links:
        yield Links("Of tables:", links)


def _summary(since: int, upto: int, page: ChangedPage) -> str:
    kinds = Counter(map(_kind, page.rows))
    found = ", ".join(f"{kinds[kind]:,} {kind}" for kind in ("added", "changed", "removed"))
    told = f"From {moment(since)} to {moment(upto)}: {found}"
    if page.is_cut:
        told += (
            f". Much changed, or much lies here: the page compared {BROWSE_ENTRIES_MAX:,} entries "
            "at each time, and the next page continues"
        )
    elif page.next is not None:
        told += " on this page, and the next page has more"
    return f"{told}. A value that changed and came back is no difference."


def _kind(row: ChangedKey) -> str:
    if row.before is None:
        return "added"
    return "removed" if row.after is None else "changed"


def _grid(call: PageRequest, name: str, codec: TableCodec | None, page: ChangedPage) -> Grid:
    following = page.next
    if following is not None and len(following) > BROWSE_KEY_BYTES_MAX:
        following = prefix_end(following[:BROWSE_KEY_BYTES_MAX])
    more = ""
    if following is not None:
        prefix = call.raw("prefix")
        since = call.text("since")
        more = call.link("changed", table=name, prefix=prefix, since=since, after=following)
    empty = "Nothing differs."
    if page.is_cut:
        empty = "Nothing differs among the entries that were compared. The next page continues."
    if codec is None:
        rows = [_key_cells(call, row) for row in page.rows]
        return Grid("Keys", ("Key", "Change", "Value"), rows, empty=empty, more=more)
    rows = [cells for row in page.rows for cells in _row_cells(call, name, codec, row)]
    return Grid("Rows", ("Row", "Change", "Column", "Value"), rows, empty=empty, more=more)


def _key_cells(call: PageRequest, row: ChangedKey) -> list[Cell]:
    before, after = (
        "" if value is None else preview(Excerpt.of(value, BROWSE_VALUE_BYTES)).text
        for value in (row.before, row.after)
    )
    kind = _kind(row)
    value = Cell(after, is_code=True) if kind == "added" else Cell(before, is_code=True)
    if kind == "changed":
        value = Cell(after or "empty", old=before or "empty")
        if before == after:
            value = Cell("differs behind what is shown here")
    return [call.key_cell(row.key), Cell(kind), value]


def _row_cells(
    call: PageRequest, name: str, codec: TableCodec, row: ChangedKey
) -> Iterator[list[Cell]]:
    """A row that differs, with a line for each column that does."""
    link = Cell(row_name(codec, row.key), row_link(call, name, row.key))
    kind = Cell(_kind(row))
    try:
        before, after = _row_values(codec, row)
    except KVStoreError as error:
        yield [link, kind, Cell(""), Cell(shown_text(str(error)))]
        return
    columns = codec.definition.by_name
    if before is None or after is None:
        yield [link, kind, Cell(""), _values(codec, before or after or {})]
        return
    found = list(columns_changed(columns, before, columns, after))
    for column, change in found or [("", Cell("the same values in another form"))]:
        yield [link, kind, Cell(column), change]
        link = kind = Cell("")


def _values(codec: TableCodec, row: dict[str, Any]) -> Cell:
    """The values of a row beside its key, short."""
    columns = codec.definition.value_columns
    pairs = (f"{each.name}={data_text(each, row[each.name])}" for each in columns)
    return Cell(shown_text(", ".join(pairs)))


def _row_values(codec: TableCodec, row: ChangedKey) -> list[dict[str, Any] | None]:
    return [
        None if value is None else codec.to_dict(row.key, value)
        for value in (row.before, row.after)
    ]


def _data(codec: TableCodec | None, rows: Sequence[ChangedKey]) -> Iterator[DataRow]:
    """The differences as data. The state of a row of a table is an object of JSON in each file."""
    for row in rows:
        before: Any
        after: Any
        before, after = (
            None if value is None else bytes_json(value) for value in (row.before, row.after)
        )
        key: Any = bytes_json(row.key)
        texts = ["" if value is None else to_notation(value) for value in (row.before, row.after)]
        name = to_notation(row.key)
        if codec is not None:
            name = key = row_name(codec, row.key)
            try:
                states = _row_values(codec, row)
            except KVStoreError as error:
                states = [{}, {}]
                name = f"{name}: {error}"
            schema = codec.definition.schema
            before, after = (state and json_row(schema, state) for state in states)
            texts = ["" if state is None else str(state) for state in (before, after)]
        kind = _kind(row)
        fields = {"key": key, "change": kind, "before": before, "after": after}
        yield DataRow([name, kind, *texts], fields)


CHANGED: Final = Section("changed", "What changed", changed, is_whole=False)
