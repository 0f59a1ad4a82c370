"""A store as a mapping of Python: `view[key]`, `in`, `del`, iteration, `len`.

    view = store.mapping(codec="json", prefix=b"flight/")
    view["UA1545"] = {"delay": 12}

A codec turns keys and values into bytes. Keys of all codecs sort as their bytes do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Final, NamedTuple, Protocol

from kvstore.base.span import require_key
from kvstore.base.timestamp import Timestamp
from kvstore.errors import Argument, CorruptionError, UsageError, printable
from kvstore.timeline.expiries import Expires


class MappingCodec(NamedTuple):
    """How keys and values become bytes, and back."""

    key: Callable[[Any], bytes]
    key_of: Callable[[bytes], Any]
    value: Callable[[Any], bytes]
    value_of: Callable[[bytes], Any]


def _text(text: object) -> bytes:
    if not isinstance(text, str):
        raise UsageError(f"{type(text).__name__} is no text", "pass a str, or choose a codec")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!r} is no text: {error}", "pass whole characters") from error


def _json(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"the value is no JSON: {error}", "pass lists, dicts and texts") from error


CODECS: Final = {
    "bytes": MappingCodec(require_key, bytes, bytes, bytes),
    "text": MappingCodec(_text, bytes.decode, _text, bytes.decode),
    "json": MappingCodec(_text, bytes.decode, _json, json.loads),
}


class MappedStore(Protocol):
    """The calls that a mapping needs of its store."""

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        ...

    def put(self, key: bytes, value: bytes, *, expires: Expires | None) -> Timestamp:
        """Set a key."""
        ...

    def put_many(self, rows: object, *, expires: Expires | None) -> Timestamp | None:
        """Set keys in one commit."""
        ...

    def pop(self, key: bytes) -> bytes | None:
        """Delete a key, and return its value."""
        ...

    def delete_range(self, *, prefix: bytes) -> Timestamp | None:
        """Delete all keys of a prefix."""
        ...

    def scan(self, *, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The live rows of a prefix."""
        ...

    def keys(self, *, prefix: bytes) -> Iterator[bytes]:
        """The live keys of a prefix."""
        ...

    def count(self, *, prefix: bytes) -> int:
        """The number of live keys of a prefix."""
        ...


class StoreMapping(MutableMapping[Any, Any]):
    """The keys of a store that begin with a prefix, without it. `Store.mapping` makes one.

    Each write is a commit, and `update` is one commit. An iteration sees one state to its end.
    `len` counts by a pass over the keys.
    """

    def __init__(
        self,
        store: MappedStore,
        codec: str | MappingCodec,
        prefix: bytes,
        expires: Expires | None = None,
    ) -> None:
        found = CODECS.get(codec) if isinstance(codec, str) else codec
        if not isinstance(found, MappingCodec):
            raise UsageError(
                Argument.of("codec", codec), f"pass {', '.join(CODECS)}, or a MappingCodec"
            )
        self._store, self._codec, self._prefix = store, found, require_key(prefix, name="prefix")
        self._expires = expires

    def __getitem__(self, key: Any) -> Any:
        value = self._store.get(self._key(key))
        if value is None:
            raise KeyError(key)
        return self._value_of(key, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._store.put(self._key(key), self._codec.value(value), expires=self._expires)

    def __delitem__(self, key: Any) -> None:
        if self._store.pop(self._key(key)) is None:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return self._store.get(self._key(key)) is not None

    def __iter__(self) -> Iterator[Any]:
        return map(self._key_of, self._store.keys(prefix=self._prefix))

    def __len__(self) -> int:
        return self._store.count(prefix=self._prefix)

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """Keys and values at one time, by one pass; `items` looks each value up as it is now."""
        for stored, value in self._store.scan(prefix=self._prefix):
            key = self._key_of(stored)
            yield key, self._value_of(key, value)

    def update(self, other: Any = (), /, **named: Any) -> None:
        """Set many keys in one commit."""
        rows = dict(other, **named)
        self._store.put_many(
            [(self._key(key), self._codec.value(value)) for key, value in rows.items()],
            expires=self._expires,
        )

    def clear(self) -> None:
        """Delete all keys of the view; their history stays. One write for any number of keys."""
        self._store.delete_range(prefix=self._prefix)

    def __repr__(self) -> str:
        return f"<kvstore.StoreMapping of {printable(self._prefix)} in {self._store!r}>"

    def _key(self, key: object) -> bytes:
        return self._prefix + self._codec.key(key)

    def _key_of(self, stored: bytes) -> Any:
        raw = stored[len(self._prefix) :]
        return self._decoded(self._codec.key_of, raw, f"key {printable(stored)}")

    def _value_of(self, key: object, raw: bytes) -> Any:
        return self._decoded(self._codec.value_of, raw, f"the value of {key!r}")

    def _decoded(self, decode: Callable[[bytes], Any], raw: bytes, where: str) -> Any:
        try:
            return decode(raw)
        except ValueError as error:  # what another writer has put there
            raise CorruptionError(where, f"it is not of the codec: {error}") from error
