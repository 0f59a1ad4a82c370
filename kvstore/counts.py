"""Counts of work that is under way, which know how much there is to do."""

from __future__ import annotations

from typing_extensions import Self


class WorkCount(int):
    """The work that is done, and the `total`, None where it is unknown. With `is_about` the total
    is an estimate, which the count may pass."""

    total: int | None = None
    is_about: bool = False

    @classmethod
    def of(cls, done: int, total: int | None, *, is_about: bool = False) -> Self:
        """A count with its total."""
        made = cls(done)
        made.total, made.is_about = total, is_about
        return made

    @classmethod
    def at(cls, done: int, share: float) -> Self:
        """A count whose total is estimated from the `share` of the work that is done."""
        return cls.of(done, round(done / share) if share > 0 else None, is_about=True)
