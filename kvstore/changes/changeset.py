"""Changesets: tags that group related changes which are not atomic.

A bulk update of ten million rows cannot be one commit. A changeset tags its commits, so that a
consumer can wait until all of them have come. The scope is ambient: code called inside the `with`
block takes part without an argument, and a commit outside any block is a changeset of its own.

    id     := | domain 63 bits | serial u64 |
    serial := seconds since the epoch, 32.32 fixed point, the low 7 bits a counter

Invariants
1. The domain is random for each open of a store; ids of two domains cannot be compared.
2. In one domain serials strictly increase, even where the clock stands still or goes back: then the
   next serial is the last one plus one (128 of them fit between two ticks of 30 ns).
3. No serial is 0. Serials are compared modulo 2^64, a horizon of 68 years.

Source: Backtrace's batch ids, in change-data capture for a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Final, NamedTuple

from kvstore.errors import ClosedError
from kvstore.timestamp import NS_PER_SECOND

COUNTER_BITS: Final = 7
DOMAIN_MAX: Final = (1 << 63) - 1
_MASK: Final = (1 << 64) - 1
_TICK: Final = _MASK ^ ((1 << COUNTER_BITS) - 1)
_HALF: Final = 1 << 63


class ChangesetId(NamedTuple):
    """The changeset of a change. A restored or replicated change has domain 0 and no changeset."""

    domain: int
    serial: int


class Serials:
    """The source of the serials of one domain. The caller serialises the calls."""

    __slots__ = ("_last",)

    def __init__(self, *, last: int = 0) -> None:
        self._last = last

    def next(self, now_ns: int, *, taken: int = 1) -> int:
        """The first of `taken` serials in a row, after all before them; `now_ns` is the time.

        Hot: once per commit.
        """
        serial = (now_ns << 32) // NS_PER_SECOND & _TICK
        if not (serial and 0 < (serial - self._last & _MASK) < _HALF):  # not after, modulo 2^64
            serial = self.step()
        self._last = serial + taken - 1
        return serial

    def step(self) -> int:
        """The serial right after the last one, whatever the time is."""
        self._last = (self._last + 1 & _MASK) or 1
        return self._last


class Changeset:
    """An open changeset: commits made inside its `with` block, in this context, carry its id.

    Blocks nest, and the innermost one tags. `id` is set on entry; `events` counts the changes.
    Threads start with an empty context: run them in `contextvars.copy_context()` to take part.
    """

    def __init__(
        self,
        owner: object,
        begin: Callable[[Changeset], None],
        finish: Callable[[Changeset], None],
    ) -> None:
        self.owner = owner
        self.name = ""
        """The name by which a server knows it; empty in the process of the store."""
        self.id: ChangesetId | None = None
        self.epoch = 0
        self.events = 0
        self.is_open = False
        self.outer: Changeset | None = None
        self._begin = begin
        self._finish = finish
        self._token: Token[Changeset | None] | None = None

    def __enter__(self) -> Changeset:
        if self._token is not None:
            raise ClosedError("the changeset")
        self.outer = _AMBIENT.get()
        try:
            self._begin(self)
            self.is_open = True
            self._token = _AMBIENT.set(self)
        except BaseException:  # an interrupt here would leave it open for ever
            self._finish(self)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the block. Its commits stay, even if it raised an error."""
        assert self._token is not None
        self.is_open = False
        try:
            _AMBIENT.reset(self._token)
        finally:
            self._finish(self)


_AMBIENT: Final[ContextVar[Changeset | None]] = ContextVar("kvstore_changeset", default=None)


def ambient(owner: object) -> Changeset | None:
    """The innermost open changeset of `owner` in this context, None where there is none."""
    changeset = _AMBIENT.get()
    while changeset is not None and not (changeset.owner is owner and changeset.is_open):
        changeset = changeset.outer
    return changeset
