"""The blocks of sorted files and of packed columns: their keys, and their sizes.

The keys of a sorted file's block are cut: each names how many bytes it shares with the key before
it (`kvstore.engine.sorted_file` has the form). A block of a stranger may tell anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Buffer

from kvstore.codec.keys import TAIL_BYTES
from kvstore.codec.ordered import is_framed, unframe_all
from kvstore.codec.varint import read_varint
from kvstore.loops.contract import BLOCK_KEYS_BYTES_MAX


def block_keys(
    contents: bytes, suffix: bytes, longest: int, most: int, values: list[bytes] | None = None
) -> list[bytes]:
    """The keys of a block of a sorted file, ascending, each without the `suffix` that it must end
    with. At least one. Their values are added to `values`.

    Raises `ValueError` at damage, and if the block has a key above `longest` bytes, more than
    `most` keys from one whole key to the next, or an entry that begins behind the first MiB.
    """
    keys, key, at, run = list[bytes](), b"", 0, 0
    end, whole = _whole_keys(contents)
    while at < end:
        if at > BLOCK_KEYS_BYTES_MAX:
            raise ValueError("a block has more entries than RocksDB puts into one")
        first = at
        try:
            shared, at = read_varint(contents, at)
            fresh, at = read_varint(contents, at)
            size, at = read_varint(contents, at)
        except IndexError:
            raise ValueError("a block ends within an entry") from None
        start = at + fresh
        if shared > len(key) or start + size > end or shared + fresh > longest:
            raise ValueError("an entry does not fit its block")
        run += 1
        if whole and first == whole[-1]:
            if shared:
                raise ValueError("a key is cut where a block tells a whole one")
            whole.pop()
            run = 1
        if run > most:
            raise ValueError("more keys are cut than RocksDB cuts behind a whole one")
        key = key[:shared] + contents[at:start]
        at = start + size
        found = key[: len(key) - len(suffix)]
        if not key.endswith(suffix):
            raise ValueError(f"an entry is of another kind than {suffix.hex()}")
        if keys and found <= keys[-1]:
            raise ValueError("its keys do not ascend")
        keys.append(found)
        if values is not None:
            values.append(contents[start:at])
    if whole:
        raise ValueError("a block tells a whole key where no entry begins")
    return keys


def block_handles(index: bytes, places: Sequence[int]) -> list[tuple[int, int, int]]:
    """The blocks that the entries of an index name which begin at `places`: offset, size, and
    where the entry ends. Raises `ValueError` at damage."""
    handles = []
    for at in places:
        try:
            shared, at = read_varint(index, at)
            fresh, at = read_varint(index, at)
            offset, at = read_varint(index, at + fresh)
            size, at = read_varint(index, at)
        except IndexError:
            raise ValueError("an index ends within an entry") from None
        if shared:
            raise ValueError("a key of an index is cut")
        handles.append((offset, size, at))
    return handles


def referring_keys(stored: Sequence[bytes], reference: bytes) -> list[bytes]:
    """The user keys of those stored keys whose tails refer to an import. Raises `ValueError` if
    one of them is not framed."""
    stems = [key[:-TAIL_BYTES] for key in stored if key[-TAIL_BYTES:-1] == reference]
    for stem in stems:
        if not is_framed(stem):
            raise ValueError(f"{stem[:64].hex()} is not a framed key")
    return unframe_all(stems)


def _whole_keys(contents: bytes) -> tuple[int, list[int]]:
    """Where the entries of a block end, and where those begin whose keys are whole, the last one
    first."""
    count = int.from_bytes(contents[-4:], "little")
    end = len(contents) - 4 * (count + 1)
    if end <= 0 or not count:
        raise ValueError("a block has no entries")
    return end, memoryview(contents)[end:-4].cast("I").tolist()[::-1]


def lz4_size(block: Buffer) -> int:
    """The number of bytes that an LZ4 block decompresses to, added up from the lengths inside it;
    -1 where the block is cut short.

    A decoder that is told a larger size leaves uninitialized memory at the end of its output.
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
    """A length whose first four bits are `length`, and the place behind it. The place is behind
    the end of `data` where the length is cut short."""
    if length < 15:
        return length, at
    while at < len(data):
        length += data[at]
        at += 1
        if data[at - 1] != 255:
            return length, at
    return length, len(data) + 1
