"""The checkpoint of a store that tasks read, because one process alone can open the store."""

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
        # Only this process has the store open: a killed process left the other copies of it.
        if left.name.split("-")[-2] != str(os.getpid()):
            shutil.rmtree(left, ignore_errors=True)
    copy = directory / f"{name}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        store.checkpoint(copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
