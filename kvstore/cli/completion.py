"""Words that the shell completes: the names of holds, feeds and imports of the store in question.

A completion that fails has no words. The shell shows no error while a user types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kvstore.errors import KVStoreError
from kvstore.opening import open_read_only
from kvstore.store import Store

_WORDS_MAX: Final = 1000


def names_of(read: Callable[[Store], Iterable[str]]) -> Callable[..., list[str]]:
    """A completer of names that `read` finds in the store that the command line names."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        try:
            with open_read_only(ctx.params["store"]) as opened:
                found = sorted({name for name in read(opened) if name.startswith(incomplete)})
        except (KVStoreError, OSError, KeyError):
            return []
        return found[:_WORDS_MAX]

    # The annotations of a completer decide what it is given.
    complete.__annotations__ = {"ctx": Any, "incomplete": str}
    return complete
