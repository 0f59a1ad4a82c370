"""Rows as the parts of an Arrow IPC stream, pulled one by one.

A part is one message of the stream. A failure after the first part becomes a last batch without
rows, whose metadata has the error: a plain reader of Arrow sees no false row, and sees that the
stream breaks off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from kvstore.errors import KVStoreError
from kvstore.limits import JSON_ANSWER_BYTES_MAX, JSON_ROWS_MAX
from kvstore.protocol import ERROR_NAME, failure_fields, to_json

DEFECT: Final = KVStoreError("the server has a defect", "see its log")
"""The error of a caller for a bug of ours, whose details stay here."""

_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class BrokenStreamError(Exception):
    """The stream failed, and its last part tells why: the connection must be closed."""


class VerbFailedError(Exception):
    """A verb failed with an error of the operating system. It has a class of its own, because the
    server takes an `OSError` for the departure of the caller."""


def arrow_parts(reader: pa.RecordBatchReader) -> Iterator[bytes]:
    """The parts of the stream. Raises `BrokenStreamError` behind the part that has an error."""
    schema = reader.schema
    yield schema.serialize().to_pybytes()
    try:
        for batch in reader:
            if batch.num_rows:
                yield batch.serialize().to_pybytes()
    except KVStoreError as error:
        yield _broken(schema, error)
        raise BrokenStreamError from error
    except Exception as error:
        yield _broken(schema, DEFECT)
        if isinstance(error, OSError):
            raise VerbFailedError from error
        raise
    yield _END


def json_rows(reader: pa.RecordBatchReader) -> tuple[list[dict[str, Any]], bool]:
    """The rows as JSON, and whether these are all. It ends after `JSON_ROWS_MAX` rows, and behind
    the batch that reaches `JSON_ANSWER_BYTES_MAX`."""
    rows: list[dict[str, Any]] = []
    size = 0
    for batch in _batches(reader):
        if size >= JSON_ANSWER_BYTES_MAX and batch.num_rows:
            return rows, False
        size += batch.nbytes
        part = batch.slice(0, JSON_ROWS_MAX - len(rows))
        cells = [_cells(column) for column in part.columns]
        names = part.schema.names
        rows.extend(dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True))
        if len(rows) == JSON_ROWS_MAX:
            return rows, False
    return rows, True


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except OSError as error:
        raise VerbFailedError from error


def _cells(column: pa.Array) -> list[Any]:
    """The cells of a column as JSON has them. Python's times have no nanoseconds."""
    if pa.types.is_timestamp(column.type):
        texts = column.cast(pa.string()).to_pylist()
        return [None if text is None else text.replace(" ", "T", 1) for text in texts]
    return [_cell(cell) for cell in column.to_pylist()]


def _cell(cell: Any) -> Any:
    """A cell as JSON: bytes as everywhere, and a text for what JSON has no form for."""
    if cell is None or isinstance(cell, bool | int | str):
        return cell
    if isinstance(cell, bytes):
        return to_json(cell)
    if isinstance(cell, float):
        return cell if math.isfinite(cell) else _NUMBERS[str(cell)]
    if isinstance(cell, dict):
        return {name: _cell(each) for name, each in cell.items()}
    if isinstance(cell, list | tuple):
        return [_cell(each) for each in cell]
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


_NUMBERS: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""Numbers that JSON does not have, as texts."""


def _broken(schema: pa.Schema, error: KVStoreError) -> bytes:
    """A message with an empty batch and the error."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        told = json.dumps(failure_fields(error)).encode()
        writer.write_batch(_empty(schema), custom_metadata={ERROR_NAME: told})
        end = sink.tell()
    # The writer writes the schema together with the first batch.
    return bytes(memoryview(sink.getvalue())[schema.serialize().size : end])


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
