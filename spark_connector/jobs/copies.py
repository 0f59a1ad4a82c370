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


@contextmanager
def copy_of(store: Store, copies: Path | None = None) -> Iterator[Path]:
    """A checkpoint for the time of the block, beside the store or in the directory `copies`."""
    # The id tells our copies from the copies of other stores in the same directory.
    name = f".{store.store_id}.copied-"
    beside = Path(tempfile.gettempdir()) if store.path is None else store.path.absolute().parent
    directory = beside if copies is None else copies
    for left in directory.glob(f"{name}*"):
        if not _is_alive(int(left.name.split("-")[-2])):
            shutil.rmtree(left, ignore_errors=True)
    copy = directory / f"{name}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        store.checkpoint(copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _is_alive(process: int) -> bool:
    """Whether a process is there. All processes that copy a store run on the machine of its owner.
    So a killed process left a copy whose number belongs to none."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True
