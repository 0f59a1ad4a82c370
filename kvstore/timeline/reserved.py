"""The reserved keys: those of tables, of positions and of expiries.

They lie above all other keys (`RESERVED` in kvstore.base.span), the definitions of tables first,
then the positions, the records of expiries, and the rows of tables. So three seeks tell what a
store has among them, and plain reads leave them out (`Reserve`).

A position tells how far a store has followed another place, such as a log of pushes in a bucket:

    position := | reserved | 00 | "p" | name |  ->  JSON      reserved: nine bytes ff

It is an ordinary key with versions. So backups, restores and replicas carry it like all other
keys, and a store that is put back to a time has the position of that time. The position of a log
of pushes has a field `pushes`, by which a look at the store names them:

    number -> {"state", "import", "at": time of the state, "added": time of a reverted push, ...}

Invariants
1. Without tables, positions and expiries every span is left as it is, and costs nothing.
2. No plain write reaches a reserved key (`kvstore.mvcc.write_set`).
3. A position moves with the rows that it stands for: neither is there without the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple

from kvstore.base.span import RESERVED, Span, prefix_end
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import JsonObject, read_object
from kvstore.codec.keys import escape
from kvstore.engine.api import DATA, Engine
from kvstore.errors import UsageError, printable
from kvstore.mvcc.expiry_records import EXPIRY
from kvstore.mvcc.meta import optional_timestamp_of
from kvstore.mvcc.versions import Versions
from kvstore.mvcc.write_set import OpenWriteSet, WriteSet
from kvstore.timeline.committer import Committer

CATALOGUE: Final = RESERVED + b"\x00kvstore.tables\x00"
"""The definitions of tables have keys that begin with this."""

NUMBERS: Final = CATALOGUE + b"\x00"
"""The greatest number of a table that was dropped. No table has this name."""

DEFINITIONS: Final = Span(CATALOGUE + b"\x01", prefix_end(CATALOGUE))
"""The definitions of tables alone."""

POSITIONS: Final = RESERVED + b"\x00p"
"""The positions of consumers of other places have keys that begin with this."""

FIRST_ROW: Final = RESERVED + b"\x01"
"""The rows of tables, and the entries of their indexes, begin here."""

_RECORDS: Final = Span.of_prefix(EXPIRY)


class Reserve:
    """The reserved keys of one store."""

    has_tables = False
    has_expiries = False
    has_positions = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.look()

    def look(self) -> None:
        """Find out which keys lie among the reserved ones. One seek, and two more if there is
        any."""
        first = self._first(RESERVED)
        self.has_tables = first.startswith(escape(CATALOGUE))
        self.has_expiries = bool(first) and self._first(EXPIRY).startswith(escape(EXPIRY))
        self.has_positions = bool(first) and self._first(POSITIONS).startswith(escape(POSITIONS))

    def note_positions(self) -> None:
        """Leave the positions out of plain reads, before the first one shows."""
        self.has_positions = True

    def note_expiries(self) -> None:
        """Leave the records of expiries out of plain reads, before the first one shows."""
        self.has_expiries = True

    @property
    def knows_all(self) -> bool:
        """Whether tables, positions and expiries are there already: nothing is left to notice."""
        return self.has_tables and self.has_positions and self.has_expiries

    def _first(self, prefix: bytes) -> bytes:
        """The first stored key at or above `prefix`, empty where there is none."""
        keys, _ = self._engine.cursor(DATA, escape(prefix)).take(1)
        return keys[0] if keys else b""

    def narrow(self, span: Span) -> Span:
        """The span without the keys of tables, positions and expiries, unless it begins among
        them."""
        is_used = self.has_tables or self.has_expiries or self.has_positions
        return span.plain() if is_used else span

    def require_importable(self, span: Span, *, is_encoded: bool, has_expiries: bool) -> None:
        """See `Layout.require_importable`."""
        reserved = span.intersect(RESERVED, None)
        if reserved is None:
            return
        if has_expiries and span.intersect(_RECORDS.start, _RECORDS.end) == span:
            return
        if not self.has_tables or reserved.start < FIRST_ROW or not is_encoded:
            raise UsageError(
                f"the import has keys from {printable(reserved.start)} on, which belong to tables",
                "make the tables first, and import their rows with `kvstore table import`; restore "
                "a backup with tables into a new store",
            )


class PushTold(NamedTuple):
    """What became of a push in a store: `state` is added, reverted, refused or waiting. Times and
    import are None where the store never added it."""

    number: str
    state: str
    import_id: int | None
    added: Timestamp | None
    reverted: Timestamp | None


class PushLogTold(NamedTuple):
    """How far a store has followed a log of pushes: the events that it has passed, and what became
    of the last pushes."""

    name: str
    passed: int
    pushes: list[PushTold]


class Positions:
    """The positions of one store."""

    def __init__(self, versions: Versions, committer: Committer, reserve: Reserve) -> None:
        self._versions, self._committer, self._reserve = versions, committer, reserve

    def get(self, name: str) -> JsonObject | None:
        """The position `name`; None if there is none. Raises `CorruptionError`."""
        [found] = self._versions.get_many([_key(name)], self._committer.upper - 1)
        return None if found is None else read_object(found, where=f"position {name}")

    def moving(self, name: str, fields: Mapping[str, Any]) -> WriteSet:
        """The writes that move a position, to be committed with its rows."""
        self._reserve.note_positions()
        writes = OpenWriteSet()
        writes.put(_key(name), json.dumps(fields, sort_keys=True).encode())
        return writes

    def move(self, name: str, fields: Mapping[str, Any]) -> Timestamp:
        """Move a position in a commit of its own, durably: there are no rows."""
        return self.write(self.moving(name, fields))

    def write(self, moving: WriteSet) -> Timestamp:
        """As `move`, of the writes that `moving` has made."""
        return self._committer.commit(moving, durability="sync")

    def note_pending(self, address: str, count: int) -> None:
        """Have the metrics tell how many events of the log of pushes at `address` are still to be
        taken."""
        self._committer.meters.pushes_pending[address] = count


def push_logs(versions: Versions, as_of: int) -> Iterator[PushLogTold]:
    """The logs of pushes that a store follows at a time. Raises `CorruptionError`."""
    chunks = versions.scan(Span.of_prefix(POSITIONS), as_of)
    for key, value in chain.from_iterable(zip(*chunk, strict=True) for chunk in chunks):
        name = key[len(POSITIONS) :].decode("utf-8", "backslashreplace")
        fields = read_object(value, where=f"position {name}")
        if type(fields.get("pushes")) is dict:
            told = fields.inner("pushes")
            pushes = [_push_told(number, told.inner(number)) for number in told]
            yield PushLogTold(name, fields.optional_integer("log") or 0, pushes)


def _push_told(number: str, push: JsonObject) -> PushTold:
    state, at = push.text("state"), optional_timestamp_of(push, "at")
    added = reverted = None
    if state == "reverted":
        added, reverted = optional_timestamp_of(push, "added"), at
    elif state == "added":
        added = at
    return PushTold(number, state, push.optional_integer("import"), added, reverted)


def _key(name: str) -> bytes:
    return POSITIONS + name.encode()
