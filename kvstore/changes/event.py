"""Events: a change with its place in the commit, its changeset, its stream and its images.

The codes are ScyllaDB's CDC codes and two more for bulk loads:

    0 preimage | 1 update | 2 insert | 3 row delete | 4 partition delete | 5 .. 8 range bounds
    9 postimage | 16 import | 17 revert

Every put is an update, because a put does not look whether the key exists. A range delete is one
event with both bounds, start included, end excluded. Images are fields of their event rather than
rows of their own, so that no image is paired with another key; `Event.rows` gives them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Final, Literal, NamedTuple, TypeAlias

from kvstore.changes.change import Expiring
from kvstore.changes.changeset import ChangesetId
from kvstore.errors import UsageError
from kvstore.timestamp import Timestamp

Images: TypeAlias = Literal["none", "delta", "pre", "post", "pre+post"]
IMAGES: Final = ("none", "delta", "pre", "post", "pre+post")
Expand: TypeAlias = Literal["none", "imports", "all"]
EXPAND: Final = ("none", "imports", "all")


class Operation(IntEnum):
    """The code of an event or of an image."""

    PREIMAGE = 0
    UPDATE = 1
    ROW_DELETE = 3
    RANGE_DELETE = 5
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


def require_images(images: str) -> Images:
    """Raise `UsageError` unless `images` is a choice."""
    if images not in IMAGES:
        raise UsageError(f"images={images!r}", f"pass one of {', '.join(IMAGES)}")
    return images  # type: ignore[return-value]  # just checked


def require_expand(expand: str) -> Expand:
    """Raise `UsageError` unless `expand` is a choice."""
    if expand not in EXPAND:
        raise UsageError(f"expand={expand!r}", f"pass one of {', '.join(EXPAND)}")
    return expand  # type: ignore[return-value]  # just checked
