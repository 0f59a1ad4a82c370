"""LZ4 blocks with their size stored beside them; the stored size is checked before use.

The decoder allocates as many bytes as the caller says, and does not clear bytes that the block
leaves unfilled. So `unpack_block` adds up the lengths inside the block first: a wrong size costs no
memory, and a caller never gets bytes that were not packed.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from typing_extensions import Buffer

from kvstore.errors import CorruptionError
from kvstore.loops.blocks import lz4_size

CODEC: Final = "lz4_raw"
"""The name by which Arrow packs and unpacks a block."""


def unpack_block(block: Buffer, size: int, *, where: str) -> memoryview:
    """The `size` bytes of a block. Raises `CorruptionError` where the block has another size."""
    found = lz4_size(block)
    if found != size:
        raise CorruptionError(where, f"a block of {found} bytes, not {size}")
    try:
        return memoryview(pa.decompress(block, decompressed_size=size, codec=CODEC))
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(where, f"it does not decompress: {error}") from error
