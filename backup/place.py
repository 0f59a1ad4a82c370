"""Where a collection lives: the storage that its URL names, decrypting where it has a key.

The address itself is read by `backup.shard.storage.address`. A collection adds two rules: it does
not mix with foreign files, and it may be encrypted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backup.sealed import SealedBlob, SealedConsensus, Secret, unlock
from backup.shard import FileBlob, Storage, open_storage
from backup.shard.storage.os_errors import not_done
from backup.shard.storage.patience import PATIENCE, Patience
from kvstore.errors import NotAStoreError

_LOCAL_FOLDERS = {"blob", "consensus"}
"""A directory with one of these is a collection: other files beside them are ignored."""

_NOBODYS = {"lost+found"}
"""Entries of an empty file system."""


def find_place(
    url: str | os.PathLike[str],
    secret: Secret | None,
    *,
    options: Mapping[str, Any] | None = None,
    patience: Patience = PATIENCE,
) -> Storage:
    """The storage that `url` names, decrypting if `secret` is given.

    `options` go to the object store (such as `endpoint` or `region`). Raises `NotAStoreError` where
    a local path holds other files, `UsageError` on an unknown address or a wrong key.
    """
    plain = open_storage(url, patience=patience, **(options or {}))
    if isinstance(plain.blob, FileBlob):
        _require_ours(Path(plain.blob.root).parent)
    return sealed(plain, secret, os.fspath(url))


def sealed(plain: Storage, secret: Secret | None, where: str) -> Storage:
    """`plain`, wrapped so that everything is encrypted by the key that `secret` opens.

    Without a key `plain` itself.
    """
    key = unlock(plain.blob, secret, where)
    if key is None:
        return plain
    return Storage(SealedBlob(plain.blob, key), SealedConsensus(plain.consensus, key))


def _require_ours(root: Path) -> None:
    try:
        if root.exists() and not root.is_dir():
            raise NotAStoreError(str(root), "a file, not a directory", "choose another path")
        found = {entry.name for entry in root.iterdir()} if root.is_dir() else set()
        if found - _NOBODYS and not found & _LOCAL_FOLDERS:
            raise NotAStoreError(str(root), "a directory of other files", "choose an empty one")
    except OSError as error:
        raise not_done(f"opening {root}", error) from error
