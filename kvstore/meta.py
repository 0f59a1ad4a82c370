"""Records of the `meta` family: a name and a small JSON object with a version.

    name                       fields beside v
    format                     version, store_id
    upper                      timestamp: no commit may take one below it
    since                      timestamp: history below it may be gone
    index-floor                timestamp: the change index is complete above it
    collected                  timestamp: GC has done its work for all below or at it
    import/<id, 16 hex>        see kvstore/imports.py
    hold/<name>                see kvstore/holds.py
    generation/<time, 16 hex>  see kvstore/changes/generation.py
    epochs/<run, 16 hex>       see kvstore/changes/epoch.py
    clear/<timestamp, 16 hex>  see kvstore/clears.py
    replica                    see kvstore/replica.py

JSON, because these are few, are read at open only, and a person with a RocksDB tool can read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvstore.engine.api import META, Batch, Engine, pairs
from kvstore.errors import CorruptionError, FormatVersionError

RECORD_VERSION: Final = 1

FORMAT: Final = "format"
UPPER: Final = "upper"
SINCE: Final = "since"
INDEX_FLOOR: Final = "index-floor"
COLLECTED: Final = "collected"


class Meta:
    """Reads and stages the records of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read(self, name: str) -> dict[str, Any] | None:
        """The record `name`, None where there is none."""
        stored = self._engine.get(META, name.encode())
        return None if stored is None else _decode(name, stored)

    def records(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Records whose names begin with `prefix`, in the order of their names."""
        start = prefix.encode()
        for key, value in pairs(self._engine.cursor(META, start, start + b"\xff")):
            name = key.decode()
            yield name.removeprefix(prefix), _decode(name, value)

    def last(self, prefix: str) -> tuple[str, dict[str, Any]] | None:
        """The last record whose name begins with `prefix`, None where there is none."""
        start = prefix.encode()
        keys, values = self._engine.cursor(META, start, start + b"\xff", reverse=True).take(1)
        if not keys:
            return None
        name = keys[0].decode()
        return name.removeprefix(prefix), _decode(name, values[0])

    def timestamp(self, name: str) -> int:
        """The timestamp in a frontier's record, 0 where there is none."""
        record = self.read(name)
        return 0 if record is None else int(record["timestamp"])

    def stage_timestamp(self, batch: Batch, name: str, timestamp: int) -> None:
        """Add the record of a frontier to an engine batch."""
        self.stage(batch, name, {"timestamp": timestamp})

    def stage(self, batch: Batch, name: str, fields: Mapping[str, Any]) -> None:
        """Add the record to an engine batch."""
        stored = json.dumps({"v": RECORD_VERSION, **fields}, sort_keys=True).encode()
        batch.put(name.encode(), stored, self._engine.families[META])

    def stage_delete(self, batch: Batch, name: str) -> None:
        """Add the removal of a record to an engine batch."""
        batch.delete(name.encode(), self._engine.families[META])


def _decode(name: str, stored: bytes) -> dict[str, Any]:
    try:
        record = json.loads(stored)
        version = record.pop("v")
    except (ValueError, KeyError, AttributeError) as error:
        raise CorruptionError(f"meta record {name}", f"not a record: {error}") from error
    if version != RECORD_VERSION:
        raise FormatVersionError(f"meta record {name}", found=version, supported=RECORD_VERSION)
    assert isinstance(record, dict)
    return record
