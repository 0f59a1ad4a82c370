"""A cache in a store: shared by processes, exact in its expiries, whole after a crash.

    cache = Cache("cache.db")
    cache.set("user/7", {"name": "Ada"}, expire=60, tag="users")

The keys below the prefix of a cache, each followed by the encoded key of an entry:

    v | key         the value
    m | key         | size u64 | due u64 | stored u64 | tags |     due 0: the entry stays
    i | tag | key   an index of the tags
    u | key         | used u64 |       see `_note_used`
    l | key         who makes the value of the key right now
    !               a store that the cache has made for itself

Invariants
1. `v` and `m` of an entry are written and deleted together, and expire at the same time.
2. An entry has its tags in `m`. A row of the index whose entry does not name the tag is a leftover:
   `evict` and `cull` pass it by and delete it.
3. The codec alone makes bytes of values. No codec here runs code that it reads: there is no pickle
   unless the user passes one.
4. Only a store that the cache has made for itself gives up history here.
"""

from __future__ import annotations

import json
import math
import secrets
import struct
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial, update_wrapper
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from kvstore.base.arguments import AGE, NUMBER, SECONDS, word
from kvstore.base.span import require_key
from kvstore.base.timestamp import NS_PER_SECOND, AgeLike, Timestamp
from kvstore.codec.tuples import decode_tuple, elements, encode_element, encode_tuple
from kvstore.errors import (
    Argument,
    BusyError,
    CorruptionError,
    PreconditionError,
    UsageError,
    printable,
)
from kvstore.remote.control import StoreOrClient
from kvstore.remote.handle import Handle, Where

if TYPE_CHECKING:
    from kvstore.transaction import Transaction

T = TypeVar("T")
Expire: TypeAlias = "float | timedelta | None"
"""How long an entry stays: seconds, or a timedelta; None for ever."""
Tags: TypeAlias = "str | Iterable[str] | None"
Key: TypeAlias = Any
"""Text, bytes, a number, None, a date, a UUID, or a tuple of these. 1, 1.0 and True are three."""

SIZE_LIMIT: Final = 1 << 30
"""The bytes of a cache unless its user says otherwise."""
KEEP: Final = timedelta(minutes=10)
"""The history of a store that the cache has made for itself."""
LEASE_S: Final = 60.0
"""The seconds after which another caller makes a value, if the first one has not."""
_CULLS_PER_LIMIT: Final = 16
"""A cache is measured each time one process has written this part of its limit. So it exceeds the
limit by a sixteenth for each process that writes."""
_ROOM_LEFT: Final = 8
"""A cull leaves this part of the limit free."""
_USED_AT_ONCE: Final = 256
"""Entries that were looked up between two writes that note it."""
_ROWS_AT_ONCE: Final = 500
"""Entries that a cull or an eviction deletes in one commit."""
_ENTRY_BYTES: Final = 128
"""The bytes that an entry takes beside its key and value, about."""
_KEY_BYTES_MAX: Final = 1024
"""Bytes of arguments from which on `memoize` has their digest as the key."""

_ATTEMPTS: Final = 1000
"""Runs of a change of one entry. Those that many processes change at once conflict often, and each
conflict means that another one has succeeded."""

_ABSENT: Final = object()
_META: Final = struct.Struct(">QQQ")
_TIME: Final = struct.Struct(">Q")
_A_TUPLE: Final = b"\x00"
"""The first byte of a key that is a tuple. No element begins with it."""


class CacheCodec(NamedTuple):
    """How values become bytes, and back. `decode` gets what any writer of the store has put."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _as_bytes(value: object) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(f"{type(value).__name__} is not bytes", 'encode it, or pass codec="json"')
    return bytes(value)


def _as_json(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        remedy = "pass lists, dicts and texts, or another codec"
        raise UsageError(f"the value is no JSON: {error}", remedy) from error


def _msgpack() -> CacheCodec:
    try:
        import msgpack
    except ImportError as error:
        raise UsageError("the codec needs msgpack", "run: pip install msgpack") from error

    def encode(value: object) -> bytes:
        try:
            packed: bytes = msgpack.packb(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the value does not pack: {error}", "pass another codec") from error
        return packed

    return CacheCodec(encode, partial(msgpack.unpackb, strict_map_key=False))


_CODECS: Final[Mapping[str, Callable[[], CacheCodec]]] = {
    "json": lambda: CacheCodec(_as_json, json.loads),
    "bytes": lambda: CacheCodec(_as_bytes, bytes),
    "msgpack": _msgpack,
}
_EVICTION: Final = word("least-recently-used", "least-recently-stored", "none")


class _Meta(NamedTuple):
    """What a cache knows of an entry beside its value."""

    size: int
    due: int
    stored: int
    tags: tuple[str, ...]

    def pack(self) -> bytes:
        return _META.pack(self.size, self.due, self.stored) + encode_tuple(self.tags)

    @classmethod
    def unpack(cls, raw: bytes) -> _Meta:
        try:
            size, due, stored = _META.unpack_from(raw)
        except struct.error as error:
            raise CorruptionError("the record of an entry", str(error)) from error
        tags = decode_tuple(raw[_META.size :]) if len(raw) > _META.size else ()
        return cls(size, due, stored, tuple(map(str, tags)))


class _Entry(NamedTuple):
    """An entry as a cull meets it."""

    key: bytes
    raw: bytes
    meta: _Meta
    rank: int
    """What is least is evicted first."""


class Cache:
    """A cache. `where` is the path of a store, which is made where nothing is, the URL of a server,
    or an open store. Use it from any thread and any number of processes.

    `codec` is `"json"`, `"bytes"`, `"msgpack"` or a `CacheCodec` of your own. `size_limit` bounds
    the bytes of keys and values, `None` does not; a cull that keeps the bound runs in the call that
    has written the next sixteenth of it. `eviction` says which entries go first:
    `"least-recently-used"`, `"least-recently-stored"`, or `"none"` of them.

    A cache that makes its own store keeps `history` in it, ten minutes by default. In a store that
    had data, or that the user opened, history stays until its owner gives it up (`Store.gc`).

    Example:

        cache = kvstore.cache.Cache("cache.db")
        cache.set("user/7", {"name": "Ada"}, expire=60, tag="users")
        assert cache.get("user/7") == {"name": "Ada"}
        cache.evict("users")
        assert cache.get("user/7") is None
        cache.close()
    """

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: bytes = b"cache/",
        codec: str | CacheCodec = "json",
        size_limit: int | None = SIZE_LIMIT,
        eviction: str = "least-recently-used",
        history: AgeLike = KEEP,
        token: str | None = None,
    ) -> None:
        self._handle = Handle.of(where, token=token)
        self._prefix = require_key(prefix, name="prefix")
        self._options: dict[str, Any] = {
            **{"prefix": prefix, "codec": codec, "size_limit": size_limit},
            **{"eviction": eviction, "history": history},
        }
        self._codec = _codec(codec)
        self._limit = None if size_limit is None else NUMBER.check("size_limit", size_limit)
        self._eviction = _EVICTION.check("eviction", eviction)
        self._history = AGE.check("history", history)
        self._values, self._metas, self._index, self._uses, self._locks, self._mark = (
            self._prefix + kind for kind in (b"v", b"m", b"i", b"u", b"l", b"!")
        )
        self._culling = threading.Lock()
        self._used: dict[bytes, int] = {}
        self._is_own: bool | None = None
        step = self._step()
        # A process that writes little and ends would never cull. Beginning anywhere in the step,
        # it does so as often as its share of the writes asks for.
        self._written = secrets.randbelow(step) if step else 0

    # -- reading ----------------------------------------------------------------------------

    def get(self, key: Key, default: Any = None) -> Any:
        """The value of `key`; `default` if there is none. One look-up."""
        name = _encoded(key)
        raw = self.store.get(self._values + name)
        if raw is None:
            return default
        self._note_used(name)
        return self._decoded(key, raw)

    def get_many(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """The entries among `keys`."""
        wanted = list(keys)
        names = [_encoded(key) for key in wanted]
        values = self.store.get_many([self._values + name for name in names])
        found = {}
        for key, name, raw in zip(wanted, names, values, strict=True):
            if raw is not None:
                self._note_used(name)
                found[key] = self._decoded(key, raw)
        return found

    def __getitem__(self, key: Key) -> Any:
        """The value of `key`. Raises `KeyError` if there is none."""
        found = self.get(key, _ABSENT)
        if found is _ABSENT:
            raise KeyError(key)
        return found

    def __contains__(self, key: Key) -> bool:
        return self.store.get(self._metas + _encoded(key)) is not None

    def __len__(self) -> int:
        """The number of entries, by a pass over them."""
        return self.store.count(prefix=self._metas)

    def __iter__(self) -> Iterator[Key]:
        """The keys, sorted by their type and value, as of one time."""
        for name in self.store.keys(prefix=self._metas):
            yield _decoded_key(name[len(self._metas) :])

    def __reversed__(self) -> Iterator[Key]:
        """The keys, the last one first, as of one time."""
        for name in self.store.keys(prefix=self._metas, reverse=True):
            yield _decoded_key(name[len(self._metas) :])

    def ttl(self, key: Key) -> float | None:
        """The seconds until `key` expires; None if it does not, or is absent."""
        left = self.store.ttl(self._values + _encoded(key))
        return None if left is None else left.total_seconds()

    def tags(self, key: Key) -> tuple[str, ...]:
        """The tags of `key`; none if it is absent."""
        raw = self.store.get(self._metas + _encoded(key))
        return () if raw is None else _Meta.unpack(raw).tags

    def volume(self) -> int:
        """The bytes that count for `size_limit`, by a pass over the entries."""
        rows = self.store.scan(prefix=self._metas)
        return sum(_Meta.unpack(raw).size for _, raw in rows)

    # -- writing ----------------------------------------------------------------------------

    def set(self, key: Key, value: Any, expire: Expire = None, tag: Tags = None) -> bool:
        """Set `key`, and replace its expiry and its tags. `expire` is in seconds: at exactly that
        time the entry is gone. With a time that is not ahead the key is deleted. Returns True."""
        self._set([(key, value)], expire, tag)
        return True

    def set_many(self, entries: Mapping[Key, Any], expire: Expire = None, tag: Tags = None) -> bool:
        """Set many keys in one commit, as `set`."""
        self._set(list(entries.items()), expire, tag)
        return True

    def _set(self, entries: list[tuple[Key, Any]], expire: Expire, tag: Tags) -> None:
        due, tags = self._due(expire), _tags(tag)
        rows = [(_encoded(key), self._codec.encode(value)) for key, value in entries]

        def put() -> None:
            with self.store.batch() as batch:
                for name, raw in rows:
                    self._put_in(batch, name, raw, due, tags)

        if self._has_lapsed(due, put):
            self.delete_many(key for key, _ in entries)
        self._note_written(sum(_size(name, raw) for name, raw in rows))

    def __setitem__(self, key: Key, value: Any) -> None:
        """Set `key` for ever and without tags."""
        self.set(key, value)

    def add(self, key: Key, value: Any, expire: Expire = None, tag: Tags = None) -> bool:
        """Set `key` if it is absent. Returns whether this call did; of many at once, one does."""
        name, raw = _encoded(key), self._codec.encode(value)
        due, tags = self._due(expire), _tags(tag)

        def put(transaction: Transaction) -> bool:
            if transaction.get(self._metas + name) is not None:
                return False
            self._put_in(transaction, name, raw, due, tags)
            return True

        done: list[bool] = []
        if self._has_lapsed(due, lambda: done.append(self._transact(put))):
            return key not in self
        self._note_written(_size(name, raw) if done[0] else 0)
        return done[0]

    def incr(self, key: Key, delta: float = 1, default: float | None = 0) -> Any:
        """Add to the number of `key`, and return the sum, a float if one of the two is. An absent
        key counts as `default`; with None it raises `KeyError`. Expiry and tags stay. No increment
        is lost. Raises `UsageError` if the value is no number, or the codec does not take the sum.
        """
        name, due = _encoded(key), 0

        def add(transaction: Transaction) -> float:
            nonlocal due
            due = 0
            raw, meta = transaction.get_many([self._values + name, self._metas + name])
            if raw is None or meta is None:
                if default is None:
                    raise KeyError(key)
                total, kept = default + delta, _Meta(0, 0, 0, ())
            else:
                total, kept = self._number(key, raw) + delta, _Meta.unpack(meta)
            due = kept.due
            self._put_in(transaction, name, self._numeral(total), kept.due or None, kept.tags)
            return total

        while True:
            try:
                total = self._transact(add)
                break
            except UsageError:
                if not due or self.store.now() < due:
                    raise  # otherwise the entry has expired between the read and the write
        self._note_written(_ENTRY_BYTES)
        return total

    def decr(self, key: Key, delta: float = 1, default: float | None = 0) -> Any:
        """Subtract, as `incr` adds."""
        return self.incr(key, -delta, default)

    def touch(self, key: Key, expire: Expire = None) -> bool:
        """Give `key` a new time to expire at; None keeps it. Returns whether it is there."""
        name, due = _encoded(key), self._due(expire)

        def put(transaction: Transaction) -> bool:
            raw, meta = transaction.get_many([self._values + name, self._metas + name])
            if raw is None or meta is None:
                return False
            self._put_in(transaction, name, raw, due, _Meta.unpack(meta).tags)
            return True

        done: list[bool] = []
        if self._has_lapsed(due, lambda: done.append(self._transact(put))):
            return self.delete(key)
        return done[0]

    def pop(self, key: Key, default: Any = None) -> Any:
        """Delete `key` and return its value; `default` if it is absent."""
        name = _encoded(key)

        def take(transaction: Transaction) -> bytes | None:
            raw, meta = transaction.get_many([self._values + name, self._metas + name])
            if raw is not None:
                tags = () if meta is None else _Meta.unpack(meta).tags
                self._delete_in(transaction, name, tags)
            return raw

        raw = self._transact(take)
        return default if raw is None else self._decoded(key, raw)

    def delete(self, key: Key) -> bool:
        """Delete `key`. Returns whether it was there."""
        return self.delete_many([key]) > 0

    def __delitem__(self, key: Key) -> None:
        """Delete `key`. Raises `KeyError` if it was not there."""
        if not self.delete(key):
            raise KeyError(key)

    def delete_many(self, keys: Iterable[Key]) -> int:
        """Delete many keys in one commit. Returns how many were there."""
        names = [_encoded(key) for key in keys]

        def drop(transaction: Transaction) -> int:
            metas = transaction.get_many([self._metas + name for name in names])
            found = [(name, raw) for name, raw in zip(names, metas, strict=True) if raw is not None]
            for name, raw in found:
                self._delete_in(transaction, name, _Meta.unpack(raw).tags)
            return len(found)

        return self._transact(drop)

    def clear(self) -> int:
        """Delete all entries by one commit of five writes. Returns how many there were."""
        count = len(self)
        with self.store.batch() as batch:
            for below in (self._values, self._metas, self._index, self._uses, self._locks):
                batch.delete_range(prefix=below)
        return count

    def evict(self, tag: str) -> int:
        """Delete all entries that have the tag, in one commit. Returns how many. Costs what they
        are, however many others there are."""
        below = self._index + encode_element(tag)

        names = [key[len(below) :] for key in self.store.keys(prefix=below)]

        def drop(transaction: Transaction) -> int:
            metas = transaction.get_many([self._metas + name for name in names])
            count = 0
            for name, raw in zip(names, metas, strict=True):
                tags = () if raw is None else _Meta.unpack(raw).tags
                if tag in tags:
                    count += 1
                    self._delete_in(transaction, name, tags)
                else:
                    transaction.delete(below + name)
            return count

        return self._transact(drop)

    # -- values that are made once ----------------------------------------------------------

    def get_or_set(
        self,
        key: Key,
        make: Callable[[], T],
        expire: Expire = None,
        tag: Tags = None,
        *,
        lease: float = LEASE_S,
    ) -> T:
        """The value of `key`; if it is absent, `make()` makes it, and it is set.

        Of many callers at once, in all threads and processes, one makes the value and the others
        wait for it. If the maker has failed, or takes longer than `lease` seconds, another one
        begins.
        """
        name, lock = _encoded(key), self.lock(key, lease)
        while True:
            seen = self.store.upper
            raw = self.store.get(self._values + name)
            if raw is not None:
                self._note_used(name)
                found: T = self._decoded(key, raw)
                return found
            if not lock.acquire(wait=False):
                lock.wait(seen)
                continue
            try:
                raw = self.store.get(self._values + name)  # another maker may have just ended
                if raw is not None:
                    again: T = self._decoded(key, raw)
                    return again
                value = make()
                self.set(key, value, expire, tag)
                return value
            finally:
                lock.release()

    def lock(self, key: Key, lease: float = LEASE_S) -> CacheLock:
        """A lock of `key` among all threads and processes. It is free again after `lease` seconds,
        whatever its holder does. It does not keep others from setting the key."""
        return CacheLock(self._handle, self._locks + _encoded(key), lease)

    def memoize(
        self,
        name: str | None = None,
        typed: bool = False,
        expire: Expire = None,
        tag: Tags = None,
        ignore: Collection[int | str] = (),
        *,
        lease: float = LEASE_S,
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """A decorator: results of a function by its arguments, made once as by `get_or_set`.

        `name` is the module and name of the function by default. With `typed` 1 and 1.0 are two
        arguments. Arguments in `ignore`, by place or name, do not count. The arguments must be
        keys. The decorated function has the key of a call: `function.cache_key(...)`.

        Example:

            cache = kvstore.cache.Cache(store)

            @cache.memoize(expire=60)
            def square(x):
                return x * x

            assert square(3) == 9
        """
        if callable(name):
            raise UsageError("memoize without brackets", "write @cache.memoize()")

        def decorate(function: Callable[..., T]) -> Callable[..., T]:
            base = name or f"{function.__module__}.{function.__qualname__}"

            def cache_key(*args: Any, **named: Any) -> Key:
                return _call_key(base, args, named, typed=typed, ignore=ignore)

            def wrapper(*args: Any, **named: Any) -> T:
                make = partial(function, *args, **named)
                return self.get_or_set(cache_key(*args, **named), make, expire, tag, lease=lease)

            update_wrapper(wrapper, function)
            wrapper.cache_key = cache_key  # type: ignore[attr-defined]  # as functools does
            return wrapper

        return decorate

    # -- keeping it small -------------------------------------------------------------------

    def expire(self) -> int:
        """Free the space of entries that have expired or were replaced. Entries expire by
        themselves, so the result, how many this call made go, is 0: callers of other caches call it
        in a loop."""
        self.store.get(self._mark)  # a look at the newest state writes the deletes that are due
        self._collect()
        return 0

    def cull(self) -> int:
        """Evict until the cache is below its limit, delete leftovers, and free the space. Returns
        how many entries went. It runs by itself; one thread of a process at a time does."""
        if not self._culling.acquire(blocking=False):
            return 0
        try:
            self._flush_used()
            evicted = 0 if self._limit is None else self._evict_excess(self._limit)
            self._delete_leftovers()
            self._collect()
            return evicted
        finally:
            self._culling.release()

    def close(self) -> None:
        """Note what was used, and let the store go. The next use opens it again."""
        self._flush_used()
        self._handle.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return partial(Cache, **self._options), (self._handle,)

    def __repr__(self) -> str:
        return f"<kvstore.cache.Cache {self._handle!r} {printable(self._prefix)}>"

    # -- inside -----------------------------------------------------------------------------

    @property
    def store(self) -> StoreOrClient:
        """The store, or the client of it, in which the cache lies."""
        store = self._handle.store
        if self._is_own is None:
            self._is_own = self._find_own(store)
        return store

    def _find_own(self, store: StoreOrClient) -> bool:
        """Whether the store has been made for this cache. The first cache in a new store, by its
        path, says so in the store."""
        if store.get(self._mark) is not None:
            return True
        if not self._handle.address or store.since or store.tables():
            return False
        if next(iter(store.changes(since=0)), None) is not None:
            return False
        with suppress(PreconditionError):  # another process came first
            store.put_if(self._mark, b"", None)
        return True

    def _due(self, expire: Expire) -> int | None:
        """The due time; None for an entry that stays, 0 for a time that is not ahead."""
        if expire is None:
            return None
        if isinstance(expire, timedelta):
            expire = expire.total_seconds()
        if not isinstance(expire, int | float) or not math.isfinite(expire):
            raise UsageError(Argument.of("expire", expire), "pass seconds, a timedelta or None")
        ahead = int(expire * NS_PER_SECOND)
        return int(self.store.now()) + ahead if ahead > 0 else 0

    def _transact(self, body: Callable[[Transaction], T]) -> T:
        return self.store.transact(body, attempts=_ATTEMPTS)

    def _has_lapsed(self, due: int | None, write: Callable[[], object]) -> bool:
        """Write entries that expire at `due`, and tell whether that time passed before they were
        written, so that nothing was."""
        if due == 0:
            return True
        try:
            write()
        except UsageError:
            if due is None or self.store.now() < due:
                raise
            return True
        return False

    def _put_in(
        self, writes: Any, name: bytes, raw: bytes, due: int | None, tags: tuple[str, ...]
    ) -> None:
        meta = _Meta(_size(name, raw), due or 0, time.time_ns(), tags)
        expires = None if due is None else Timestamp(due)
        writes.put(self._values + name, raw, expires=expires)
        writes.put(self._metas + name, meta.pack(), expires=expires)
        for tag in tags:
            writes.put(self._index + encode_element(tag) + name, b"", expires=expires)

    def _delete_in(self, writes: Any, name: bytes, tags: tuple[str, ...]) -> None:
        writes.delete(self._values + name)
        writes.delete(self._metas + name)
        writes.delete(self._uses + name)
        for tag in tags:
            writes.delete(self._index + encode_element(tag) + name)

    def _decoded(self, key: Key, raw: bytes) -> Any:
        try:
            return self._codec.decode(raw)
        except ValueError as error:
            raise CorruptionError(
                f"the value of {key!r}",
                f"it is not of the codec: {error}",
                "use the codec that wrote it, or delete the entry",
            ) from error

    def _number(self, key: Key, raw: bytes) -> float:
        found = self._decoded(key, raw)
        if isinstance(found, int | float):
            return found
        try:
            return int(found)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the value of {key!r} is no number", "set it to one") from error

    def _numeral(self, number: float) -> bytes:
        if self._codec.encode is not _as_bytes:
            return self._codec.encode(number)
        if not isinstance(number, int):
            raise UsageError(f"{number!r} is no whole number", 'add integers, or pass codec="json"')
        return b"%d" % number

    # What was used: a look-up writes nothing by itself. After some hundred of them one commit
    # notes the times, which are lost if the process is killed before.

    def _note_used(self, name: bytes) -> None:
        if self._limit is None or self._eviction != "least-recently-used":
            return
        self._used[name] = time.time_ns()
        if len(self._used) >= _USED_AT_ONCE:
            self._flush_used()

    def _flush_used(self) -> None:
        used, self._used = self._used, {}
        if used:
            rows = [(self._uses + name, _TIME.pack(at)) for name, at in used.items()]
            self.store.put_many(rows, durability="async")

    # The bound: bytes that this process has written are counted, and from time to time all entries
    # are measured. No counter is shared, so writers do not wait for each other.

    def _step(self) -> int:
        limit = SIZE_LIMIT if self._limit is None else self._limit
        return limit // _CULLS_PER_LIMIT

    def _note_written(self, size: int) -> None:
        self._written += size
        if self._written > self._step():
            self._written = 0
            self.cull()

    def _evict_excess(self, limit: int) -> int:
        import numpy as np  # takes 50 ms, and most processes never cull

        sizes, ranks = array("Q"), array("Q")
        with self.store.snapshot() as snapshot:
            for entry in self._entries(snapshot):
                sizes.append(entry.meta.size)
                ranks.append(entry.rank)
            total = sum(sizes)
            if total <= limit or self._eviction == "none":
                return 0
            order = np.argsort(np.frombuffer(ranks, np.uint64), kind="stable")
            freed = np.cumsum(np.frombuffer(sizes, np.uint64)[order])
            enough = total - limit + limit // _ROOM_LEFT
            going = order[: int(np.searchsorted(freed, min(enough, total))) + 1]
            chosen = np.zeros(len(sizes), dtype=bool)
            chosen[going] = True
            evicted = 0
            found = self._entries(snapshot)
            victims = (entry for entry, goes in zip(found, chosen, strict=True) if goes)
            while some := list(islice(victims, _ROWS_AT_ONCE)):
                evicted += self._transact(partial(self._drop_unchanged, some))
        return evicted

    def _drop_unchanged(self, entries: list[_Entry], transaction: Transaction) -> int:
        """Delete the entries that nobody has written since they were chosen."""
        metas = transaction.get_many([self._metas + entry.key for entry in entries])
        count = 0
        for entry, raw in zip(entries, metas, strict=True):
            if raw == entry.raw:
                self._delete_in(transaction, entry.key, entry.meta.tags)
                count += 1
        return count

    def _entries(self, snapshot: Any) -> Iterator[_Entry]:
        """All entries at one time, with their ranks: two scans side by side."""
        at, below = len(self._metas), len(self._uses)
        used = ((key[below:], raw) for key, raw in snapshot.scan(prefix=self._uses))
        last = next(used, None)
        for key, raw in snapshot.scan(prefix=self._metas):
            name, meta = key[at:], _Meta.unpack(raw)
            while last is not None and last[0] < name:
                last = next(used, None)
            rank = meta.stored
            if last is not None and last[0] == name and self._eviction == "least-recently-used":
                rank = max(rank, *_TIME.unpack(last[1]))
            yield _Entry(name, raw, meta, rank)

    def _delete_leftovers(self) -> None:
        """Delete what names no entry any more: times of use, and rows of the index of tags."""
        keys = self.store.keys(prefix=self._uses)
        while some := list(islice(keys, _ROWS_AT_ONCE)):
            metas = self._metas_of([key[len(self._uses) :] for key in some])
            self._drop_rows([key for key, meta in zip(some, metas, strict=True) if meta is None])
        keys = self.store.keys(prefix=self._index)
        while some := list(islice(keys, _ROWS_AT_ONCE)):
            tagged = [next(elements(key, len(self._index))) for key in some]
            metas = self._metas_of([key[end:] for key, (_, end) in zip(some, tagged, strict=True)])
            rows = zip(some, tagged, metas, strict=True)
            self._drop_rows(
                [key for key, (tag, _), meta in rows if meta is None or tag not in meta.tags]
            )

    def _metas_of(self, names: list[bytes]) -> list[_Meta | None]:
        found = self.store.get_many([self._metas + name for name in names])
        return [None if raw is None else _Meta.unpack(raw) for raw in found]

    def _drop_rows(self, keys: list[bytes]) -> None:
        if keys:
            with self.store.batch(durability="async") as batch:
                for key in keys:
                    batch.delete(key)

    def _collect(self) -> None:
        if self._is_own:
            with suppress(BusyError):  # another call collects
                self.store.gc(keep=self._history)


class CacheLock:
    """A lock in a store: `with cache.lock(key): ...`. `Cache.lock` makes one.

    Threads may share the object. Its holder does not get it twice: a second `acquire` waits. A
    thread that has not acquired it may release it for the one that has.
    """

    def __init__(self, handle: Handle, name: bytes, lease: float) -> None:
        self._handle, self._name = handle, name
        self._lease = timedelta(seconds=SECONDS.check("lease", lease))
        self._tokens: dict[int, bytes] = {}
        """What the lock holds for each thread that acquired it. A lease may run out, so that
        several are here, and a thread frees its own alone."""

    def acquire(self, wait: bool = True) -> bool:
        """Take the lock. If others have it, wait for it, or return False."""
        token = secrets.token_bytes(8)
        while True:
            store = self._handle.store
            seen = store.upper
            try:
                store.put_if(self._name, token, None, expires=self._lease)
            except PreconditionError:
                if not wait:
                    return False
                self.wait(seen)
            else:
                self._tokens[threading.get_ident()] = token
                return True

    def wait(self, seen: int) -> None:
        """Wait until something was written above the time `seen`, or the lease has run out."""
        left = self._handle.store.ttl(self._name)
        if left is not None:
            self._handle.store.wait_beyond(seen, timeout=left.total_seconds() + 0.001)

    def release(self) -> None:
        """Free the lock, unless its lease has run out and another one has it."""
        token = self._tokens.pop(threading.get_ident(), None)
        if token is None:
            try:
                _, token = self._tokens.popitem()  # of the thread that has acquired it last
            except KeyError:
                return
        with suppress(PreconditionError):
            self._handle.store.delete_if(self._name, token)

    def locked(self) -> bool:
        """Whether somebody has the lock."""
        return self._handle.store.get(self._name) is not None

    def __enter__(self) -> CacheLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _codec(given: str | CacheCodec) -> CacheCodec:
    if isinstance(given, CacheCodec):
        return given
    make = _CODECS.get(given) if isinstance(given, str) else None
    if make is None:
        hint = f"pass {', '.join(_CODECS)}, or a CacheCodec(encode, decode)"
        raise UsageError(Argument.of("codec", given), hint)
    return make()


def _encoded(key: Key) -> bytes:
    return _A_TUPLE + encode_tuple(key) if isinstance(key, tuple) else encode_element(key)


def _decoded_key(name: bytes) -> Key:
    if name.startswith(_A_TUPLE):
        return decode_tuple(name[1:])
    return decode_tuple(name)[0]


def _size(name: bytes, raw: bytes) -> int:
    return len(name) + len(raw) + _ENTRY_BYTES


def _tags(given: Tags) -> tuple[str, ...]:
    several = given is None or (isinstance(given, Iterable) and not isinstance(given, str))
    found: tuple[Any, ...] = tuple(given or ()) if several else (given,)
    for tag in found:
        if not isinstance(tag, str):
            raise UsageError(Argument.of("tag", tag), "pass a text, or several")
    return tuple(dict.fromkeys(found))


def _call_key(
    base: str,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    *,
    typed: bool,
    ignore: Collection[int | str],
) -> Key:
    """The key of a call. Long arguments are replaced by their digest."""
    places = [each for place, each in enumerate(args) if place not in ignore]
    words = [(name, named[name]) for name in sorted(named) if name not in ignore]
    parts: list[Any] = [base, len(places), *places]
    for name, each in words:
        parts += [name, each]
    if typed:
        parts += [type(each).__qualname__ for each in (*places, *(each for _, each in words))]
    else:
        parts = [_untyped(each) for each in parts]
    try:
        encoded = encode_tuple(parts)
    except UsageError as error:
        remedy = "pass arguments that are keys, or leave them out by ignore="
        raise error.at("an argument of the call is no key: ", remedy=(remedy,)) from error
    if len(encoded) > _KEY_BYTES_MAX:
        return base, blake2b(encoded, digest_size=32).digest()
    return tuple(parts)


def _untyped(value: Any) -> Any:
    """1, 1.0 and True are one argument of a function unless it asks for types."""
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value
