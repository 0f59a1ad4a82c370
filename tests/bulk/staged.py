"""Staging directories as an attacker would forge them: checksums and digests are made to fit."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import rocksdict as rocks

from kvstore import bulk
from kvstore.base.digest import digest
from kvstore.bulk.manifest import MANIFEST_NAME
from kvstore.codec.keys import VALUE, encode_reference, frame
from tests.harness.rocks_files import writer_options

Fields: TypeAlias = dict[str, Any]

ROWS = {b"%03d" % number: b"row %d" % number for number in range(200)}


def stage(
    staging: Path,
    rows: Mapping[bytes, bytes] = ROWS,
    *,
    parts: int = 1,
    import_id: int | None = None,
) -> bulk.Import:
    """A sealed import of `rows`, cut into parts by key."""
    staged = bulk.Import.create(staging, import_id=import_id)
    keys = sorted(rows)
    for part in range(parts):
        with staged.writer() as writer:
            for key in keys[len(keys) * part // parts : len(keys) * (part + 1) // parts]:
                writer.put(key, rows[key])
    staged.seal()
    return staged


def binary(*items: bytes | None) -> pa.Array:
    """A column of keys or values."""
    return pa.array(items, pa.binary())


def manifest_of(staging: Path) -> Fields:
    """The manifest's fields, without the checksum."""
    fields: Fields = json.loads((staging / MANIFEST_NAME).read_bytes())
    del fields["checksum"]
    return fields


def reseal(staging: Path, fields: Fields, *, totals: bool = True) -> None:
    """Write a manifest whose totals and checksum fit its fields."""
    if totals and isinstance(fields.get("parts"), list):
        for total in ("rows", "bytes"):
            counts = [part.get(total) for part in fields["parts"] if isinstance(part, dict)]
            fields[total] = sum(count for count in counts if isinstance(count, int))
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(canonical.encode()).hexdigest()
    (staging / MANIFEST_NAME).write_text(json.dumps({**fields, "checksum": checksum}))


def described(path: Path) -> Fields:
    """The fields of a manifest for the file, without its keys and rows."""
    found, content = path.stat(), path.read_bytes()
    return {
        "name": path.name,
        "bytes": found.st_size,
        "digest": digest(content),
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
    }


def forge(staging: Path, entries: Sequence[tuple[bytes, bytes | None]], **fields: Any) -> None:
    """Put a file of any entries in the place of the only part; None removes the part. `fields`
    replace fields of an honest manifest."""
    manifest = manifest_of(staging)
    (part,) = manifest["parts"]
    path = staging / part["name"]
    path.unlink()
    writer = rocks.SstFileWriter(writer_options("lz4"))
    writer.open(str(path))
    for key, value in entries:
        if value is None:
            del writer[key]
        else:
            writer[key] = value
    writer.finish()
    ends = {
        name: max(key[:-11], b"").replace(b"\x00\xff", b"\x00").hex()
        for name, key in (("smallest", entries[0][0]), ("largest", entries[-1][0]))
    }
    part.update(described(path), rows=len(entries), **ends)
    part.update(fields)
    reseal(staging, manifest)


def entry(staging: Path, key: bytes, kind: bytes = VALUE) -> bytes:
    """The key of a row of the import."""
    import_id = int(manifest_of(staging)["import_id"], 16)
    return frame(key) + encode_reference(import_id) + kind


def everything_in(directory: Path) -> dict[str, object]:
    """Every name below a directory with its content, except RocksDB's information log."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        if path.name.startswith("LOG"):
            continue
        state = path.lstat()
        shown: object = stat.filemode(state.st_mode)
        if path.is_symlink():
            shown = os.readlink(path)
        elif stat.S_ISREG(state.st_mode):
            shown = state.st_ino, state.st_mtime_ns, digest(path.read_bytes())
        found[str(path.relative_to(directory))] = shown
    return found


def part_of(staging: Path) -> Path:
    """The first file that the manifest names."""
    return staging / manifest_of(staging)["parts"][0]["name"]


def first_part(change: Callable[[Fields], object]) -> Callable[[Fields], None]:
    """A change of the manifest that changes its first part."""
    return lambda fields: (change(fields["parts"][0]), None)[1]
