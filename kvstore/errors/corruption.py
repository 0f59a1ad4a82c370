"""Errors of damaged bytes: stop, and restore them from a backup."""

from __future__ import annotations

from kvstore.errors.root import KVStoreError


class CorruptionError(KVStoreError):
    """The bytes at `where` are not the bytes that were written there."""

    def __init__(self, where: str, problem: str, remedy: str = "restore it from a backup") -> None:
        super().__init__(f"{where} is damaged: {problem}", remedy)
        self.where = where
        self.problem = problem


class JournalDamagedError(CorruptionError):
    """A journal file is damaged at `offset`; the records `first..last` cannot be read.

    `last` is None where no record can be read behind the damage, so that the number of lost records
    is unknown. It is below `first` where no record is lost.
    """

    def __init__(
        self, path: str, *, offset: int, first: int, last: int | None, problem: str
    ) -> None:
        if last is None:
            lost = f"ordinal {first} and all later ones cannot be read"
        elif last < first:
            lost = f"it stands between ordinals {last} and {first}"
        else:
            lost = f"ordinals {first}..{last} cannot be read"
        super().__init__(
            f"{path} at byte {offset}",
            f"{problem}; {lost}",
            "restore the file, or copy what is left with `kvstore journal salvage`",
        )
        self.path = path
        self.offset = offset
        self.first = first
        self.last = last


class StatesLostError(CorruptionError):
    """The newest states of a collection, or of a shard of it, are gone: it was cut, emptied or
    replaced by an older copy. `known` is the newest state that surely existed, `found` the newest
    that exists; both are versions of the state, or both are times."""

    def __init__(self, where: str, *, found: int, known: int, remedy: str = "") -> None:
        super().__init__(
            where,
            f"its newest state is {found}, and there was {known}: it is an older copy, or cut",
            remedy or "put back the newest copy of all its files; as_of= restores older states",
        )
        self.found = found
        self.known = known


class EventsMissingError(CorruptionError):
    """The change index does not hold the changes that its epochs count: some are missing, or some
    are too many."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem, "start over from a full read, and report it")
