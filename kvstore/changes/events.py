"""Changes and events: what a commit did to one key or range, with its place in the commit, its
stream and its images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from typing_extensions import Self

from kvstore.base.arguments import ArgumentKind, word
from kvstore.base.timestamp import Timestamp
from kvstore.changes.epochs import ChangesetId

# --------------------------------------------------------------------------------------------------
# One change that a commit made to one key or one range.

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


# --------------------------------------------------------------------------------------------------
# Events: a change with its place in the commit, its changeset, its stream and its images.
#
# The codes are ScyllaDB's CDC codes and two more for bulk loads:
#
#     0 preimage | 1 update | 2 insert | 3 row delete | 4 partition delete | 5 .. 8 range bounds
#     9 postimage | 16 import | 17 revert
#
# Every put is an update, because a put does not look whether the key exists. A range delete is one
# event with both bounds, start included, end excluded. Images are fields of their event rather than
# rows of their own, so that no image is paired with another key; `Event.rows` gives them one by
# one.

Images: TypeAlias = Literal["none", "delta", "pre", "post", "pre+post"]
IMAGES: Final = ("none", "delta", "pre", "post", "pre+post")
IMAGES_CHOICE: Final[ArgumentKind[Images]] = word(*IMAGES)
Expand: TypeAlias = Literal["none", "imports", "all"]
EXPAND: Final = ("none", "imports", "all")
EXPAND_CHOICE: Final[ArgumentKind[Expand]] = word(*EXPAND)


class Operation(IntEnum):
    """The code of an event or of an image."""

    PREIMAGE = 0
    PUT = 1
    DELETE = 3
    DELETE_RANGE = 5
    POSTIMAGE = 9
    IMPORT = 16
    REVERT = 17


class Event(NamedTuple):
    """One change.

    `sequence` counts the changes of a commit from 0, over all streams; the keys of an expanded
    range delete share its number. `end_of_batch` marks the last event of the commit that this
    reader gets. For whole imports and reverts `key` is the import's id (8 bytes, big-endian).
    `value` is the value of a put. `pre` and `post` are the key's values before and after the
    commit; None if there was no value, or if the reader did not ask for the image. `expires` is an
    attribute beside the fields: the time at which the value of a put expires.
    """

    timestamp: Timestamp
    sequence: int
    op: Operation
    key: bytes
    end_key: bytes | None
    value: bytes | None
    pre: bytes | None
    post: bytes | None
    changeset: ChangesetId
    stream: bytes
    end_of_batch: bool

    @property
    def expires(self) -> Timestamp | None:
        """The time at which the value of a put expires, as the put set it; None if it stays."""
        return None

    def rows(self) -> Iterator[tuple[Operation, bytes, bytes | None]]:
        """The event as rows of code, key and value: preimage if any, change, postimage if any."""
        if self.pre is not None:
            yield Operation.PREIMAGE, self.key, self.pre
        yield self.op, self.key, self.value
        if self.post is not None:
            yield Operation.POSTIMAGE, self.key, self.post


class ExpiringEvent(Expiring, Event):
    """The event of a put whose value expires."""
