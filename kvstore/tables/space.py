"""Where tables lie among the keys of a store.

The rows of one table lie together, in the order of their keys. The entries of each index follow.

    name of a table := | reserved | 00 | "kvstore.tables" 00 | name in UTF-8 |    see definition.py
    row             := | reserved | table | 00 | tuple of the key columns |
    index entry     := | reserved | table | index | tuple of the index columns | tuple of the key |

    reserved := ff ff ff ff ff ff ff ff ff     nine bytes: see kvstore.span
    table    := number u8                      from 1 to 239
              | f0 | number u32 |              from 240 on, big-endian
    index    := number u8                      from 1 to 255
"""

from __future__ import annotations

from typing import Final

from kvstore.errors import CorruptionError
from kvstore.reserve import CATALOGUE, FIRST_ROW
from kvstore.span import RESERVED

TABLE_NUMBER_MAX: Final = (1 << 32) - 1
INDEX_NUMBER_MAX: Final = 255

_WIDE: Final = 0xF0
_ROWS: Final = b"\x00"


def definition_key(name: str) -> bytes:
    """The key of the definition of a table."""
    return CATALOGUE + name.encode()


def name_of(key: bytes) -> str:
    """The table whose definition has this key."""
    try:
        return key.removeprefix(CATALOGUE).decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"key {key.hex()}", "the name of a table is no text") from error


def table_prefix(number: int) -> bytes:
    """The beginning of all keys of a table."""
    if number < _WIDE:
        return RESERVED + bytes([number])
    return RESERVED + bytes([_WIDE]) + number.to_bytes(4, "big")


def rows_prefix(number: int) -> bytes:
    """The beginning of the keys of a table's rows."""
    return table_prefix(number) + _ROWS


def is_entry(key: bytes) -> bool:
    """Whether a key is an entry of an index: a key of tables that is neither a row nor a
    definition."""
    if not key.startswith(RESERVED) or key < FIRST_ROW:
        return False
    at = len(RESERVED)
    at += 5 if key[at] == _WIDE else 1
    return key[at : at + 1] > _ROWS


def index_prefix(number: int, index: int) -> bytes:
    """The beginning of the entries of an index."""
    return table_prefix(number) + bytes([index])
