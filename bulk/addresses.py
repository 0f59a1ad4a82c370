"""The staging places that callers name: a directory of a file system, or a URL of an object store.

path, file:///path           a directory (`bulk.staging`)
s3://  gs://  az://          objects below the URL (`bulk.bucket`)
memory://name                objects in the memory of this process
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bulk.bucket import BucketUrl
from kvstore.arguments import is_url, require_path
from kvstore.errors import UsageError
from kvstore.storage.address import file_path, require_address, require_options

Staging: TypeAlias = "str | os.PathLike[str] | BucketUrl"


def staging_place(
    given: Staging, options: Mapping[str, Any] | None = None, patience: float | None = None
) -> Path | BucketUrl:
    """The directory or the URL that `given` names. `options` and `patience` are for object stores.

    Raises `UsageError` for other texts, and for options of a directory.
    """
    if isinstance(given, BucketUrl):
        return given
    options = require_options(options)
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if is_url(text) and not text.startswith("file:"):
        if "://" not in text and not isinstance(given, str):
            raise UsageError(f"staging {text} is a URL in a Path", "pass the URL as a text")
        return BucketUrl(require_address(text), options, patience)
    if options:
        raise UsageError(
            f"a directory takes no options, not {', '.join(sorted(options))}",
            "leave them out, or pass a URL",
        )
    return require_path(file_path(text) if text.startswith("file:") else given, name="staging")
