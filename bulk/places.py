"""The place of a new store: it is built beside its path, and appears there as a whole, by a rename.
A file of an export appears so too.

Invariants of a store's place
1. Nothing that is at the path is touched.
2. A build that was killed leaves a hidden directory, which is no store. The next call for the same
   path removes it.
3. Two processes do not build at one path: the directory is locked.
4. Work that is continued keeps its directory when it fails, and takes up the directory that its
   last attempt has left.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from kvstore.arguments import require_absent, require_outside, require_parent
from kvstore.errors import LockedError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.journal import OS_FILES
from kvstore.journal.files import Lock

_LOCK = "LOCK"


@contextmanager
def appearing(path: Path, *, task: str, resume: bool = False) -> Iterator[Path]:
    """A directory for files, in which a store is to be built under the name `store`. It is moved to
    `path` when the block ends. `task` names the work, such as "restore". With `resume` the
    directory may have the files of an earlier attempt.

    Raises `UsageError` if something is at `path`, `LockedError` while another process builds there.
    """
    advice = f"{task} to a path that does not exist"
    try:
        require_absent(path, advice=advice)
    except UsageError:
        _sweep(path)
        raise
    require_outside(path, name="path")
    with _scratch(path, task, resume=resume) as directory:
        yield directory
        require_absent(path, advice=advice)
        with storage_errors(str(path)):
            os.rename(directory / "store", path)
            OS_FILES.sync_directory(str(path.parent))


@contextmanager
def appearing_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A path for a file, which has the name `path` and is on disk when the block ends. After an
    error nothing is left of it. Raises `UsageError` if something is at `path`, unless `overwrite`
    is true; a directory is never replaced."""
    advice = "name another file, or pass overwrite=True"
    if path.is_dir():
        raise UsageError(f"{path} is a directory", "name a file in it")
    require_parent(path)
    require_outside(path, name="path")
    if not overwrite:
        require_absent(path, advice=advice)
    passing = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with storage_errors(str(path)):
        try:
            yield passing
            with passing.open("rb") as file:
                os.fsync(file.fileno())
            if not overwrite:
                require_absent(path, advice=advice)
            os.replace(passing, path)
            OS_FILES.sync_directory(str(path.parent))
        finally:
            passing.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove the directories of builds that were killed behind the rename."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.building-*"):
        with suppress(LockedError), closing(OS_FILES.lock(str(left / _LOCK))):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _scratch(path: Path, task: str, *, resume: bool) -> Iterator[Path]:
    """A directory beside `path` in which the store is built; each path has one at most."""
    building = path.with_name(f".{path.name}.building-{secrets.token_hex(4)}")
    lock: Lock | None = None
    try:
        with storage_errors(str(path)):
            for left in path.parent.glob(f".{glob.escape(path.name)}.building-*"):
                # Left by a killed build, unless a process has its lock: then it is in use.
                taken = OS_FILES.lock(str(left / _LOCK))
                if resume and lock is None:
                    building, lock = left, taken
                    continue
                with closing(taken):
                    shutil.rmtree(left, ignore_errors=True)
            if lock is None:
                building.mkdir(parents=True)
                lock = OS_FILES.lock(str(building / _LOCK))
    except LockedError as error:
        if lock is not None:
            lock.close()
        raise LockedError(str(path), f"another {task} to it") from error
    with closing(lock):
        try:
            yield building
        except BaseException:
            if not resume or not any(left.name != _LOCK for left in building.iterdir()):
                shutil.rmtree(building, ignore_errors=True)
            raise
        shutil.rmtree(building, ignore_errors=True)
