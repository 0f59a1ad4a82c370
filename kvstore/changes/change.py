"""One change that a commit made to one key or one range."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

from typing_extensions import Self

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


class Expiring:
    """The due time of a change or an event whose value expires. The due time is not a field of the
    tuple, so such a change unpacks and compares like every other change."""

    _due: int

    @classmethod
    def of(cls, row: Iterable[Any], due: int) -> Self:
        """`row`, whose value expires at `due`."""
        made = cls(*row)
        made._due = due
        return made

    @property
    def expires(self) -> Timestamp:
        """The time at which the value expires."""
        return Timestamp(self._due)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, expires={self.expires!r})"


class ExpiringChange(Expiring, Change):
    """A put whose value expires."""
