"""Entries of `data` in columns: keys, suffixes and kinds, encoded at once.

    entry := | framed user key | complemented timestamp u64 | kind u8 | -> value

`kvstore/codec/keys.py` defines the bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.codec.keys import TOMBSTONE, U64_MAX, VALUE
from kvstore.codec.ordered import TERMINATOR


def suffixes_of(times: npt.NDArray[np.int64]) -> bytes:
    """The suffixes of versions at these times, one after the other."""
    return (U64_MAX - times.astype("uint64")).astype(">u8").tobytes()


def kinds_of(is_put: pa.Array) -> bytes:
    """The kinds of versions, each a put or a delete."""
    puts = is_put.to_numpy(zero_copy_only=False)
    return np.where(puts, VALUE[0], TOMBSTONE[0]).astype(np.uint8).tobytes()


def version_prefixes(keys: pa.Array, times: npt.NDArray[np.int64]) -> pa.Array:
    """The stored keys of versions without their kinds. They sort by key, and then newest first."""
    data = pa.py_buffer(suffixes_of(times))
    suffixes = pa.Array.from_buffers(pa.binary(8), len(times), [None, data]).cast(pa.binary())
    escaped = pc.replace_substring(keys, b"\x00", b"\x00\xff")
    terminator = pa.scalar(TERMINATOR, pa.binary())
    return pc.binary_join_element_wise(escaped, terminator, suffixes, b"")


def with_kinds(prefixes: pa.Array, is_put: pa.Array) -> pa.Array:
    """The stored keys of versions, each a put or a delete."""
    put, delete = pa.scalar(VALUE, pa.binary()), pa.scalar(TOMBSTONE, pa.binary())
    return pc.binary_join_element_wise(prefixes, pc.if_else(is_put, put, delete), b"")
