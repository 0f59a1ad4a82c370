"""Errors of storage whose outcome is unknown: reopen and look before trying again."""

from __future__ import annotations

from kvstore.errors.root import KVStoreError


class StorageError(KVStoreError):
    """Storage failed during the call. Acknowledged writes stand; the last one may or may not."""


class OutOfSpaceError(StorageError):
    """The disk is full. Acknowledged writes stand."""

    def __init__(self, where: str) -> None:
        super().__init__(f"no space left while writing {where}", "free space, then reopen")
        self.where = where


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
