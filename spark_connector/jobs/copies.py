"""The checkpoint of a store that tasks read: a live store is its owner's alone."""

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
    """A checkpoint beside the store, or in the directory `copies`, as long as the block runs."""
    # By the store's id: in a directory that several share, others' copies are not ours to remove.
    name = f".{store.store_id}.copied-"
    beside = Path(tempfile.gettempdir()) if store.path is None else store.path.absolute().parent
    directory = beside if copies is None else copies
    for left in directory.glob(f"{name}*"):  # by processes that were killed:
        if left.name.split("-")[-2] != str(os.getpid()):  # only one has the store open
            shutil.rmtree(left, ignore_errors=True)
    copy = directory / f"{name}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        store.checkpoint(copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
