"""The verbs of tables: typed rows as Arrow streams, decoded beside the store.

A caller sends keys as the table encodes them: a client has the definition, which is a value of the
store. The verb `batch` writes rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.codec.json import read_object
from kvstore.errors import (
    CorruptionError,
    TableAlteredError,
    UsageError,
)
from kvstore.limits import SERVER_STREAM_ROWS
from kvstore.remote import verbs
from kvstore.remote.served_rows import SentRows
from kvstore.remote.server.invocation import Answer, Invocation, serves
from kvstore.remote.server.verbs.upkeep import told
from kvstore.tables.catalogue import arguments_of, require_name
from kvstore.tables.definition import Definition
from kvstore.tables.indexes import found_batches, whole_index


@serves(verbs.TABLE_SCAN)
def table_scan(call: Invocation) -> Answer:
    """Rows of a table at one time, typed, in key order. `start` and `end` are keys as the table
    encodes them; all rows by default."""
    reverse, limit = call.flag("reverse"), call.count("limit")
    rows = SentRows(call.store).held(call.time("as_of"))
    codec, columns = rows.codec(_name(call)), _columns(call)
    span = _span(call, codec.key.prefix)

    def batches() -> Iterator[pa.RecordBatch]:
        with rows:
            for batch in rows.batches(span, None, reverse=reverse, limit=limit):
                yield codec.decode(batch.column(0), batch.column(1), columns)

    return _typed(codec.schema_of(columns), batches())


@serves(verbs.TABLE_FIND)
def table_find(call: Invocation) -> Answer:
    """Rows of a table whose entries in an index lie from `start` to below `end`, in the order of
    the index. The bounds are keys as the index encodes them."""
    reverse, limit = call.flag("reverse"), call.count("limit")
    rows = SentRows(call.store).held(call.time("as_of"))
    codec, columns = rows.codec(_name(call)), _columns(call)
    index = whole_index(codec, call["index"])
    span = _span(call, codec.index_codec(index).prefix)
    how: dict[str, Any] = {"columns": columns, "reverse": reverse, "limit": limit}

    def batches() -> Iterator[pa.RecordBatch]:
        with rows:
            yield from found_batches(codec, rows, index, span, **how)

    return _typed(codec.schema_of(columns), batches())


@serves(verbs.TABLE_CHANGES)
def table_changes(call: Invocation) -> Answer:
    """The changes of rows in the window (since, upto], typed, with the names of Delta's change
    feed."""
    images = call.word("images", "pre+post")
    reader = call.store.table(_name(call)).changes(
        call["since"], call.time("upto"), images=images, columns=_columns(call)
    )
    return _typed(reader.schema, reader)


@serves(verbs.TABLE_JOIN)
def table_join(call: Invocation) -> Answer:
    """For each label the columns of the row that it asks for, in the order of the labels, which
    are an Arrow stream. `question` is a JSON object of the arguments of `Table.join`: `on`, `at`,
    `known_at` and `columns`. `first` is the number of the first label in errors."""
    labels, age = call.table, call.age("max_age")
    if labels is None:
        raise UsageError("a join without labels", "send an Arrow stream of keys and times")
    question = _question(call)
    found = SentRows(call.store).join(
        _name(call), labels, max_age=age, prefix="", first=call.count("first") or 0, **question
    )
    added = pa.schema(list(found.schema)[labels.num_columns :])
    return _typed(added, (batch.select(added.names) for batch in found))


@serves(verbs.MAKE_TABLE)
def make_table(call: Invocation) -> Answer:
    """Make a table, or find the one that is there and the same. `definition` is its definition as
    JSON, as the store would keep it."""
    given = arguments_of(_definition(call))
    table = call.store.table(
        _name(call),
        given.schema,
        given.key,
        given.indexes if call.flag("has_indexes") else None,
        given.event_time,
    )
    return {"definition": json.loads(table.codec().stored)}


@serves(verbs.ALTER_TABLE)
def alter_table(call: Invocation) -> Answer:
    """Alter a table. `definition` is the definition that it is to have: the caller has altered the
    newest one."""
    codec = SentRows(call.store).alter(_name(call), _definition(call))
    return {"definition": json.loads(codec.stored)}


@serves(verbs.BUILD_INDEX)
def build_index(call: Invocation) -> Answer:
    """Make the entries of a new index for the rows that are there."""
    table, index = call.store.table(_name(call)), call["index"]
    return told(lambda tell: {"timestamp": table.build_index(index, progress=tell)})


def _name(call: Invocation) -> str:
    call.access.require_whole("a call of a table")
    return require_name(call["table"])


def _definition(call: Invocation) -> Definition:
    """The definition of a table that a caller has made."""
    name, text = _name(call), call["definition"]
    try:
        return Definition.from_bytes(name, text.encode())
    except CorruptionError as error:
        raise UsageError(
            f"the definition of table {name!r}: {error.problem}", "send it whole"
        ) from error


def _question(call: Invocation) -> dict[str, Any]:
    try:
        found = read_object(call["question"].encode(), where="question")
        given = {name: found[name] for name in ("on", "at", "known_at", "columns")}
        on, columns = given["on"], given["columns"]
        is_sound = all(
            type(each) is list and all(type(name) is str for name in each) for each in (on, columns)
        )
        if not is_sound or not isinstance(given["at"], str | None):
            raise KeyError("names")
        if not isinstance(given["known_at"], str | int | None):
            raise KeyError("known_at")
    except (CorruptionError, KeyError) as error:
        raise UsageError(
            f"question: {error}", "send a JSON object with on, at, known_at and columns"
        ) from error
    return given


def _columns(call: Invocation) -> list[str] | None:
    return call.items("columns") if call.has("columns") else None


def _span(call: Invocation, prefix: bytes) -> Span:
    """The span of the arguments `start` and `end`, which lies among the keys of `prefix`."""
    whole, start, end = Span.of_prefix(prefix), call.value("start"), call.value("end")
    span = Span(whole.start if start is None else start, whole.end if end is None else end)
    if span.intersect(whole.start, whole.end) != span:
        raise TableAlteredError(_name(call))
    return span


def _typed(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatchReader:
    """Batches as they travel: none is empty, and none has more rows than a stream sends at once."""

    def pieces() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for first in range(0, batch.num_rows, SERVER_STREAM_ROWS):
                yield batch.slice(first, SERVER_STREAM_ROWS)

    return pa.RecordBatchReader.from_batches(schema, pieces())
