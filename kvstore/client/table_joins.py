"""The join of labels with a table of a client: labels travel in pieces, and columns come back.

Invariants
1. All labels see one moment: the newest time of the server is asked for once, at the call.
2. A lease keeps the history of the server from the call until the end of the result.
3. Memory is bounded by a piece of labels and a batch of the answer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kvstore.arguments import require_age
from kvstore.client import calls, streams
from kvstore.client.frontiers import ServedFrontiers
from kvstore.client.joins import RemoteSide
from kvstore.client.pool import Pool
from kvstore.client.reply import Reply
from kvstore.errors import KVStoreError
from kvstore.joins.sources import Piece, Pieces
from kvstore.limits import JOIN_ROWS_FIRST, SERVER_BODY_BYTES_MAX
from kvstore.tables.codec import TableCodec
from kvstore.tables.joining import asked_rows
from kvstore.timestamp import TimeLike


class _Question(NamedTuple):
    """The columns of labels that travel, and the arguments of the verb `table_join`."""

    sent: list[str]
    at: str | None
    fields: dict[str, Any]
    max_age: float | None


def join_served(
    pool: Pool,
    codec: TableCodec,
    labels: object,
    on: str | Sequence[str],
    at: str | None,
    known_at: str | TimeLike | None,
    max_age: timedelta | None,
    columns: Sequence[str] | None,
    prefix: str,
) -> pa.RecordBatchReader:
    """The labels with columns of the rows that they ask for. See `Table.join`."""
    age = require_age(max_age, name="max_age")
    reader, names, chosen, schema = asked_rows(codec, labels, on, at, known_at, columns, prefix)
    known = known_at
    is_column = isinstance(known_at, str) and known_at in reader.schema.names
    if known_at is not None and not is_column:
        known = int(ServedFrontiers(pool).to_time(known_at, name="known_at"))
    sent = [*names, *([] if at is None else [at]), *([str(known_at)] if is_column else [])]
    fields = {"on": names, "at": at, "known_at": known, "columns": chosen}
    age_s = None if age is None else age.total_seconds()
    question = _Question(list(dict.fromkeys(sent)), at, fields, age_s)
    batches = _joined(pool, codec, reader, question, schema)
    next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


def _joined(
    pool: Pool,
    codec: TableCodec,
    reader: pa.RecordBatchReader,
    question: _Question,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    with RemoteSide(pool).opened() as answers:
        newest = answers.newest
        if codec.definition.has_event_time and question.fields["known_at"] is None:
            question.fields["known_at"] = newest
        # A batch without columns first: taking it holds the history, within the call.
        yield pa.record_batch([], names=[])
        pieces = Pieces(reader, JOIN_ROWS_FIRST, JOIN_ROWS_FIRST)
        for piece in pieces:
            size = 0
            for batch in _answered(pool, codec, piece, question, newest, schema):
                size += sum(column.nbytes for column in batch.columns[len(reader.schema) :])
                yield batch
            pieces.learn(piece.rows, size)


def _answered(
    pool: Pool,
    codec: TableCodec,
    piece: Piece,
    question: _Question,
    newest: int,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """The batches of a piece with the added columns. Where the answer breaks off, its rest is asked
    for again within the client's patience."""
    request = _request(codec, piece, question, newest)
    if len(request.body) > SERVER_BODY_BYTES_MAX and piece.rows > 1:
        for half in piece.halves():
            yield from _answered(pool, codec, half, question, newest, schema)
        return
    repeats = None
    while piece.rows:
        answered = 0
        opened = pool.open(request)  # this waits for an absent server by itself
        try:
            found = streams.rows_of(pool, *opened)
            for labels, columns in _side_by_side(piece.batches, found):
                yield pa.RecordBatch.from_arrays([*labels.columns, *columns], schema=schema)
                answered += labels.num_rows
            return
        except KVStoreError as error:
            if answered:
                piece, repeats = piece.behind(answered), None
                request = _request(codec, piece, question, newest)
            repeats = repeats or pool.repeats(request)
            if not repeats(error):
                raise


def _request(
    codec: TableCodec, piece: Piece, question: _Question, newest: int
) -> calls.ClientRequest[Any]:
    table = pa.Table.from_batches(piece.batches).select(question.sent)
    fields = question.fields
    if question.at is None:  # then the labels ask for the moment of the call
        fields = {**fields, "at": "_".join(["at", *question.sent])}
        table = table.append_column(fields["at"], pa.array(np.full(piece.rows, newest)))
    arguments = {
        "table": codec.definition.name,
        "question": json.dumps(fields),
        "max_age": question.max_age,
        "first": piece.first,
    }
    return calls.of_rows("table_join", table, arguments, Reply.json, is_read=True)


def _side_by_side(
    labels: Iterable[pa.RecordBatch], found: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, list[pa.Array]]]:
    """Labels, and as many rows of their answers."""
    rest = deque(batch for batch in labels if batch.num_rows)
    for batch in found:
        at = 0
        while at < batch.num_rows:
            label = rest.popleft()
            rows = min(label.num_rows, batch.num_rows - at)
            yield label.slice(0, rows), batch.slice(at, rows).columns
            at += rows
            if rows < label.num_rows:
                rest.appendleft(label.slice(rows))
