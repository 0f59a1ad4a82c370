"""Errors of storage whose outcome is unknown: reopen and look before trying again."""

from __future__ import annotations

from kvstore.errors.root import KVStoreError


class StorageError(KVStoreError):
    """Storage failed during the call. Acknowledged writes stand; the last one may or may not."""


class OutOfSpaceError(StorageError):
    """The disk is full. Acknowledged writes stand.

    `needed` and `free` are bytes, if the error was found before anything was written.
    """

    def __init__(self, where: str, *, needed: int | None = None, free: int | None = None) -> None:
        what = f"no space left while writing {where}"
        remedy = "free space, then open the store again, or repeat the call"
        if needed is not None:
            what = f"{where} has {free:,} bytes free, and {needed:,} are needed"
            remedy = "free space, then try again: nothing was written"
        super().__init__(what, remedy)
        self.where = where
        self.needed, self.free = needed, free


class IndeterminateError(StorageError):
    """A blob or consensus call at `where` may or may not have had its effect.

    Only idempotent calls may be made again without looking first.
    """

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(
            f"whether {where} took effect is unknown: {cause}",
            "look at the present state before trying again",
        )
        self.where = where
        self.cause = cause


class PoisonedError(StorageError):
    """An earlier write or fsync failed: the bytes on disk are unknown. Every call raises this."""

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(
            f"{where} refuses all calls since a write failed ({cause})",
            "close it and open it again; acknowledged durable commits are kept",
        )
        self.where = where
        self.cause = cause
