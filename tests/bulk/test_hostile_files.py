"""Links, special files and swapped files: an import is refused, or its rows are right."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.manifest import MANIFEST_NAME
from kvstore.errors import CorruptionError, ImportRefusedError, UsageError
from tests.bulk.refusal import refused
from tests.bulk.staged import ROWS, everything_in, manifest_of, part_of, stage

pytestmark = pytest.mark.usefixtures("each_engine")


def resealed_link(staging: Path, target: Path | str) -> Path:
    """A symbolic link in the place of the part, and the part's file outside the directory."""
    part = part_of(staging)
    moved = part.rename(staging.parent / "elsewhere.sst")
    part.symlink_to(target)
    return moved


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("move", [False, True])
def test_a_symbolic_link_gives_the_file_that_it_leads_to(
    tmp_path: Path, staging: Path, relative: bool, move: bool
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        outside = resealed_link(
            staging, "../elsewhere.sst" if relative else staging.parent / "elsewhere.sst"
        )
        bulk.ingest(store, staging, move=move)
        assert outside.is_file()
        assert (staging / manifest_of(staging)["parts"][0]["name"]).is_symlink() is not move
    outside.unlink()
    with kvstore.open(tmp_path / "store") as store:
        assert dict(store.scan()) == ROWS
        store.verify().require_ok()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(path.parent, os.O_RDONLY)  # the path itself may be too long for a socket
        try:
            listening.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def looping(path: Path) -> None:
    path.symlink_to(path.name)


def to_a_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "fifo")
    path.symlink_to("fifo")


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a directory": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": looping,
    "a link to a FIFO": to_a_fifo,
    "a link to a directory": lambda path: path.symlink_to(".."),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("place", ["part", "manifest"])
@pytest.mark.parametrize("name", IRREGULAR)
def test_only_regular_files_are_read(
    attacked: kvstore.Store, staging: Path, name: str, place: str
) -> None:
    path = part_of(staging) if place == "part" else staging / MANIFEST_NAME
    path.unlink()
    IRREGULAR[name](path)
    refused(attacked, staging)


@pytest.mark.parametrize("name", IRREGULAR)
def test_only_regular_files_are_sealed(tmp_path: Path, name: str) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"a", b"1")
        part = writer.finish()
    assert part is not None
    (tmp_path / "staged" / part.name).unlink()
    IRREGULAR[name](tmp_path / "staged" / part.name)
    with pytest.raises(UsageError, match="cannot be sealed"):
        staged.seal()
    assert not (tmp_path / "staged" / MANIFEST_NAME).exists()


@pytest.mark.parametrize("name", sorted(set(IRREGULAR) - {"a directory", "a link to a directory"}))
def test_a_staging_directory_that_is_none_is_refused(
    attacked: kvstore.Store, tmp_path: Path, name: str
) -> None:
    IRREGULAR[name](tmp_path / "staged")
    refused(attacked, tmp_path / "staged")


def other_file(part: Path) -> None:
    part.unlink()
    part.write_bytes(b"not what was checked")


def other_bytes(part: Path) -> None:
    with part.open("r+b") as file:
        file.write(b"not what was checked")


def link_to_another(part: Path) -> None:
    other_file(part)
    part.symlink_to(shutil.move(part, part.parent / "other"))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("swap", [other_file, other_bytes, link_to_another])
def test_a_part_that_is_replaced_after_it_was_checked_is_refused(
    store: kvstore.Store,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap: Callable[[Path], None],
    move: bool,
    copied: bool,
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    def replace(step: str) -> None:
        if step.startswith("bring"):
            swap(part_of(staging))

    if copied:
        monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(ImportRefusedError, match="while it was added"):
        bulk.ingest(store, staging, move=move, progress=replace)
    assert part_of(staging).exists()
    assert list(store.scan()) == []


def test_a_refusal_between_two_parts_leaves_every_staged_file(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staging = tmp_path / "staged"
    stage(staging, parts=3)
    last = staging / manifest_of(staging)["parts"][-1]["name"]
    before = everything_in(staging)

    def replace(step: str) -> None:
        if step.startswith("bring 3"):
            other_file(last)

    with pytest.raises(ImportRefusedError, match="while it was added"):
        bulk.ingest(store, staging, move=True, progress=replace)
    left = everything_in(staging)
    assert left.pop(last.name) != before.pop(last.name)
    assert left == before


def test_a_move_that_was_interrupted_is_finished_by_the_next(
    store: kvstore.Store, staging: Path
) -> None:
    def killed(step: str) -> None:
        if step == "add":
            raise RuntimeError("killed here")

    for progress in (killed, killed, None):
        assert part_of(staging).is_file()
        with suppress(RuntimeError):
            bulk.ingest(store, staging, move=True, progress=progress)
    assert [path.name for path in staging.iterdir()] == [MANIFEST_NAME]
    assert dict(store.scan()) == ROWS


def test_files_that_may_only_be_read_are_checked_and_added(
    store: kvstore.Store, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of another user are like this: the kernel refuses to link them."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    bulk.ingest(store, staging, on_conflict="error", thorough=True)
    assert dict(store.scan()) == ROWS


@pytest.mark.damages_store
def test_writing_into_a_linked_file_is_told_by_its_block_checksums(
    tmp_path: Path, staging: Path
) -> None:
    with kvstore.open(tmp_path / "store", engine="rocksdb") as store:
        bulk.ingest(store, staging)
    with part_of(staging).open("r+b") as file:
        file.write(b"written afterwards")
    with kvstore.open(tmp_path / "store") as store:
        with pytest.raises(CorruptionError):
            list(store.scan())
        assert not store.verify().ok
