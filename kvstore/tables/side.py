"""The side of a join that a table answers: typed columns of the rows that labels ask for.

    kvstore.join(labels, [kvstore.Join(users, key="user_id", prefix="user_"), sessions])

The store looks labels up by the encoded keys of their rows, in this process
(`kvstore.joins.stored`) or behind a server (`kvstore.client.joins`). Then the rows are decoded
together.

Invariants
1. The key of a label is encoded as the key of a row is. A value that the table's key cannot hold is
   refused by column and row.
2. A row is read by the definition of the moment at which the join was called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import pyarrow as pa

from kvstore.errors import UsageError
from kvstore.joins.side import Answers, Asked, Search, Side
from kvstore.joins.sources import Piece
from kvstore.tables.codec import TableCodec
from kvstore.tables.conform import key_values
from kvstore.tables.evolve import two_named

ROW_TIMESTAMP: Final = "row_timestamp"
_TIME: Final = pa.timestamp("ns", "UTC")


class TableSide:
    """See `kvstore.joins.side.KeyedSide`. Raises `UsageError` for a table with an event time."""

    def __init__(
        self, stored: Side, codec: TableCodec, columns: Sequence[str] | None = None
    ) -> None:
        """`stored` answers with the values of keys."""
        definition = codec.definition
        if definition.has_event_time:
            raise UsageError(
                f"{definition.where} has an event time, which a join at one time does not look at",
                "join it by Table.join",
            )
        key = {column.name for column in definition.key_columns}
        names = [column.name for column in definition.columns if column.name not in key]
        self._stored, self._codec = stored, codec
        self._columns = names if columns is None else list(columns)
        self.fields = (*codec.schema_of(self._columns), pa.field(ROW_TIMESTAMP, _TIME))

    def choose(self, columns: Sequence[str]) -> TableSide:
        """The side with these columns of the table."""
        self._require_once(columns)
        return TableSide(self._stored, self._codec, columns)

    @property
    def name(self) -> str:
        """The name of the table."""
        return self._codec.definition.name

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the table's key."""
        return tuple(column.name for column in self._codec.definition.key_columns)

    def keys(self, piece: Piece, names: tuple[str, ...]) -> pa.Array:
        """The keys of the rows that labels ask for. `names` are columns of the labels."""
        key_columns = self._codec.definition.key_columns
        columns = {
            column.name: key_values(piece.batches, piece.first, name, column.type)
            for name, column in zip(names, key_columns, strict=True)
        }
        return self._codec.key.keys(pa.RecordBatch.from_pydict(columns))

    @contextmanager
    def opened(self) -> Iterator[TableAnswers]:
        """Hold the history that is kept."""
        self._require_once(self._columns)
        with self._stored.opened() as answers:
            yield TableAnswers(answers, self._codec, self._columns)

    def _require_once(self, columns: Sequence[str]) -> None:
        if ROW_TIMESTAMP in columns:  # of a table of an older release
            raise two_named(self._codec.definition, ROW_TIMESTAMP)


class TableAnswers:
    """See `kvstore.joins.side.Answers`."""

    def __init__(self, stored: Answers, codec: TableCodec, columns: list[str]) -> None:
        self._stored, self._codec, self._columns = stored, codec, columns
        self.rows_first, self.rows_max = stored.rows_first, stored.rows_max

    @property
    def newest(self) -> int:
        """The newest complete time."""
        return self._stored.newest

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The columns of the rows, and the timestamps of their versions."""
        found = self._stored.answer(labels, search)
        if found is None:
            return None
        values, times = found
        alive = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        rows = pa.array(alive)
        decoded = self._codec.decode(labels.keys.take(rows), values.take(rows), self._columns)
        sources = np.full(len(values), -1, np.int64)
        sources[alive] = np.arange(len(alive))
        taken = pa.array(sources, mask=sources < 0)
        return [*(column.take(taken) for column in decoded.columns), times]
