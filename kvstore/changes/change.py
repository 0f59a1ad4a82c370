"""One change that a commit made to one key or one range."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from kvstore.timestamp import Timestamp

Op: TypeAlias = Literal["put", "delete", "delete_range"]


class Change(NamedTuple):
    """`op` is `"put"` (with `value`), `"delete"`, or `"delete_range"` (with `end_key`).

    Changes of one commit share its timestamp, range deletes first. `expires` is an attribute beside
    the fields: the time at which the value of a put expires.
    """

    timestamp: Timestamp
    op: Op
    key: bytes
    end_key: bytes | None
    value: bytes | None

    @property
    def expires(self) -> Timestamp | None:
        """The time at which the value of a put expires, as the put set it; None if it stays."""
        return None


class ExpiringChange(Change):
    """A put whose value expires. Its due time is no field, so that the tuple has the fields of
    every `Change`, and compares as one."""

    _due: int

    @classmethod
    def of(cls, change: Change, due: int) -> ExpiringChange:
        """`change`, whose value expires at `due`."""
        made = cls(*change)
        made._due = due
        return made

    @property
    def expires(self) -> Timestamp:
        """The time at which the value expires."""
        return Timestamp(self._due)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, expires={self.expires!r})"
