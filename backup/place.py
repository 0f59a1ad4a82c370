"""Where a collection lives: from a URL to its blob and its consensus.

path, file://        <root>/blob/, <root>/consensus/          any number of processes
memory://name        this process only, for tests
s3://, gs://, az://  objects below the URL's path             credentials from the environment
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from backup.sealed import SealedBlob, SealedConsensus, Secret, unlock
from backup.shard import Blob, Consensus, FileBlob, FileConsensus, MemoryBlob, MemoryConsensus
from backup.shard.object_store import object_place
from kvstore.errors import NotAStoreError, UsageError

_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_LOCAL_FOLDERS = {"blob", "consensus"}


class Place(NamedTuple):
    """The storage of one collection."""

    blob: Blob
    consensus: Consensus


_in_memory: dict[str, Place] = {}


def find_place(
    url: str | os.PathLike[str], secret: Secret | None, *, options: dict[str, str] | None = None
) -> Place:
    """The storage that `url` names, decrypting if `secret` is given.

    `options` go to the object store (such as `endpoint` or `region`). Raises `NotAStoreError` where
    a local path holds other files, `UsageError` on an unknown scheme or a wrong key.
    """
    text = os.fspath(url)
    place = _plain_place(text, options)
    data_key = unlock(place.blob, secret, text)
    if data_key is None:
        return place
    return Place(SealedBlob(place.blob, data_key), SealedConsensus(place.consensus, data_key))


def _plain_place(url: str, options: dict[str, str] | None) -> Place:
    parts = urlsplit(url)
    if parts.scheme in _OBJECT_SCHEMES:
        return Place(*object_place(url, options or {}))
    if options:
        raise UsageError(f"{url} takes no options", "they are for object stores")
    if parts.scheme == "memory":
        name = parts.netloc + parts.path
        return _in_memory.setdefault(name, Place(MemoryBlob(), MemoryConsensus()))
    if "://" in url and parts.scheme != "file":
        raise UsageError(
            f"{url}: unknown kind of place", "pass a path, file://, s3://, gs://, az://"
        )
    root = Path(unquote(parts.path)) if parts.scheme == "file" else Path(url)
    _require_ours(root)
    return Place(FileBlob(root / "blob"), FileConsensus(root / "consensus"))


def _require_ours(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise NotAStoreError(str(root), "a file, not a directory", "choose another path")
    if root.is_dir() and {entry.name for entry in root.iterdir()} - _LOCAL_FOLDERS:
        raise NotAStoreError(str(root), "a directory of other files", "choose an empty one")
