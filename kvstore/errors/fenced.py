"""Errors of owners that a newer owner has replaced: step down."""

from __future__ import annotations

from kvstore.errors.root import KVStoreError


class FencedError(KVStoreError):
    """A newer owner has taken over `name`; this one must stop."""

    def __init__(
        self, name: str, remedy: str = "stop this owner; the newer one carries on"
    ) -> None:
        super().__init__(f"{name} was taken over by a newer owner", remedy)
        self.name = name


class HoldLostError(FencedError):
    """The hold `name` was invalidated because it exceeded its budget; its history may be gone."""

    def __init__(self, name: str, *, held: int, budget_seconds: float) -> None:
        KVStoreError.__init__(
            self,
            f"hold {name!r} at {held} was invalidated: older than its {budget_seconds:g} s",
            "start over from a full read, and take a larger budget",
        )
        self.name = name
        self.held = held
        self.budget_seconds = budget_seconds


class LeaseExpiredError(FencedError):
    """The lease of shard reader `name` ran out; parts it was reading may have been collected."""

    def __init__(self, name: str) -> None:
        KVStoreError.__init__(
            self,
            f"the lease of reader {name!r} has expired",
            "register a new reader and start from a snapshot; renew it more often",
        )
        self.name = name


class OpaqueMismatchError(FencedError):
    """Critical hold `name` carries the token `opaque` of a newer owner, and stands at `since`."""

    def __init__(self, name: str, *, opaque: bytes, since: int) -> None:
        super().__init__(name)
        self.opaque = opaque
        self.since = since
