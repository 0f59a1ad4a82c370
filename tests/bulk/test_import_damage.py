"""A damaged staging directory is refused before the store is touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.manifest import MANIFEST_NAME
from kvstore.errors import FormatVersionError, ImportRefusedError
from tests.bulk.staged import ROWS, Fields, first_part, part_of, stage

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def edit(staging: Path, change: Callable[[Fields], object]) -> None:
    """Change the manifest, and leave its checksum as it is."""
    path = staging / MANIFEST_NAME
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def flip_a_bit(staging: Path) -> None:
    content = bytearray(part_of(staging).read_bytes())
    content[len(content) // 2] ^= 1
    part_of(staging).write_bytes(content)


def take_another_imports_part(staging: Path) -> None:
    stage(staging.parent / "other")
    shutil.copy(part_of(staging.parent / "other"), part_of(staging))


def put_a_directory_in_its_place(staging: Path) -> None:
    part = part_of(staging)
    part.unlink()
    part.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda staging: (staging / MANIFEST_NAME).unlink(),
    "manifest is text": lambda staging: (staging / MANIFEST_NAME).write_text("hello"),
    "manifest is binary": lambda staging: (staging / MANIFEST_NAME).write_bytes(b"\xff\x00"),
    "manifest is garbled": lambda staging: (staging / MANIFEST_NAME).write_text("{"),
    "manifest is cut": lambda staging: os.truncate(staging / MANIFEST_NAME, 100),
    "rows edited": lambda staging: edit(staging, lambda fields: fields.update(rows=1)),
    "rows of a part edited": lambda staging: edit(staging, first_part(lambda p: p.update(rows=1))),
    "id edited": lambda staging: edit(staging, lambda fields: fields.update(import_id="0" * 16)),
    "part dropped": lambda staging: edit(staging, lambda fields: fields["parts"].pop()),
    "span edited": lambda staging: edit(staging, first_part(lambda p: p.update(smallest=""))),
    "checksum dropped": lambda staging: edit(staging, lambda fields: fields.pop("checksum")),
    "part missing": lambda staging: part_of(staging).unlink(),
    "part is a directory": put_a_directory_in_its_place,
    "part cut": lambda staging: os.truncate(part_of(staging), part_of(staging).stat().st_size - 1),
    "part empty": lambda staging: part_of(staging).write_bytes(b""),
    "part altered": flip_a_bit,
    "part of another import": take_another_imports_part,
    "nothing there": lambda staging: staging.rename(staging.with_name("gone")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("move", [False, True], ids=["link", "move"])
def test_a_damaged_import_is_refused_and_a_sound_one_goes_in_after_it(
    store: kvstore.Store, tmp_path: Path, damage: Callable[[Path], object], move: bool
) -> None:
    store.put(b"k", b"kept")
    before = store.upper, list(store.changes(0))
    staging = tmp_path / "staged"
    stage(staging, parts=2)
    damage(staging)
    with pytest.raises(ImportRefusedError) as refused:
        bulk.ingest(store, staging, move=move)
    assert refused.value.staging == str(staging)
    assert refused.value.problem
    assert (store.upper, list(store.changes(0))) == before
    assert list(store.scan()) == [(b"k", b"kept")]
    assert store.imports.all() == []
    stage(tmp_path / "sound")
    bulk.ingest(store, tmp_path / "sound", move=move)
    assert dict(store.scan()) == {**ROWS, b"k": b"kept"}


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
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(FormatVersionError):
        bulk.ingest(store, tmp_path / "staged")
