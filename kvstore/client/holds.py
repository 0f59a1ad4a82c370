"""A hold that a client has taken: the owner's handle is here, the claim is with the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.client.calls import ns
from kvstore.client.pool import FROM_CLIENT
from kvstore.forks import own
from kvstore.timestamp import TimeLike, Timestamp


class ClientHold:
    """A client's handle on a hold; `Client.hold` takes it. See `Hold`. Needs the right `admin`.

    Leaving a `with` block releases it.
    """

    def __init__(self, call: Callable[..., dict[str, Any]], name: str, token: str) -> None:
        """`call` calls a verb."""
        self._call = call
        self.name = name
        self.token = token
        own(self, repr(self), endings=("release",), remedy=FROM_CLIENT)

    @property
    def timestamp(self) -> Timestamp:
        """The time from which the hold keeps history. Raises `FencedError` if a newer owner has
        taken the hold, `HoldLostError` if it was invalidated."""
        return Timestamp(self._call("held", name=self.name, token=self.token)["timestamp"])

    def move(self, to: TimeLike) -> None:
        """Hold `to` instead, durably. Raises as `Hold.move`."""
        at = ns(to, "to")
        self._call("move_hold", name=self.name, token=self.token, to=at, durable=True)

    def release(self) -> None:
        """Give up the hold, durably. Raises as `move`."""
        self._call("release_hold", name=self.name, token=self.token)

    def __repr__(self) -> str:
        return f"<kvstore.ClientHold {self.name!r}>"

    def __enter__(self) -> ClientHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
