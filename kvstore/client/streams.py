"""Rows as they arrive: an Arrow stream of a server as a record batch reader.

Each chunk of the body is one message of the stream, so its bytes become a batch without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

from kvstore.client.calls import ClientRequest
from kvstore.client.connection import Connection
from kvstore.client.pool import Pool
from kvstore.client.reply import Reply, ReplyHead, strange, told_by
from kvstore.errors import IndeterminateError, KVStoreError

T = TypeVar("T")


def rows(pool: Pool, request: ClientRequest[Any]) -> pa.RecordBatchReader:
    """The rows that a request asks for. Raises its error before the first row, or later, from the
    reader. The connection is used again after the last row."""
    return rows_of(pool, *pool.open(request))


def rows_of(pool: Pool, connection: Connection, head: ReplyHead) -> pa.RecordBatchReader:
    """The rows of an answer that has begun, as `rows` has them."""
    batches = _batches(pool, connection, head)
    schema = next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


def read_whole(
    pool: Pool, request: ClientRequest[Any], read: Callable[[pa.RecordBatchReader], T]
) -> T:
    """The result of `read`, which reads all rows that a request asks for. Where their stream breaks
    off, the request is sent again within the client's patience, and `read` begins again."""
    attempts = None
    while True:
        opened = pool.open(request)  # this waits for an absent server by itself
        try:
            with rows_of(pool, *opened) as reader:
                return read(reader)
        except KVStoreError as error:  # a failure is rare
            attempts = attempts or pool.attempts(request)  # patience begins with the first failure
            attempts.failed(error)


def _batches(pool: Pool, connection: Connection, head: ReplyHead) -> Iterator[Any]:
    """The schema, then the batches."""
    is_whole = False
    try:
        require_rows(connection, head, pool.where)
        messages = connection.chunks()
        schema = pa.ipc.read_schema(pa.py_buffer(next(messages)))
        yield schema
        for message in messages:
            if len(message) > 8:
                yield read_batch(message, schema, pool.where)
        is_whole = True
    except (pa.ArrowException, StopIteration) as error:
        raise strange(pool.where, f"no Arrow stream: {error}") from error
    except OSError as error:
        raise IndeterminateError(f"a stream of {pool.where}", str(error) or repr(error)) from error
    finally:
        if is_whole:
            pool.give(connection, head)
        else:
            connection.close()


def require_rows(connection: Connection, head: ReplyHead, where: str) -> None:
    """Raise the error that the server answered with in the place of rows."""
    if head.length is None and head.status < 400:
        return
    body = connection.receive(head.length or 0)
    error = Reply(head.status, head.kind, body, where).error
    raise error or strange(where, "no rows")


def read_batch(message: bytes, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """The batch of a message. Raises the error that it carries in the place of rows."""
    read = pa.ipc.read_message(message)
    batch = pa.ipc.read_record_batch(read, schema)
    if not batch.num_rows:
        raise failure(message, schema, where)
    return batch


def failure(message: bytes, schema: pa.Schema, where: str) -> KVStoreError:
    """The error in the metadata of a batch without rows."""
    stream = schema.serialize().to_pybytes() + message
    with pa.ipc.open_stream(stream) as reader:
        return told_by(reader.read_next_batch_with_custom_metadata().custom_metadata, where)
