"""Directories of journals: whether one is at a path, and whether this release may open it."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.engine.state import CONTENT
from kvstore.errors import FormatVersionError, NotAStoreError
from kvstore.errors.system import storage_errors
from kvstore.journal import OS_FILES, Files
from kvstore.journal.inspection import content_of
from kvstore.journal.names import (
    COMPACTING_NAME,
    LOCK_NAME,
    is_journal_file,
    is_unborn,
    read_note,
)


def is_memory_store(path: Path) -> bool:
    """Whether `path` is a directory with a journal, or with the note of a journal that is lost."""
    if not path.is_dir():
        return False
    names = os.listdir(path)
    if any(map(is_journal_file, names)):
        return True
    return LOCK_NAME in names and read_note(OS_FILES, str(path)) is not None


def require_memory_directory(path: Path, *, create: bool, files: Files = OS_FILES) -> None:
    """Raise `NotAStoreError` unless `path` holds a memory engine's journal or, if `create`,
    may become one; `FormatVersionError` if a newer release wrote it."""
    with storage_errors(str(path)):
        _require_memory_directory(path, create=create, files=files)


def _require_memory_directory(path: Path, *, create: bool, files: Files) -> None:
    if path.exists() and not path.is_dir():
        raise NotAStoreError(str(path), "a file, not a directory", "choose another path")
    if path.exists() and is_memory_store(path):
        content = content_of(path, files=files)
        if content not in (None, CONTENT):
            _refuse(path, str(content))
        return
    present = set(os.listdir(path)) if path.exists() else set()
    if not {name for name in present if not is_unborn(name)} <= {LOCK_NAME, COMPACTING_NAME}:
        raise NotAStoreError(
            str(path), "a directory of other files", "check the path, or choose an empty directory"
        )
    if not create:
        raise NotAStoreError(str(path), "no store is there", "check the path")


def _refuse(path: Path, content: str) -> None:
    kind, _, version = content.rpartition("-")
    if kind == CONTENT.rpartition("-")[0]:
        raise FormatVersionError(str(path), found=version, supported=CONTENT.rpartition("-")[2])
    raise NotAStoreError(str(path), f"a journal of {content!r}", "choose another path")
