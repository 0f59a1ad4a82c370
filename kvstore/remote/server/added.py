"""Parts of a server that packages above bring. They are imported by name where they are asked for.

A group has places by name: a module, and in it a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

PAGES: Final = {"collections": "kvstore.backup.page:collections"}
"""Sections of the page."""

ADDED_VERBS: Final = {"imports": "kvstore.bulk.served:import_verbs"}
"""Verbs of a server."""

ADDED_WORK: Final = {
    "import": "kvstore.bulk.ingest:ingest_brought",
    "pull": "kvstore.bulk.pushes:pull",
}
"""Work of the owner of a store."""


def added(group: Mapping[str, str], name: str) -> Callable[..., Any]:
    """The function `name` of `group`, whose module is imported: it lies above the server."""
    module, _, member = group[name].partition(":")
    found: Callable[..., Any] = getattr(import_module(module), member)
    return found
