"""Tables: their names, and their rows with typed columns at the time of the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from kvstore.browsing import KeyRow
from kvstore.errors import KVStoreError, UsageError
from kvstore.limits import BROWSE_KEY_BYTES_MAX, BROWSE_ROWS_MAX
from kvstore.server.page.blocks import Cell, Grid, PageBlock, PageView, Text
from kvstore.server.page.call import SHOWN_CHARS, PageRequest
from kvstore.server.page.notation import shortened, size, to_notation
from kvstore.server.page.section import Section
from kvstore.span import Span
from kvstore.tables.codec import TableCodec

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
