"""The frontiers of a served store: each is one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.arguments import is_many
from kvstore.client import calls
from kvstore.client.pool import Pool
from kvstore.timestamp import TimeLike, Timestamp, counts_from_now, to_timestamp


class ServedFrontiers:
    """The times and the id of a store behind a server."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def since(self) -> Timestamp:
        """See `Store.since`. One round trip, as for each name below."""
        return Timestamp(self._times()["since"])

    @property
    def upper(self) -> Timestamp:
        """See `Store.upper`."""
        return self._pool.send(calls.upper())

    @property
    def durable(self) -> Timestamp:
        """See `Store.durable`."""
        return Timestamp(self._times()["durable"])

    @property
    def whole_since(self) -> Timestamp:
        """See `Store.whole_since`."""
        return Timestamp(self._times()["whole_since"])

    @property
    def indexed_since(self) -> Timestamp:
        """See `Store.indexed_since`."""
        return Timestamp(self._times()["indexed_since"])

    @property
    def store_id(self) -> str:
        """See `Store.store_id`."""
        return str(self._times()["store_id"])

    def now(self) -> Timestamp:
        """See `Store.now`."""
        return Timestamp(self._times()["now"])

    def to_time(self, time: TimeLike, *, name: str = "time") -> Timestamp:
        """See `Store.to_time`. One round trip for a time that counts from now, else none."""
        return to_timestamp(time, name=name, now=self.now)

    def times_still(
        self, as_of: TimeLike | Sequence[TimeLike] | None
    ) -> TimeLike | Sequence[TimeLike] | None:
        """The times of labels as they are sent: those that count from now become instants, all by
        one round trip. One time for all keys stays as it is."""
        if not is_many(as_of) or not any(map(counts_from_now, as_of)):
            return as_of
        now = int(self.now())
        return [
            to_timestamp(time, name="as_of", now=lambda: now) if counts_from_now(time) else time
            for time in as_of
        ]

    def _times(self) -> dict[str, Any]:
        return self._pool.send(calls.fields_of("times"))
