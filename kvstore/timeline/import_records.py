"""The records of imports: the stamp of each, imports whose rows became plain versions, and the keys
of small ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from kvstore.base.notices import notice
from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import JsonObject
from kvstore.codec.keys import (
    TAIL_BYTES,
    TOMBSTONE,
    VALUE,
    encode_reference,
    frame,
    span_bounds,
    unframe,
)
from kvstore.engine.api import DATA, Engine, WriteBatch, chunks
from kvstore.engine.sorted_file import key_blocks_of
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import (
    IMPORT_KEYS_BYTES_MAX,
    PAST_IMPORTS_MAX,
    SCAN_CHUNK,
    SETTLE_BYTES_MAX,
    SETTLE_ROWS_MAX,
)
from kvstore.loops.blocks import referring_keys
from kvstore.mvcc.key_history import Lifetime
from kvstore.mvcc.meta import Meta, nothing, number_of, optional_timestamp_of, span_of, timestamp_of
from kvstore.mvcc.versions import ImportedRow, imported_entries
from kvstore.timeline.committer import Committer

# --------------------------------------------------------------------------------------------------
# The record of one import.
#
#     import/<id, 16 hex>  := state "adding" | "added" | "reverted", digest, rows, bytes,
#                             spans [[start, end] hex], prepared, added, reverted,
#                             origin: what the caller notes about its rows, if anything
#
#     nothing --prepare--> adding --add--> added --revert--> reverted
#                             |              |                   |
#                             |            settle             collect
#                             |              `------> past <-----'
#                             `--abort--> nothing
#
# A past import has no rows of its own any more: see the section on past imports.
#
# Invariants
# 1. The record of an import is durable before its files enter the engine. So the files that a crash
#    leaves can be found, added by a second try, or aborted.
# 2. `added` and `reverted` never change once set.
# 3. A record outlives the last row that refers to it and the last change entry that names it.

IMPORT_PREFIX: Final = "import/"


@dataclass(frozen=True, slots=True)
class ImportRecord:
    """The record of one import in a store."""

    import_id: int
    digest: str
    rows: int
    size_bytes: int
    spans: tuple[Span, ...]
    prepared: Timestamp | None = None
    added: Timestamp | None = None
    reverted: Timestamp | None = None
    origin: str = ""
    """Where the rows come from, as `bulk.ingest` was told; may be empty."""
    report: str = ""
    """The report of the gate that the load has passed, as JSON; empty if there was none."""

    @property
    def reference(self) -> bytes:
        """The suffix that its rows carry."""
        return encode_reference(self.import_id)

    @property
    def lifetime(self) -> Lifetime:
        """When its rows are visible, once it was added."""
        assert self.added is not None
        if self.reverted is None:
            return Lifetime(self.added)
        return Lifetime(self.added, self.reverted)

    @property
    def is_small(self) -> bool:
        """Whether its rows may be written again as plain versions."""
        return self.rows <= SETTLE_ROWS_MAX and self.size_bytes <= SETTLE_BYTES_MAX

    @property
    def state(self) -> str:
        """`adding`, `added` or `reverted`."""
        if self.reverted is not None:
            return "reverted"
        return "adding" if self.added is None else "added"

    def require_standing(self) -> None:
        """Raise `UsageError` if it was reverted. A job that runs again would get the time at which
        its rows were added, and they would not show."""
        if self.reverted is not None:
            raise UsageError(
                f"import {self.import_id} was reverted at {self.reverted}",
                "load the corrected rows under another id",
            )

    def settles(self, since: int) -> bool:
        """Whether it can become plain versions: it is small, it was added at or below `since`, and
        it stands. A revert that is not yet history needs the record."""
        if self.added is None or self.added > since or self.reverted is not None:
            return False
        return self.is_small


def tell_of(event: str, record: ImportRecord, timestamp: Timestamp, where: str) -> None:
    """Log what became of an import of the store at `where`."""
    notice(
        "kvstore.timeline.imports",
        event,
        store=where,
        import_id=f"{record.import_id:016x}",
        timestamp=str(timestamp),
        rows=record.rows,
        bytes=record.size_bytes,
    )


def import_name(import_id: int) -> str:
    """The name of the record of an import."""
    return f"{IMPORT_PREFIX}{import_id:016x}"


def import_fields(record: ImportRecord) -> dict[str, Any]:
    """The fields of a record, as they are stored."""
    return {
        "state": record.state,
        "digest": record.digest,
        "rows": record.rows,
        "bytes": record.size_bytes,
        "spans": [[span.start.hex(), _hex(span.end)] for span in record.spans],
        "prepared": record.prepared,
        "added": record.added,
        "reverted": record.reverted,
        **origin_field(record),
    }


def origin_field(record: ImportRecord) -> dict[str, str]:
    """The fields `origin` and `report`, which a record without them lacks."""
    fields = {"origin": record.origin, "report": record.report}
    return {name: text for name, text in fields.items() if text}


def report_of(record: JsonObject) -> str:
    """The report in a stored record; empty if it has none."""
    return record.text("report") if "report" in record else ""


def origin_of(record: JsonObject) -> str:
    """The origin in a stored record; empty if it has none."""
    return record.text("origin") if "origin" in record else ""


def stored_import(name: str, record: JsonObject) -> ImportRecord:
    """As `read_import`, of the import whose id is `name` in hexadecimal."""
    return read_import(number_of(name, record), record)


def read_import(import_id: int, record: JsonObject) -> ImportRecord:
    """An import from its record. Raises `CorruptionError` where it is not of an import's shape."""
    spans = record.items_of("spans", list)
    if not import_id or any(len(bounds) != 2 for bounds in spans):
        raise record.damaged("import id 0 is never given out, and a span has two bounds")
    found = ImportRecord(
        import_id=import_id,
        digest=record.text("digest"),
        rows=record.integer("rows"),
        size_bytes=record.integer("bytes"),
        spans=tuple(span_of(record, start, end) for start, end in spans),
        prepared=optional_timestamp_of(record, "prepared"),
        added=optional_timestamp_of(record, "added"),
        reverted=optional_timestamp_of(record, "reverted"),
        origin=origin_of(record),
        report=report_of(record),
    )
    if found.reverted is not None and (found.added is None or found.added >= found.reverted):
        raise record.damaged(f"added at {found.added}, reverted at {found.reverted}")
    if record.text("state") != found.state:
        raise record.damaged(f"its state is {record['state']!r}, its times say {found.state!r}")
    return found


def _hex(end: bytes | None) -> str | None:
    return None if end is None else end.hex()


# --------------------------------------------------------------------------------------------------
# Past imports: imports that have no rows of their own any more, because their rows became plain
# versions or were removed as garbage.
#
# A job that adds an import again gets the first stamp, also after the import became past. For that
# a store remembers the last imports, at least `PAST_IMPORTS_MAX` and at most twice as many. They
# are stored in two turns. The present turn fills. When the next turn begins, the turn before the
# present one is removed.
#
#     past-imports                            := turn, count: the turn that fills, its imports
#     past-import/<turn, 16 hex>/<id, 16 hex> := digest, rows, bytes, added, reverted, origin,
#                                                report
#
# Invariants
# 1. An import is either in the records or past: one engine batch makes the change.
# 2. No past import is held in memory. A look-up reads two names.
# 3. Imports are forgotten because others came, and not because time passed: a job that continues
#    after a year finds its last import.

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
        report=report_of(record),
    )


def _name(turn: int, import_id: int) -> str:
    return f"{_PREFIX}{turn:016x}/{import_id:016x}"


# --------------------------------------------------------------------------------------------------
# The keys of small imports, so that work on their rows costs the rows, and not the keys between
# them.
#
# The files of an import span much of the key space, in which live data may be a million times as
# large. GC, settling and the change index therefore look up the rows of a small import by its list.
#
#     import-keys/<id, 16 hex>  := keys [hex], ascending
#
# Invariants
# 1. A list names every row of its import: it was read from the files, and its length is the number
#    of rows. The batch that changes the rows of an import changes its list.
# 2. The list is written together with the record of the import, and goes together with it. It is
#    not held in memory.
# 3. An import without a list is read by a pass over its spans: a large one, or one with long keys.

KEYS_PREFIX: Final = "import-keys/"


class KeyLists:
    """The key lists of one store."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta

    def of(self, import_id: int) -> list[bytes] | None:
        """The keys of an import, ascending. None if it has no list."""
        record = self._meta.read(keys_name(import_id))
        return None if record is None else read_keys(record)

    def stage(
        self, batch: WriteBatch, record: ImportRecord, found: Collection[bytes] | None
    ) -> None:
        """Add the list of the keys `found` in the files of an import to an engine batch.

        Adds none if the import is large, or if a stranger's files or calls have other rows than
        they say, a key twice, or a key outside of the spans.
        """
        if found is None or not record.is_small or not len(found) == len(set(found)) == record.rows:
            return
        keys = sorted(found)
        if sum(map(len, keys)) <= IMPORT_KEYS_BYTES_MAX and _are_within(keys, record.spans):
            listed = [key.hex() for key in keys]
            self._meta.stage(batch, keys_name(record.import_id), {"keys": listed})

    def amend(self, batch: WriteBatch, record: ImportRecord, changes: RowChanges) -> None:
        """Bring the list of an import, if it has one, to the rows that it has with `changes`."""
        keys = self.of(record.import_id) if changes != UNCHANGED else None
        if keys is not None:
            gone = {unframe(stored[:-TAIL_BYTES]) for stored in changes.left_out}
            self.stage_delete(batch, record.import_id)
            self.stage(batch, record, [*({*keys} - gone), *changes.deleted])

    def stage_delete(self, batch: WriteBatch, import_id: int) -> None:
        """Add the removal of a list to an engine batch."""
        self._meta.stage_delete(batch, keys_name(import_id))


def _are_within(keys: Sequence[bytes], spans: Iterable[Span]) -> bool:
    """Whether each of some ascending keys lies in a span. Costs two look-ups for each span."""
    passed = 0
    for span in sorted(spans, key=lambda span: span.start):
        if bisect_left(keys, span.start) > passed:
            return False
        end = len(keys) if span.end is None else bisect_left(keys, span.end)
        passed = max(passed, end)
    return passed == len(keys)


class FoundKeys:
    """The keys of an import, read from its sorted files one after the other."""

    def __init__(self, record: ImportRecord) -> None:
        self._reference = record.reference
        self._rows = record.rows
        self._room = IMPORT_KEYS_BYTES_MAX
        self.keys: list[bytes] | None = [] if record.is_small else None
        """The keys so far; a forged import may have any. None once it is known that the import gets
        no list."""

    def read(self, file: Path | str) -> None:
        """Add the keys of a file. A pass over it, unless the import gets no list. Raises
        `CorruptionError` at damage."""
        if self.keys is None:
            return
        with closing(key_blocks_of(file)) as blocks:
            for stored in blocks:
                try:
                    found = referring_keys(stored, self._reference)
                except ValueError as error:
                    raise CorruptionError(str(file), str(error)) from error
                self._rows -= len(stored)
                self._room -= sum(map(len, found))
                if self._rows < 0 or self._room < 0:
                    self.keys = None
                    return
                self.keys += found


def read_keys(record: JsonObject) -> list[bytes]:
    """The keys of a list's record. Raises `CorruptionError` unless they ascend."""
    keys = [record.unhexed(key, name="keys") for key in record.items_of("keys", str)]
    if any(before >= after for before, after in pairwise(keys)):
        raise record.damaged("its keys do not ascend")
    return keys


def keys_name(import_id: int) -> str:
    """The name of the list of an import."""
    return f"{KEYS_PREFIX}{import_id:016x}"


# --------------------------------------------------------------------------------------------------
# The stored rows of an import that is not yet added: found, left out, and joined by deletes.
#
# The files of an import were built elsewhere. A store that takes them may leave rows out, or delete
# further keys at the same stamp. Both become part of the batch that adds the import.
#
# Invariants
# 1. The record of an import counts the rows that it has once it is added.


class RowChanges(NamedTuple):
    """The changes to the rows of one import: the stored keys of rows that are left out, and the
    keys that it deletes beside the rows of its files."""

    left_out: Collection[bytes] = ()
    deleted: Collection[bytes] = ()

    @property
    def rows(self) -> int:
        """The number of rows that the import gains."""
        return len(self.deleted) - len(self.left_out)


UNCHANGED: Final = RowChanges()

Amend: TypeAlias = "Callable[[], RowChanges]"
"""Decides which rows of an import change. It is called under the commit lock, as the last check."""


class StoredRows:
    """The rows of imports in one engine."""

    def __init__(self, engine: Engine, committer: Committer) -> None:
        self._engine, self._committer = engine, committer

    def has(self, record: ImportRecord, key: bytes) -> bool:
        """Whether a linked import has a row for `key`. At most two look-ups."""
        stem = frame(key) + record.reference
        return any(self._engine.get(DATA, stem + kind) is not None for kind in (VALUE, TOMBSTONE))

    def among(self, record: ImportRecord, keys: Iterable[bytes]) -> Iterator[ImportedRow]:
        """The rows that a linked import has for `keys`, which ascend. A seek a key."""
        reference = record.reference
        for rows in imported_entries(self._engine, keys, reference, rows_max=SCAN_CHUNK):
            yield from rows

    def stage(self, batch: WriteBatch, record: ImportRecord, changes: RowChanges) -> None:
        """Add changes to an engine batch."""
        data = self._engine.families[DATA]
        for stored in changes.left_out:
            batch.delete(stored, data)
        for key in changes.deleted:
            batch.put(frame(key) + record.reference + TOMBSTONE, b"", data)

    def remove(self, record: ImportRecord, keys: Sequence[bytes] | None) -> None:
        """Remove all rows of an import that was not added. `keys` is its key list. Costs a pass
        over its spans without it."""
        if keys is not None:
            stems = [frame(key) + record.reference for key in keys]
            self._remove(record, [stem + kind for stem in stems for kind in (VALUE, TOMBSTONE)])
            return
        for span in record.spans:
            for found, _ in chunks(self._engine.cursor(DATA, *span_bounds(span.start, span.end))):
                own = [key for key in found if key[-TAIL_BYTES:-1] == record.reference]
                self._remove(record, own)

    def _remove(self, record: ImportRecord, stored: Sequence[bytes]) -> None:
        if stored:
            stage = partial(self.stage, record=record, changes=RowChanges(stored))
            mend = self._committer.mend_by(nothing)
            self._committer.write_meta(stage, durable=False, mend=mend)
