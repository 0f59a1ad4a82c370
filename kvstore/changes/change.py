"""One change that a commit made to one key or one range."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from kvstore.timestamp import Timestamp

Op: TypeAlias = Literal["put", "delete", "delete_range"]


class Change(NamedTuple):
    """`op` is `"put"` (with `value`), `"delete"`, or `"delete_range"` (with `end_key`).

    Changes of one commit share its timestamp, range deletes first.
    """

    timestamp: Timestamp
    op: Op
    key: bytes
    end_key: bytes | None
    value: bytes | None
