"""The contract of the loops: the shapes of their arguments and results, and constants.

The format of stored keys is not here: the loops take its constants from `kvstore.codec`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias

from typing_extensions import Buffer


class Absent(Enum):
    """The answer for a key that has no entry. None is another answer: the key was deleted."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
Found: TypeAlias = "bytes | Literal[Absent.ABSENT] | None"

Buffers: TypeAlias = "tuple[int, Buffer, Buffer, Buffer, Buffer]"
"""Rows as Arrow columns: the row count, then offsets and bytes of the keys, and of the values."""

ARRAY_BYTES_MAX: Final = (1 << 31) - 1
"""The bytes that one Arrow binary array can hold: its offsets are signed integers of 32 bits."""

Nearby: TypeAlias = "tuple[bytes, bytes | None, list[bytes], list[int]]"
"""The range tombstones near a stored key: over the stored keys from the first bytes on and below
the second, if any, the newest between `bounds[i - 1]` and `bounds[i]` has the time `newest[i]`, 0
where there is none. All bounds are escaped user keys."""

ENTRY_HEAD: Final = struct.Struct("<IIIQQ")
"""The head of a change entry (`kvstore.changes.index`): version, codec and flags as one number, the
row count, the bytes of the body, the domain and the serial of the changeset."""

RULE_ANY: Final = 1
RULE_NO_VALUE: Final = 2
RULE_ID: Final = 3
RULE_SPAN: Final = 4
"""The rules by which `survey` checks a row, chosen by the row's operation: any key and value; no
value; a key of eight bytes and no value; a value above the key. An operation with rule 0 is
unknown."""

BLOCK_KEYS_BYTES_MAX: Final = 1 << 20
"""Where the last entry of a sorted file's block begins at most. RocksDB ends a block with the entry
that reaches `BLOCK_BYTES`."""

WINDOW_BYTES: Final = 128 << 10
"""Bytes of a sorted file that a pass reads at once. A read takes 1 us, as long as unpacking a
block."""

BLOCK_BYTES_MOST: Final = (1 << 30) + BLOCK_KEYS_BYTES_MAX
"""Bytes of a block of rows at most: one that RocksDB ends behind a value of the greatest size."""

INDEX_BYTES_MOST: Final = 1 << 30
"""Bytes of the index of a sorted file at most."""

STORED_KEY_BYTES_MOST: Final = (128 << 10) + 64
"""More than a stored key has: each of 64 KiB of a user key may be a zero, which takes two bytes."""

ROW_FORMAT: Final = 1
"""The version of the format of rows."""

SIGNED: Final = 0
UNSIGNED: Final = 1
DOUBLE: Final = 2
FRAMED: Final = 3
BOOLEAN: Final = 4
FIXED: Final = 5
WHOLE: Final = 6
"""How a column becomes elements of keys: eight bytes of a signed or unsigned integer or of a
double; bytes to frame; a byte that is 0 or 1; other bytes of a fixed number; the bytes of a
decimal as they are."""

CALLED: Final = 0
STORED: Final = 1
TEXT: Final = 2
TRUTH: Final = 3
INSTANT: Final = 4
LOCAL: Final = 5
"""The way from a stored value to a value of Python and back: a given function; no change; UTF-8; a
byte and a boolean; microseconds since the epoch and a datetime in UTC; the same and a datetime
without a zone."""

NODE_FIXED: Final = 0
NODE_VARYING: Final = 1
NODE_LIST: Final = 2
NODE_SLOTS: Final = 3
NODE_FIELDS: Final = 4
"""The nodes of a nested type: bytes of a fixed number; bytes; a list; a list of fixed size; a
struct."""

NestedNode: TypeAlias = "tuple[int, int, bool, int]"
"""A node of a nested type: its kind; its width in bytes, or the size of its lists; whether it takes
nulls; the number of nodes below it."""

NestedColumn: TypeAlias = "tuple[Buffer | None, int, Buffer | None, Buffer | None, int, int, int]"
"""The column of a node: bits of validity, None where no value is null; the first row; the bytes of
the values; their offsets, and the width of an offset in bytes; the number of rows; the offset of
the first value that the column below has."""

NestedMade: TypeAlias = "tuple[int, bytes | None, bytes, bytes | None]"
"""The column of a node that was made: the number of values; a byte for each, 0 for a null, None
where none is null; the bytes of the values; where their number varies, the offsets."""

KeyMade: TypeAlias = "tuple[int, int, bool, int, int, int, Callable[[Any], bytes]]"
"""A column of keys to make: its kind; the tag of its elements; whether they are flipped; its way
(`STORED`, ...); the least and the greatest integer that it takes; a function that makes the element
of any value."""

KeyRead: TypeAlias = "tuple[str | None, int, int, bool, int, int, Callable[[Any], Any] | None]"
"""A column of keys to read: its name, None if nobody asked for it; kind, tag, flip and width as in
`decode_keys`; its way; the function, if its way is `CALLED`."""

CellRead: TypeAlias = "tuple[str, int, str, int, Callable[[Any], Any] | None]"
"""A column of rows to read: its name; its place in the row; its letter in the module `struct`, `s`
for bytes; its way; the function, if its way is `CALLED`."""

INSTANT_LEAST: Final = -62_135_596_800_000_000
INSTANT_MOST: Final = 253_402_300_799_999_999
"""The first and the last datetime of Python, of the years 1 and 9999, in microseconds since the
epoch. A function is called for times outside."""

Column: TypeAlias = "tuple[int, Buffer | None, int, Buffer | None, Buffer | None]"
"""A column of values: their width in bytes, 0 if it varies; bits of validity, None where no value
is null; the first row; the bytes of the values; where it varies, the offsets of the values."""

FileRows: TypeAlias = "tuple[int, Column, Column, bytes, bytes | None, bool]"
"""Rows that go to a sorted file: how many there are; their keys and values; their suffixes; their
kinds; and whether the keys are framed. See `kvstore.loops.packing.Packer.add`."""

Made: TypeAlias = "Sequence[Any]"
"""The buffers of a column that was made: bits of validity, the bytes of the values, and where
their width varies, the offsets."""


KeyColumn: TypeAlias = (
    "tuple[int, int, bool, int, Buffer | None, int, Buffer | None, Buffer | None]"
)
"""A column of values that become elements of keys: its kind; the tag of its elements; whether they
are flipped; and the five items of `Column`."""

Keys: TypeAlias = "tuple[int, Buffer, Buffer]"
"""The number of keys, their offsets as integers of 32 bits, and their joined bytes."""


class Seeker(Protocol):
    """The methods of an engine's reader that a look-up calls."""

    def seek(self, key: bytes) -> None: ...
    def next(self) -> None: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes: ...


class BackSeeker(Seeker, Protocol):
    """The methods of a reader that a search for floors calls."""

    def seek_for_prev(self, key: bytes) -> None: ...
    def prev(self) -> None: ...


class Walker(Protocol):
    """The methods of a reader that a pass calls."""

    def next(self) -> None: ...
    def prev(self) -> None: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes: ...


Ahead: TypeAlias = "tuple[bytes, bool]"
"""A place to continue from: the first entry at or above the stored key, or, where the flag is set,
the last entry at or below it."""


class LimitNode(Protocol):
    """A node of the map of range tombstones (`kvstore.mvcc.fragments`): a pair or a longer tuple
    that begins with `keys` and `below`. The limit of a key is found by taking
    `below[bisect_right(keys, key)]` once more than the map is deep. Two items of the last tuple
    follow: the times of range tombstones from each of its keys on, and the times of the ones over
    all its keys, newest first. No time is in both."""

    def __getitem__(self, index: int, /) -> Any: ...


class Frontiers(Protocol):
    """The fields of the timeline that a point read compares with."""

    @property
    def since(self) -> int: ...
    @property
    def floor(self) -> int: ...
    @property
    def upper(self) -> int: ...
    @property
    def is_healthy(self) -> bool: ...


class OutOfOrder(Exception):  # noqa: N818  # a signal to the caller, who knows the user's keys
    """The key at `index` of the rows to add is not above the one before it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def let_others_run() -> None:
    """Return at once. Loops over many keys call this now and then: the call of a Python function
    gives other threads their turn and delivers signals."""


FIELD: Final = 0
UNQUOTED: Final = 1
QUOTED: Final = 2
CLOSED: Final = 3
RETURN: Final = 4
"""Where in a record of CSV a byte stands: see `kvstore.loops.records`."""
