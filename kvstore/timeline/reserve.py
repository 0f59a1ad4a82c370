"""The keys that belong to tables, to positions and to expiries.

The reserved keys lie above all other keys (`RESERVED` in kvstore.base.span): the definitions of
tables first, then the positions of `kvstore.timeline.positions`, the records of expiries, and
rows. So three seeks tell what a store has among them.

Invariants
1. Without tables and expiries every span is left as it is, and costs nothing.
2. No plain write reaches a reserved key (`kvstore.mvcc.write_set`).
"""

from __future__ import annotations

from typing import Final

from kvstore.base.span import RESERVED, Span
from kvstore.codec.keys import escape
from kvstore.engine.api import DATA, Engine
from kvstore.errors import UsageError, printable
from kvstore.mvcc.expiry_records import EXPIRY

CATALOGUE: Final = RESERVED + b"\x00kvstore.tables\x00"
"""The definitions of tables have keys that begin with this."""

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
    def is_in_use(self) -> bool:
        """Whether there are tables and expiries already."""
        return self.has_tables and self.has_expiries

    def _first(self, prefix: bytes) -> bytes:
        """The first stored key at or above `prefix`, empty where there is none."""
        keys, _ = self._engine.cursor(DATA, escape(prefix)).take(1)
        return keys[0] if keys else b""

    def narrow(self, span: Span) -> Span:
        """The span without the keys of tables and expiries, unless it begins among them."""
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
