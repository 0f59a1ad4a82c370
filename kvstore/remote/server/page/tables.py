"""Tables on the page: their sizes, their rows by conditions and orders, their definitions through
time."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from kvstore.base.span import Span, prefix_end
from kvstore.codec.tuples import desc
from kvstore.errors import KVStoreError, UsageError
from kvstore.limits import (
    BROWSE_COUNT_ENTRIES_MAX,
    BROWSE_ENTRIES_MAX,
    BROWSE_FILE_ROWS_MAX,
    BROWSE_KEY_BYTES_MAX,
)
from kvstore.remote.server.page.html import (
    SHOWN_CHARS,
    Cell,
    DataRow,
    Facets,
    Field,
    Grid,
    Heading,
    Lines,
    Links,
    PageBlock,
    PageData,
    PageView,
    SearchForm,
    Text,
    ValueCounts,
    from_notation,
    moment,
    shortened,
    size,
    to_notation,
)
from kvstore.remote.server.page.request import PageRequest, Section
from kvstore.tables.catalogue import named_parts
from kvstore.tables.definition import (
    Column,
    Definition,
    KeyPart,
    definition_key,
    index_prefix,
    name_of,
    rows_prefix,
    table_prefix,
)
from kvstore.tables.looks import (
    OPERATORS,
    UNARY,
    Condition,
    Facet,
    RowPage,
    RowSearch,
    StoredRow,
    best_index,
)
from kvstore.tables.nested import is_nested
from kvstore.tables.row_codec import TableCodec
from kvstore.tables.words import json_row, shown_value, to_value
from kvstore.timeline.reserved import CATALOGUE

# --------------------------------------------------------------------------------------------------
# Definitions, and values of columns for people.


def shown_text(text: str) -> str:
    """A text that came from a store, such as the name of a column, short and printable."""
    return to_notation(shortened(text, SHOWN_CHARS).encode("utf-8", "surrogatepass"), keeps="\\")


def codec_of(call: PageRequest, name: str) -> TableCodec:
    """The codec of a table at the time of the page. Raises `NotFoundError`, and `UsageError` where
    the table was made later."""
    with call.store.snapshot(call.as_of) as snapshot:
        return snapshot.table(name).codec()


def cell_of(column: Column, value: Any) -> Cell:
    """A value of a column."""
    if value is None:
        return Cell("", note="null")
    if isinstance(value, bytes):
        return Cell(shortened(to_notation(value[: SHOWN_CHARS * 4]), SHOWN_CHARS), is_code=True)
    if isinstance(value, str):
        return Cell(shown_text(value))
    return Cell(shown_text(shown_value(column.type, value)))


def row_name(codec: TableCodec, key: bytes) -> str:
    """The columns of a stored key with their values."""
    try:
        values = codec.key.values(key)
        pairs = zip(codec.key.columns, values, strict=True)
        named = ", ".join(f"{each.name}={data_text(each, value)}" for each, value in pairs)
    except (KVStoreError, OverflowError):  # of a damaged row: bytes and numbers
        named = codec.key.named(key)
    return shown_text(named)


def is_number(column: Column) -> bool:
    """Whether the values of a column are set to the right."""
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_decimal)
    return any(test(column.type) for test in tests)


def parts_told(definition: Definition, parts: Sequence[KeyPart]) -> str:
    """The columns of a key or an index, a falling one with a word about it."""
    named = named_parts(definition, list(parts))
    return ", ".join(
        f"{shown_text(each.value)} falling" if isinstance(each, desc) else shown_text(each)
        for each in named
    )


# --------------------------------------------------------------------------------------------------
# All tables at the time of the page, with their sizes.
#
# The counts of one page read `BROWSE_COUNT_ENTRIES_MAX` entries together. A table with more rows
# than its share is estimated: by the bytes of its keys in the files, among all entries.

_COUNTED_LEAST: Final = 512


def tables(call: PageRequest) -> PageView:
    """The tables that are there at the time of the page."""
    return PageView("Tables", [*tables_grid(call)])


def tables_grid(call: PageRequest) -> Iterator[PageBlock]:
    """The tables, a page at a time."""
    space = Span.of_prefix(CATALOGUE)
    after = max(call.raw("after"), space.start)
    page = call.store.browsing.keys(Span(after, space.end), call.as_of)
    definitions = [codec_of(call, name_of(found.key)).definition for found in page.rows]
    spans = [Span.of_prefix(rows_prefix(each.number)) for each in definitions]
    rows = []
    for definition, told in zip(definitions, _told_counts(call, spans), strict=True):
        name = definition.name
        indexes = ", ".join(shown_text(each.name) for each in definition.indexes)
        columns = ", ".join(f"{each.name} {each.type}" for each in definition.columns)
        rows.append(
            [
                Cell(shown_text(name), call.link("table", name=name)),
                *told,
                Cell(parts_told(definition, definition.key)),
                Cell(indexes),
                Cell(shortened(shown_text(columns), 300)),
            ]
        )
    more = "" if page.next is None else call.link("tables", after=page.next)
    heads = ("Table", "Rows", "Size", "Key", "Indexes", "Columns")
    empty = "The store has no tables at this time: its keys and values are bytes."
    numbers = frozenset({1, 2})
    yield Grid("Tables at this time", heads, rows, empty=empty, more=more, numbers=numbers)
    if rows:
        yield Text(
            "The size of a table is that of its rows at this time, without their history and "
            f"without indexes. A page counts {BROWSE_COUNT_ENTRIES_MAX:,} entries, and estimates "
            "larger tables by the bytes of their files."
        )


def _told_counts(call: PageRequest, spans: Sequence[Span]) -> Iterator[tuple[Cell, Cell]]:
    """The live keys of each span, and their bytes. What a small span leaves of its share goes to
    the next ones."""
    left = BROWSE_COUNT_ENTRIES_MAX
    for number, span in enumerate(spans):
        share = max(left // (len(spans) - number), _COUNTED_LEAST)
        counted = call.store.browsing.count(span, call.as_of, most=share)
        left -= counted.passed
        count, bytes_ = counted.rows, counted.bytes
        if counted.is_exact:
            yield Cell(f"{count:,}"), Cell(size(bytes_))
            continue
        part, whole = call.store.browsing.sizes([span, Span()])
        entries = call.store.stats()["data_entries"] * part / max(whole, 1)
        count = max(round(entries * counted.rows / counted.passed), counted.rows)
        bytes_ = count * counted.bytes // max(counted.rows, 1)
        yield Cell(f"about {count:,}"), Cell(f"about {size(bytes_)}")


TABLES: Final = Section("tables", "Tables", tables)


# --------------------------------------------------------------------------------------------------
# What a person asks of a table, in the query of an address:
#
#     c1, o1, v1, c2, ...     column, operator and value of each condition
#     column, operator, value a condition that a form adds
#     order                   `key`, `index:NAME`, or nothing: the order that reads least
#     falling                 1 for the opposite order
#     after                   where the page begins
#
# Names of columns and indexes, texts and bytes are in the notation of bytes, other values as the
# shell takes them.

CONDITIONS_MAX: Final = 6
_INDEX: Final = "index:"
_VALUE_CHARS_MAX: Final = 400
"""A longer value has no link that asks for it: addresses are bounded."""


class _Asked(NamedTuple):
    """What the caller asks of a table."""

    name: str
    codec: TableCodec
    conditions: Sequence[Condition]
    order: str
    is_falling: bool

    @property
    def search(self) -> RowSearch:
        """The search that was asked for, or that reads least."""
        if self.order.startswith(_INDEX):
            index: str | None = self.order.removeprefix(_INDEX)
        else:
            index = None if self.order else best_index(self.codec, self.conditions)
        return RowSearch(self.conditions, index, self.is_falling)

    def fields(self) -> dict[str, str]:
        """The fields of an address that asks for the same."""
        found = {"name": self.name}
        for number, (column, operator, value) in enumerate(self.conditions, 1):
            found[f"c{number}"] = to_notation(column.encode())
            found[f"o{number}"] = operator
            if operator not in UNARY:
                found[f"v{number}"] = _text_of(self.codec.definition.column(column), value)
        if self.order:
            found["order"] = to_notation(self.order.encode())
        if self.is_falling:
            found["falling"] = "1"
        return found

    def with_condition(self, condition: Condition) -> _Asked:
        """The same with one more condition."""
        return self._replace(conditions=[*self.conditions, condition])

    def without(self, condition: Condition) -> _Asked:
        """The same without a condition."""
        return self._replace(conditions=[each for each in self.conditions if each != condition])


def _asked(call: PageRequest, name: str, codec: TableCodec) -> _Asked:
    """Raises `UsageError` that names the condition, or the order, that cannot be asked for."""
    fields = [(f"c{number}", f"o{number}", f"v{number}") for number in range(1, CONDITIONS_MAX + 1)]
    conditions = [
        _condition(call, codec.definition, *names)
        for names in (*fields, ("column", "operator", "value"))
        if call.text(names[0])
    ]
    conditions = list(dict.fromkeys(conditions))
    if len(conditions) > CONDITIONS_MAX:
        raise UsageError(f"{len(conditions)} conditions", f"keep {CONDITIONS_MAX} at most")
    order = call.name("order")
    if order and order != "key":
        codec.definition.index(order.removeprefix(_INDEX))
    return _Asked(name, codec, conditions, order, call.text("falling") == "1")


def _condition(
    call: PageRequest, definition: Definition, column: str, operator: str, value: str
) -> Condition:
    asked = definition.column(call.name(column))
    word = call.choice(operator, dict.fromkeys(OPERATORS), "=")
    known = next(each for each in OPERATORS if each == word)
    given = None if known in UNARY else _value_of(definition, asked, call.raw_text(value))
    return Condition(asked.name, known, given)


def _value_of(definition: Definition, column: Column, text: str) -> Any:
    where = f"{definition.where}, column {column.name!r}"
    if is_nested(column.type):
        raise UsageError(f"{where} is {column.type}", "use is null or is not null")
    if _is_text(column) or _is_binary(column):
        raw = from_notation(text)
        try:
            return raw.decode() if _is_text(column) else raw
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: {text[:100]!r} is no text", "correct it") from error
    return to_value(column.type, text.strip(), where)


def _text_of(column: Column, value: Any) -> str:
    """The text of an address that `_value_of` reads as a value."""
    if isinstance(value, str | bytes):
        return to_notation(value.encode() if isinstance(value, str) else value)
    if pa.types.is_duration(column.type):
        return str(pa.scalar(value, column.type).cast(pa.int64()).as_py())
    return shown_value(column.type, value)


def _is_text(column: Column) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _is_binary(column: Column) -> bool:
    types = pa.types
    tests = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(test(column.type) for test in tests)


# --------------------------------------------------------------------------------------------------
# The rows of a table that meet the conditions, at the time of the page.


def table(call: PageRequest) -> PageView:
    """The rows of a table. What cannot be asked is told beside the form."""
    name, after = call.text("name"), call.raw("after")
    codec = codec_of(call, name)
    title = f"Table {shown_text(name)}"
    more = Links(
        "",
        [
            Cell("Definition, indexes and sizes", call.link("definition", name=name)),
            Cell("What changed here", call.link("changed", table=name)),
            Cell("All tables", call.link("tables")),
        ],
    )
    try:
        asked = _asked(call, name, codec)
        look = partial(call.store.browsing.rows, codec, asked.search, call.as_of, after=after)
        page = look(with_facets=True)
    except UsageError as error:
        plain = _Asked(name, codec, [], "", is_falling=False)
        told = Text(f"{error.what}: {error.remedy}." if error.remedy else error.what, True)
        return PageView(title, [more, told, _form(call, plain)], status=400)
    blocks: list[PageBlock] = [more, _form(call, asked)]
    if asked.conditions:
        blocks.append(_chips(call, asked))
    blocks.append(Text(_work(asked, page)))
    if page.facets:
        blocks.append(_facets(call, asked, page))
    blocks.append(_grid(call, asked, page))
    data = PageData(
        name,
        [shown_text(each) for each in codec.definition.schema.names],
        lambda: _data_rows(codec, look(limit=BROWSE_FILE_ROWS_MAX)),
        f"from this page on, {BROWSE_FILE_ROWS_MAX:,} rows at most",
    )
    return PageView(title, blocks, data=data)


def _form(call: PageRequest, asked: _Asked) -> SearchForm:
    definition = asked.codec.definition
    columns = [(to_notation(each.encode()), shown_text(each)) for each in definition.by_name]
    orders = [("", "what reads least"), ("key", f"key: {parts_told(definition, definition.key)}")]
    for index in definition.indexes:
        if index.is_whole:
            value = to_notation(f"{_INDEX}{index.name}".encode())
            told = f"{shown_text(index.name)}: {parts_told(definition, index.parts)}"
            orders.append((value, told))
    order = to_notation(asked.order.encode())
    hidden = {**asked.fields(), **({"at": call.at_text} if call.at_text else {})}
    hidden = {name: text for name, text in hidden.items() if name not in ("order", "falling")}
    return SearchForm(
        "table",
        (
            Field("column", "Column", "", [("", "any"), *columns]),
            Field("operator", "Comparison", "=", [(each, each) for each in OPERATORS]),
            Field("value", "Value", ""),
            Field("order", "In the order of", order, orders),
            Field("falling", "Beginning with", "1" if asked.is_falling else "", _DIRECTIONS),
        ),
        "Find",
        hidden,
    )


_DIRECTIONS: Final = (("", "the first"), ("1", "the last"))


def _chips(call: PageRequest, asked: _Asked) -> Links:
    links = [
        Cell(
            f"{_told(asked.codec.definition, each)} \N{MULTIPLICATION SIGN}",
            call.link("table", **asked.without(each).fields()),
        )
        for each in asked.conditions
    ]
    if len(links) > 1:
        links.append(Cell("All rows", call.link("table", name=asked.name)))
    return Links("Conditions, which a click takes away:", links)


def _told(definition: Definition, condition: Condition) -> str:
    column, operator, value = condition
    if operator in UNARY:
        return f"{shown_text(column)} {operator}"
    text = shortened(_text_of(definition.column(column), value), 60)
    return f"{shown_text(column)} {operator} {text}"


def _work(asked: _Asked, page: RowPage) -> str:
    """What the look has read, and by which order."""
    search = asked.search
    order = "the key" if search.index is None else f"index {shown_text(search.index)}"
    bound = f"A page looks at {BROWSE_ENTRIES_MAX:,} rows, or fewer large ones"
    if not search.conditions:
        rest = (
            f"{bound}, and there are more." if page.is_cut else f"{page.seen:,} rows from here on."
        )
        return f"In the order of {order}. {rest}"
    found = f"By {order}: {page.met:,} of {page.seen:,} rows meet the conditions"
    if not page.is_cut:
        return f"{found}, to the end."
    return f"{found}. {bound}, and the next page continues behind its last row."


def _grid(call: PageRequest, asked: _Asked, page: RowPage) -> Grid:
    codec = asked.codec
    columns = codec.definition.columns
    rows = [_cells(call, asked.name, codec, row) for row in page.rows]
    following = page.next
    if following is not None and len(following) > BROWSE_KEY_BYTES_MAX:
        # An address cannot carry it: the next page begins behind all keys that share its beginning.
        following = following[:BROWSE_KEY_BYTES_MAX]
        following = following if asked.is_falling else prefix_end(following)
    more = ""
    if following is not None:
        more = call.link("table", **asked.fields(), after=following)
    return Grid(
        "Rows at this time",
        [_heading(call, asked, column) for column in columns],
        rows,
        empty="No row here at this time."
        if not page.is_cut
        else "No row among those that were read. The next page continues.",
        more=more,
        numbers=frozenset(at for at, each in enumerate(columns) if is_number(each)),
        is_data=True,
    )


def _heading(call: PageRequest, asked: _Asked, column: Column) -> Heading:
    """The head of a column, with a link where the key or an index begins with the column."""
    definition, text = asked.codec.definition, shown_text(column.name)
    leads = {"key": definition.key}
    leads |= {f"{_INDEX}{each.name}": each.parts for each in definition.indexes if each.is_whole}
    order = next((name for name, parts in leads.items() if parts[0].id == column.id), None)
    if order is None:
        return Heading(text)
    search = asked.search
    now = "key" if search.index is None else f"{_INDEX}{search.index}"
    turned = asked._replace(order=order, is_falling=now == order and not asked.is_falling)
    link = call.link("table", **turned.fields())
    if now != order:
        return Heading(text, link)
    is_falling = leads[order][0].is_falling is not asked.is_falling
    return Heading(text, link, "descending" if is_falling else "ascending")


def _cells(call: PageRequest, name: str, codec: TableCodec, row: StoredRow) -> list[Cell]:
    columns = codec.definition.columns
    link = row_link(call, name, row.key)
    try:
        values = codec.to_dict(*row)
    except KVStoreError as error:
        found = [Cell(shown_text(str(error)), link)]
    else:
        found = [cell_of(column, values[column.name]) for column in columns]
        found[0] = Cell(found[0].text or "null", link, is_code=found[0].is_code)
    return [*found, *[Cell("")] * (len(columns) - len(found))]


def row_link(call: PageRequest, name: str, key: bytes) -> str:
    """The address of a row; empty for a key that is too long for one."""
    return "" if len(key) > BROWSE_KEY_BYTES_MAX else call.link("row", name=name, key=key)


def _facets(call: PageRequest, asked: _Asked, page: RowPage) -> Facets:
    names = ", ".join(shown_text(facet.column) for facet in page.facets)
    where = "among the rows from here on"
    if page.is_cut:
        where = f"among the first {page.met:,} rows that were found"
    columns = [_facet(call, asked, facet) for facet in page.facets]
    return Facets(f"Values of {names}, {where}", columns)


def _facet(call: PageRequest, asked: _Asked, facet: Facet) -> ValueCounts:
    column = asked.codec.definition.column(facet.column)
    values = []
    for value, count in facet.values:
        cell = Cell("null") if value is None else cell_of(column, value)
        condition = Condition(column.name, "is null" if value is None else "=", value)
        is_linked = len(asked.conditions) < CONDITIONS_MAX and condition not in asked.conditions
        if is_linked and (value is None or len(_text_of(column, value)) <= _VALUE_CHARS_MAX):
            link = call.link("table", **asked.with_condition(condition).fields())
            cell = Cell(
                cell.text or "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}", link
            )
        values.append((cell, count))
    return ValueCounts(shown_text(column.name), values, facet.distinct - len(values))


def _data_rows(codec: TableCodec, page: RowPage) -> Iterator[DataRow]:
    """The rows of a page as data. A row that cannot be read has its error alone."""
    schema = codec.definition.schema
    for row in page.rows:
        try:
            values = codec.to_dict(*row)
        except KVStoreError as error:
            yield DataRow([str(error)], {"error": str(error)})
            continue
        yield data_row(schema, values)


def data_row(schema: pa.Schema, values: Mapping[str, Any]) -> DataRow:
    """A row of columns as data. A null is an empty text."""
    texts = [
        "" if values[each.name] is None else shown_value(each.type, values[each.name])
        for each in schema
    ]
    return DataRow(texts, json_row(schema, dict(values)))


def data_text(column: Column, value: Any) -> str:
    """A value of a column, whole."""
    return "null" if value is None else shown_value(column.type, value)


TABLE: Final = Section("table", "Table", table, in_navigation=False)


# --------------------------------------------------------------------------------------------------
# The definition of a table: columns, indexes and sizes at the time of the page, and what each
# alteration changed.


def definition(call: PageRequest, name: str = "") -> PageView:
    """The definition of a table at the time of the page, and its definitions from then back."""
    name = name or call.text("name")
    found = codec_of(call, name).definition
    key = {part.id: number for number, part in enumerate(found.key, 1)}
    columns = [
        [
            Cell(shown_text(column.name)),
            Cell(str(column.type)),
            Cell("" if column.is_nullable else "not null"),
            Cell(f"{key[column.id]}" if column.id in key else ""),
        ]
        for column in found.columns
    ]
    blocks: list[PageBlock] = [
        Links(
            "",
            [
                Cell("Rows", call.link("table", name=name)),
                Cell("What changed here", call.link("changed", table=name)),
            ],
        ),
        _sizes(call, found),
        Grid("Columns", ("Column", "Type", "Nulls", "Place in the key"), columns),
        *_definitions(call, name),
    ]
    return PageView(f"Definition of table {shown_text(name)}", blocks)


def _sizes(call: PageRequest, found: Definition) -> Grid:
    """The rows and the indexes of a table, with their numbers and bytes."""
    spans = {"rows": Span.of_prefix(rows_prefix(found.number))}
    told = {"rows": parts_told(found, found.key)}
    notes = {"rows": "in the order of the key"}
    for index in found.indexes:
        label = f"index {shown_text(index.name)}"
        spans[label] = Span.of_prefix(index_prefix(found.number, index.number))
        told[label] = parts_told(found, index.parts)
        words = ["unique"] * index.is_unique + ["not whole yet"] * (not index.is_whole)
        notes[label] = ", ".join(words)
    counts = _told_counts(call, list(spans.values()))
    rows = [
        [Cell(label), Cell(told[label]), *each, Cell(notes[label])]
        for label, each in zip(spans, counts, strict=True)
    ]
    [on_file] = call.store.browsing.sizes([Span.of_prefix(table_prefix(found.number))])
    caption = f"Rows and indexes at this time (with all history, about {size(on_file)} in files)"
    heads = ("What", "Columns", "Entries", "Bytes", "Notes")
    return Grid(caption, heads, rows, numbers=frozenset({2, 3}))


_DEFINITIONS_SHOWN: Final = 20


def _definitions(call: PageRequest, name: str) -> Iterator[PageBlock]:
    """What each alteration changed, newest first."""
    key = definition_key(name)
    page = call.store.browsing.versions(key, call.as_of, limit=_DEFINITIONS_SHOWN)
    versions = []
    for version in page.rows:
        stored = None
        if version.value is not None:
            stored = version.value.head
            if not version.value.is_whole:
                stored = call.store.get(key, as_of=version.timestamp)
        lines = [] if stored is None else _lines(Definition.from_bytes(name, stored))
        versions.append((version.timestamp, lines))
    for number, (at, lines) in enumerate(versions):
        is_oldest = number + 1 == len(versions)
        if is_oldest and page.next is not None:
            return
        before = [] if is_oldest else versions[number + 1][1]
        deed = "Dropped" if not lines else "Altered" if before else "Made"
        found = difflib.unified_diff(before, lines, lineterm="", n=0)
        changed = [line for line in found if not line.startswith(("---", "+++", "@@"))]
        if changed:
            yield Lines(f"{deed} at {moment(at)}", changed, is_difference=True)


def _lines(found: Definition) -> list[str]:
    """A definition as lines, one for each thing that an alteration changes."""
    lines = [f"key {parts_told(found, found.key)}"]
    for column in found.columns:
        nulls = "" if column.is_nullable else ", not null"
        default = "" if column.default is None else ", with a default"
        lines.append(f"column {shown_text(column.name)}: {column.type}{nulls}{default}")
    for index in found.indexes:
        words = ", unique" * index.is_unique + ", not whole" * (not index.is_whole)
        lines.append(f"index {shown_text(index.name)}: {parts_told(found, index.parts)}{words}")
    return lines


DEFINITION: Final = Section("definition", "Definition", definition, in_navigation=False)
