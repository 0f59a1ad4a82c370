"""Staging places as a whole: the manifest of one, and the expiry of old ones below a URL."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from bulk.addresses import Staging, staging_place
from bulk.bucket import BEGUN_NAME, Bucket, BucketUrl
from bulk.manifest import Manifest
from bulk.staging import read_manifest
from kvstore.arguments import require_age
from kvstore.clock import Clock
from kvstore.errors import UsageError
from kvstore.storage.below import BlobBelow
from kvstore.timestamp import NS_PER_SECOND


class ExpiredStaging(NamedTuple):
    """A staging that was removed: its path below the URL, and its bytes."""

    path: str
    size_bytes: int


def staged_manifest(staging: Staging, options: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a sealed import, in a directory or at a URL. Raises `ImportRefusedError`."""
    place = staging_place(staging, options)
    return read_manifest(place) if isinstance(place, Path) else place.open().manifest()


def expire_stagings(
    url: str,
    *,
    older_than: timedelta,
    options: Mapping[str, Any] | None = None,
    patience: float | None = None,
) -> list[ExpiredStaging]:
    """Remove all imports below `url` whose building began `older_than` ago or earlier.

    A sealed import goes as well: a store that has added it does not need it, and any other store
    can no longer add it. Objects that no import has put there stay. Costs one list, one get for
    each import, and one delete for each object.
    """
    age = require_age(older_than, name="older_than")
    place = staging_place(url, options, patience)
    if not isinstance(place, BucketUrl):
        raise UsageError(f"{url} is no URL", "pass the URL above the stagings")
    if age is None:
        raise UsageError("older_than=None is no age", "pass a timedelta")
    root = place.open()
    oldest = Clock().wall_ns() - int(age.total_seconds() * NS_PER_SECOND)
    removed = []
    names = [found.name for found in root.blob.patience.over(lambda: [*root.blob.list()])]
    for name in names:
        path, _, last = name.rpartition("/")
        if last != BEGUN_NAME:
            continue
        staging = Bucket(BlobBelow(root.blob, path), f"{root.where}/{path}")
        begun = staging.begun_ns()
        if begun is not None and begun <= oldest:
            removed.append(ExpiredStaging(path, staging.remove()))
    return removed
