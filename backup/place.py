"""Where a collection lives: the storage that its URL names, decrypting where it has a key.

The address itself is read by `kvstore.storage.address`. A collection adds two rules: it does not
mix with foreign files, and it may be encrypted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.backup.sealed import SealedBlob, SealedConsensus, Secret, unlock
from kvstore.backup.shard import FileBlob, Storage, open_storage
from kvstore.base.paths import is_there, require_outside, require_parent
from kvstore.errors import Argument, NotAStoreError, UsageError
from kvstore.storage.address import public_address, require_options
from kvstore.storage.local_files import not_done
from kvstore.storage.patience import PATIENCE, Patience
from kvstore.storage.wrapped import Bandwidth, CachedBlob, FetchedBlob, KeptBytes, LimitedBlob

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
    bandwidth: Bandwidth | None = None,
) -> CollectionPlace:
    """The storage that `url` names, decrypting if `secret` is given.

    `options` go to the object store (such as `endpoint` or `region`). Raises `NotAStoreError` where
    a local path holds other files, `UsageError` on an unknown address or a wrong key.
    """
    given_options = require_options(options)
    plain = open_storage(url, patience=patience, **given_options)
    root = None
    if isinstance(plain.blob, FileBlob):
        root = Path(plain.blob.root).parent
        _require_ours(root)
    if bandwidth is not None:
        if not isinstance(bandwidth, Bandwidth):
            raise UsageError(
                Argument.of("bandwidth", bandwidth), "pass a Bandwidth, or None for no limit"
            )
        plain = Storage(LimitedBlob(plain.blob, bandwidth), plain.consensus)
    given = tuple(sorted(given_options.items()))
    # A worker that starts after a change of the directory opens the same place.
    address = PlaceAddress(public_address(url), secret, given)
    return CollectionPlace(plain, secret, address.url, address, root)


@dataclass(frozen=True, slots=True)
class PlaceAddress:
    """What another process of this machine needs to open a storage. It has the secret: it goes
    through a pipe and is written nowhere. With `fetched`, parts are kept in that directory."""

    url: str
    secret: Secret | None
    options: tuple[tuple[str, Any], ...]
    fetched: Path | None = None

    def fetching(self, directory: Path) -> PlaceAddress:
        """The same storage, with the bytes of parts kept in `directory`."""
        return replace(self, fetched=directory)

    def open(self) -> Storage:
        """Open the storage. Raises as `find_place`."""
        found = find_place(self.url, self.secret, options=dict(self.options))
        return found.storage if self.fetched is None else found.fetching(self.fetched)


class CollectionPlace:
    """A storage, and the secret that opens it. Other processes open it by its `address`; a storage
    that is in the memory of this process has none."""

    def __init__(
        self,
        plain: Storage,
        secret: Secret | None,
        where: str,
        address: PlaceAddress | None = None,
        root: Path | None = None,
    ) -> None:
        """Raises `UsageError` on a wrong key."""
        self._root = root
        self._plain, self._secret, self._where = plain, secret, where
        self.address = None if where.startswith("memory:") else address
        self.storage = sealed(plain, secret, where)

    @property
    def is_local(self) -> bool:
        """Whether the parts are files of this machine, or of a file system that it has mounted."""
        return isinstance(self._plain.blob, FileBlob)

    def require_parent(self) -> None:
        """Raise `UsageError` if a new collection would lie in a directory that is missing: the path
        may be mistyped, or a disk not mounted."""
        if self._root is not None and not is_there(self._root):
            require_parent(self._root)

    def fetching(self, directory: Path) -> Storage:
        """The same storage, for work that is continued after a kill: the bytes of parts are kept in
        `directory`, encrypted as they are."""
        blob = FetchedBlob(self._plain.blob, directory)
        return sealed(Storage(blob, self._plain.consensus), self._secret, self._where)

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
        if not found & _LOCAL_FOLDERS:
            require_outside(root, name="the collection")
        if found - _NOBODYS and not found & _LOCAL_FOLDERS:
            raise NotAStoreError(
                str(root),
                "a directory of other files",
                "check the path, or choose an empty directory",
            )
    except OSError as error:
        raise not_done(f"opening {root}", error) from error
