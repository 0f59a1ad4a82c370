"""The checkpoint of a store that tasks read: one process alone can open the store to write."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore import Store
from kvstore.errors import storage_errors


@contextmanager
def copy_of(store: Store, copies: Path | None = None) -> Iterator[Path]:
    """A checkpoint for the time of the block, beside the store or in the directory `copies`."""
    # The id tells our copies from the copies of other stores in the same directory.
    name = f".{store.store_id}.copied-"
    beside = Path(tempfile.gettempdir()) if store.path is None else store.path.absolute().parent
    directory = beside if copies is None else copies.absolute()  # tasks run in others
    with storage_errors(str(directory)):
        for left in directory.glob(f"{name}*"):
            process = left.name.removeprefix(name).partition("-")[0]
            if process.isdecimal() and not _is_alive(int(process)):
                shutil.rmtree(left, ignore_errors=True)
    copy = directory / f"{name}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        store.checkpoint(copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _is_alive(process: int) -> bool:
    """Whether a process is there. All processes that copy a store run on the machine of its owner.
    So a killed process left a copy whose number belongs to none.

    A later process may have got the number. The copy stays until a job runs after its end."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to another user; it is no process's number
        return True
    return True
