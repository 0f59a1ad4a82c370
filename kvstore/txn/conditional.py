"""Conditional writes: they happen only if a key or span has the state that the caller expects.

The condition is checked under the commit lock, right before the write, so no other commit comes
between check and write. A value under a tombstone of either kind counts as absent.

Invariants
1. A write whose condition does not hold takes no timestamp and writes nothing.
2. The check compares the value before the time. If both differ, the error names the value.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from kvstore.commit import CommitNote, Durability
from kvstore.errors import PreconditionError, UsageError
from kvstore.mvcc import WriteSet
from kvstore.parts import Parts
from kvstore.span import BytesLike, Span, require_key
from kvstore.timestamp import Timestamp


class Unchecked(Enum):
    """The type of `UNCHECKED`: None, as an expected value, means that the key is absent."""

    UNCHECKED = "unchecked"


UNCHECKED: Final = Unchecked.UNCHECKED


class _CalledOffError(Exception):
    """Stops a commit that has nothing to write."""


class Conditional:
    """Conditional commits of one store."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._committer = parts.versions, parts.committer
        self._reads = parts.reads

    def write_if(
        self,
        writes: WriteSet,
        key: bytes,
        *,
        expected: BytesLike | Unchecked | None,
        unchanged_since: int | None,
        durability: Durability | None,
        note: CommitNote | None = None,
    ) -> Timestamp:
        """Commit `writes` if `key` has the value `expected` (None: absent) and no version newer
        than `unchanged_since`. One look-up each.

        Raises `PreconditionError` if the condition does not hold, `HistoryGoneError` if history
        that would decide it is gone.
        """
        key, expected = require_key(key), _require_expected(expected)
        if expected is UNCHECKED and unchanged_since is None:
            raise UsageError(
                "a conditional write without a condition", "pass expected or unchanged_since"
            )

        def check() -> None:
            if unchanged_since is not None:
                self._reads.require_kept(Span.of_key(key), unchanged_since)
            if expected is not UNCHECKED:
                found = self._newest(key)
                if found != expected:
                    raise PreconditionError(key, expected=expected, found=found)
            if unchanged_since is not None:
                self._require_unchanged(key, unchanged_since)

        return self._committer.commit(writes, durability=durability, check=check, note=note)

    def pop(
        self, key: bytes, *, durability: Durability | None, note: CommitNote | None = None
    ) -> bytes | None:
        """Delete `key` and return its value; None, with nothing written, if the key is absent."""
        writes = WriteSet()
        writes.delete(key)
        found: bytes | None = None

        def check() -> None:
            nonlocal found
            found = self._newest(key)
            if found is None:
                raise _CalledOffError

        self._commit_unless_called_off(writes, check, durability, note)
        return found

    def delete_live_range(
        self,
        writes: WriteSet,
        span: Span,
        *,
        durability: Durability | None,
        note: CommitNote | None = None,
    ) -> Timestamp | None:
        """Commit a range delete of `span` if a key in it is alive; else return None.

        The search for the first live key passes over dead keys, so it runs outside the lock. Under
        the lock one look-up of that key is enough.
        """
        alive = self._first_live(span)
        if alive is None and note is None:
            return None

        def check() -> None:
            if (alive is None or self._newest(alive) is None) and self._first_live(span) is None:
                raise _CalledOffError

        return self._commit_unless_called_off(writes, check, durability, note)

    # -- inside -----------------------------------------------------------------------------

    def _commit_unless_called_off(
        self,
        writes: WriteSet,
        check: Callable[[], None],
        durability: Durability | None,
        note: CommitNote | None = None,
    ) -> Timestamp | None:
        try:
            return self._committer.commit(writes, durability=durability, check=check, note=note)
        except _CalledOffError:
            return None

    def _newest(self, key: bytes) -> bytes | None:
        return self._versions.get(require_key(key), self._committer.upper - 1)

    def _first_live(self, span: Span) -> bytes | None:
        at = self._committer.upper - 1
        keys, _ = next(self._versions.scan(span, at), ((), ()))
        if at < self._committer.frontiers.floor:
            # GC or a clear may have removed the key meanwhile: look again, under the lock. A loop
            # might not end, because a clear that fails leaves the floor raised.
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


def _require_expected(expected: BytesLike | Unchecked | None) -> bytes | Unchecked | None:
    """`expected` as bytes, if it is a buffer. Raises `UsageError` for another type: a text would
    never equal a value."""
    if isinstance(expected, bytearray | memoryview):
        return bytes(expected)
    if expected is not None and not isinstance(expected, bytes | Unchecked):
        raise UsageError(
            f"expected must be bytes or None, not {type(expected).__name__}", "encode it first"
        )
    return expected
