"""Changes as Arrow record batches: `changes_batches`, and the batches of a feed.

    timestamp  int64                   nanoseconds; the commit's
    seq        int32                   place in the commit
    op         uint8                   code: see kvstore.changes.events
    key        binary                  the key; a range delete's start; an import's id
    end_key    binary, nullable        a range delete's end
    value      binary, nullable        the value of a put
    pre, post  binary, nullable        the key's value before and after, where asked for
    changeset  fixed binary (16)       domain u64 and serial u64, big-endian
    stream     fixed binary (16)       the stream's id
    expires    int64, nullable         nanoseconds; the time at which the value of a put expires

The batch of a large entry uses the entry's own buffers for keys and values. It copies nothing, and
reading 10,000 changes of one commit costs 0.2 ms. Small entries are gathered into batches of a few
thousand rows. Batches come in time order. A commit that is spread over streams comes stream by
stream, and first the control stream with the range deletes. Sort by `seq` for the order in which
the commit made its changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kvstore.base.span import Span
from kvstore.changes.events import Event
from kvstore.changes.index import OP_PUT, OP_PUT_LARGE, ChangeEntry, ChangeIndex, Commit, placed
from kvstore.changes.streams import STREAM_ID_BYTES
from kvstore.changes.windows import EventReader, Wanted
from kvstore.limits import (
    ARROW_BYTES_MAX,
    ARROW_ROWS_MAX,
    FEW_CHANGES_BYTES,
    SORTED_CHANGES_MAX,
    WHOLE_ROWS_MIN,
)
from kvstore.mvcc.arrow import binary_array
from kvstore.mvcc.versions import Versions

CHANGESET_BYTES: Final = 16


@cache
def changes_schema() -> pa.Schema:
    """The columns of changes. A function, as `kvstore.mvcc.arrow.rows_schema`."""
    return pa.schema(
        [
            pa.field("timestamp", pa.int64(), nullable=False),
            pa.field("seq", pa.int32(), nullable=False),
            pa.field("op", pa.uint8(), nullable=False),
            pa.field("key", pa.binary(), nullable=False),
            pa.field("end_key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("pre", pa.binary()),
            pa.field("post", pa.binary()),
            pa.field("changeset", pa.binary(CHANGESET_BYTES), nullable=False),
            pa.field("stream", pa.binary(STREAM_ID_BYTES), nullable=False),
            pa.field("expires", pa.int64()),
        ]
    )


@cache
def version_changes_schema() -> pa.Schema:
    """The columns that make a version. The other columns tell how it came about."""
    names = ("key", "timestamp", "op", "value", "end_key")
    return pa.schema([changes_schema().field(name) for name in names])


class ColumnReader:
    """Reads changes as record batches from an index and the versions beside it."""

    def __init__(self, versions: Versions, index: ChangeIndex, events: EventReader) -> None:
        self._versions = versions
        self._index = index
        self._events = events
        self._dues = events.dues

    def batches(
        self, wanted: Wanted, *, since: int, upto: int, schema: pa.Schema | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of the changes in `(since, upto]`; see the top of this file.

        Makes only the columns of `schema`: 10,000 changes take 0.25 ms with all columns, 0.1 ms
        with the columns of versions.
        """
        schema = schema or changes_schema()
        pending: list[Event] = []
        size, taken = 0, 0
        with_dues = "expires" in schema.names and self._dues.may_be_in(wanted.span)

        def gathered() -> pa.RecordBatch:
            events = self._dues.of_events(iter(pending), wanted.span) if with_dues else pending
            return from_events(list(events), schema)

        for commit in self._index.read(since=since, upto=upto, select=wanted.select):
            first = 0 if commit.chunk == 0 else taken
            taken = first + commit.entry.count
            if is_whole(commit.entry):
                if pending:
                    yield gathered()
                    pending, size = [], 0
                batch = self._whole(commit, first, wanted, schema, with_dues=with_dues)
                if wanted.images.startswith("pre") and "pre" in schema.names:
                    yield from self._with_pre(batch, commit.timestamp)
                else:
                    yield batch
                continue
            for event in self._events.of_rows(placed(commit, first), wanted):
                pending.append(event)
                size += sum(map(len, filter(None, (event.key, *event[5:8]))))
                if len(pending) >= ARROW_ROWS_MAX or size >= ARROW_BYTES_MAX:
                    yield gathered()
                    pending, size = [], 0
        if pending:
            yield gathered()

    def few(self, *, since: int, upto: int) -> list[pa.RecordBatch] | None:
        """All changes in `(since, upto]` as versions, in time order; None if they are too large for
        memory."""
        held: list[pa.RecordBatch] = []
        rows = size = 0
        wanted = Wanted(Span())
        for batch in self.batches(wanted, since=since, upto=upto, schema=version_changes_schema()):
            held.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows > SORTED_CHANGES_MAX or size > FEW_CHANGES_BYTES:
                return None
        return held

    def _whole(
        self, commit: Commit, first: int, wanted: Wanted, schema: pa.Schema, *, with_dues: bool
    ) -> pa.RecordBatch:
        """The batch of an entry without imports, reverts and range deletes, over its own
        buffers."""
        entry = commit.entry
        ops = np.frombuffer(entry.ops, np.uint8)
        codes = ops
        if not entry.is_small_puts:
            codes = np.where(ops == OP_PUT_LARGE, np.uint8(OP_PUT), ops)
        keys = wrapped(entry.key_offsets, entry.keys, entry.count)
        values = _values(entry, codes, all_puts=entry.is_small_puts)
        none = pa.nulls(entry.count, pa.binary())
        if wanted.images == "none":
            values = none
        elif (large := np.flatnonzero(ops == OP_PUT_LARGE)).size:
            values = self._with_large(values, keys, large.tolist(), commit.timestamp)
        columns: dict[str, Callable[[], pa.Array]] = {
            "timestamp": lambda: pa.array(np.full(entry.count, commit.timestamp, np.int64)),
            "seq": lambda: _sequence(entry, first),
            "op": lambda: pa.array(codes),
            "key": lambda: keys,
            "end_key": lambda: none,
            "value": lambda: values,
            "pre": lambda: none,
            "post": lambda: values if wanted.images.endswith("post") else none,
            "changeset": lambda: _ids(pack_changeset(entry.changeset) * entry.count, entry.count),
            "stream": lambda: _ids(commit.stream * entry.count, entry.count),
            "expires": lambda: pa.nulls(entry.count, pa.int64()),
        }
        arrays = [columns[name]() for name in schema.names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        batch = batch if wanted.span == Span() else _within(batch, wanted.span)
        return self._with_dues(batch, commit.timestamp) if with_dues else batch

    def _with_dues(self, batch: pa.RecordBatch, at: int) -> pa.RecordBatch:
        """The batch of puts and deletes of the commit at `at`, with the due times of the puts."""
        keys = batch.column("key").to_pylist()
        return _with(batch, "expires", pa.array(self._dues.of_keys(keys, at), pa.int64()))

    def _with_large(self, values: pa.Array, keys: pa.Array, places: list[int], at: int) -> pa.Array:
        """The values of an entry; values that the entry lacks are read from the versions."""
        found: list[bytes | None] = values.to_pylist()
        for place in places:
            found[place] = self._versions.get(keys[place].as_py(), at)
        return pa.array(found, pa.binary())

    def _with_pre(self, batch: pa.RecordBatch, at: int) -> Iterator[pa.RecordBatch]:
        """The batch with its preimages, in slices, because preimages can be larger than the
        changes."""
        first, size = 0, 0
        images: list[bytes | None] = []
        for key in batch.column("key").to_pylist():
            image = self._versions.get(key, at - 1)
            images.append(image)
            size += len(image or b"")
            if size >= ARROW_BYTES_MAX:
                yield _with(batch.slice(first, len(images)), "pre", pa.array(images, pa.binary()))
                first, size, images = first + len(images), 0, []
        if images:
            yield _with(batch.slice(first), "pre", pa.array(images, pa.binary()))


def record_batch_reader(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    """A reader that pulls the batches one by one."""
    return pa.RecordBatchReader.from_batches(changes_schema(), batches)


def is_whole(entry: ChangeEntry) -> bool:
    """Whether an entry becomes a batch of its own: it is large, with puts and deletes only."""
    return entry.count >= WHOLE_ROWS_MIN and entry.points == entry.count


def from_events(events: list[Event], schema: pa.Schema | None = None) -> pa.RecordBatch:
    """Events as a record batch with the columns of `schema`, by default of `changes_schema`."""
    columns = [
        pa.array([event.timestamp for event in events], pa.int64()),
        pa.array([event.sequence for event in events], pa.int32()),
        pa.array([int(event.op) for event in events], pa.uint8()),
        binary_array([event.key for event in events]),
        pa.array([event.end_key for event in events], pa.binary()),
        pa.array([event.value for event in events], pa.binary()),
        pa.array([event.pre for event in events], pa.binary()),
        pa.array([event.post for event in events], pa.binary()),
        _ids(b"".join(pack_changeset(event.changeset) for event in events), len(events)),
        _ids(b"".join(event.stream for event in events), len(events)),
        pa.array([None if type(e) is Event else e.expires for e in events], pa.int64()),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=changes_schema())
    if schema is None or schema is changes_schema():
        return batch
    return batch.select(schema.names)


def pack_changeset(changeset: tuple[int, int]) -> bytes:
    """The 16 bytes of a changeset's id. They sort as the ids do."""
    domain, serial = changeset
    return domain.to_bytes(8, "big") + serial.to_bytes(8, "big")


def wrapped(offsets: memoryview, data: memoryview, count: int, valid: Any = None) -> pa.Array:
    """An Arrow array over an entry's own buffers. `unpack` has checked the buffers."""
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _values(entry: ChangeEntry, codes: np.ndarray[Any, Any], *, all_puts: bool) -> pa.Array:
    valid = None
    if not all_puts:
        valid = pa.py_buffer(np.packbits(codes == OP_PUT, bitorder="little").tobytes())
    return wrapped(entry.value_offsets, entry.values, entry.count, valid)


def _with(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """The batch with another column of this name."""
    columns = batch.columns
    columns[batch.schema.get_field_index(name)] = column
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _sequence(entry: ChangeEntry, first: int) -> pa.Array:
    if entry.sequence is None:
        return pa.array(np.arange(first, first + entry.count, dtype=np.int32))
    return pa.array(np.frombuffer(entry.sequence, np.int32))


def _ids(data: bytes, count: int) -> pa.Array:
    """An array of `count` ids of streams or changesets, which stand in `data` one by one."""
    return pa.Array.from_buffers(pa.binary(STREAM_ID_BYTES), count, [None, pa.py_buffer(data)])


def _within(batch: pa.RecordBatch, span: Span) -> pa.RecordBatch:
    import pyarrow.compute as pc

    keys = batch.column("key")
    mask = pc.greater_equal(keys, pa.scalar(span.start, pa.binary()))
    if span.end is not None:
        mask = pc.and_(mask, pc.less(keys, pa.scalar(span.end, pa.binary())))
    return batch.filter(mask)
