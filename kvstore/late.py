"""Names of `kvstore` that are imported at their first use. Most programs need no server.

import kvstore
kvstore.server.app(store)
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_NAMES: Final = {
    "server": ("kvstore.server", ""),
    "connect": ("kvstore.client", "connect"),
    "connect_async": ("kvstore.client", "connect_async"),
    "Client": ("kvstore.client", "Client"),
    "AsyncClient": ("kvstore.client", "AsyncClient"),
}


def __getattr__(name: str) -> Any:
    """The object of `kvstore` by this name. Raises `AttributeError`."""
    if name not in _NAMES:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    module, member = _NAMES[name]
    found = importlib.import_module(module)
    return getattr(found, member) if member else found
