"""Past imports: imports that have no rows of their own any more, because their rows became plain
versions or were removed as garbage.

A job that adds an import again gets the first stamp, also after the import became past. For that a
store remembers the last imports, at least `PAST_IMPORTS_MAX` and at most twice as many. They are
stored in two turns. The present turn fills. When the next turn begins, the turn before the present
one is removed.

    past-imports                                := turn, count: the turn that fills, how many it has
    past-import/<turn, 16 hex>/<id, 16 hex>     := digest, rows, bytes, added, reverted, origin

Invariants
1. An import is either in the records or past: one engine batch makes the change.
2. No past import is held in memory. A look-up reads two names.
3. Imports are forgotten because others came, and not because time passed: a job that continues
   after a year finds its last import.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from kvstore.codec.json import JsonObject
from kvstore.engine.api import WriteBatch
from kvstore.imports.record import ImportRecord, origin_field, origin_of
from kvstore.limits import PAST_IMPORTS_MAX
from kvstore.meta import Meta, number_of, optional_timestamp_of, timestamp_of

_TURN: Final = "past-imports"
_PREFIX: Final = "past-import/"


class _Turn(NamedTuple):
    number: int
    filled: int


class PastImports:
    """The past imports of one store. The caller holds the commit lock where it writes."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        record = meta.read(_TURN)
        self._turn = _Turn(0, 0)
        if record is not None:
            self._turn = _Turn(record.integer("turn"), record.integer("count"))

    def get(self, import_id: int) -> ImportRecord | None:
        """The record that is kept of a past import. None if it is unknown, or was forgotten."""
        present = self._turn.number
        for turn in (present, present - 1):
            if turn >= 0 and (record := self._meta.read(_name(turn, import_id))) is not None:
                return _read(import_id, record)
        return None

    def all(self) -> Iterator[ImportRecord]:
        """All past imports. Raises `CorruptionError` at a record that is none."""
        for name, record in self._meta.records(_PREFIX):
            digits = name.partition("/")[2]
            yield _read(number_of(digits, record), record)

    def next_turn(self, count: int) -> _Turn:
        """The present turn after `count` further imports."""
        if self._turn.filled and self._turn.filled + count > PAST_IMPORTS_MAX:
            return _Turn(self._turn.number + 1, count)
        return _Turn(self._turn.number, self._turn.filled + count)

    def stage(self, batch: WriteBatch, records: Collection[ImportRecord], turn: _Turn) -> None:
        """Add imports that become past to an engine batch; `turn` is what `next_turn` told."""
        if turn.number > max(self._turn.number, 1):
            begin, end = _PREFIX, f"{_PREFIX}{turn.number - 1:016x}/"
            self._meta.stage_delete_between(batch, begin, end)
        for record in records:
            self._meta.stage(
                batch,
                _name(turn.number, record.import_id),
                {
                    "digest": record.digest,
                    "rows": record.rows,
                    "bytes": record.size_bytes,
                    "added": record.added,
                    "reverted": record.reverted,
                    **origin_field(record),
                },
            )
        self._meta.stage(batch, _TURN, {"turn": turn.number, "count": turn.filled})

    def take(self, turn: _Turn) -> None:
        """Continue with `turn`, which was written."""
        self._turn = turn


def _read(import_id: int, record: JsonObject) -> ImportRecord:
    return ImportRecord(
        import_id=import_id,
        digest=record.text("digest"),
        rows=record.integer("rows"),
        size_bytes=record.integer("bytes"),
        spans=(),
        added=timestamp_of(record, "added"),
        reverted=optional_timestamp_of(record, "reverted"),
        origin=origin_of(record),
    )


def _name(turn: int, import_id: int) -> str:
    return f"{_PREFIX}{turn:016x}/{import_id:016x}"
