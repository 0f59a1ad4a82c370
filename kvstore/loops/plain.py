"""The loops in Python: what each of them does, in as few words as that takes.

`compiled.pyx` says the same in C's terms. Who changes one changes the other.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, islice, repeat
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from typing_extensions import Buffer

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    KEY_BYTES_LEAST,
    TAIL_BYTES,
    TOMBSTONE,
    VALUE,
    check_data_key,
    decode_suffix,
    encode_suffix,
    require_entry,
)
from kvstore.codec.ordered import TERMINATOR, is_escaped
from kvstore.errors import CorruptionError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.timestamp import Timestamp

T = TypeVar("T")

_UNLIMITED: Final = b"\x00\x02"
"""Behind an escaped key: above all versions of the key, below those of any other."""


REVISION: Final = 6
"""Raised with each change of a name, an argument or a meaning here: what was compiled from an
older source, as a checkout that was moved on has it, is not taken."""


class Absent(Enum):
    """That a stretch of keys has no entry, which is not what None says: that it was deleted."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
Found: TypeAlias = "bytes | Literal[Absent.ABSENT] | None"


class Position(Protocol):
    """What look-ups need of a `Reader`."""

    def seek(self, key: bytes) -> None: ...
    def next(self) -> None: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes: ...


Buffers: TypeAlias = "tuple[int, Buffer, Buffer, Buffer, Buffer]"
"""Rows as Arrow's columns: how many, then offsets and bytes of the keys, and of the values."""

_INVISIBLE: Final = b"\xff" * 9
"""In the place of a suffix: older than all."""
_BUFFER_BYTES_MAX: Final = (1 << 31) - 1


def collect(
    source: Iterator[tuple[bytes, bytes]],
    keys: list[bytes],
    values: list[bytes],
    count: int,
    bytes_max: int,
) -> bool:
    """Append the next entries of `source`: `count`, or fewer once their values have `bytes_max`
    bytes. Whether there may be more; False where `source` has ended."""
    missing = count
    for key, value in islice(source, count):
        keys.append(key)
        values.append(value)
        missing -= 1
        bytes_max -= len(value)
        if bytes_max <= 0:
            return True
    return missing == 0


def gather(
    source: Iterator[tuple[Any, ...]],
    rows: list[Any],
    count: int,
    bytes_max: int,
    first: int,
    last: int,
) -> int:
    """Append the next of `source` to `rows`: `count`, or fewer once their fields from `first` to
    before `last`, which are bytes or None, have `bytes_max` bytes. How many these have."""
    size = 0
    for row in islice(source, count):
        rows.append(row)
        size += sum(map(len, filter(None, row[first:last])))
        if size >= bytes_max:
            break
    return size


class Live:
    """Picks the live entries out of a pass over `data`, piece by piece, in either direction.

    Of each key that is the newest entry that the read at `as_of` sees, if it is a value and no
    newer range tombstone covers it. An entry has the time of its suffix, or that at which its
    import was added (`stamps`: lifetimes by suffix; not there: invisible). Between the escaped
    bounds `starts[i - 1]` and `starts[i]` the newest range tombstone is of `newest[i]`, 0: none.

    A key's entries stand together, so the newest seen so far is held until another key comes, or
    `end`. What `LiveRows` and `LiveColumns` have found alive they hand out.

    Times are compared here as suffixes, as they are stored: the newer, the less.
    """

    last: bytes | None = None
    """The last stored key that was passed over."""

    def __init__(
        self,
        as_of: int,
        stamps: Mapping[bytes, tuple[int, int]],
        starts: Sequence[bytes],
        newest: Sequence[int],
    ) -> None:
        self._as_of = as_of
        self._stamps = stamps
        self._starts = starts
        self._newest = [encode_suffix(time) for time in newest]
        self._imports: dict[bytes, bytes] = {}
        self._stem: bytes | None = None
        self._suffix = _INVISIBLE
        self._held = b"", b""
        self._shown: tuple[list[bytes], list[bytes]] = [], []
        """Stored keys and values of what was found alive and not yet handed out."""

    def pass_over(
        self, source: Iterator[tuple[bytes, bytes]], count: int, bytes_max: int = sys.maxsize
    ) -> bool:
        """Pass over the next entries of `source`, which are of `data`, as `collect` takes them.
        Raises `CorruptionError` on what is no key of `data`."""
        keys: list[bytes] = []
        values: list[bytes] = []
        has_more = collect(source, keys, values, count, bytes_max)
        least = encode_suffix(self._as_of)
        stem, newest, held = self._stem, self._suffix, self._held
        for key, value in zip(keys, values, strict=True):
            here = key[:-TAIL_BYTES]
            if len(key) < KEY_BYTES_LEAST or here[-2:] != TERMINATOR or key[-1] > 1:
                check_data_key(key)
            if here != stem:
                if newest is not _INVISIBLE:
                    self._release(newest, *held)
                    newest = _INVISIBLE
                stem = here
            suffix = key[-TAIL_BYTES:-1]
            if suffix < FIRST_TIMED_SUFFIX:
                suffix = self._imports.get(suffix) or self._import(suffix)
            if least <= suffix < newest:
                newest, held = suffix, (key, value)
        self._stem, self._suffix, self._held = stem, newest, held
        self.last = keys[-1] if keys else self.last
        return has_more

    def end(self) -> None:
        """Nothing else is to come: what is held is decided."""
        if self._suffix is not _INVISIBLE:
            self._release(self._suffix, *self._held)
            self._suffix, self._held = _INVISIBLE, (b"", b"")

    def _import(self, reference: bytes) -> bytes:
        """The suffix of the time at which the rows of an import became visible."""
        added, reverted = self._stamps.get(reference, (0, 0))
        visible = added <= self._as_of < reverted
        self._imports[reference] = encode_suffix(added) if visible else _INVISIBLE
        return self._imports[reference]

    def _release(self, suffix: bytes, key: bytes, value: bytes) -> None:
        if not key[-1]:
            return
        # Bounds are escaped and not framed: what lies at one sorts behind it with all its tails.
        if self._starts and self._newest[bisect_right(self._starts, key)] < suffix:
            return
        if not is_escaped(key[:-KEY_BYTES_LEAST]):
            check_data_key(key)
        keys, values = self._shown
        keys.append(key)
        values.append(value)


class LiveRows(Live):
    """Live entries as rows."""

    def found(self) -> tuple[list[bytes], list[bytes]]:
        """User keys and values of what was found since the last call."""
        keys, values = self._shown
        self._shown = [], []
        return _user_keys(keys), values


class LiveColumns(Live):
    """Live entries as Arrow's columns."""

    @property
    def rows(self) -> int:
        """How many were found since they were last handed out."""
        return len(self._shown[0])

    @property
    def size(self) -> int:
        """The bytes of their values."""
        return sum(map(len, self._shown[1]))

    def found(self) -> list[Buffers]:
        """Keys and values of what was found since the last call, in as many pieces as their bytes
        need: none where nothing was."""
        keys, values = self._shown
        self._shown = [], []
        return list(_joined_pairs(_user_keys(keys), values))


def _joined_pairs(keys: list[bytes], values: list[bytes]) -> Iterator[Buffers]:
    if not keys:
        return
    joined_keys, joined_values = join(keys), join(values)
    if joined_keys is not None and joined_values is not None:
        yield len(keys), *joined_keys, *joined_values
        return
    middle = len(keys) // 2
    yield from _joined_pairs(keys[:middle], values[:middle])
    yield from _joined_pairs(keys[middle:], values[middle:])


def _user_keys(stored: Sequence[bytes]) -> list[bytes]:
    return [key[:-KEY_BYTES_LEAST].replace(b"\x00\xff", b"\x00") for key in stored]


class Readers:
    """Readers kept between look-ups: positioning one costs less than making one.

    `make` gives a new one, `check` raises what kept one from having a position. At most `most` are
    kept.
    """

    def __init__(self, make: Callable[[], Any], check: Callable[[Any], None], most: int) -> None:
        self._make = make
        self._check = check
        self._most = most
        # `renew` puts an empty list in its place, so that a reader given back late goes to one
        # that nobody takes from.
        self._idle: list[Any] = []

    def renew(self) -> None:
        """Lend none again of those made so far: something was written that they do not see."""
        self._idle = []

    def borrow(self) -> tuple[list[Any], Any]:
        """A reader that sees all writes so far, and a ticket to give it back with."""
        idle = self._idle
        try:
            return idle, idle.pop()
        except IndexError:
            return idle, self._make()

    def give_back(self, ticket: list[Any], reader: Any) -> None:
        """Return what `borrow` gave."""
        if len(ticket) < self._most:
            ticket.append(reader)

    def find(self, key: bytes, rest: bytes, limit: bytes) -> Found:
        """The value of the first entry from `key`, escaped, with `rest` behind it on, and below
        `key`, escaped, with `limit` behind it; None where that is a tombstone."""
        ticket, reader = self.borrow()
        (value,) = find_many(reader, self._check, [key], rest, [], [limit], ABSENT)
        self.give_back(ticket, reader)
        return value


class Lookup:
    """`get`, by the range tombstones and imports that `show` was last told of.

    `engine` is asked for readers. `slowly` answers what needs more than the newest stretch says:
    where a range tombstone above the time of the read may hide one below it, and where imports
    and range tombstones meet.
    """

    def __init__(self, engine: Any, slowly: Callable[[bytes, int], bytes | None]) -> None:
        self._engine = engine
        self._slowly = slowly
        self.show([], [_UNLIMITED], {})

    def show(
        self,
        boundaries: Sequence[bytes],
        limits: Sequence[bytes],
        stamps: Mapping[bytes, tuple[int, int]],
    ) -> None:
        """Look up by these from now on: `limits[i + 1]` from `boundaries[i]` on."""
        self._view = boundaries, limits, stamps

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`, None where it is absent or deleted."""
        boundaries, limits, stamps = self._view
        engine, rest = self._engine, TERMINATOR + encode_suffix(as_of)
        if stamps and boundaries:
            return self._slowly(key, as_of)
        if stamps:
            ticket, reader = engine.borrow()
            ((_, value),) = find_among(reader, engine.check, [key], as_of, rest, stamps)
            engine.give_back(ticket, reader)
            return value
        limit = limits[bisect_right(boundaries, key)]
        found: Found = engine.find(key, rest, limit)
        if found is ABSENT:
            return None if limit == _UNLIMITED else self._slowly(key, as_of)
        return found


class Frontiers(Protocol):
    """What a read asks of the timeline."""

    @property
    def since(self) -> int: ...
    @property
    def floor(self) -> int: ...
    @property
    def upper(self) -> int: ...
    @property
    def is_healthy(self) -> bool: ...


class PointRead:
    """`Store.get` where nothing is in its way, else `otherwise`, which is the whole of it."""

    def __init__(
        self,
        lookup: Lookup,
        frontiers: Frontiers,
        otherwise: Callable[[Any, Any, Any], Any],
    ) -> None:
        self._lookup = lookup
        self._frontiers = frontiers
        self._otherwise = otherwise

    def get(self, key: Any, as_of: Any = None, default: Any = None) -> Any:
        """The value of `key` at `as_of`, `default` where it is absent or deleted. One seek."""
        frontiers = self._frontiers
        at = as_of
        if type(key) is bytes and len(key) <= KEY_BYTES_MAX and frontiers.is_healthy:
            if as_of is None:
                at = frontiers.upper - 1
            elif not (
                type(as_of) in (int, Timestamp) and frontiers.since <= as_of < frontiers.upper
            ):
                return self._otherwise(key, as_of, default)
            value = self._lookup.get(key, at)
            if at >= frontiers.floor:
                return default if value is None else value
        return self._otherwise(key, as_of, default)


def find_many(
    reader: Position,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    rest: bytes,
    boundaries: Sequence[bytes],
    limits: Sequence[bytes],
    absent: Literal[Absent.ABSENT] | None,
) -> list[Found]:
    """As `Readers.find`, of `keys` in their order, with `limits[i + 1]` from `boundaries[i]` on,
    and `absent` for an empty stretch.

    They are sought in key order, which takes half the time of seeking them in no order.
    """
    found: dict[bytes, Found] = {}
    for key in sorted(keys):
        escaped = key.replace(b"\x00", b"\x00\xff")
        reader.seek(escaped + rest)
        stored = reader.key()
        if stored is None:
            check(reader)
            found[key] = absent
        elif stored < escaped + limits[bisect_right(boundaries, key)]:
            require_entry(stored, escaped)
            found[key] = None if stored[-1:] == TOMBSTONE else reader.value()
        else:
            found[key] = absent
    return [found[key] for key in keys]


def find_among(
    reader: Position,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    as_of: int,
    rest: bytes,
    stamps: Mapping[bytes, tuple[int, int]],
) -> list[tuple[int, bytes | None]]:
    """Of each of `keys`, in a store with imports: when its newest entry that is visible at `as_of`
    became so, -1 where there is none, and its value, None: deleted.

    `rest` is what follows the escaped key of a version at `as_of`. They are sought in key order: a
    seek and a step each, mostly.
    """
    found = {key: _newest(reader, check, key, as_of, rest, stamps) for key in sorted(keys)}
    return [found[key] for key in keys]


def _newest(
    reader: Position,
    check: Callable[[Any], None],
    key: bytes,
    as_of: int,
    rest: bytes,
    stamps: Mapping[bytes, tuple[int, int]],
) -> tuple[int, bytes | None]:
    escaped = key.replace(b"\x00", b"\x00\xff")
    end = escaped + _UNLIMITED
    newest, value = -1, None
    reader.seek(escaped + TERMINATOR)
    found = reader.key()
    while found is not None and found < end:
        require_entry(found, escaped)
        lifetime = stamps.get(found[-TAIL_BYTES:-1])
        if lifetime is not None:
            added, reverted = lifetime
            if newest < added <= as_of < reverted:
                newest, value = added, reader.value() if found[-1] else None
            reader.next()
        elif found >= escaped + rest:
            timestamp = decode_suffix(found[-TAIL_BYTES:-1])
            if timestamp > newest:
                newest, value = timestamp, reader.value() if found[-1] else None
            break
        elif found[-TAIL_BYTES:] >= FIRST_TIMED_SUFFIX:
            reader.seek(escaped + rest)
        else:  # of an import that this read does not know
            reader.next()
        found = reader.key()
    if found is None:
        check(reader)
    return newest, value


def let_others_run() -> None:
    """Nothing, in Python: what is compiled calls it now and then in a loop over many keys, so that
    other threads have their turn and signals are heard, as in a loop that is not."""


def arrange(items: Sequence[T], keys: Sequence[bytes]) -> list[T]:
    """`items`, each of which has a key, in the order of the keys; of the same key, as they are."""
    return [items[at] for at in sorted(range(len(items)), key=keys.__getitem__)]


class Puts:
    """Writes as they are collected: what each key is set to (None: deleted), and the bytes of all
    keys and values, of a key that is written twice those of both.

    `put` takes what needs no look, as long as `size` is not above `size_max`, and leaves the rest
    to `put_otherwise`, which is for a subclass to say.
    """

    __slots__ = ("points", "size", "size_max")

    def __init__(self) -> None:
        self.points: dict[bytes, bytes | None] = {}
        self.size = 0
        self.size_max = sys.maxsize

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`. The last write to a key wins."""
        if (
            self.size > self.size_max
            or type(key) is not bytes
            or type(value) is not bytes
            or len(key) > KEY_BYTES_MAX
            or len(value) > VALUE_BYTES_MAX
        ):
            self.put_otherwise(key, value)
            return
        self.points[key] = value
        self.size += len(key) + len(value)

    def put_otherwise(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value` after a closer look, or say why not."""
        raise NotImplementedError


def put_all(
    put: Callable[[bytes, bytes, Any], None],
    points: Mapping[bytes, bytes | None],
    suffix: bytes,
    family: Any,
) -> None:
    """Call `put` with the entry of each point (None: a tombstone) at the time of `suffix`, in key
    order, which the memtable takes in half the time of no order."""
    value_tail = TERMINATOR + suffix + VALUE
    tombstone_tail = TERMINATOR + suffix + TOMBSTONE
    for key in sorted(points):
        value = points[key]
        escaped = key.replace(b"\x00", b"\x00\xff")
        if value is None:
            put(escaped + tombstone_tail, b"", family)
        else:
            put(escaped + value_tail, value, family)


def join_puts(
    points: Mapping[bytes, bytes | None], longest: int, places: bytes, op: int
) -> bytes | None:
    """The body of the change entry of `points`, with `places` in the middle and an `op` for each
    at the end (`kvstore.changes.entry`). None where one is a delete, or a value has more than
    `longest` bytes. All must be shorter than 2 GiB together."""
    keys, values = list(points), [value for value in points.values() if value is not None]
    if len(values) != len(keys) or any(len(value) > longest for value in values):
        return None
    offsets = [array("i", accumulate(map(len, each), initial=0)) for each in (keys, values)]
    return b"".join((*offsets, places, *keys, *values, bytes([op]) * len(keys)))


RULE_ANY: Final = 1
RULE_NO_VALUE: Final = 2
RULE_ID: Final = 3
RULE_SPAN: Final = 4
"""The rule of `survey` for a row, by its operation: anything, no value, a key of eight bytes and no
value, a value above the key. An operation with rule 0 is unknown."""


def survey(
    body: Buffer, count: int, is_sequenced: bool, rules: bytes, where: str
) -> tuple[int, int, int, int]:
    """Where the keys and the values of an entry of `count` rows end in its `body`
    (`kvstore.changes.entry`), how many rows have `RULE_ANY`, and how many that or `RULE_NO_VALUE`.

    Raises `CorruptionError` where any number of the body does not fit the others, or a row does
    not fit the rule that `rules`, of 256 bytes, has for its operation. After it, every reader may
    take the offsets as they are.
    """
    data = memoryview(body)
    offsets = 4 * (count + 1)
    keys_at = 2 * offsets + (4 * count if is_sequenced else 0)
    if count < 0 or len(data) < keys_at + count:
        raise CorruptionError(where, f"{len(data)} bytes for {count} rows")
    keys = np.frombuffer(data, "<i4", count + 1)
    values = np.frombuffer(data, "<i4", count + 1, offsets)
    keys_end = keys_at + int(keys[-1])
    values_end = keys_end + int(values[-1])
    if keys[0] or values[0] or keys[-1] < 0 or values[-1] < 0 or values_end + count != len(data):
        raise CorruptionError(where, "its offsets do not add up")
    if (keys[1:] < keys[:-1]).any() or (values[1:] < values[:-1]).any():
        raise CorruptionError(where, "its offsets do not ascend")
    if is_sequenced:
        places = np.frombuffer(data, "<i4", count, 2 * offsets)
        if (places < 0).any() or (places[1:] <= places[:-1]).any():
            raise CorruptionError(where, "the places of its rows do not ascend")
    asked = np.frombuffer(rules, np.uint8)[np.frombuffer(data, np.uint8, count, values_end)]
    plain = int(np.count_nonzero(asked == RULE_ANY))
    if plain == count:
        return keys_end, values_end, count, count
    empty = values[1:] == values[:-1]
    wrong = (asked == 0) | (asked > RULE_SPAN) | ((asked == RULE_NO_VALUE) & ~empty)
    wrong |= (asked == RULE_ID) & ~(empty & (keys[1:] - keys[:-1] == 8))
    for row in np.flatnonzero(asked == RULE_SPAN).tolist():
        start = data[keys_at + keys[row] : keys_at + keys[row + 1]]
        end = data[keys_end + values[row] : keys_end + values[row + 1]]
        wrong[row] = bytes(start) >= bytes(end)
    if wrong.any():
        first = int(np.argmax(wrong))
        problem = "does not fit" if asked[first] else "has the unknown"
        raise CorruptionError(where, f"row {first} {problem} operation {data[values_end + first]}")
    return keys_end, values_end, plain, plain + int(np.count_nonzero(asked == RULE_NO_VALUE))


def lz4_size(block: Buffer) -> int:
    """How many bytes an LZ4 block stands for, by its lengths alone; -1 where it is cut short.

    A decoder that is told more leaves the rest of its output as memory happened to be.
    """
    data = bytes(block)
    at = size = 0
    while at < len(data):
        token = data[at]
        literals, at = _lz4_length(data, at + 1, token >> 4)
        at += literals
        size += literals
        if at >= len(data):
            return size if at == len(data) else -1
        matched, at = _lz4_length(data, at + 2, token & 15)
        size += matched + 4
    return -1


def _lz4_length(data: bytes, at: int, length: int) -> tuple[int, int]:
    """A length whose first four bits are `length`, and where it ends: behind `data` if cut short"""
    if length < 15:
        return length, at
    while at < len(data):
        length += data[at]
        at += 1
        if data[at - 1] != 255:
            return length, at
    return length, len(data) + 1


def cut(offsets: memoryview, data: Buffer) -> list[bytes]:
    """What `join` has joined. Raises `CorruptionError` where `offsets` are none of `data`."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    try:
        column = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        what = "its offsets do not ascend within its bytes"
        raise CorruptionError("a column of an entry", what) from error
    items: list[bytes] = column.to_pylist()  # 40 ns an item; slicing costs 90
    return items


def tuples(kind: type[T], count: int, fields: Sequence[Any]) -> Iterator[T]:
    """So many of `kind`, which is a named tuple: a field that is a list has an item for each, any
    other is the same in all. What they hold must not come to refer to them: what is compiled does
    not show them to the cyclic collector."""
    columns = [field if type(field) is list else repeat(field, count) for field in fields]
    # `_make` without its Python frame.
    return map(tuple.__new__, repeat(kind), zip(*columns, strict=True))  # type: ignore[arg-type]


def join(items: Sequence[bytes]) -> tuple[bytes, bytes] | None:
    """The two buffers of an Arrow binary array: offsets, and the items one behind the other.
    None where they are too long for one."""
    offsets = list(accumulate(map(len, items), initial=0))
    if offsets[-1] > _BUFFER_BYTES_MAX:
        return None
    return array("i", offsets).tobytes(), b"".join(items)
