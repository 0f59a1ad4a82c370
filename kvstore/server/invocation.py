"""One call of a verb: the arguments, which the verb's declaration has checked, and the access of
the caller.

Invariants
1. A verb reads keys and spans by the methods of this class only, which ask the caller's access. So
   no verb can leave the check out.
2. An argument has the type that its verb declares, or was left out: see `Verb.read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pyarrow as pa

from kvstore.commit import Expires
from kvstore.server.access import Grant
from kvstore.span import Span
from kvstore.store import RequestToken, Store
from kvstore.timestamp import TimeLike


class Invocation:
    """The arguments of one call."""

    __slots__ = ("_given", "access", "store", "table", "token", "waits")

    def __init__(
        self,
        store: Store,
        access: Grant,
        given: Mapping[str, Any],
        table: pa.Table | None = None,
        token: RequestToken | None = None,
    ) -> None:
        self.store, self.access, self._given = store, access, given
        self.table, self.token = table, token
        self.waits: bool | None = None
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
