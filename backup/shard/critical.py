"""Critical holds: they keep history for an owner that may be away for long, and never expire.

Each hold carries an 8-byte token of its present owner. Moving a hold is compare-and-set on this
token, so an owner that was replaced while it slept cannot move the hold any more. Write the hold's
name down durably before registering it: a hold that nobody remembers keeps history for ever.
"""

from __future__ import annotations

import secrets

from backup.shard.state import commands as c
from backup.shard.state.log import StateLog
from backup.shard.state.state import require_frontier
from kvstore.errors import FencedError, OpaqueMismatchError

_TAKE_OVER_ATTEMPTS = 8


class Critical:
    """A hold that never expires. Moving it takes its token."""

    def __init__(self, log: StateLog, name: str, *, since: int, opaque: bytes) -> None:
        self.name = name
        self.since = since
        self.opaque = opaque
        self._log = log

    def downgrade(self, since: int, *, opaque: bytes | None = None) -> int:
        """Give up history below `since`, and put the token `opaque` (default: the same) on the
        hold.

        Returns the hold's `since`.

        Raises `OpaqueMismatchError` if another owner has put its own token: step down.
        """
        require_frontier(since, name="since")
        new = self.opaque if opaque is None else opaque
        command = c.CompareAndDowngrade(self.name, self.opaque, new, since)
        outcome, _, unsure = self._log.apply(command)
        # A mismatch with our own token: an attempt whose reply was lost has moved the hold.
        refused = isinstance(outcome, c.OpaqueMismatch)
        if refused and not (unsure and outcome.opaque == new and outcome.since >= since):
            raise OpaqueMismatchError(self.name, opaque=outcome.opaque, since=outcome.since)
        self.since = outcome.since
        self.opaque = new
        return self.since

    def take_over(self) -> None:
        """Fence the present owner by a new token: its next move is refused."""
        if not any(self._try_take_over() for _ in range(_TAKE_OVER_ATTEMPTS)):
            raise FencedError(self.name, "several owners are taking over at once: settle on one")

    def _try_take_over(self) -> bool:
        try:
            self.downgrade(0, opaque=secrets.token_bytes(8))
        except OpaqueMismatchError as error:
            self.opaque = error.opaque
            return False
        return True

    def expire(self) -> None:
        """End the hold."""
        self._log.apply(c.ExpireCritical(self.name))
