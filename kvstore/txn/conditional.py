"""Writes that happen only if the store is as the caller thinks it is.

The condition is looked at under the commit lock, right before the write: between the two nothing
can come. A value hidden by a tombstone of either kind counts as absent.

Invariants
1. A write whose condition does not hold takes no timestamp and writes nothing.
2. The value is compared before the time: a caller who expected another value hears of that.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from kvstore.commit import Committer, Durability
from kvstore.errors import PreconditionError, UsageError
from kvstore.mvcc import Versions, WriteSet
from kvstore.span import Span, require_key
from kvstore.timestamp import Timestamp


class Unchecked(Enum):
    """The type of `UNCHECKED`: None, as an expected value, means that the key is absent."""

    UNCHECKED = "unchecked"


UNCHECKED: Final = Unchecked.UNCHECKED


class _CalledOffError(Exception):
    """The condition says that there is nothing to do."""


class Conditional:
    """Conditional commits of one store."""

    def __init__(
        self,
        versions: Versions,
        committer: Committer,
        *,
        require_kept: Callable[[Span, int], None],
    ) -> None:
        self._versions = versions
        self._committer = committer
        self._require_kept = require_kept

    def write_if(
        self,
        writes: WriteSet,
        key: bytes,
        *,
        expected: bytes | Unchecked | None,
        unchanged_since: int | None,
        durability: Durability | None,
    ) -> Timestamp:
        """Commit `writes` if `key` has the value `expected` (None: is absent), and no version
        newer than `unchanged_since`. Raises `PreconditionError`, and `HistoryGoneError` where it
        cannot be known. One look-up each."""
        _require_expected(expected)
        if expected is UNCHECKED and unchanged_since is None:
            raise UsageError(
                "a conditional write without a condition", "pass expected or unchanged_since"
            )

        def check() -> None:
            if unchanged_since is not None:
                self._require_kept(Span.of_key(key), unchanged_since)
            if expected is not UNCHECKED:
                found = self._newest(key)
                if found != expected:
                    raise PreconditionError(key, expected=expected, found=found)
            if unchanged_since is not None:
                self._require_unchanged(key, unchanged_since)

        return self._committer.commit(writes, durability=durability, check=check)

    def pop(self, key: bytes, *, durability: Durability | None) -> bytes | None:
        """Delete `key` if it is there; returns what was, None (and nothing written) if nothing."""
        writes = WriteSet()
        writes.delete(key)
        found: bytes | None = None

        def check() -> None:
            nonlocal found
            found = self._newest(key)
            if found is None:
                raise _CalledOffError

        self._commit_unless_called_off(writes, check, durability)
        return found

    def delete_live_range(
        self, writes: WriteSet, span: Span, *, durability: Durability | None
    ) -> Timestamp | None:
        """Commit a range delete of `span` if anything in it is alive; None if nothing was.

        Finding the first live key passes over the dead ones before it, and is done
        outside the lock; under it, a look at that key is enough.
        """
        alive = self._first_live(span)
        if alive is None:
            return None

        def check() -> None:
            if self._newest(alive) is None and self._first_live(span) is None:
                raise _CalledOffError

        return self._commit_unless_called_off(writes, check, durability)

    # -- inside -----------------------------------------------------------------------------

    def _commit_unless_called_off(
        self, writes: WriteSet, check: Callable[[], None], durability: Durability | None
    ) -> Timestamp | None:
        try:
            return self._committer.commit(writes, durability=durability, check=check)
        except _CalledOffError:
            return None

    def _newest(self, key: bytes) -> bytes | None:
        return self._versions.get(require_key(key), self._committer.upper - 1)

    def _first_live(self, span: Span) -> bytes | None:
        at = self._committer.upper - 1
        keys, _ = next(self._versions.scan(span, at), ((), ()))
        if at < self._committer.floor:
            # GC or a clear may have taken what was to be found: look again, behind it. Once: the
            # floor stays where a clear that failed has raised it.
            with self._committer.lock:
                keys, _ = next(self._versions.scan(span, self._committer.upper - 1), ((), ()))
        return keys[0] if keys else None

    def _require_unchanged(self, key: bytes, since: int) -> None:
        newest = self._versions.revisions(key)[:1]
        if newest and newest[0][0] > since:
            raise PreconditionError(
                key,
                expected=f"nothing written since {since}",
                found=f"a version at {Timestamp(newest[0][0])}",
            )


def _require_expected(expected: object) -> None:
    """A text would never equal what is stored, and the caller would try for ever."""
    if expected is not None and not isinstance(expected, (bytes, Unchecked)):
        raise UsageError(
            f"expected must be bytes or None, not {type(expected).__name__}", "encode it first"
        )
