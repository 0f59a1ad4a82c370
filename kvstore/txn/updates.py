"""Updates in place: the value of a key is read and written in one commit.

The function of the caller runs under the commit lock. So no commit comes between its read and its
write, an update never conflicts, and the change feed has the new value.

Invariants
1. The function gets the newest value of the key, and runs once.
2. If the function raises, or commits to the store itself, the update writes nothing.

A counter is decimal text, which a person and every other reader of the store can read:

    counter := "-"? digit+         an integer of 64 bits; an absent key counts as 0
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from kvstore.arguments import require_integer
from kvstore.commit import CommitNote, Durability
from kvstore.errors import UsageError, printable
from kvstore.mvcc.write import WriteSet
from kvstore.parts import Parts
from kvstore.span import RESERVED, require_key

Updating: TypeAlias = "Callable[[bytes | None], bytes | None]"
"""From the value of a key, None where it is absent, to its new value; None deletes the key."""

COUNTER_MAX: Final = (1 << 63) - 1
_DIGITS_MAX: Final = 19


class _UnchangedError(Exception):
    """Calls off the commit of an update that leaves an absent key absent."""


class Updates:
    """Updates in place of one store."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._committer = parts.versions, parts.committer

    def update(
        self,
        key: bytes,
        change: Updating,
        *,
        due: int | None = None,
        durability: Durability | None,
        note: CommitNote | None = None,
    ) -> bytes | None:
        """See `Store.update`. The new value expires at `due`."""
        key, change = require_key(key), require_change(change)
        writes = WriteSet()
        if key >= RESERVED:
            writes.delete(key)  # refuses a key that no put could have
        committer, frontiers = self._committer, self._committer.frontiers
        new: bytes | None = None

        def check() -> None:
            nonlocal new
            upper = frontiers.upper
            old = self._versions.get(key, upper - 1)
            new = change(old)
            if frontiers.upper != upper:
                raise UsageError(
                    f"the function that updates {printable(key)} has committed to the store",
                    "use a transaction to write several keys",
                )
            if new is None:
                if old is None:
                    raise _UnchangedError
                writes.delete(key)
                return
            if due is None:
                writes.put(key, new)
            else:
                writes.put_expiring(key, new, due)
            if type(new) is not bytes:
                new = bytes(new)

        try:
            committer.commit(writes, durability=durability, check=check, note=note)
        except _UnchangedError:
            return None
        return new

    def increment(
        self,
        key: bytes,
        by: int,
        *,
        due: int | None = None,
        durability: Durability | None,
        note: CommitNote | None = None,
    ) -> int:
        """See `Store.increment`."""
        found = self.update(key, adding(key, by), due=due, durability=durability, note=note)
        assert found is not None, "a counter is never deleted"
        return int(found)


def require_change(change: Updating) -> Updating:
    """`change`, if it is a function."""
    if not callable(change):
        raise UsageError(f"{change!r} is no function", "pass one that takes the value")
    return change


def adding(key: bytes, by: int) -> Updating:
    """The change that adds `by` to the counter at `key`."""
    return partial(_added, key, require_integer(by, name="by"))


def counted(key: bytes, value: bytes | None) -> int:
    """The number of the counter at `key`. Raises `UsageError` for a value that is no counter."""
    if value is None:
        return 0
    digits = value[1:] if value[:1] == b"-" else value
    if not digits.isdigit() or len(digits) > _DIGITS_MAX:
        raise UsageError(
            f"the value of {printable(key)} is no counter: {printable(value)}",
            "counters are integers in decimal text; use update for other values",
        )
    return int(value)


def _added(key: bytes, by: int, value: bytes | None) -> bytes:
    total = counted(key, value) + by
    if not -COUNTER_MAX - 1 <= total <= COUNTER_MAX:
        raise UsageError(
            f"the counter {printable(key)} would be {total}, which needs more than 64 bits",
            "count in several keys",
        )
    return b"%d" % total
