"""Storage by address: one URL gives a blob and a consensus.

    path, file:///path    local files: FileBlob in <path>/blob, FileConsensus in <path>/consensus
    memory://name         this process's memory; the same name is the same storage
    s3://  gs://  az://   an object store, with objects below the URL's path

Options of object stores (region, endpoint, keys) are passed on to obstore, which also reads the
environment as the providers' own tools do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from kvstore.arguments import is_url
from kvstore.errors import KVStoreError, UsageError
from kvstore.storage.below import BlobBelow
from kvstore.storage.contract import Blob, Storage
from kvstore.storage.file_blob import FileBlob
from kvstore.storage.file_consensus import FileConsensus
from kvstore.storage.memory import MemoryBlob, MemoryConsensus
from kvstore.storage.patience import PATIENCE, Patience

_memories: dict[str, Storage] = {}
_memory_blobs: dict[str, Blob] = {}
_SCHEMES = ("file", "memory", "s3", "gs", "az")


def open_storage(
    url: str | os.PathLike[str], *, patience: Patience = PATIENCE, **options: Any
) -> Storage:
    """Open the storage that `url` names; nothing is created before the first write.

    `patience` says how long calls are repeated after failures that may pass.

    Raises `UsageError` for an address that is empty or not understood.
    """
    text = require_address(url)
    if "://" not in text:
        return _files(text, options, patience)
    parts = urlsplit(text)
    if parts.scheme == "file":
        return _files(file_path(text), options, patience)
    if parts.scheme == "memory":
        fresh = Storage(MemoryBlob(), MemoryConsensus())
        return _memories.setdefault(text.rstrip("/"), fresh)
    # Imported late, here and below: local files need no client of object stores.
    from kvstore.storage.object_store import open_object_store

    return Storage(*open_object_store(text, patience=patience, **options))


def is_gone(url: str, *, seconds: float) -> bool | None:
    """Whether nothing is left of a storage at `url`; None where that is not known: it is in the
    memory of a process, or does not answer within `seconds`."""
    if url.startswith("memory:"):
        return None
    try:
        found = open_storage(url, patience=Patience(seconds))
        return found.blob.patience.over(lambda: next(iter(found.blob.list()), None)) is None
    except KVStoreError:
        return None


def open_blob(
    url: str | os.PathLike[str], *, patience: Patience = PATIENCE, **options: Any
) -> Blob:
    """The blobs directly below `url`: objects whose names other programs can foretell.

    Blobs of `memory://name/path` are also seen below `memory://name`. Raises as `open_storage`.
    """
    text = require_address(url)
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no URL: {error}", "check the URL") from error
    if "://" not in text or parts.scheme == "file":
        if options:
            raise UsageError(
                f"local files take no options, not {', '.join(sorted(options))}",
                "leave them out, or pass a URL",
            )
        return FileBlob(
            os.path.abspath(file_path(text) if "://" in text else text), patience=patience
        )
    if parts.scheme == "memory":
        blob = _memory_blobs.setdefault(parts.netloc, MemoryBlob())
        return BlobBelow(blob, parts.path)
    from kvstore.storage.object_store import open_object_blob

    return open_object_blob(text, patience=patience, **options)


def require_address(url: str | os.PathLike[str]) -> str:
    """`url` as text. Raises `UsageError` where it is empty, or neither a URL nor a path."""
    text = address_text(url)
    if not text:  # not the working directory: an unset variable in a script
        raise UsageError("the address of the storage is empty", "give a path or a URL")
    scheme, colon, _ = text.partition(":")
    if colon and "://" not in text and (scheme in _SCHEMES or is_url(text)):
        known = scheme if scheme in _SCHEMES else "s3"
        raise UsageError(
            f"{text!r} is neither a URL nor a path",
            f"write a URL as {known}://..., or ./{text} for a directory of that name",
        )
    return text


def address_text(url: object) -> str:
    """`url` as text, if it is a text or a path. Raises `UsageError`."""
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(
            f"the address of the storage must be a text or a path, not {type(url).__name__}",
            "give a path or a URL",
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the address of the storage is no text: {error}", "give a path or a URL"
        ) from error
    return text


def require_options(options: object) -> Mapping[str, Any]:
    """The options of an object store, none for None. Raises `UsageError`, which does not show them:
    some are secrets."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise UsageError(f"options must be a mapping, not {type(options).__name__}", "pass a dict")
    for name in options:
        if not isinstance(name, str):
            raise UsageError(f"the name of an option must be a text, not {name!r}", "pass a str")
    return options


def public_address(url: str | os.PathLike[str]) -> str:
    """`url` without user, password and query, to be shown and stored; a path is made absolute."""
    text = os.fspath(url)
    scheme, found, _ = text.partition("://")
    if not found:
        return os.path.abspath(text) if text else ""
    try:
        parts = urlsplit(text)
    except ValueError:  # no URL: the name of a given storage
        return f"{scheme}://"
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def file_path(url: str) -> str:
    """The path that a `file:` URL names. Raises `UsageError` where it names more than a path."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{url!r} names a host", "write file:///absolute/path")
    if "?" in url or "#" in url:
        raise UsageError(f"{url!r} has a ? or #", "write them as %3F and %23, or a plain path")
    return unquote(parts.path)


def _files(path: str, options: dict[str, Any], patience: Patience) -> Storage:
    if options:
        raise UsageError(
            f"local files take no options, not {', '.join(sorted(options))}",
            "leave them out, or pass a URL",
        )
    root = os.path.abspath(path)
    blob = FileBlob(os.path.join(root, "blob"), patience=patience)
    return Storage(blob, FileConsensus(f"{root}/consensus", patience=patience))
