"""Point-in-time joins: Arrow batches of labels, with the values that keys had at their times.

The labels stream through in pieces. Each side of the join (`kvstore.joins.side`) answers a piece,
and its columns are put beside the columns of the labels.

Invariants
1. Each label comes out once, in its place, with all its columns.
2. A label gets the value of the newest version at or below its time: see `kvstore.mvcc.version`.
3. Each side keeps its history from the call until the end of the result.
4. Memory is bounded by the limits of a piece. A piece whose values are too large is halved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import pyarrow as pa

from kvstore.arguments import require_age
from kvstore.columns import require_bytes_type
from kvstore.errors import UsageError
from kvstore.joins.side import Answers, Asked, Join, KeyedSide, Search, Side, everywhere
from kvstore.joins.sources import (
    Piece,
    Pieces,
    column_names,
    keys_of,
    label_reader,
    require_column_name,
    require_columns,
    require_prefix,
    times_of_labels,
)
from kvstore.limits import JOIN_VALUE_BYTES_MAX
from kvstore.timestamp import TIMESTAMP_MAX

OnGone: TypeAlias = Literal["error", "null"]


class _Part(NamedTuple):
    """One side of a join, with the columns of its keys and the names of the columns that it
    adds."""

    side: Side
    key: tuple[str, ...]
    names: tuple[str, ...]
    search: Search


class _Plan(NamedTuple):
    """A join whose arguments and columns are checked."""

    parts: list[_Part]
    at: str | None
    schema: pa.Schema


class _Opened(NamedTuple):
    part: _Part
    answers: Answers


def join(
    labels: object,
    joins: Sequence[Join],
    *,
    key: str = "id",
    at: str | None = "ts",
    on_gone: OnGone = "error",
) -> pa.RecordBatchReader:
    """The labels, each with the values that its keys had at its time in each of several sources.

    The labels are read once, and the columns of the sources stand side by side, in the order of
    `joins`. Each of `joins` is a `Join`, or a source alone: a store, a snapshot, a collection or a
    table. Arguments, columns, errors and memory
    are as in `Store.join`; a name that two sources add is refused.
    """
    if on_gone not in ("error", "null"):
        raise UsageError(f"on_gone={on_gone!r}", "pass 'error' or 'null'")
    if not isinstance(joins, Sequence) or not joins:
        raise UsageError("there is no source to join", "pass a list of stores or of kvstore.Join")
    parts = [_part(each, key, on_gone == "null") for each in joins]
    if at is not None:
        require_column_name(at, "at")
    reader = label_reader(labels)
    schema = reader.schema
    for part in parts:
        require_columns(schema, reader.schema, part.key, at, part.names)
        if not isinstance(part.side, KeyedSide):
            require_bytes_type(reader.schema.field(part.key[0]))
        for field, name in zip(part.side.fields, part.names, strict=True):
            schema = schema.append(field.with_name(name))
    batches = _joined(reader, _Plan(parts, at, schema))
    next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


def _part(given: Join, key: str, is_gone_null: bool) -> _Part:
    each = given if isinstance(given, Join) else Join(given)
    if not hasattr(each.source, "join_side"):
        raise UsageError(
            f"a source of a join must be a store, not {type(each.source).__name__}",
            "pass stores, snapshots, collections or tables, or kvstore.Join of them",
        )
    require_age(each.max_age, name="max_age")
    age = TIMESTAMP_MAX if each.max_age is None else each.max_age // timedelta(microseconds=1)
    search = Search(min(age * 1000, TIMESTAMP_MAX), is_gone_null, JOIN_VALUE_BYTES_MAX)
    side = each.source.join_side()
    if isinstance(side, KeyedSide):
        side = side if each.columns is None else side.choose(column_names("columns", each.columns))
        own = [field.name for field in side.fields]
        if not each.prefix:
            own[-1] = f"{side.name}_{own[-1]}"
        asked = column_names("key", side.key if each.key is None else each.key)
        if len(asked) != len(side.key):
            raise UsageError(
                f"key={asked!r} for a key of {len(side.key)} columns",
                f"name the labels' columns of {', '.join(side.key)}",
            )
        return _Part(side, asked, _names(each, own, own), search)
    asked = column_names("key", [key if each.key is None else each.key])
    names = _names(each, each.columns, [field.name for field in side.fields])
    return _Part(side, asked, names, search)


def _names(join: Join, chosen: Sequence[str] | None, fields: list[str]) -> tuple[str, ...]:
    """The names that the columns `fields` of a source have in the result."""
    names = fields if chosen is None else chosen
    require_prefix(join.prefix)
    if (
        not isinstance(names, tuple | list)
        or len(names) != len(fields)
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise UsageError(f"columns={names!r}", "pass two names: of the value and of its timestamp")
    return tuple(join.prefix + name for name in names)


def _joined(reader: pa.RecordBatchReader, plan: _Plan) -> Iterator[pa.RecordBatch]:
    with ExitStack() as held:
        opened = [_Opened(part, held.enter_context(part.side.opened())) for part in plan.parts]
        every = [each.answers for each in opened]
        if plan.at is None:
            for each in every:
                _ = each.newest  # the time of the call is the time of labels
        # A batch without columns first: taking it holds the history, within the call.
        yield pa.record_batch([], names=[])
        pieces = Pieces(reader, min(a.rows_first for a in every), min(a.rows_max for a in every))
        for piece in pieces:
            size = 0
            for batch in _answered(opened, piece, plan):
                size += sum(
                    batch.column(name).nbytes for part in plan.parts for name in part.names[:-1]
                )
                yield batch
            pieces.learn(piece.rows, size)


def _answered(opened: list[_Opened], piece: Piece, plan: _Plan) -> Iterator[pa.RecordBatch]:
    """The batches of a piece with the columns of all sides."""
    columns = _columns(opened, piece, plan.at)
    if columns is None:
        for half in piece.halves():
            yield from _answered(opened, half, plan)
        return
    at = 0
    for batch in piece.batches:
        rows = batch.num_rows
        added = [column.slice(at, rows) for column in columns]
        at += rows
        if rows:
            yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=plan.schema)


def _newest(opened: list[_Opened]) -> int:
    return max(each.answers.newest for each in opened)


def _columns(opened: list[_Opened], piece: Piece, at: str | None) -> list[pa.Array] | None:
    times = None if at is None else times_of_labels(piece, at, partial(_newest, opened))
    keys: dict[str, pa.Array] = {}  # of stores: tables encode theirs
    columns: list[pa.Array] = []
    for part, answers in opened:
        if isinstance(part.side, KeyedSide):
            asked = part.side.keys(piece, part.key)
        elif (asked := keys.get(part.key[0])) is None:
            asked = keys_of(piece, part.key[0])
            if asked is None:
                return None
            keys[part.key[0]] = asked
        asked_at = everywhere(answers.newest, piece.rows) if times is None else times
        found = answers.answer(Asked(asked, asked_at, piece.first), part.search)
        if found is None:
            return None
        columns += found
    return columns
