"""How much code one incremental backup of one row passes: source files, and moves between them.

A reader who follows one backup opens these files. The bounds only go down: a new layer on this path
has to replace another.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import backup
import kvstore
from kvstore.testing.bounds import bounds

ROOT = Path(kvstore.__file__).parent.parent
PACKAGES = ("kvstore", "bulk", "backup")
INNER_LOOPS = "kvstore/loops/"
"""Compiled modules: they open no frame."""

FILES_MAX = 55
"""Decision 70 has the reason why this number is not 30."""
BACKUP_FILES_MAX = 17


class Trace:
    """Our source files that calls enter, and the moves from one file to another."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.moves: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        entered = _file_of(frame)
        if event != "call" or entered is None:
            return
        self.files[entered] += 1
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        left = None if caller is None else _file_of(caller)
        if left is not None and left != entered:
            self.moves[left, entered] += 1


def _file_of(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    if not name.startswith(f"{ROOT}/"):
        return None
    name = name[len(f"{ROOT}/") :]
    is_ours = name.split("/")[0] in PACKAGES and not name.startswith(INNER_LOOPS)
    return name if is_ours else None


def test_an_incremental_backup_of_one_row_passes_few_files(tmp_path: Path) -> None:
    collection = backup.Collection(tmp_path / "collection")
    with kvstore.open(tmp_path / "store") as store:
        for key in (b"first", b"second"):  # this backup is an increment too, and fills the caches
            store.put(key, b"value")
            collection.backup(store)
        store.put(b"third", b"value")
        trace, before = Trace(), sys.getprofile()
        with bounds(FSYNC_WARNED_S=3600):  # the warning of a slow disk is no part of the path
            sys.setprofile(trace)
            try:
                info = collection.backup(store)
            finally:
                sys.setprofile(before)
    assert info.rows == 1
    of_backup = sorted(name for name in trace.files if name.startswith("backup/"))
    assert len(of_backup) <= BACKUP_FILES_MAX, of_backup
    assert len(trace.files) <= FILES_MAX, sorted(trace.files)
    print(f"{len(trace.files)} files, {sum(trace.moves.values())} moves")
