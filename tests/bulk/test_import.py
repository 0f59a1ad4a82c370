"""Bulk loads: when rows become visible, and what adding an import twice does."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.manifest import MANIFEST_NAME
from kvstore.errors import ImportRefusedError, KeyOrderError, OutOfSpaceError, UsageError
from kvstore.limits import INGEST_FLUSH_BYTES
from tests.bulk.staged import binary, stage

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_rows_become_visible_at_the_time_they_are_added(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"import", b"b": b"import"})
    between = store.put(b"a", b"written after building, before adding")
    stamp = bulk.ingest(store, tmp_path / "staged")
    after = store.put(b"b", b"after")
    assert between < stamp < after
    assert store.get(b"a", as_of=between) == b"written after building, before adding"
    assert store.get(b"b", as_of=between) is None
    assert store.get(b"a") == b"import"
    assert store.get(b"b", as_of=stamp) == b"import"
    assert store.get(b"b") == b"after"
    changes = list(store.changes(between, stamp))
    assert [(change.key, change.timestamp) for change in changes] == [(b"a", stamp), (b"b", stamp)]


@pytest.mark.usual_limits
def test_a_store_that_is_only_read_refuses_an_import_whatever_its_log_has(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    store.put(b"k", bytes(2 * INGEST_FLUSH_BYTES), durability="sync")
    with (
        kvstore.open_read_only(tmp_path / "store") as reader,
        pytest.raises(UsageError, match="read only"),
    ):
        bulk.ingest(reader, tmp_path / "staged")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_files_are_read_ahead_before_the_commit_begins(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    steps: list[str] = []
    advise = os.posix_fadvise

    def advised(*given: int) -> None:
        steps.append("advise")
        advise(*given)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    bulk.ingest(store, tmp_path / "staged", progress=steps.append)
    assert steps == ["check", "advise", "prepare", "bring 1 of 1", "link", "add"]


def test_many_parts_become_visible_together(store: kvstore.Store, tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    for part in range(5):
        with staged.writer() as writer:
            for row in range(100):
                writer.put(b"%d/%03d" % (part, row), b"v")
    staged.seal()
    before = store.sync() - 1
    stamp = bulk.ingest(store, tmp_path / "staged")
    assert len(list(store.scan(as_of=before))) == 0
    assert len(list(store.scan(as_of=stamp))) == 500


def test_adding_twice_returns_the_first_stamp_even_without_the_files(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    stamp = bulk.ingest(store, tmp_path / "staged", move=True)
    store.put(b"a", b"2")
    assert bulk.ingest(store, tmp_path / "staged") == stamp
    assert store.get(b"a") == b"2"


def test_an_ingest_computes_the_manifests_checksum_once(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage(tmp_path / "in", {b"k": b"v"})
    sha256, hashed = hashlib.sha256, []

    def counted(data: bytes) -> object:
        hashed.append(data)
        return sha256(data)

    monkeypatch.setattr("kvstore.bulk.manifest.hashlib.sha256", counted)
    bulk.ingest(store, made.staging)
    assert len(hashed) == 1


def test_one_staged_import_can_be_added_to_two_stores(tmp_path: Path) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    for name in ("one", "two"):
        with kvstore.open(tmp_path / name) as store:
            bulk.ingest(store, tmp_path / "staged")
            assert store.get(b"a") == b"1"


def test_an_id_used_with_another_manifest_is_refused(store: kvstore.Store, tmp_path: Path) -> None:
    stage(tmp_path / "one", {b"a": b"1"}, import_id=7)
    stage(tmp_path / "two", {b"a": b"2"}, import_id=7)
    bulk.ingest(store, tmp_path / "one")
    with pytest.raises(ImportRefusedError, match="another manifest"):
        bulk.ingest(store, tmp_path / "two")
    assert store.get(b"a") == b"1"


def test_an_import_without_rows_gets_a_stamp(store: kvstore.Store, tmp_path: Path) -> None:
    bulk.Import.create(tmp_path / "staged").seal()
    stamp = bulk.ingest(store, tmp_path / "staged")
    assert list(store.changes(0, stamp)) == []


def test_tombstone_rows_delete(store: kvstore.Store, tmp_path: Path) -> None:
    store.put(b"a", b"old")
    store.put(b"b", b"old")
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        ops = pa.array(["delete", "put"])
        values = binary(None, b"new")
        writer.write(pa.record_batch({"key": binary(b"a", b"b"), "value": values, "op": ops}))
        writer.delete(b"c")
    staged.seal()
    stamp = bulk.ingest(store, tmp_path / "staged")
    assert list(store.scan()) == [(b"b", b"new")]
    assert [c.op for c in store.changes(stamp - 1)] == ["delete", "put", "delete"]


def test_keys_of_any_bytes_survive(store: kvstore.Store, tmp_path: Path) -> None:
    keys = [
        b"",
        b"\x00",
        b"\x00\x00",
        b"\x00\x01",
        b"\x00\xff",
        b"a",
        b"a\x00",
        b"\xff",
        b"\xff" * 8,
    ]
    rows = {key: bytes([index]) for index, key in enumerate(keys)}
    stage(tmp_path / "staged", rows)
    bulk.ingest(store, tmp_path / "staged")
    assert dict(store.scan()) == rows
    assert list(store.scan(reverse=True)) == sorted(rows.items(), reverse=True)
    assert all(store.get(key) == value for key, value in rows.items())


def test_a_full_disk_is_told_as_such_wherever_it_is_met(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    staged = bulk.Import.create(tmp_path / "staged")
    writer = staged.writer()
    writer.put(b"a", b"1")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpaceError):
        writer.finish()
    monkeypatch.undo()
    with staged.writer() as again:
        again.put(b"a", b"1")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpaceError):
        staged.seal()
    monkeypatch.undo()
    staged.seal()
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OutOfSpaceError):
        bulk.ingest(store, tmp_path / "staged")
    monkeypatch.undo()
    bulk.ingest(store, tmp_path / "staged")
    assert store.get(b"a") == b"1"


CROSSING = ((b"a", b"d", b"g"), (b"b", b"e"), (b"c", b"f", b"h"), (b"x", b"y"))


def test_parts_whose_spans_cross_are_added_as_any(store: kvstore.Store, tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    for keys in CROSSING:
        with staged.writer() as writer:
            for key in keys:
                writer.put(key, b"v")
    staged.seal()
    stamp = bulk.ingest(store, tmp_path / "staged", thorough=True)
    everything = sorted(key for keys in CROSSING for key in keys)
    assert [key for key, _ in store.scan()] == everything
    assert [change.key for change in store.changes(stamp - 1)] == everything
    store.verify().require_ok()
    store.revert_import(staged.import_id)
    assert list(store.scan()) == []
    store.verify().require_ok()
    with pytest.raises(UsageError, match="was reverted at"):
        bulk.ingest(store, tmp_path / "staged")


@pytest.mark.parametrize("op", ["put", "delete"])
@pytest.mark.parametrize("late", range(1, 4))
def test_a_key_in_two_parts_is_named_at_sealing(tmp_path: Path, late: int, op: str) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    for number, keys in enumerate(CROSSING):
        with staged.writer() as writer:
            writer.put(b"A%d" % number, b"v")
            for key in sorted({*keys, b"d"} if number == late else keys):
                writer.delete(key) if (key, op) == (b"d", "delete") else writer.put(key, b"v")
    with pytest.raises(KeyOrderError, match="key b'd' came twice"):
        staged.seal()
    assert not (tmp_path / "staged" / MANIFEST_NAME).exists()


def test_parts_that_share_a_bound_are_refused_at_sealing(tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    for keys in ((b"a", b"c"), (b"c", b"d")):
        with staged.writer() as writer:
            for key in keys:
                writer.put(key, b"")
    with pytest.raises(KeyOrderError, match="key b'c' came twice"):
        staged.seal()


def test_more_crossing_parts_than_a_pass_can_open_are_refused_at_sealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.bulk.manifest.CROSSING_PARTS_MAX", 2)
    for width in (15, 25):
        staged = bulk.Import.create(tmp_path / f"staged{width}")
        for first in (10, 20, 30):
            with staged.writer() as writer:
                writer.put(b"%d" % first, b"")
                writer.put(b"%d" % (first + width), b"")
        if width == 15:
            staged.seal()
            continue
        with pytest.raises(UsageError, match="more than 2 parts cross"):
            staged.seal()
