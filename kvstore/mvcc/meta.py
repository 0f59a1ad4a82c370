"""Records of the `meta` family: a name and a small JSON object with a version.

    name                       fields beside v
    format                     version, store_id
    upper                      timestamp: no commit may take one below it
    since                      timestamp: history below it may be gone
    index-floor                timestamp: the change index is complete above it
    staged                     timestamp: see kvstore/timeline/pieces.py
    collected                  timestamp: GC has done its work for all below or at it
    import/<id, 16 hex>        see kvstore/timeline/import_records.py
    import-keys/<id, 16 hex>   see kvstore/timeline/import_records.py
    past-imports               see kvstore/timeline/import_records.py
    past-import/<turn>/<id>    see kvstore/timeline/import_records.py; both numbers in 16 hex digits
    hold/<name>                see kvstore/timeline/holds.py
    generation/<time, 16 hex>  see kvstore/changes/streams.py
    epochs/<run, 16 hex>       see kvstore/changes/epochs.py
    clear/<timestamp, 16 hex>  see kvstore/timeline/read_times.py
    collections                see kvstore/retention/gc.py
    replica                    see kvstore/feeds/replica.py
    request/<writer>           see kvstore/timeline/request_notes.py
    requests-forgotten         timestamp: notes of requests up to it may be gone

The records are JSON, which a person with a RocksDB tool can read. Opening reads all records except
`import-keys`, `past-import` and `request`, of which there may be many. A record of a wrong shape
raises a `CorruptionError` that names it: each module takes its fields with the methods of
`JsonObject`, which ask for their types and bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Generic, TypeAlias, TypeVar

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.codec.json import JsonObject, read_object
from kvstore.engine.api import META, Engine, WriteBatch, pairs
from kvstore.errors import CorruptionError, FormatVersionError, UsageError, printable
from kvstore.limits import JSON_BYTES_MAX

T = TypeVar("T")

Records: TypeAlias = "Callable[[WriteBatch], None]"
"""Adds records to an engine batch."""

Publish: TypeAlias = "Callable[[], object]"
"""Shows records that were written. An error in it poisons the store."""


def nothing() -> None:
    """Publish nothing."""


RECORD_VERSION: Final = 1

FORMAT: Final = "format"
UPPER: Final = "upper"
SINCE: Final = "since"
INDEX_FLOOR: Final = "index-floor"
COLLECTED: Final = "collected"
STAGED: Final = "staged"

_NUMBER = re.compile(r"[0-7][0-9a-f]{15}")
"""A number below 2^63 as names have it."""


class Meta:
    """Reads and stages the records of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read(self, name: str) -> JsonObject | None:
        """The record `name`, None where there is none."""
        stored = self._engine.get(META, name.encode())
        return None if stored is None else _decode(name, stored)

    def records(self, prefix: str) -> Iterator[tuple[str, JsonObject]]:
        """Records whose names begin with `prefix`, in the order of their names."""
        for key, value in self.stored(prefix):
            name = _name(key)
            yield name.removeprefix(prefix), _decode(name, value)

    def stored(self, prefix: str) -> Iterator[tuple[bytes, bytes]]:
        """The same records as names and JSON, as they are stored."""
        start = prefix.encode()
        return pairs(self._engine.cursor(META, start, start + b"\xff" if start else None))

    def numbered(self, prefix: str) -> Iterator[tuple[int, JsonObject]]:
        """The records with this prefix, each with the number of 16 hexadecimal digits that ends its
        name. Raises `CorruptionError` on another name."""
        for name, record in self.records(prefix):
            yield number_of(name, record), record

    def last_numbered(self, prefix: str) -> tuple[int, JsonObject] | None:
        """The last of `numbered`, None where there is none."""
        start = prefix.encode()
        keys, values = self._engine.cursor(META, start, start + b"\xff", reverse=True).take(1)
        if not keys:
            return None
        name = _name(keys[0])
        record = _decode(name, values[0])
        return number_of(name.removeprefix(prefix), record), record

    def timestamp(self, name: str) -> int:
        """The timestamp in a frontier's record, 0 where there is none."""
        record = self.read(name)
        return 0 if record is None else record.integer("timestamp", most=TIMESTAMP_MAX)

    def stage_timestamp(self, batch: WriteBatch, name: str, timestamp: int) -> None:
        """Add the record of a frontier to an engine batch."""
        self.stage(batch, name, {"timestamp": timestamp})

    def stage(self, batch: WriteBatch, name: str, fields: Mapping[str, Any]) -> None:
        """Add the record to an engine batch."""
        stored = json.dumps({"v": RECORD_VERSION, **fields}, sort_keys=True).encode()
        if len(stored) > JSON_BYTES_MAX:  # it could not be read again
            raise UsageError(f"record {name} has {len(stored)} bytes", "use fewer, larger parts")
        batch.put(name.encode(), stored, self._engine.families[META])

    def stage_delete(self, batch: WriteBatch, name: str) -> None:
        """Add the removal of a record to an engine batch."""
        batch.delete(name.encode(), self._engine.families[META])

    def stage_delete_between(self, batch: WriteBatch, begin: str, end: str) -> None:
        """Add the removal of the records `begin <= name < end` to an engine batch."""
        batch.delete_range(begin.encode(), end.encode(), self._engine.families[META])


class KeptRecords(Generic[T]):
    """The records with one prefix, for an owner that reads them at its beginning, and again and
    again if another process writes them.

    From the second read on, the stored bytes are kept, and a record with the same bytes is not
    decoded again.
    """

    def __init__(self, meta: Meta, prefix: str, decode: Callable[[str, JsonObject], T]) -> None:
        """`decode` gets the rest of the name behind the prefix, and the record."""
        self._meta, self._prefix, self._decode = meta, prefix, decode
        self._known: dict[bytes, tuple[bytes, T]] = {}
        self._is_read = False

    def read(self) -> list[T]:
        """The records as they are stored, decoded, in the order of their names."""
        found: dict[bytes, tuple[bytes, T]] = {}
        for key, value in self._meta.stored(self._prefix):
            known = self._known.get(key)
            if known is None or known[0] != value:
                name = _name(key)
                record = _decode(name, value)
                known = value, self._decode(name.removeprefix(self._prefix), record)
            found[key] = known
        if self._is_read:
            self._known = found
        self._is_read = True
        return [record for _, record in found.values()]


def timestamp_of(record: JsonObject, name: str = "timestamp") -> Timestamp:
    """The timestamp in the field `name`."""
    return Timestamp(record.integer(name, most=TIMESTAMP_MAX))


def optional_timestamp_of(record: JsonObject, name: str) -> Timestamp | None:
    """The same as `timestamp_of`, but None where the field is null or missing."""
    return None if record.get(name) is None else timestamp_of(record, name)


def span_of(record: JsonObject, start: object, end: object) -> Span:
    """The span of two bounds in hexadecimal; the second may be None: every key from the first."""
    unhexed = record.unhexed
    try:
        return Span(unhexed(start, name="start"), None if end is None else unhexed(end, name="end"))
    except UsageError as error:
        raise record.damaged(error.what) from error


def number_of(name: str, record: JsonObject) -> int:
    """The number that `name` is in 16 hexadecimal digits. Raises `CorruptionError` otherwise."""
    if not _NUMBER.fullmatch(name):
        raise record.damaged("its name does not end with a number")
    return int(name, 16)


def _decode(name: str, stored: bytes) -> JsonObject:
    record = read_object(stored, where=f"meta record {name}")
    version = record.field("v", int)
    if version != RECORD_VERSION:
        raise FormatVersionError(record.where, found=version, supported=RECORD_VERSION)
    del record["v"]
    return record


def _name(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"meta record {printable(key)}", "its name is no text") from error
