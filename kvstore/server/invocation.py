"""One call of a verb: its arguments, checked against the verb's parameters and the caller's access.

Arguments come from a query string, where they are bytes, or from a JSON object. Rows come from an
Arrow stream, or as a list in the JSON.

Invariants
1. A verb reads keys and spans by the methods of this class only, which ask the caller's access. So
   no verb can leave the check out.
2. An argument that the verb does not have is refused: a misspelt condition must not be ignored.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa

from kvstore.commit import Expires
from kvstore.errors import UsageError
from kvstore.protocol import from_json
from kvstore.server.access import Grant
from kvstore.span import Span
from kvstore.store import RequestToken, Store
from kvstore.timestamp import TimeLike


class Invocation:
    """The arguments of one call."""

    __slots__ = ("_fields", "access", "store", "table", "token", "waits")

    def __init__(
        self,
        store: Store,
        access: Grant,
        fields: Mapping[str, Any],
        table: pa.Table | None = None,
        token: RequestToken | None = None,
    ) -> None:
        self.store, self.access, self._fields = store, access, fields
        self.table, self.token = table, token
        self.waits: bool | None = None
        """Whether the caller waits for the disk; None if the verb does. Set by `durability`."""

    def require_names(self, known: Collection[str]) -> None:
        """Raise `UsageError` for an argument that is none of `known`."""
        for name in self._fields:
            if name not in known:
                raise UsageError(f"argument {name!r}", f"pass some of {', '.join(known)}")

    # -- keys -------------------------------------------------------------------------------

    def key(self, name: str = "key") -> bytes:
        """The key `name`, which the caller may use."""
        if name not in self._fields:
            raise UsageError(f"argument {name!r} is missing", "pass a key")
        return self.access.require_key(self._bytes(name) or b"")

    def keys(self) -> list[bytes]:
        """The keys of the Arrow column `key`, or of the list `keys`."""
        if self.table is not None:
            return self.access.require_keys(self.column("key"))
        return self.access.require_keys(
            [from_json(key, name=f"keys[{n}]") for n, key in enumerate(self.items("keys"))]
        )

    def column(self, name: str) -> list[Any]:
        """The column `name` of the Arrow table, as a list. A column that was left out is null."""
        assert self.table is not None
        if name not in self.table.column_names:
            return [None] * self.table.num_rows
        return list(self.table.column(name).to_pylist())

    def span(self) -> Span:
        """The span of the arguments `start`, `end` and `prefix`, which the caller may use."""
        bounds = (self._bytes(name) for name in ("start", "end", "prefix"))
        return self.access.span(Span.of(*bounds))

    def value(self, name: str = "value") -> bytes | None:
        """The bytes `name`, which are no key; None where they are missing or null."""
        return self._bytes(name)

    # -- other arguments --------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the argument was given. It may be null."""
        return name in self._fields

    def is_list(self, name: str) -> bool:
        """Whether the argument is a list."""
        return type(self._fields.get(name)) is list

    def time(self, name: str) -> TimeLike | None:
        """A time as `kvstore.timestamp.to_timestamp` reads it: a number or a text."""
        found = self._fields.get(name)
        if isinstance(found, bytes):
            return self._text(name)
        if found is None or (type(found) in (int, str)):
            return found
        raise UsageError(f"{name} must be nanoseconds or ISO-8601", "pass a number or a text")

    def expiry(self) -> Expires | None:
        """The time `expires`, which may also count from now: `+1h`."""
        return self.time("expires")

    def count(self, name: str) -> int | None:
        """A number of things; None where it is missing."""
        found = self._fields.get(name)
        if isinstance(found, bytes):
            text = self._text(name)
            found = int(text) if text.isdecimal() and len(text) < 20 else text
        if found is None or type(found) is int:
            return found
        raise UsageError(f"{name}={found!r}", "pass a count")

    def seconds(self, name: str) -> float | None:
        """A duration in seconds; None where it is missing."""
        found = self._fields.get(name)
        if isinstance(found, bytes):
            try:
                found = float(self._text(name))
            except ValueError:
                raise UsageError(f"{name}={found!r}", "pass seconds") from None
        if found is None:
            return None
        if type(found) not in (int, float) or not 0 <= found <= timedelta.max.total_seconds():
            raise UsageError(f"{name}={found!r}", "pass seconds")
        return float(found)

    def age(self, name: str) -> timedelta | None:
        """The same as `seconds`, as a timedelta."""
        seconds = self.seconds(name)
        # The greatest number that `seconds` takes is above the greatest timedelta, by rounding.
        return None if seconds is None else timedelta(seconds=min(seconds, 1e13))

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        found = self._fields.get(name, False)
        if isinstance(found, bytes):
            found = {b"true": True, b"1": True, b"": True, b"false": False, b"0": False}.get(found)
        if found is not True and found is not False:
            raise UsageError(f"{name}={self._fields[name]!r}", "pass true or false")
        return found

    def text(self, name: str) -> str | None:
        """A text; None where it is missing."""
        found = self._fields.get(name)
        if isinstance(found, bytes):
            return self._text(name)
        if found is not None and type(found) is not str:
            raise UsageError(f"{name} must be a text, not {type(found).__name__}", "pass a text")
        return found

    def words(self, name: str, known: Sequence[str], default: str) -> Any:
        """One of the words `known`."""
        found = self.text(name)
        if found is not None and found not in known:
            raise UsageError(f"{name}={found!r}", f"pass one of {', '.join(known)}")
        return default if found is None else found

    def items(self, name: str) -> list[Any]:
        """The list `name`."""
        found = self._fields.get(name)
        if type(found) is not list:
            raise UsageError(f"{name} must be a list", "pass a list as JSON, or an Arrow stream")
        return found

    # -- inside -----------------------------------------------------------------------------

    def _bytes(self, name: str) -> bytes | None:
        found = self._fields.get(name)
        if found is None or type(found) is bytes:
            return found
        return from_json(found, name=name)

    def _text(self, name: str) -> str:
        try:
            return str(self._fields[name].decode())
        except UnicodeDecodeError as error:
            shown = base64.b64encode(self._fields[name][:64]).decode()
            raise UsageError(f"{name} is no text: base64 {shown}", "pass UTF-8") from error
