"""The record of one import.

    import/<id, 16 hex>  := state "adding" | "added" | "reverted", digest, rows, bytes,
                            spans [[start, end] hex], prepared, added, reverted,
                            origin: what the caller notes about its rows, if anything

    nothing --prepare--> adding --add--> added --revert--> reverted
                            |              |                   |
                            |            settle             collect
                            |              `------> past <-----'
                            `--abort--> nothing

A past import has no rows of its own any more. `kvstore.imports.past` has the record that is
kept of it.

Invariants
1. The record of an import is durable before its files enter the engine. So the files that a crash
   leaves can be found, added by a second try, or aborted.
2. `added` and `reverted` never change once set.
3. A record outlives the last row that refers to it and the last change entry that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvstore.codec.json import JsonObject
from kvstore.codec.keys import encode_reference
from kvstore.errors import UsageError
from kvstore.limits import SETTLE_BYTES_MAX, SETTLE_ROWS_MAX
from kvstore.meta import number_of, optional_timestamp_of, span_of
from kvstore.mvcc.version import Lifetime
from kvstore.notices import notice
from kvstore.span import Span
from kvstore.timestamp import Timestamp

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

    def settles(self, since: int) -> bool:
        """Whether it can become plain versions: it is small, it was added at or below `since`, and
        it stands. A revert that is not yet history needs the record."""
        if self.added is None or self.added > since or self.reverted is not None:
            return False
        return self.is_small


def tell_of(event: str, record: ImportRecord, timestamp: Timestamp, where: str) -> None:
    """Log what became of an import of the store at `where`."""
    notice(
        "kvstore.imports",
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
    """The field `origin`, which a record without an origin lacks."""
    return {"origin": record.origin} if record.origin else {}


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
    )
    if found.reverted is not None and (found.added is None or found.added >= found.reverted):
        raise record.damaged(f"added at {found.added}, reverted at {found.reverted}")
    if record.text("state") != found.state:
        raise record.damaged(f"its state is {record['state']!r}, its times say {found.state!r}")
    return found


def _hex(end: bytes | None) -> str | None:
    return None if end is None else end.hex()


def require_import_id(import_id: object) -> None:
    """Raise `UsageError` on anything but an integer."""
    if not isinstance(import_id, int):
        raise UsageError(f"import id {import_id!r}", "ids are integers: see store.imports.all()")
