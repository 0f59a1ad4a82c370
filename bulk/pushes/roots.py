"""The place of a root of pushes, as callers name it: a URL that backups take, or a directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulk.addresses import Staging
from bulk.bucket import BucketUrl
from kvstore.arguments import require_parent, require_path
from kvstore.storage.address import file_path, open_blob, public_address, require_options
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
        url = self.url.url
        if "://" not in url or url.startswith("file:"):
            require_parent(Path(file_path(url) if "://" in url else url))


def root_place(
    url: Staging, options: Mapping[str, Any] | None, patience: float | None
) -> PushesPlace:
    """The root of pushes that `url` names. Raises `UsageError`."""
    if isinstance(url, BucketUrl):
        return PushesPlace(url)
    text = url if isinstance(url, str) else str(require_path(url, name="url"))
    if "://" not in text:
        text = str(require_path(text, name="url"))
    return PushesPlace(BucketUrl(text, require_options(options), patience))
