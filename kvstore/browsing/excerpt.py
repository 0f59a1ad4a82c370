"""The beginning of a value: enough to show it, whatever its size."""

from __future__ import annotations

from typing import NamedTuple

from typing_extensions import Self


class Excerpt(NamedTuple):
    """The first bytes of a value, and the size of the whole value in bytes."""

    head: bytes
    size: int

    @classmethod
    def of(cls, value: bytes, most: int) -> Self:
        """The first `most` bytes of `value`."""
        return cls(value[:most], len(value))

    @property
    def is_whole(self) -> bool:
        """Whether the excerpt is the value."""
        return len(self.head) == self.size
