"""The place of a root of pushes, as callers name it: a URL that backups take, or a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulk.addresses import Staging
from bulk.bucket import BucketUrl
from kvstore.arguments import require_outside, require_parent, require_path
from kvstore.errors.system import storage_errors
from kvstore.storage.address import open_blob, parse_address, public_address, require_options
from kvstore.storage.contract import Blob
from kvstore.storage.patience import Patience


@dataclass(frozen=True)
class PushesPlace:
    """The root of pushes: a URL that backups take, or a directory that all machines share."""

    url: BucketUrl

    def open(self) -> tuple[Blob, str]:
        """The blobs below the root, and its name in errors."""
        url = self.url
        blob = open_blob(url.url, patience=Patience(url.patience_s), **url.options)
        return blob, public_address(url.url)

    def require_parent(self) -> None:
        """Raise `UsageError` for a directory whose parent is missing: the path is mistyped, or a
        disk is not mounted."""
        address = parse_address(self.url.url)
        if address.is_file:
            require_parent(Path(address.path))


def root_place(
    url: Staging, options: Mapping[str, Any] | None, patience: float | None
) -> PushesPlace:
    """The root of pushes that `url` names. Raises `UsageError`."""
    if isinstance(url, BucketUrl):
        return PushesPlace(url)
    if not isinstance(url, str):
        require_path(url, name="url")
    address = parse_address(url)
    if address.is_file:
        with storage_errors(address.path):
            is_new = not os.path.isdir(address.path) or not os.listdir(address.path)
        if is_new:
            require_outside(Path(address.path), name="the log of pushes")
    text = str(require_path(address.path, name="url")) if address.is_file else address.url
    return PushesPlace(BucketUrl(text, require_options(options), patience))
