"""Bulk loads: what may be staged, what is refused, and when it becomes visible."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import bulk
import kvstore
from bulk.sort import sorted_runs
from bulk.staging import MANIFEST_NAME, discard
from kvstore.errors import (
    ClosedError,
    FormatVersionError,
    ImportRefusedError,
    KeyConflictError,
    KeyOrderError,
    OutOfSpaceError,
    StorageError,
    UsageError,
)
from kvstore.limits import SCAN_CHUNK

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def stage(staging: Path, rows: dict[bytes, bytes], *, import_id: int | None = None) -> bulk.Import:
    staged = bulk.Import.create(staging, import_id=import_id)
    with staged.writer() as writer:
        for key in sorted(rows):
            writer.put(key, rows[key])
    staged.seal()
    return staged


def binary(*items: bytes | None) -> pa.Array:
    return pa.array(items, pa.binary())


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
        b"\xff" * 9,
    ]
    rows = {key: bytes([index]) for index, key in enumerate(keys)}
    stage(tmp_path / "staged", rows)
    bulk.ingest(store, tmp_path / "staged")
    assert dict(store.scan()) == rows
    assert list(store.scan(reverse=True)) == sorted(rows.items(), reverse=True)
    assert all(store.get(key) == value for key, value in rows.items())


# -- on_conflict ----------------------------------------------------------------------------


def test_on_conflict_error_names_the_live_keys_and_adds_nothing(
    store: kvstore.Store, tmp_path: Path
) -> None:
    store.put(b"b", b"live")
    store.put(b"c", b"dead")
    store.delete(b"c")
    stage(tmp_path / "staged", {b"a": b"1", b"b": b"1", b"c": b"1"})
    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert caught.value.keys == (b"b",)
    assert list(store.scan()) == [(b"b", b"live")]
    assert store.imports() == []
    store.delete(b"b")
    bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert len(list(store.scan())) == 3


def test_a_key_written_between_check_and_commit_is_a_conflict(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(tmp_path / "staged", {b"a": b"1", b"b": b"1"})
    prepare = store.prepare_import

    def write_first(record: kvstore.ImportRecord) -> None:
        store.put(b"b", b"sneaked in")
        prepare(record)

    monkeypatch.setattr(store, "prepare_import", write_first)
    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert caught.value.keys == (b"b",)
    assert list(store.scan()) == [(b"b", b"sneaked in")]


# -- abort ----------------------------------------------------------------------------------


def test_who_has_an_import_to_himself_may_abort_and_add_it(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staged = stage(tmp_path / "staged", {b"a": b"1"})
    with store.importing(staged.import_id):
        assert not store.abort_import(staged.import_id)
        bulk.ingest(store, tmp_path / "staged")
        with pytest.raises(UsageError, match="revert"):
            store.abort_import(staged.import_id)
    assert bulk.ingest(store, tmp_path / "staged") == store.imports()[0].added


def test_a_row_that_deletes_a_live_key_is_a_conflict_at_a_second_try_too(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"a", b"1")
        writer.delete(b"b")
    staged.seal()

    def killed(step: str) -> None:
        if step == "add":
            raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        bulk.ingest(store, tmp_path / "staged", on_conflict="error", progress=killed)
    store.put(b"b", b"came meanwhile")
    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert caught.value.keys == (b"b",)
    store.delete(b"b")
    bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert dict(store.scan()) == {b"a": b"1"}


@pytest.mark.parametrize("op", ["put", "delete"])
@pytest.mark.parametrize("came_by", ["put", "import", "revert"])
def test_a_key_that_comes_alive_between_check_and_commit_is_a_conflict(
    store: kvstore.Store, tmp_path: Path, op: str, came_by: str
) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"a", b"1")
        writer.put(b"k", b"1") if op == "put" else writer.delete(b"k")
    staged.seal()
    if came_by == "revert":
        store.put(b"k", b"below")
        made = bulk.Import.create(tmp_path / "covers")
        with made.writer() as writer:
            writer.delete(b"k")
        made.seal()
        bulk.ingest(store, tmp_path / "covers")

    def interfere(step: str) -> None:
        if step == "link" and came_by == "put":
            store.put(b"k", b"sneaked in")
        elif step == "link" and came_by == "import":
            stage(tmp_path / "other", {b"k": b"other"})
            bulk.ingest(store, tmp_path / "other")
        elif step == "link":
            store.revert_import(made.import_id)

    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error", progress=interfere)
    assert caught.value.keys == (b"k",)
    assert [key for key, _ in store.scan()] == [b"k"]
    store.verify().require_ok()


def test_gc_beside_a_check_for_conflicts_does_not_refuse_the_import(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})

    def collect(step: str) -> None:
        store.put(b"other", b"v")
        store.gc(before=store.now())

    bulk.ingest(store, tmp_path / "staged", on_conflict="error", progress=collect)
    assert store.get(b"a") == b"1"


def test_an_import_left_half_added_is_invisible_and_can_be_aborted_or_added(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = stage(tmp_path / "staged", {b"a": b"1"})

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(store, "add_import", fail)
        with pytest.raises(RuntimeError):
            bulk.ingest(store, tmp_path / "staged")
    assert store.get(b"a") is None
    assert [record.state for record in store.imports()] == ["adding"]
    assert store.abort_import(staged.import_id)
    assert store.imports() == []
    assert not store.abort_import(staged.import_id)
    bulk.ingest(store, tmp_path / "staged")
    assert store.get(b"a") == b"1"
    with pytest.raises(UsageError, match="revert"):
        store.abort_import(staged.import_id)


@pytest.mark.parametrize("step", ["check", "prepare", "link", "add"])
def test_an_abort_waits_for_who_is_adding_the_import(
    store: kvstore.Store, tmp_path: Path, step: str
) -> None:
    """It would take away rows that the other has counted on, and the import be added without."""
    staged = stage(tmp_path / "staged", {b"a": b"1", b"b": b"2"})

    def killed(at: str) -> None:
        if at == "add":
            raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        bulk.ingest(store, tmp_path / "staged", progress=killed)
    refused: list[str] = []

    def abort() -> None:
        try:
            store.abort_import(staged.import_id)
        except UsageError as error:
            refused.append(str(error))

    other = threading.Thread(target=abort)

    def interfere(at: str) -> None:
        if at == step:
            other.start()
            other.join(0.05)
            with pytest.raises(UsageError, match="being added by this thread"):
                store.abort_import(staged.import_id)

    if step == "link":  # of an import that is not linked yet
        assert store.abort_import(staged.import_id)
    bulk.ingest(store, tmp_path / "staged", progress=interfere)
    other.join()
    assert "revert it instead" in refused[0]
    assert dict(store.scan()) == {b"a": b"1", b"b": b"2"}
    store.verify().require_ok()


# -- what is refused before anything is touched -----------------------------------------------


def part_of(staging: Path) -> Path:
    return next(staging.glob("part-*.sst"))


def truncate(staging: Path) -> None:
    part = part_of(staging)
    os.truncate(part, part.stat().st_size - 1)


def flip_a_bit(staging: Path) -> None:
    content = bytearray(part_of(staging).read_bytes())
    content[len(content) // 2] ^= 1
    part_of(staging).write_bytes(content)


def take_another_imports_file(staging: Path) -> None:
    stage(staging.parent / "other", {b"a": b"1", b"b": b"2"})
    shutil.copy(part_of(staging.parent / "other"), part_of(staging))


def edit_the_manifest(staging: Path) -> None:
    path = staging / MANIFEST_NAME
    fields = json.loads(path.read_text())
    fields["parts"][0]["rows"] += 1
    path.write_text(json.dumps(fields))


def garble_the_manifest(staging: Path) -> None:
    (staging / MANIFEST_NAME).write_text("{")


@pytest.mark.parametrize(
    "damage",
    [
        lambda staging: part_of(staging).unlink(),
        truncate,
        flip_a_bit,
        take_another_imports_file,
        edit_the_manifest,
        garble_the_manifest,
        lambda staging: (staging / MANIFEST_NAME).unlink(),
    ],
    ids=["missing", "truncated", "altered", "foreign", "edited", "garbled", "unsealed"],
)
def test_a_damaged_staging_directory_is_refused_whole(
    store: kvstore.Store, tmp_path: Path, damage: object
) -> None:
    stage(tmp_path / "staged", {b"a": b"1", b"b": b"2"})
    assert callable(damage)
    damage(tmp_path / "staged")
    with pytest.raises(ImportRefusedError) as caught:
        bulk.ingest(store, tmp_path / "staged")
    assert str(tmp_path / "staged") in str(caught.value)
    assert list(store.scan()) == []
    assert store.imports() == []


def test_damage_that_keeps_the_file_times_is_found_when_asked_to_be_thorough(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    part = part_of(tmp_path / "staged")
    times = part.stat()
    content = bytearray(part.read_bytes())
    content[10] ^= 0xFF  # a byte of the random id, so no fixed one would do
    with part.open("r+b") as file:
        file.write(content)
    os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ImportRefusedError):
        bulk.ingest(store, tmp_path / "staged", thorough=True)


def test_a_copied_staging_directory_is_taken_by_its_checksums(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    shutil.copytree(tmp_path / "staged", tmp_path / "copy", copy_function=shutil.copyfile)
    bulk.ingest(store, tmp_path / "copy")
    assert store.get(b"a") == b"1"


def test_a_manifest_of_a_newer_release_is_refused(store: kvstore.Store, tmp_path: Path) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    path = tmp_path / "staged" / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(FormatVersionError):
        bulk.ingest(store, tmp_path / "staged")


def as_format_1(staging: Path) -> None:
    """Give a sealed import the manifest that format 1 had: SHA-256, under that name."""
    path = staging / MANIFEST_NAME
    fields = json.loads(path.read_text())
    del fields["checksum"]
    fields["format"] = 1
    for part in fields["parts"]:
        del part["digest"]
        part["sha256"] = hashlib.sha256((staging / part["name"]).read_bytes()).hexdigest()
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(fields))


def test_an_import_of_format_1_is_taken_once_and_checked(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})
    as_format_1(tmp_path / "staged")
    known = json.loads((tmp_path / "staged" / MANIFEST_NAME).read_text())["checksum"]
    shutil.copytree(tmp_path / "staged", tmp_path / "altered")
    flip_a_bit(tmp_path / "altered")
    with pytest.raises(ImportRefusedError, match="altered"):
        bulk.ingest(store, tmp_path / "altered")
    stamp = bulk.ingest(store, tmp_path / "staged", thorough=True)
    assert store.get(b"a") == b"1"
    assert bulk.ingest(store, tmp_path / "staged") == stamp
    assert [record.digest for record in store.imports()] == [known]


# -- writing parts ----------------------------------------------------------------------------


def test_keys_out_of_order_are_refused_by_name(tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    writer = staged.writer()
    writer.put(b"b", b"")
    with pytest.raises(KeyOrderError) as caught:
        writer.write(pa.record_batch({"key": binary(b"c", b"a"), "value": binary(b"", b"")}))
    assert (caught.value.previous, caught.value.key) == (b"c", b"a")
    with pytest.raises(KeyOrderError, match="twice"):
        staged.writer().write(
            pa.record_batch({"key": binary(b"a", b"a"), "value": binary(b"", b"")})
        )


def test_a_part_that_holds_half_of_a_write_takes_no_more_and_does_not_finish(
    tmp_path: Path,
) -> None:
    """Its first and last key would not be those it says, and its rows lie outside its span."""
    staged = bulk.Import.create(tmp_path / "staged")
    writer = staged.writer()
    with pytest.raises(KeyOrderError):
        writer.write(pa.record_batch({"key": binary(b"b", b"a"), "value": binary(b"", b"")}))
    for go_on in (
        lambda: writer.put(b"c", b""),
        lambda: writer.write(pa.record_batch({"key": binary(b"c"), "value": binary(b"")})),
        writer.finish,
    ):
        with pytest.raises(UsageError, match="half of a write"):
            go_on()
    assert writer.is_closed
    assert staged.seal().parts == ()
    assert list((tmp_path / "staged").glob("part-*")) == []


@pytest.mark.parametrize("at", [1, SCAN_CHUNK - 1, SCAN_CHUNK, SCAN_CHUNK + 904])
def test_disorder_is_named_wherever_it_stands_in_a_batch(tmp_path: Path, at: int) -> None:
    """Rows are handed on in chunks of a batch."""
    keys = [b"%08d" % number for number in range(2 * SCAN_CHUNK)]
    keys[at], previous = b"0", keys[at - 1]
    writer = bulk.Import.create(tmp_path / "staged").writer()
    with pytest.raises(KeyOrderError) as caught:
        writer.write(pa.record_batch({"key": binary(*keys), "value": binary(*keys)}))
    assert (caught.value.previous, caught.value.key) == (previous, b"0")
    with pytest.raises(UsageError, match="half of a write"):
        writer.finish()


def test_a_single_row_that_is_refused_leaves_the_part_as_it_was(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"b", b"1")
        with pytest.raises(KeyOrderError):
            writer.put(b"a", b"2")
        writer.put(b"c", b"3")
    assert staged.seal().rows == 2
    bulk.ingest(store, tmp_path / "staged")
    assert dict(store.scan()) == {b"b": b"1", b"c": b"3"}


def test_a_value_no_store_would_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulk.part.VALUE_BYTES_MAX", 3)
    writer = bulk.Import.create(tmp_path / "staged").writer()
    for add in (
        lambda: writer.put(b"a", b"1234"),
        lambda: writer.write(pa.record_batch({"key": binary(b"a"), "value": binary(b"1234")})),
    ):
        with pytest.raises(UsageError, match="4 bytes"):
            add()
    writer.put(b"a", b"123")


def test_wrong_paths_and_ids_are_told_as_such(store: kvstore.Store, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ImportRefusedError, match="not a directory"):
        bulk.ingest(store, file)
    with pytest.raises(UsageError, match="lies in a file"):
        bulk.Import.create(file / "staged")
    for wrong in ("7", True, 1.0, -1, 1 << 63):
        with pytest.raises(UsageError, match="ids are integers"):
            bulk.Import.create(tmp_path / "staged", import_id=wrong)  # type: ignore[arg-type]


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
    monkeypatch.setattr("bulk.manifest.CROSSING_PARTS_MAX", 2)
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


@pytest.mark.parametrize("how", ["put", "rows", "rows and put", "rows and rows"])
def test_a_delete_and_a_put_of_one_key_are_two_rows_of_it(tmp_path: Path, how: str) -> None:
    writer = bulk.Import.create(tmp_path / "staged").writer()
    ops = pa.array(["delete", "put"])
    both = pa.record_batch({"key": binary(b"b", b"b"), "value": binary(None, b"1"), "op": ops})
    row = pa.record_batch({"key": binary(b"b"), "value": binary(b"1")})
    if how == "put":
        writer.delete(b"b")
    elif how == "rows":
        writer.put(b"a", b"1")
    else:
        writer.write(both.slice(0, 1))
    again = {
        "put": lambda: writer.put(b"b", b"1"),
        "rows": lambda: writer.write(both),
        "rows and put": lambda: writer.put(b"b", b"1"),
        "rows and rows": lambda: writer.write(row),
    }
    with pytest.raises(KeyOrderError, match="key b'b' came twice"):
        again[how]()
    writer.put(b"c", b"2")
    part = writer.finish()
    assert part is not None
    assert part.rows == 2


@pytest.mark.parametrize(
    "batch",
    [
        pa.record_batch({"key": pa.array(["a"]), "value": binary(b"")}),
        pa.record_batch({"key": binary(b"a"), "value": pa.array([1])}),
        pa.record_batch({"key": binary(None), "value": binary(b"")}),
        pa.record_batch({"key": binary(b"a"), "value": binary(None)}),
        pa.record_batch({"key": binary(b"a")}),
        pa.record_batch({"key": binary(b"a"), "value": binary(b""), "op": pa.array(["upsert"])}),
        pa.record_batch(
            {"key": binary(b"a"), "value": binary(b""), "op": pa.nulls(1, pa.string())}
        ),
        pa.record_batch({"key": binary(b"a"), "value": binary(b""), "op": pa.array([1])}),
        pa.record_batch({"key": binary(b"a"), "value": binary(b""), "op": binary(b"\xff")}),
        pa.record_batch([binary(b"a"), binary(b""), binary(b"b")], names=["key", "value", "key"]),
        None,
    ],
    ids=[
        *("text key", "number value", "null key", "null value", "no value"),
        *("unknown op", "null op", "number op", "op that is no text", "two keys", "none"),
    ],
)
def test_batches_of_another_shape_are_refused(tmp_path: Path, batch: pa.RecordBatch) -> None:
    with pytest.raises(UsageError), bulk.Import.create(tmp_path / "staged").writer() as writer:
        writer.write(batch)
    assert list((tmp_path / "staged").iterdir()) == []


def test_a_sealed_or_foreign_directory_cannot_be_staged_into(tmp_path: Path) -> None:
    staged = stage(tmp_path / "staged", {b"a": b"1"})
    with pytest.raises(UsageError):
        bulk.Import.create(tmp_path / "staged")
    for too_late in (staged.seal, staged.writer):
        with pytest.raises(UsageError, match="sealed"):
            too_late()
    with pytest.raises(UsageError):
        bulk.Import.create(tmp_path / "other", import_id=0)


def test_a_directory_that_was_given_up_is_not_brought_back_by_who_still_writes(
    tmp_path: Path,
) -> None:
    """Tasks of a job that failed run on for seconds."""
    staged = bulk.Import.create(tmp_path / "staged")
    late, begun = staged.writer(), staged.writer()
    begun.put(b"a", b"1")
    sorting = tmp_path / "staged" / "sorting"
    rows = [pa.record_batch({"key": binary(b"a"), "value": binary(b"1")})]
    sorted_runs(rows, sorting)
    discard(tmp_path / "staged")
    with pytest.raises(StorageError):
        late.put(b"b", b"")
    with pytest.raises(StorageError):
        begun.finish()
    with pytest.raises(StorageError):
        sorted_runs(rows, sorting)
    assert list(tmp_path.iterdir()) == []
    discard(tmp_path / "staged")  # done again, as by two that gave it up


def test_sealing_with_an_open_writer_and_writing_after_finish_are_refused(tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    writer = staged.writer()
    writer.put(b"a", b"")
    with pytest.raises(UsageError, match="open"):
        staged.seal()
    writer.finish()
    with pytest.raises(ClosedError):
        writer.put(b"b", b"")
