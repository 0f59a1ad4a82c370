"""The extra `server`: packages that only a process which serves a store needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from kvstore.errors import UsageError

_PACKAGES: Final = ("uvicorn", "httptools")


def require_extra() -> None:
    """Raise `UsageError`, which names the command to run, where a package is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise UsageError(
                f"a server needs the package {package!r}", "run: pip install kvstore-mvcc[server]"
            )
