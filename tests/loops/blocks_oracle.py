"""The loops over blocks, and the check of change entries, once more in plain Python: what the
compiled loops must answer to any bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import Buffer

from kvstore.codec.keys import TAIL_BYTES, is_framed, unframe_all
from kvstore.codec.varint import read_varint
from kvstore.errors import CorruptionError
from kvstore.loops.shapes import (
    BLOCK_KEYS_BYTES_MAX,
    RULE_ANY,
    RULE_ID,
    RULE_NO_VALUE,
    RULE_SPAN,
)


def block_keys(
    contents: bytes, suffix: bytes, longest: int, most: int, values: list[bytes] | None = None
) -> list[bytes]:
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


def unpacked(block: bytes) -> bytes | None:
    """The bytes of an LZ4 block by its description; None where it ends within a sequence, or refers
    to bytes before its beginning."""
    data, at = bytearray(), 0
    try:
        while True:
            token, at = block[at], at + 1
            literals, at = _lz4_length(block, at, token >> 4)
            if at + literals > len(block):
                return None
            data += block[at : at + literals]
            at += literals
            if at == len(block):
                return bytes(data)
            back = block[at] | block[at + 1] << 8
            matched, at = _lz4_length(block, at + 2, token & 15)
            if not 0 < back <= len(data):
                return None
            for _ in range(matched + 4):
                data.append(data[-back])
    except IndexError:
        return None


def _lz4_length(block: bytes, at: int, length: int) -> tuple[int, int]:
    """A length whose first four bits are `length`, and the place behind it."""
    if length == 15:
        while True:
            length += block[at]
            at += 1
            if block[at - 1] != 255:
                break
    return length, at


def survey(
    body: Buffer, count: int, is_sequenced: bool, rules: bytes, where: str
) -> tuple[int, int, int, int]:
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
    ops = np.frombuffer(data, np.uint8, count, values_end)
    asked = np.frombuffer(rules, np.uint8)[ops]
    plain = int(np.count_nonzero(asked == RULE_ANY))
    if plain < count:
        wrong = _breaks_rule(asked, keys, values, data[keys_at:keys_end], data[keys_end:values_end])
        if wrong.any():
            first = int(np.argmax(wrong))
            problem = "does not fit" if asked[first] else "has the unknown"
            raise CorruptionError(where, f"row {first} {problem} operation {ops[first]}")
    return keys_end, values_end, plain, plain + int(np.count_nonzero(asked == RULE_NO_VALUE))


def _breaks_rule(
    asked: Any, keys: Any, values: Any, key_bytes: memoryview, value_bytes: memoryview
) -> Any:
    """For each row, whether its key and value break the rule `asked` of it."""
    empty = values[1:] == values[:-1]
    wrong = (asked == 0) | (asked > RULE_SPAN) | ((asked == RULE_NO_VALUE) & ~empty)
    wrong |= (asked == RULE_ID) & ~(empty & (keys[1:] - keys[:-1] == 8))
    for row in np.flatnonzero(asked == RULE_SPAN).tolist():
        start = key_bytes[keys[row] : keys[row + 1]]
        end = value_bytes[values[row] : values[row + 1]]
        wrong[row] = bytes(start) >= bytes(end)
    return wrong
