"""The place of a new store: it is built beside its path, and appears there as a whole, by a rename.

Invariants
1. Nothing that is at the path is touched.
2. A build that was killed leaves a hidden directory, which is no store. The next build at the same
   path removes it.
3. Two processes do not build at one path: the directory is locked.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvstore.arguments import require_absent
from kvstore.errors import LockedError
from kvstore.errors.system import storage_errors
from kvstore.journal import OS_FILES

_LOCK = "LOCK"


@contextmanager
def appearing(path: Path, *, task: str) -> Iterator[Path]:
    """A directory for files, in which a store is to be built under the name `store`. It is moved to
    `path` when the block ends. `task` names the work, such as "restore".

    Raises `UsageError` if something is at `path`, `LockedError` while another process builds there.
    """
    advice = f"{task} to a path that does not exist"
    require_absent(path, advice=advice)
    with _scratch(path, task) as directory:
        yield directory
        require_absent(path, advice=advice)
        with storage_errors(str(path)):
            os.rename(directory / "store", path)
            OS_FILES.sync_directory(str(path.parent))


@contextmanager
def _scratch(path: Path, task: str) -> Iterator[Path]:
    """A directory beside `path` in which the store is built; each path has one at most."""
    building = path.with_name(f".{path.name}.building-{secrets.token_hex(4)}")
    try:
        with storage_errors(str(path)):
            for left in path.parent.glob(f".{glob.escape(path.name)}.building-*"):
                # Left by a killed build, unless a process has its lock: then it is in use.
                with closing(OS_FILES.lock(str(left / _LOCK))):
                    shutil.rmtree(left, ignore_errors=True)
            building.mkdir(parents=True)
            lock = OS_FILES.lock(str(building / _LOCK))
    except LockedError as error:
        raise LockedError(str(path), f"another {task} to it") from error
    with closing(lock):
        try:
            yield building
        finally:
            shutil.rmtree(building, ignore_errors=True)
