"""Where a collection lives: the storage that its URL names, decrypting where it has a key.

The address itself is read by `kvstore.storage.address`. A collection adds two rules: it does
not mix with foreign files, and it may be encrypted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backup.sealed import SealedBlob, SealedConsensus, Secret, unlock
from backup.shard import FileBlob, Storage, open_storage
from kvstore.errors import NotAStoreError
from kvstore.storage.cached_blob import CachedBlob
from kvstore.storage.kept_bytes import KeptBytes
from kvstore.storage.os_errors import not_done
from kvstore.storage.patience import PATIENCE, Patience

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
) -> CollectionPlace:
    """The storage that `url` names, decrypting if `secret` is given.

    `options` go to the object store (such as `endpoint` or `region`). Raises `NotAStoreError` where
    a local path holds other files, `UsageError` on an unknown address or a wrong key.
    """
    plain = open_storage(url, patience=patience, **(options or {}))
    if isinstance(plain.blob, FileBlob):
        _require_ours(Path(plain.blob.root).parent)
    return CollectionPlace(plain, secret, os.fspath(url))


class CollectionPlace:
    """A storage, and the secret that opens it."""

    def __init__(self, plain: Storage, secret: Secret | None, where: str) -> None:
        """Raises `UsageError` on a wrong key."""
        self._plain, self._secret, self._where = plain, secret, where
        self.storage = sealed(plain, secret, where)

    def keeping(self, kept: KeptBytes) -> Storage:
        """The same storage, for a reader that keeps the bytes of parts, encrypted as they are."""
        blob = CachedBlob(self._plain.blob, kept)
        return sealed(Storage(blob, self._plain.consensus), self._secret, self._where)


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
