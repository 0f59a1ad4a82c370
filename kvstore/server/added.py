"""Parts of a server that packages above bring, by entry points.

kvstore.pages     a function of places, which returns a `Section` of the page
kvstore.verbs     a function of places, which returns verbs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from kvstore.errors import UsageError

PAGES: Final = "kvstore.pages"
VERBS: Final = "kvstore.verbs"


def added(group: str, name: str) -> Callable[[Sequence[str]], Any]:
    """The function `name` of `group`. Raises `UsageError` where no installed package has it."""
    for entry in entry_points(group=group):
        if entry.name == name:
            found: Callable[[Sequence[str]], Any] = entry.load()
            return found
    raise UsageError(f"no package adds {name!r} to {group}", "install this project again")
