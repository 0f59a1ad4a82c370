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
from kvstore.arguments import require_path
from kvstore.errors import UsageError
from kvstore.storage.address import parse_address, require_options

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
    address = parse_address(given)
    if not address.is_file:
        return BucketUrl(address.url, options, patience)
    if options:
        raise UsageError(
            f"a directory takes no options, not {', '.join(sorted(options))}",
            "leave them out, or pass a URL",
        )
    return require_path(address.path, name="staging")
