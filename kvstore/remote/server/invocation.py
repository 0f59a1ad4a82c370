"""One call of a verb: its work, and its checked arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike
from kvstore.remote.server.changesets import LentChangesets
from kvstore.remote.server.tokens import Grant
from kvstore.remote.verbs import Verb
from kvstore.store import Store
from kvstore.timeline.expiries import Expires
from kvstore.timeline.request_notes import RequestToken

# --------------------------------------------------------------------------------------------------
# The work of a verb.

Answer: TypeAlias = "Mapping[str, Any] | pa.RecordBatchReader"
"""JSON, or rows."""

RunVerb: TypeAlias = "Callable[[Invocation], Answer]"


@dataclass(frozen=True, slots=True)
class ServedVerb:
    """A verb and its work, which checked arguments come to."""

    declared: Verb[Any]
    run: RunVerb

    @property
    def text(self) -> str:
        """What the verb does, for people: the docstring of its work, on one line."""
        return " ".join((self.run.__doc__ or "").split())


SERVED: Final[dict[str, ServedVerb]] = {}
"""The verbs of every store, by name. `kvstore.remote.server.verbs` fills it."""


def serves(declared: Verb[Any]) -> Callable[[RunVerb], RunVerb]:
    """The decorator of the work of a verb."""

    def decorated(run: RunVerb) -> RunVerb:
        assert declared.name not in SERVED, declared.name
        SERVED[declared.name] = ServedVerb(declared, run)
        return run

    return decorated


# --------------------------------------------------------------------------------------------------
# One call of a verb: the arguments, which the verb's declaration has checked, and the access of
# the caller.
#
# Invariants
# 1. A verb reads keys and spans by the methods of this class only, which ask the caller's access.
#    So no verb can leave the check out.
# 2. An argument has the type that its verb declares, or was left out: see `Verb.read`.


class Invocation:
    """The arguments of one call."""

    __slots__ = ("_given", "access", "awaits_disk", "changesets", "store", "table", "token")

    def __init__(
        self,
        store: Store,
        changesets: LentChangesets,
        access: Grant,
        given: Mapping[str, Any],
        table: pa.Table | None = None,
        token: RequestToken | None = None,
    ) -> None:
        self.store, self.changesets, self.access, self._given = store, changesets, access, given
        self.table, self.token = table, token
        self.awaits_disk: bool | None = None
        """Whether the caller waits for the disk; None if the verb does. Set by `durability`."""

    # -- keys -------------------------------------------------------------------------------

    def key(self, name: str = "key") -> bytes:
        """The key `name`, which the caller may use."""
        key: bytes = self._given[name]
        return self.access.require_key(key)

    def keys(self) -> list[bytes]:
        """The keys of the Arrow column `key`, or of the list `keys`."""
        found = self._given["keys"] if self.table is None else self.column("key")
        return self.access.require_keys(found)

    def column(self, name: str) -> list[Any]:
        """The column `name` of the Arrow table, as a list. A column that was left out is null."""
        assert self.table is not None
        if name not in self.table.column_names:
            return [None] * self.table.num_rows
        return list(self.table.column(name).to_pylist())

    def span(self) -> Span:
        """The span of the arguments `start`, `end` and `prefix`, which the caller may use."""
        get = self._given.get
        return self.access.span(Span.of(get("start"), get("end"), get("prefix")))

    # -- other arguments --------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the argument was given. It may be null."""
        return name in self._given

    def __getitem__(self, name: str) -> Any:
        """An argument that the verb requires."""
        return self._given[name]

    def value(self, name: str = "value") -> bytes | None:
        """The bytes `name`, which are no key; None where they are missing or null."""
        return self._given.get(name)

    def time(self, name: str) -> TimeLike | None:
        """A time; None where it is missing."""
        return self._given.get(name)

    def expiry(self) -> Expires | None:
        """The time `expires`, which may also count from now: `+1h`."""
        return self._given.get("expires")

    def count(self, name: str) -> int | None:
        """A number of things; None where it is missing."""
        return self._given.get(name)

    def seconds(self, name: str) -> float | None:
        """A duration in seconds; None where it is missing."""
        return self._given.get(name)

    def age(self, name: str) -> timedelta | None:
        """The same as `seconds`, as a timedelta."""
        seconds = self._given.get(name)
        # The greatest number that `seconds` takes is above the greatest timedelta, by rounding.
        return None if seconds is None else timedelta(seconds=min(seconds, 1e13))

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        found: bool = self._given.get(name, False)
        return found

    def text(self, name: str) -> str | None:
        """A text; None where it is missing."""
        return self._given.get(name)

    def word(self, name: str, otherwise: str) -> Any:
        """One of the words that the verb declares; `otherwise` where it is missing."""
        return self._given.get(name, otherwise)

    def items(self, name: str) -> list[Any]:
        """The list `name`; empty where it is missing."""
        found: list[Any] = self._given.get(name, [])
        return found
