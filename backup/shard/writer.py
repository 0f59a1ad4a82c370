"""Appending to a shard, and how an append is retried safely.

A batch is uploaded first (`batch_writer.write_batch`); appending it is one command. The outcome of
an append is always known, except where a newer append of the same writer hides it: then the caller
gets `IndeterminateError`, and nothing is guessed.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from backup.shard.rows.batch_writer import part_names
from backup.shard.state import commands as c
from backup.shard.state.log import StateLog
from backup.shard.state.state import ShardBatch, frontier_text, require_frontier
from kvstore.errors import IndeterminateError, UpperMismatchError, UsageError
from kvstore.storage.contract import put_retrying


class Writer:
    """Appends batches under one name, which the shard remembers with the last token."""

    def __init__(self, log: StateLog, name: str) -> None:
        self.name = name
        self._log = log

    def compare_and_append(
        self,
        batch: ShardBatch,
        *,
        token: str | None = None,
        expected_upper: int | None = None,
        retrying: bool = False,
    ) -> c.Appended:
        """Append `batch` if the shard's upper is its lower (`expected_upper`, if given, says so).

        `token` names this append. After a crash, repeat it with the same token and `retrying=True`:
        it is done once. If an earlier attempt has succeeded, the result is the shard's current
        upper. Raises `UpperMismatchError` (surely not appended: another writer was faster),
        `IndeterminateError` (the outcome cannot be told any more), `UsageError` for bounds that
        make no sense or a token that was used before.
        """
        if expected_upper is not None and expected_upper != batch.lower:
            raise UsageError(
                f"the batch begins at {batch.lower}, not at {expected_upper}",
                "build the batch from the expected upper on",
            )
        token = token or secrets.token_hex(16)
        command = c.CompareAndAppend(batch, self.name, token, self._log.clock.wall_ns())
        outcome, _, unsure = self._log.apply(command)
        if isinstance(outcome, c.InlineBackpressure):
            command = replace(command, batch=self._as_blobs(batch))
            outcome, _, unsure = self._log.apply(command)
        return self._done(outcome, batch, retried=unsure or retrying)

    def _done(self, outcome: object, batch: ShardBatch, *, retried: bool) -> c.Appended:
        match outcome:
            case c.Appended():
                return outcome
            case c.AlreadyCommitted(upper) if retried:
                return c.Appended(upper)
            case c.AlreadyCommitted():
                raise UsageError(
                    f"writer {self.name} used the token of its last append again",
                    "name each append by a token of its own",
                )
            case c.UpperMismatch(upper, writer_upper):
                if retried and writer_upper is not None and writer_upper >= batch.upper:
                    raise IndeterminateError(
                        f"the append of [{batch.lower}, {batch.upper})",
                        f"the shard is at {frontier_text(upper)}, this writer's newer appends too",
                    )
                raise UpperMismatchError(
                    expected=batch.lower, upper=upper, writer_upper=writer_upper
                )
        raise _bounds_error(outcome)

    def append(self, batch: ShardBatch) -> c.Appended:
        """Append the part of `batch` that the shard lacks, where replicas write identical data.

        Rows below the shard's upper are dropped. Raises `UpperMismatchError` unless the rest joins
        the shard. Idempotent.
        """
        outcome = self._log.apply(c.Append(batch)).outcome
        match outcome:
            case c.Appended():
                return outcome
            case c.AlreadyWritten(upper):
                return c.Appended(upper)
            case c.UpperMismatch(upper, _):
                raise UpperMismatchError(expected=batch.lower, upper=upper)
        raise _bounds_error(outcome)

    def progress(self, upper: int) -> c.Appended:
        """Say that nothing was written in `[shard.upper, upper)`."""
        require_frontier(upper, name="upper")
        return self.compare_and_append(ShardBatch(self._log.state.upper, upper))

    def heartbeat(self) -> c.Appended:
        """Say that this writer lives, at the shard's present upper."""
        at = self._log.refresh().upper
        return self.compare_and_append(ShardBatch(at, at))

    def expire(self) -> None:
        """Forget this writer. A later retry of its last append then raises `UpperMismatchError`."""
        self._log.apply(c.ExpireWriter(self.name))

    def _as_blobs(self, batch: ShardBatch) -> ShardBatch:
        """The batch with its inline parts uploaded after all."""
        names = part_names(self._log.shard, self._log.clock)
        parts = []
        for part in batch.parts:
            if part.inline is not None:
                name = names()
                put_retrying(self._log.blob, name, part.inline)
                part = replace(part, name=name, inline=None)
            parts.append(part)
        return replace(batch, parts=tuple(parts))


def _bounds_error(outcome: object) -> UsageError:
    match outcome:
        case c.InvalidBounds(lower, upper):
            return UsageError(
                f"a batch cannot reach from {lower} back to {upper}",
                "let its upper lie at or above its lower",
            )
        case c.InvalidEmptyInterval(at):
            return UsageError(
                f"a batch with rows needs time: both bounds are {at}",
                "let its upper lie above its lower",
            )
    raise AssertionError(outcome)
