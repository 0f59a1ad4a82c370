"""A forged part is refused. Every check looks at its first and last key, a thorough check at all
rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference, encode_suffix, frame
from kvstore.limits import KEY_BYTES_MAX
from tests.bulk.refusal import refused
from tests.bulk.staged import described, entry, forge, manifest_of, part_of, reseal
from tests.harness.parts import parts_of

pytestmark = pytest.mark.usefixtures("each_engine")


def foreign(key: bytes) -> bytes:
    return frame(key) + encode_reference(7) + VALUE


def versions(key: bytes) -> bytes:
    return frame(key) + encode_suffix(1) + VALUE


AT_THE_ENDS: dict[str, Callable[[Path], list[tuple[bytes, bytes | None]]]] = {
    "a foreign import id first": lambda at: [(foreign(b"a"), b""), (entry(at, b"b"), b"")],
    "a foreign import id last": lambda at: [(entry(at, b"a"), b""), (foreign(b"b"), b"")],
    "a timestamp first": lambda at: [(versions(b"a"), b""), (entry(at, b"b"), b"")],
    "a timestamp last": lambda at: [(entry(at, b"a"), b""), (versions(b"b"), b"")],
    "a removal": lambda at: [
        (entry(at, b"a"), b""),
        (versions(b"live"), None),
        (entry(at, b"z"), b""),
    ],
    "an unknown kind": lambda at: [(entry(at, b"a"), b""), (entry(at, b"b", b"\x02"), b"")],
    "a short key": lambda at: [(b"\x00", b""), (entry(at, b"b"), b"")],
    "no framing": lambda at: [(entry(at, b"a"), b""), (b"b" * 30, b"")],
}

IN_THE_MIDDLE: dict[str, Callable[[Path], tuple[bytes, bytes]]] = {
    "a foreign import id": lambda at: (foreign(b"m"), b"v"),
    "a timestamp": lambda at: (versions(b"m"), b"v"),
    "a key twice": lambda at: (entry(at, b"n", TOMBSTONE), b""),
    "a tombstone with a value": lambda at: (entry(at, b"m", TOMBSTONE), b"v"),
    "an unknown kind": lambda at: (entry(at, b"m", b"\x02"), b"v"),
    "a short key": lambda at: (b"m", b"v"),
    "no framing": lambda at: (b"m" * 30, b"v"),
    "a key too long": lambda at: (entry(at, b"m" * (KEY_BYTES_MAX + 1)), b"v"),
}


@pytest.mark.parametrize("name", AT_THE_ENDS)
def test_rows_that_the_ends_of_a_file_tell_are_refused(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    forge(staging, AT_THE_ENDS[name](staging))
    fields = manifest_of(staging)
    reseal(staging, fields)
    refused(attacked, staging)


@pytest.mark.parametrize("name", IN_THE_MIDDLE)
def test_rows_inside_a_file_are_refused_thoroughly(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    inside = IN_THE_MIDDLE[name](staging)
    forge(staging, [(entry(staging, b"a"), b"1"), inside, (entry(staging, b"n"), b"2")])
    refused(attacked, staging, thorough=True)


@pytest.mark.damages_store
@pytest.mark.parametrize("name", sorted(set(IN_THE_MIDDLE) - {"a key too long"}))
def test_rows_inside_a_file_that_were_added_are_told_by_verify(
    store: kvstore.Store, staging: Path, name: str
) -> None:
    inside = IN_THE_MIDDLE[name](staging)
    forge(staging, [(entry(staging, b"a"), b"1"), inside, (entry(staging, b"n"), b"2")])
    bulk.ingest(store, staging)
    assert not store.verify().ok


def test_a_key_in_two_crossing_parts_is_refused_thoroughly(
    attacked: kvstore.Store, tmp_path: Path
) -> None:
    staging = tmp_path / "staged"
    staged = bulk.Import.create(staging)
    parts = []
    for keys in ((b"a", b"d", b"g"), (b"b", b"d", b"e")):
        with staged.writer() as writer:
            for key in keys:
                writer.put(key, b"v")
            part = writer.finish()
        assert part is not None
        parts.append(
            {**described(staging / part.name), "rows": 3}
            | {"smallest": part.smallest.hex(), "largest": part.largest.hex()}
        )
    fields = {"format": 1, "import_id": f"{staged.import_id:016x}", "parts": parts}
    reseal(staging, {**fields, "tables": [], "expiries": False})
    refused(attacked, staging, match="came twice", thorough=True)


NO_PARTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "text": lambda content: b"no rows",
    "zeros": lambda content: bytes(len(content)),
    "cut": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "an index that is damaged": lambda content: content[:-200] + bytes(100) + content[-100:],
}


@pytest.mark.parametrize("name", NO_PARTS)
def test_a_file_that_is_no_part_is_refused(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    path, fields = part_of(staging), manifest_of(staging)
    content = NO_PARTS[name](path.read_bytes())
    path.write_bytes(content)
    fields["parts"][0].update(described(path))
    reseal(staging, fields)
    refused(attacked, staging)


def test_a_file_of_a_store_is_refused(
    attacked: kvstore.Store, staging: Path, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "other", engine="rocksdb") as other:
        other.put(b"a", b"1")
        parts_of(other).engine.compact("data")
        files = sorted((tmp_path / "other").glob("*.sst"))
    path, fields = part_of(staging), manifest_of(staging)
    shutil.copy(files[0], path)
    fields["parts"][0].update(described(path))
    reseal(staging, fields)
    refused(attacked, staging)
