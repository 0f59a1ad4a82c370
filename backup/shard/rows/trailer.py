"""The trailer of a part: digests of the pieces that a reader may fetch alone.

    part    := "PAR1" | block ... | filter ... | trailer | footer | its length u32 | "PAR1"
    trailer := entry ... | start of the tail u64 | blocks u32 | "KVT3" | digest 16
    entry   := start of the block u64 | digest of the block 16

A *block* is a row group. The *tail* is the rest of the part behind the last block. It begins with
the filters, and its digest covers all of it but itself. Numbers are little-endian. Parquet's
readers go by the footer, and see neither trailer nor gap.

Invariants
1. Blocks follow each other without a gap, from byte 4 to the tail.
2. A reader that has checked the tail knows the digest of each block. So every byte that it fetches
   is checked before it is believed, the headers of pages included.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvstore.backup.shard.rows.pages import MAGIC, TAIL_BYTES, footer_bytes
from kvstore.base.digest import DIGEST_BYTES, short_digest
from kvstore.limits import ROW_GROUPS_READ_MAX

_ENTRY = struct.Struct("<Q16s")
_END = struct.Struct("<QI4s16s")
TRAILER_BYTES: Final = _END.size
"""Bytes of the last fields of a trailer, which tell where the tail begins."""
_MARK: Final = b"KVT3"


class PartBlock(NamedTuple):
    """The place of a row group in a part, and the digest of its bytes."""

    start: int
    end: int
    digest: bytes

    def is_intact(self, data: bytes) -> bool:
        """Whether `data` are the bytes of the block."""
        return len(data) == self.end - self.start and short_digest(data) == self.digest


class Trailer(NamedTuple):
    """Where the tail of a part begins, and its blocks."""

    start: int
    blocks: Sequence[PartBlock]


def sealed(data: bytes, starts: Sequence[int], tail: int, *, footer: int) -> bytes:
    """The end of a part: the trailer, and what stands behind it.

    `data` is a Parquet file, whose row groups begin at `starts` and end at `tail`, and whose
    footer begins at `footer`.
    """
    view = memoryview(data)
    entries = [
        _ENTRY.pack(start, short_digest(view[start:end]))
        for start, end in pairwise([*starts, tail])
    ]
    head = b"".join(entries) + _END.pack(tail, len(starts), _MARK, b"")[:-DIGEST_BYTES]
    found = short_digest(view[tail:footer], head, view[footer:])
    return head + found + bytes(view[footer:])


def bytes_before(end: bytes, *, size: int) -> int | None:
    """How many bytes the tail of a part of `size` bytes has, by its last bytes `end`.

    None where `end` shows no trailer: the part is older, or `end` is shorter than the footer and 32
    bytes.
    """
    at = _end_at(end, size)
    if at is None:
        return None
    start, _, mark, _ = _END.unpack_from(end, at)
    if mark != _MARK:
        return None
    if not len(MAGIC) <= start <= size - (len(end) - at):
        raise ValueError("its tail begins outside of it")
    return int(size - start)


def read_trailer(tail: bytes, *, size: int) -> Trailer:
    """The trailer in the `tail` of a part of `size` bytes. Raises `ValueError` if it is damaged."""
    at = _end_at(tail, size)
    start, count, mark, digest = (0, 0, b"", b"") if at is None else _END.unpack_from(tail, at)
    if at is None or mark != _MARK or size - len(tail) != start:
        raise ValueError("its trailer is gone")
    if count > ROW_GROUPS_READ_MAX or count * _ENTRY.size > at:
        raise ValueError(f"its trailer declares {count} row groups")
    ends = at + _END.size - DIGEST_BYTES
    view = memoryview(tail)
    if short_digest(view[:ends], view[ends + DIGEST_BYTES :]) != digest:
        raise ValueError("its tail fails the checksum")
    entries = list(_ENTRY.iter_unpack(view[at - count * _ENTRY.size : at]))
    edges = [*(begin for begin, _ in entries), start]
    if edges[0] != len(MAGIC) or not all(low < high for low, high in pairwise(edges)):
        raise ValueError("its row groups are not in order")
    blocks = [
        PartBlock(low, high, found)
        for (low, high), (_, found) in zip(pairwise(edges), entries, strict=True)
    ]
    return Trailer(start, blocks)


def _end_at(end: bytes, size: int) -> int | None:
    """Where in `end` the last fields of a trailer would stand; None where `end` is too short."""
    footer = footer_bytes(end[-TAIL_BYTES:], size=size)
    at = len(end) - TAIL_BYTES - footer - _END.size
    return at if at >= 0 else None
