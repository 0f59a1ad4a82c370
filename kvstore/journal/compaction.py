"""Compaction beside a running writer: another process makes one snapshot of many records.

Compaction reads sealed files only, so the writer does not wait. The holder of the writer's lock
removes the files that the snapshot supersedes: the writer when it next rotates or opens, or this
module if there is no writer. (Without another process the writer itself compacts at replay:
`Journal.open(..., snapshot=...)`.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore.errors import LockedError, NotAStoreError
from kvstore.errors.system import storage_errors
from kvstore.journal.files import OS_FILES, Files
from kvstore.journal.inspection import content_of
from kvstore.journal.names import LOCK_NAME
from kvstore.journal.recovery import StateMachine, replay
from kvstore.journal.snapshot import SnapshotInfo, remove_superseded, write_snapshot


@dataclass(frozen=True, slots=True)
class CompactResult:
    """The outcome of a compaction. `snapshot` is None if no record was new.

    `removed` is empty beside a running writer, which removes the files itself.
    """

    snapshot: SnapshotInfo | None
    replayed: int
    removed: tuple[str, ...]


def compact(
    path: str | os.PathLike[str],
    fold: StateMachine,
    *,
    content: str | None = None,
    files: Files = OS_FILES,
) -> CompactResult:
    """Fold the sealed files of the journal in `path` into a new snapshot.

    Costs one replay, and the memory of the state. Raises `LockedError` while another compaction
    runs, `RetryableError` if the writer has written a newer snapshot meanwhile, and
    `JournalDamagedError`. After an error nothing has changed.
    """
    directory = os.path.abspath(os.fspath(path))
    with storage_errors(directory):
        found = replay(
            files,
            directory,
            restore=fold.restore,
            apply=fold.apply,
            content=content,
            include_live=False,
        )
    snapshot = None
    if found.records:
        snapshot = write_snapshot(
            files,
            directory,
            fold.records(),
            ordinal=found.last,
            incarnation=found.incarnation,
            content=found.content or "",
        )
    return CompactResult(snapshot, found.records, _remove_unless_written(files, directory))


def compact_by_content(
    path: str | os.PathLike[str], folds: Mapping[str, Callable[[], StateMachine]]
) -> CompactResult:
    """As `compact`, with the fold for the journal's content.

    Raises `NotAStoreError` if there is no fold for that content.
    """
    content = content_of(path)
    if content is None:
        what = "it has no journal, or none that tells what its records mean"
        raise NotAStoreError(os.fspath(path), what, "check the path")
    if content not in folds:
        raise NotAStoreError(
            os.fspath(path),
            f"its journal holds {content!r}",
            f"contents that can be compacted: {', '.join(sorted(folds))}",
        )
    return compact(path, folds[content](), content=content)


def _remove_unless_written(files: Files, directory: str) -> tuple[str, ...]:
    try:
        with storage_errors(directory):
            lock = files.lock(os.path.join(directory, LOCK_NAME))
    except LockedError:
        return ()
    try:
        return remove_superseded(files, directory)
    finally:
        lock.close()
