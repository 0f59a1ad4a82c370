"""LZ4 blocks whose size is stored beside them, opened without believing it.

The decoder allocates as many bytes as it is told, and leaves those that the block does not fill as
memory happened to be. So the lengths inside the block are added up first: a size that is not
theirs costs no memory, and nothing is handed out that was not packed.
"""

from __future__ import annotations

import pyarrow as pa
from typing_extensions import Buffer

from kvstore.errors import CorruptionError
from kvstore.loops import lz4_size

_CODEC = "lz4_raw"


def pack_block(data: bytes) -> bytes:
    """The LZ4 block of `data`. O(bytes)."""
    packed: bytes = pa.compress(data, codec=_CODEC, asbytes=True)
    return packed


def unpack_block(block: Buffer, size: int, *, where: str) -> memoryview:
    """The `size` bytes of a block. Raises `CorruptionError` where it does not hold as many."""
    found = lz4_size(block)
    if found != size:
        raise CorruptionError(where, f"a block of {found} bytes, not {size}")
    try:
        return memoryview(pa.decompress(block, decompressed_size=size, codec=_CODEC))
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(where, f"it does not decompress: {error}") from error
