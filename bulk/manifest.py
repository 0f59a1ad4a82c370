"""The manifest of an import: the list of its sealed parts. Only this module reads it.

    import.json := {"format": 1, "import_id": 16 hex, "rows": n, "bytes": n,
                    "parts": [{"name", "smallest" hex, "largest" hex, "rows", "bytes",
                               "digest", "mtime_ns", "inode"}],
                    "tables": [{"table", "revision", "digest"}], "expiries": true | false,
                    "checksum": SHA-256 of the rest as sorted, compact JSON}

`tables` names the definitions that encoded rows of tables. `expiries` tells that some parts have
the records of keys that expire (`kvstore.mvcc.expiry_records`).

Invariants
1. Each name has the form that part writers give, so it cannot lead out of the directory.
2. Parts ascend by their smallest key. No key is a bound of two parts, so no part is listed twice.
3. Writing a manifest that was read gives the same bytes, so its checksum covers every field.

The checksum has no key: it finds damage, and proves nothing about the author. So each field is
checked as well. `require_metadata` (`bulk.staging`) checks that the files agree with the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from kvstore.bulk.part import PART_NAME, Part
from kvstore.codec.json import JsonObject, read_object
from kvstore.codec.keys import (
    IMPORT_ID_MAX,
)
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    ImportRefusedError,
    KeyOrderError,
    UsageError,
)
from kvstore.limits import (
    CROSSING_PARTS_MAX,
    KEY_BYTES_MAX,
)
from kvstore.tables import TableCodec
from kvstore.tables.definition import Definition


class EncodedBy(NamedTuple):
    """The definition of a table that encoded rows: its revision, and the SHA-256 of its bytes.

    A row is added only while the definition that encoded it is the newest one of its table. So each
    added row has an entry in every index, and a layout that the table knows.
    """

    table: str
    revision: int
    digest: str

    @classmethod
    def of(cls, codec: TableCodec) -> EncodedBy:
        """The definition of a codec."""
        return cls.of_stored(codec.definition.name, codec.stored)

    @classmethod
    def of_stored(cls, name: str, stored: bytes) -> EncodedBy:
        """The definition of a table in its stored form."""
        revision = Definition.from_bytes(name, stored).revision
        return cls(name, revision, hashlib.sha256(stored).hexdigest())


def depth(parts: Sequence[Part]) -> int:
    """The largest number of parts whose spans contain one common key."""
    ends = [(part.smallest, False) for part in parts] + [(part.largest, True) for part in parts]
    return max(accumulate(-1 if is_end else 1 for _, is_end in sorted(ends)), default=0)


MANIFEST_FORMAT: Final = 1
_DIGEST: Final = re.compile(r"blake3:[0-9a-f]{32}")
_DEFINITION_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_IMPORT_ID: Final = re.compile(r"[0-9a-f]{16}")
_INODE_MAX: Final = (1 << 64) - 1
_TIME_MIN: Final = -(1 << 63)
"""The lowest modification time: file systems have times before 1970."""


@dataclass(frozen=True)
class Manifest:
    """A sealed import: its id, and its parts by key."""

    import_id: int
    parts: tuple[Part, ...]
    tables: tuple[EncodedBy, ...] = ()
    has_expiries: bool = False
    """Whether some parts have the records of expiries."""

    @property
    def rows(self) -> int:
        """Rows of all parts, with the entries of indexes and the records of expiries."""
        return sum(part.rows for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(part.size_bytes for part in self.parts)

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the contents. It identifies the parts sealed under the import's id."""
        canonical = json.dumps(self._fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> str:
        """The bytes of the manifest's file."""
        return json.dumps({**self._fields(), "checksum": self.checksum}, indent=1, sort_keys=True)

    def _fields(self) -> dict[str, Any]:
        return {
            "format": MANIFEST_FORMAT,
            "import_id": f"{self.import_id:016x}",
            "rows": self.rows,
            "bytes": self.size_bytes,
            "parts": [_part_fields(part) for part in self.parts],
            "tables": [table._asdict() for table in self.tables],
            "expiries": self.has_expiries,
        }


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Decode the bytes of a manifest's file. Raises `CorruptionError` if a rule above is broken,
    `FormatVersionError` if a newer release wrote the file."""
    fields = read_object(data, where=where)
    found = fields.get("format")
    if type(found) is not int or found != MANIFEST_FORMAT:
        raise FormatVersionError(where, found=found, supported=(MANIFEST_FORMAT,))
    import_id = fields.text("import_id")
    if not _IMPORT_ID.fullmatch(import_id) or not 0 < int(import_id, 16) <= IMPORT_ID_MAX:
        raise fields.damaged(f"{import_id[:20]!r} is no import id")
    parts = tuple(map(_part, fields.objects("parts")))
    tables = tuple(map(_table, fields.objects("tables")))
    manifest = Manifest(int(import_id, 16), parts, tables, fields.field("expiries", bool))
    if fields.text("checksum") != manifest.checksum:
        raise fields.damaged("it is not as it was sealed: its checksum differs")
    if fields != {**manifest._fields(), "checksum": manifest.checksum}:
        raise fields.damaged("its sums differ from the sums of its parts, or a field is foreign")
    require_parts(parts, where=where)
    return manifest


def require_parts(parts: Sequence[Part], *, where: str) -> None:
    """Raise `CorruptionError` unless one manifest can list all these parts.

    Spans of parts may cross. Only a pass over the rows finds out whether parts share a key.
    """
    names = {part.name for part in parts}
    if len(names) < len(parts):
        raise CorruptionError(where, "a part is listed twice")
    if any(after.smallest < before.smallest for before, after in pairwise(parts)):
        raise CorruptionError(where, "parts are not listed by key")
    if shared_bound(parts) is not None:
        raise CorruptionError(where, "two parts have one key")
    if depth(parts) > CROSSING_PARTS_MAX:
        raise CorruptionError(where, f"more than {CROSSING_PARTS_MAX} parts cross each other")


def shared_bound(parts: Sequence[Part]) -> bytes | None:
    """A key that is a bound of two parts, None if there is none."""
    seen: set[bytes] = set()
    for part in parts:
        bounds = {part.smallest, part.largest}
        if shared := seen & bounds:
            return min(shared)
        seen |= bounds
    return None


def _table(fields: JsonObject) -> EncodedBy:
    table = EncodedBy(
        fields.text("table"), fields.integer("revision", least=1), fields.text("digest")
    )
    if not _DEFINITION_DIGEST.fullmatch(table.digest):
        raise fields.damaged(f"{table.digest[:80]!a} is no digest")
    return table


def _part(fields: JsonObject) -> Part:
    part = Part(
        name=fields.text("name"),
        smallest=fields.hexed("smallest"),
        largest=fields.hexed("largest"),
        rows=fields.integer("rows", least=1),
        size_bytes=fields.integer("bytes", least=1),
        digest=fields.text("digest"),
        mtime_ns=fields.integer("mtime_ns", least=_TIME_MIN),
        inode=fields.integer("inode", most=_INODE_MAX),
    )
    if not PART_NAME.fullmatch(part.name):
        raise fields.damaged(f"{part.name[:60]!a} is no name of a part")
    if max(len(part.smallest), len(part.largest)) > KEY_BYTES_MAX:
        raise fields.damaged(f"a key of more than {KEY_BYTES_MAX} bytes")
    if part.smallest > part.largest or (part.rows > 1) != (part.smallest < part.largest):
        raise fields.damaged(f"{part.rows} rows do not fit between its bounds")
    if not _DIGEST.fullmatch(part.digest):
        raise fields.damaged(f"{part.digest[:80]!a} is no digest")
    return part


def _part_fields(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "smallest": part.smallest.hex(),
        "largest": part.largest.hex(),
        "rows": part.rows,
        "bytes": part.size_bytes,
        "digest": part.digest,
        "mtime_ns": part.mtime_ns,
        "inode": part.inode,
    }


MANIFEST_NAME: Final = "import.json"
STAGE_AGAIN: Final = "stage the import again"


@contextmanager
def refused_as_damaged(where: object) -> Iterator[None]:
    """Damage that is found in the block makes an import at `where` one that no store takes: a
    `CorruptionError` becomes an `ImportRefusedError`."""
    try:
        yield
    except CorruptionError as error:
        problem = f"{error.where}: {error.problem}"
        raise ImportRefusedError(str(where), problem, STAGE_AGAIN) from error


def manifest_of(
    staging: object, import_id: int, parts: Sequence[Part], tables: Sequence[EncodedBy]
) -> Manifest:
    """The manifest of `parts`, which are not looked at. Raises as `seal`."""
    listed = [replace(part, expiries=()) for part in parts]
    listed += [expiry for part in parts for expiry in part.expiries]
    ordered = sorted(listed, key=lambda part: part.smallest)
    if (key := shared_bound(ordered)) is not None:
        raise KeyOrderError(f"parts of {staging}", previous=key, key=key)
    manifest = Manifest(import_id, tuple(ordered), tuple(tables), len(listed) > len(parts))
    try:
        parse_manifest(manifest.to_json().encode(), where=f"{staging}/{MANIFEST_NAME}")
    except CorruptionError as error:
        raise UsageError(f"{staging} cannot be sealed: {error.problem}", STAGE_AGAIN) from error
    return manifest
