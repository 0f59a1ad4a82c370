"""Where the stores of a feature repository lie, and their open handles.

A path is opened shared, so that feature servers, notebooks and jobs open it side by side. A URL is
a server's. A process has one handle for each place, which its feature stores share.
"""

from __future__ import annotations

import atexit
import threading
from pathlib import Path
from typing import Any, Final

import kvstore
from kvstore.errors import UsageError

_OPENED: Final[dict[tuple[str, str | None, bool], Any]] = {}
_LOCK: Final = threading.Lock()


def address_of(path: str, repo_path: Path | None) -> str:
    """A URL as it is; a path from the directory of the feature repository on."""
    if "://" in path:
        return path
    place = Path(path).expanduser()
    return str(place if place.is_absolute() or repo_path is None else Path(repo_path) / place)


def opened(address: str, token: str | None, *, follows: bool = False) -> Any:
    """The handle of a place; with `follows` one that only reads, beside the process that writes.
    Raises as `kvstore.open`, `kvstore.connect` and `kvstore.follow`."""
    known = (address, token, follows)
    with _LOCK:
        found = _OPENED.get(known)
        if found is None:
            found = _OPENED[known] = _open(*known)
        return found


def _open(address: str, token: str | None, follows: bool) -> Any:
    if "://" in address:
        if follows:
            raise UsageError(f"{address} cannot be followed", "follow: takes a path")
        return kvstore.connect(address, token=token)
    if follows:
        return kvstore.follow(address)
    Path(address).parent.mkdir(parents=True, exist_ok=True)
    return kvstore.open(address, shared=True)


@atexit.register
def close_all() -> None:
    """Close every handle. The next use opens it again."""
    with _LOCK:
        while _OPENED:
            _OPENED.popitem()[1].close()
