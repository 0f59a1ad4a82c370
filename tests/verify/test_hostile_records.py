"""Records of `meta` in all wrong shapes: opening, reading and verifying name the record, or give
the answers of a sound store; nothing ends in a raw error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ManualClock, bulk
from kvstore.engine.api import META
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import CorruptionError, FormatVersionError, KVStoreError
from kvstore.opening import engine_at
from tests.harness.crafted import (
    Stored,
    crafted_store,
    outcome,
    outcomes,
    stored_in,
    upkeep,
    write_over,
)
from tests.harness.parts import parts_of

pytestmark = pytest.mark.damages_store

WRONG: dict[str, Any] = {
    "missing": ...,
    "null": None,
    "boolean": True,
    "real": 1.5,
    "negative": -1,
    "far": 1 << 63,
    "farther": 1 << 200,
    "text": "zz",
    "surrogate": "\ud800",
    "empty": "",
    "list": [],
    "deep": [[[[]]]],
    "object": {"a": 1},
    "objects": [{}],
    "pair": [["00", "00"]],
    "triple": [["00", "01", "02"]],
    "numbers": [[1, 2]],
    "stream": ["00" * 16],
}
"""The values that replace each field."""

BYTES = {
    "nothing": b"",
    "zeros": bytes(100),
    "no JSON": b"junk",
    "a list": b"[]",
    "deep": b'{"v": 1, "a": ' + b"[" * 100_000,
    "twice": b'{"v": 1, "v": 1}',
    "infinite": b'{"v": Infinity}',
    "not UTF-8": b'{"v": "\xff"}',
    "version as text": b'{"v": "1"}',
    "a later version": b'{"v": 2}',
    "no fields": b'{"v": 1}',
}
"""The values that replace each record."""

NAMES = [b"epochs/x", b"epochs/f" + b"f" * 15, b"import/0x1", b"generation/" + b" 1".rjust(16)]
NAMES += [b"clear/-" + b"0" * 15, b"hold/\xff", b"hold/", b"epochs/" + b"0" * 17, b"\xff"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The entries of a store with a record of every kind."""
    path = tmp_path_factory.mktemp("sound")
    with kvstore.open(path / "s", engine="memory", clock=ManualClock(1)) as store:
        store.put(b"a", b"1")
        store.put(b"q", b"1")
        for import_id in (1, 2):
            settled = bulk.Import.create(path / f"{import_id}", import_id=import_id)
            with settled.writer() as writer:
                writer.put(b"s", b"row")
            settled.seal()
            bulk.ingest(store, settled.staging)
            if import_id == 1:
                store.gc(before=store.upper - 1)
        store.hold("backup").move(store.upper - 1)
        staged = bulk.Import.create(path / "in")
        with staged.writer() as writer:
            writer.put(b"i", b"row")
        staged.seal()
        bulk.ingest(store, path / "in")
        store.revert_import(staged.import_id)
        store.holds.drop("backup")
        store.clear_range(b"q", b"r")
        store.hold("lost")
        store.reshard(3)
        with store.changeset():
            store.put(b"b", b"2")
        store.put(b"c", b"2")
        store.delete_range(b"d", b"f")
        store.sync()
        return stored_in(parts_of(store).engine)


def names(stored: Stored) -> list[str]:
    return [name.decode() for name in stored[META]]


def use(stored: Stored) -> None:
    """Open, read, verify and write a store of these entries. Raises what opening raises."""
    with crafted_store(stored) as store:
        outcomes(store, [b"a", b"i"])
        store.verify()
        for _, write in upkeep(store):
            outcome(write)
        store.verify()


def test_a_store_has_a_record_of_every_kind(sound: Stored) -> None:
    kinds = {name.partition("/")[0] for name in names(sound)}
    assert kinds >= {"format", "upper", "import", "hold", "generation", "epochs", "clear"}
    assert kinds >= {"import-keys", "past-imports", "past-import"}
    with crafted_store(sound) as store:
        assert store.verify().ok
        found = outcomes(store, [b"a", b"i"])
        assert [error for error in found.values() if isinstance(error, KVStoreError)] == []


def records(kind: str, sound: Stored) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for name, value in sound[META].items():
        if name.decode().startswith(kind):
            yield name, json.loads(value)


KINDS = ["format", "upper", "import/", "hold/", "generation/", "epochs/", "clear/"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_a_wrong_shape_is_corruption(kind: str, sound: Stored) -> None:
    tried = 0
    for name, fields in records(kind, sound):
        for field in fields:
            for wrong in WRONG.values():
                changed = {**fields, field: wrong}
                if wrong is ...:
                    del changed[field]
                stored = {**sound, META: {**sound[META], name: json.dumps(changed).encode()}}
                error = outcome(partial(use, stored))
                assert error is None or name.decode() in str(error)
                tried += 1
    assert tried > len(WRONG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_other_bytes_is_corruption(kind: str, sound: Stored) -> None:
    name, _ = next(records(kind, sound))
    for value in BYTES.values():
        stored = {**sound, META: {**sound[META], name: value}}
        error = outcome(partial(use, stored))
        assert isinstance(error, CorruptionError | FormatVersionError), error
        assert name.decode() in str(error)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_of_another_name_ends_in_no_raw_error(name: bytes, sound: Stored) -> None:
    for value in (b'{"v": 1}', b"junk", next(iter(sound[META].values()))):
        stored = {**sound, META: {**sound[META], name: value}}
        error = outcome(partial(use, stored))
        assert error is None or isinstance(error, CorruptionError | FormatVersionError), error


@pytest.mark.usefixtures("each_engine")
def test_a_store_that_does_not_open_is_let_go_of(tmp_path: Path) -> None:
    """The error names the record. Once the record is repaired, the same process opens the store."""
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"a", b"1")
        right = stored_in(parts_of(store).engine)[META][b"format"]
        write_over(parts_of(store).engine, {META: {b"format": b'{"v": 1, "version": "x"}'}})
    for opening in (kvstore.open, kvstore.open_read_only):
        with pytest.raises(CorruptionError, match="meta record format"):
            opening(tmp_path / "s")
    made_by = MemoryEngine if engine_at(tmp_path / "s") == "memory" else RocksEngine
    engine = made_by(tmp_path / "s")
    write_over(engine, {META: {b"format": right}})
    engine.close()
    with kvstore.open(tmp_path / "s") as store:
        assert store.get(b"a") == b"1"
