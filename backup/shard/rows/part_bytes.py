"""The bytes of a part, as Parquet's reader fetches them, each column checked before it is decoded.

A small part is fetched whole and its checksum is compared. Of a large part only the requested
ranges are fetched. Its tail is checked by the digest in it, and the pages of a column when they are
fetched (see `pages`). A reader of single keys asks for whole blocks instead, which are checked by
their digests (see `trailer`).

Invariant: each call of `opened` gives a file with a position of its own. So two threads may read
one part, each through a file of its own.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Sequence
from itertools import islice

import pyarrow as pa

from kvstore.backup.shard.remedies import PART
from kvstore.backup.shard.rows.pages import TAIL_BYTES, Chunk, footer_bytes, require_pages
from kvstore.backup.shard.rows.trailer import (
    TRAILER_BYTES,
    PartBlock,
    Trailer,
    bytes_before,
    read_trailer,
)
from kvstore.backup.shard.state.trace import ShardPart
from kvstore.base.digest import is_digest
from kvstore.errors import CorruptionError
from kvstore.limits import PART_TAIL_BYTES
from kvstore.storage.contract import Blob


class MissingPartError(CorruptionError):
    """A part's blob is gone. Only a reader whose lease has expired may meet this without damage."""


def part_bytes(blob: Blob, part: ShardPart) -> bytes:
    """All bytes of a part, checked. Raises `MissingPartError` or `CorruptionError`."""
    data = blob.patience.over(lambda: blob.get(part.name))
    if data is None:
        raise MissingPartError(f"part {part.name}", "its blob is gone", PART)
    if len(data) != part.size or not is_digest(part.checksum, data):
        problem = f"its {len(data)} bytes fail the checksum"
        raise CorruptionError(f"part {part.name}", problem, PART)
    return data


class WholePart:
    """All bytes of a part."""

    def __init__(self, part: ShardPart, data: bytes) -> None:
        self.part = part
        self._data = data

    def opened(self) -> pa.NativeFile:
        """A file to hand to Parquet's reader."""
        return pa.BufferReader(self._data)

    def end(self) -> pa.NativeFile:
        """A file with the last bytes of the part, the footer among them."""
        return self.opened()

    def footer(self) -> bytes:
        """Its footer. Raises `ValueError` where it cannot be one."""
        length = footer_bytes(self._data[-TAIL_BYTES:], size=len(self._data))
        return self._data[-length - TAIL_BYTES : -TAIL_BYTES]

    has_trailer = None
    """Unknown: the checksum covers all bytes."""

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise `ValueError` unless the pages are as large as the footer says."""
        _require_chunks(chunks, memoryview(self._data), 0)

    def tail_bytes(self, start: int, length: int) -> bytes:
        """Bytes behind the row groups."""
        return self._data[start : start + length]


def _require_chunks(chunks: Sequence[Chunk], data: memoryview, start: int) -> None:
    """Check the chunks in `data`, which begins at `start` in the part. A chunk that begins before
    `data` or ends behind it is refused: Parquet's reader asks for whole chunks."""
    end = start + len(data)
    first = bisect.bisect_left(chunks, start, key=lambda chunk: chunk.start + chunk.size - 1)
    for chunk in islice(chunks, first, None):
        if chunk.start >= end:
            return
        if chunk.start < start or chunk.start + chunk.size > end:
            raise ValueError(f"column {chunk.column} is not where its footer says")
        require_pages(chunk, data[chunk.start - start :][: chunk.size])


class FetchedPart:
    """A blob that is fetched range by range. A column is checked when it is fetched.

    With `by_block` whole row groups are fetched, each by one request, and checked by their digests.
    The last one is kept.
    """

    def __init__(self, blob: Blob, part: ShardPart, *, by_block: bool = False) -> None:
        """Fetches the tail. Raises `ValueError` if it is damaged."""
        self.part = part
        self._blob = blob
        self._chunks: Sequence[Chunk] = ()
        self._tail = b""
        self._tail_at = max(part.size - PART_TAIL_BYTES, 0)
        self._tail = self._fetched(self._tail_at, part.size - self._tail_at)
        self._trailer = self._checked_tail()
        self._by_block = by_block and self._trailer is not None
        self._block: tuple[PartBlock, bytes] | None = None

    @property
    def has_trailer(self) -> bool:
        """Whether the tail was checked."""
        return self._trailer is not None

    def _checked_tail(self) -> Trailer | None:
        size = self.part.size
        least = footer_bytes(self._tail[-TAIL_BYTES:], size=size) + TAIL_BYTES + TRAILER_BYTES
        self._reach_back(min(least, size))
        length = bytes_before(self._tail, size=size)
        if length is None:
            return None
        self._reach_back(length)
        return read_trailer(self._tail[-length:], size=size)

    def _reach_back(self, length: int) -> None:
        """Have the last `length` bytes of the part."""
        at = self.part.size - length
        if at < self._tail_at:
            self._tail = self._fetched(at, self._tail_at - at) + self._tail
            self._tail_at = at

    def opened(self) -> pa.NativeFile:
        """A file to hand to Parquet's reader."""
        return pa.PythonFile(_FetchedFile(self), mode="r")

    def end(self) -> pa.NativeFile:
        """A file with the last bytes of the part, the footer among them."""
        return pa.BufferReader(self._tail)

    def footer(self) -> bytes:
        """Its footer. Raises `ValueError` where it cannot be one."""
        size = self.part.size
        length = footer_bytes(self._tail[-TAIL_BYTES:], size=size)
        return self._fetched(size - length - TAIL_BYTES, length)

    def check(self, chunks: Sequence[Chunk]) -> None:
        """From now on raise `ValueError` unless pages are as large as the footer says."""
        self._chunks = chunks

    def checked(self, at: int, length: int) -> bytes:
        """The bytes from `at` on. Raises `ValueError` where `check` says so."""
        if self._by_block and (block := self._block_with(at, length)) is not None:
            return self._block_bytes(block)[at - block.start :][:length]
        data = self._fetched(at, length)
        if self._chunks:
            _require_chunks(self._chunks, memoryview(data), at)
        return data

    def tail_bytes(self, start: int, length: int) -> bytes:
        """Bytes behind the row groups."""
        return self._fetched(start, length)

    def _block_with(self, at: int, length: int) -> PartBlock | None:
        """The block that has all of these bytes."""
        assert self._trailer is not None
        blocks = self._trailer.blocks
        found = blocks[bisect.bisect_right(blocks, at, key=lambda block: block.start) - 1]
        return found if found.start <= at and at + length <= found.end else None

    def _block_bytes(self, block: PartBlock) -> bytes:
        if self._block is None or self._block[0] != block:
            data = self._fetched(block.start, block.end - block.start)
            if not block.is_intact(data):
                raise ValueError(f"the row group at byte {block.start} fails the checksum")
            if self._chunks:
                _require_chunks(self._chunks, memoryview(data), block.start)
            self._block = block, data
        return self._block[1]

    def _fetched(self, at: int, length: int) -> bytes:
        if self._tail and at >= self._tail_at:
            return self._tail[at - self._tail_at :][:length]
        name = self.part.name
        data = self._blob.patience.over(lambda: self._blob.get_range(name, start=at, length=length))
        if data is None:
            raise MissingPartError(f"part {name}", "its blob is gone", PART)
        return data


class _FetchedFile(io.RawIOBase):
    """A fetched part as a seekable file."""

    def __init__(self, source: FetchedPart) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = self._source.part.size
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = max(self._source.part.size - self._at, 0) if size < 0 else size
        data = self._source.checked(self._at, length)
        self._at += len(data)
        return data
