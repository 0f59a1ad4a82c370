"""The bytes of a part: a sorted Parquet file that anything can read, and that this project reads
piece by piece, without believing what its headers declare.

    part       := "PAR1" | row group ... | filter ... | trailer | footer | its length u32 | "PAR1"
    trailer    := entry ... | start of the tail u64 | row groups u32 | "KVT1" | digest 16
    entry      := start of the row group u64 | digest of the row group 16

    columns    as the schema of versions says, in the order of its rows (recorded as sorting
               columns); also `until` (see below)
    row group  about `PART_BLOCK_BYTES` as it is stored, which a reader of one key fetches; with
               min/max statistics of key, time and op
    pages      zstd at any level, each with a checksum; in a small part only pages of keys and
               values are compressed
    filters    Bloom filters of the keys of each row group, in parts that another batch lies below,
               and that a reader of one key does not fetch whole
    footer     Parquet's own, with kvstore.part = "1" (format version), kvstore.rule = "versions"

The *tail* is the rest of the part behind the last row group. It begins with the filters, and the
digest in the trailer covers all of it but itself. The trailer's numbers are little-endian.
Parquet's readers go by the footer, and see neither trailer nor gap.

Invariants
1. A part is written once, under a name that is never used again, so retrying its upload is safe.
2. Bounds (`key_min`, `key_max`, times) hold for every row; they may be wider, never narrower.
   A reader skips parts and row groups by them, so too narrow a bound would be a wrong answer.
3. Every read is checked: a small part by its checksum, a large part page by page or by the digests
   of its row groups.
4. Row groups follow each other without a gap, from byte 4 to the tail. A reader that has checked
   the tail knows the digest of each.

The column `until` says when a version stops being the newest of its key:

    until int64    of a put or delete: the timestamp of the next newer put or delete of its key in
                   the same part; null where there is none, and at range tombstones

The rows of a part that are alive at t are then a filter, which any program can apply to rows in any
order: `op = 1 and timestamp <= t and (until is null or until > t)`, and no newer range tombstone
covers the key. Where a key's versions lie in two parts, the older versions do not know the newer:
look at the parts' bounds before relying on the filter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.backup.shard.rows.rules import ORDER, VERSIONS_SCHEMA
from kvstore.backup.shard.state.state import RULE
from kvstore.base.digest import DIGEST_BYTES, short_digest
from kvstore.codec.varint import read_varint
from kvstore.limits import (
    GROUP_BYTES_READ_MAX,
    GROUP_ROWS_READ_MAX,
    PAGE_HEADER_BYTES_MAX,
    PART_FOOTER_BYTES_MAX,
    PART_WHOLE_BYTES_BY_BLOCK_MAX,
    PART_WHOLE_BYTES_MAX,
    ROW_GROUPS_READ_MAX,
)

MAGIC: Final = b"PAR1"
TAIL_BYTES: Final = len(MAGIC) + 4
"""Bytes at a file's end: the length of the footer, and the magic."""

PART_FORMAT = b"1"
FORMAT_KEY = b"kvstore.part"
RULE_KEY = b"kvstore.rule"

UNTIL: Final = pa.field("until", pa.int64())
PART_SCHEMA: Final = VERSIONS_SCHEMA.append(UNTIL).with_metadata(
    {FORMAT_KEY: PART_FORMAT, RULE_KEY: RULE.encode()}
)
SORTING: Final = [
    pq.SortingColumn(PART_SCHEMA.get_field_index(name), descending=way == "descending")
    for name, way in ORDER
]


def whole_bytes_max(*, by_block: bool) -> int:
    """The size up to which a part is fetched whole: by a reader of single keys if `by_block`."""
    if by_block:
        return min(PART_WHOLE_BYTES_BY_BLOCK_MAX, PART_WHOLE_BYTES_MAX)
    return PART_WHOLE_BYTES_MAX


# --------------------------------------------------------------------------------------------------
# The trailer: digests of the pieces that a reader may fetch alone.

_ENTRY = struct.Struct("<Q16s")
_END = struct.Struct("<QI4s16s")
TRAILER_BYTES: Final = _END.size
"""Bytes of the last fields of a trailer, which tell where the tail begins."""
_MARK: Final = b"KVT1"


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


def tail_bytes(end: bytes, *, size: int) -> int | None:
    """How many bytes the tail of a part of `size` bytes has, by its last bytes `end`, which hold
    its footer and the last fields of its trailer. None where these are no trailer of this format.
    """
    at = _end_at(end, size)
    start, _, mark, _ = _END.unpack_from(end, at)
    if mark != _MARK:
        return None
    if not len(MAGIC) <= start <= size - (len(end) - at):
        raise ValueError("its tail begins outside of it")
    return int(size - start)


def read_trailer(tail: bytes, *, size: int) -> Trailer:
    """The trailer in the `tail` of a part of `size` bytes. Raises `ValueError` if it is damaged."""
    at = _end_at(tail, size)
    start, count, mark, digest = _END.unpack_from(tail, at)
    if mark != _MARK or size - len(tail) != start:
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


def _end_at(end: bytes, size: int) -> int:
    """Where in `end` the last fields of the trailer stand. Raises `ValueError` where they do not
    fit."""
    at = len(end) - TAIL_BYTES - footer_bytes(end[-TAIL_BYTES:], size=size) - _END.size
    if at < 0:
        raise ValueError("its trailer is gone")
    return at


# --------------------------------------------------------------------------------------------------
# What the headers declare, checked before Parquet's reader acts on it.
#
# Parquet states sizes four times: in the footer, for each row group, for each column chunk and in
# the header of each page. Parquet's reader allocates memory by the header of a page, so 9 kB of a
# hostile part could ask for gigabytes. An unknown codec or statistic ends the process. So the
# footer is read here first, and each number is held against the number above it.
#
#     footer  at most `PART_FOOTER_BYTES_MAX`; the columns of the format; rows as the state has them
#     group   1..`GROUP_ROWS_READ_MAX` rows; at most `GROUP_BYTES_READ_MAX` bytes, decoded
#     chunk   inside the file, one for each column, overlapping no other; plain or zstd
#     page    inside its chunk; plain bytes, or numbers by a dictionary that is inside its page
#
# pyarrow has no public way to do this: its limits bound the length of headers and not the sizes in
# them, no memory pool of it has a capacity, and page headers are not shown.
#
# Invariants
# 1. The footer declares at most `GROUP_BYTES_READ_MAX` for a row group, and a decoder allocates at
#    most a few times the declared bytes.
# 2. A problem is a `ValueError`, which the caller turns into an error that names the part.

_INT32, _INT64, _BYTE_ARRAY = 1, 2, 6
_WIDTHS = {_INT32: 4, _INT64: 8}
_REQUIRED, _OPTIONAL = 0, 1
_UNCOMPRESSED, _ZSTD = 0, 6
_PLAIN, _PLAIN_DICTIONARY, _RLE, _BIT_PACKED, _RLE_DICTIONARY = 0, 2, 3, 4, 8
_ENCODINGS = (_PLAIN, _PLAIN_DICTIONARY, _RLE, _BIT_PACKED, _RLE_DICTIONARY)
_NUMBER_ENCODINGS = (_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY)
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_HEADER_BYTES = 256
"""Bytes that nearly every header of a page fits into. To copy the bound for each page would take
longer than to decode it."""


class Chunk(NamedTuple):
    """The bytes of one column in one row group, as the footer declares them."""

    column: str
    kind: int
    start: int
    size: int
    decoded_bytes: int
    rows: int
    is_compressed: bool


class ParquetColumn(NamedTuple):
    """A column as the format has it."""

    name: str
    kind: int
    repetition: int


def footer_bytes(tail: bytes, *, size: int) -> int:
    """The length of the footer, from the last bytes of a file of `size` bytes."""
    length = int.from_bytes(tail[-TAIL_BYTES : -len(MAGIC)], "little")
    _require(tail[-len(MAGIC) :] == MAGIC, "it is no Parquet file, or cut short")
    _require(length <= PART_FOOTER_BYTES_MAX, f"it declares a footer of {length} bytes")
    _require(length <= size - TAIL_BYTES - len(MAGIC), "its footer is longer than it is")
    return length


def read_footer(data: bytes) -> Fields:
    """The footer in `data`, which holds nothing else."""
    footer, end = read_struct(data)
    _require(end == len(data), "more bytes stand behind its footer")
    _require(not footer.keys() & {8, 9}, "it is encrypted by Parquet's own means")
    return footer


def properties(footer: Fields) -> dict[bytes, bytes]:
    """The names and values that the footer carries for its readers."""
    return {_text(pair, 1): _text(pair, 2, b"") for pair in _listed(footer, 5, dict)}


def chunks_of(footer: Fields, schema: pa.Schema, *, rows: int, size: int) -> list[Chunk]:
    """The chunks of a part with `schema`, `rows` rows and `size` bytes, sorted by their place."""
    columns = [_column(field) for field in schema]
    _require_schema(footer, columns)
    groups = _listed(footer, 4, dict)
    _require(_number(footer, 3) == rows, f"it declares {_number(footer, 3)} rows, not {rows}")
    declared = sum(_number(group, 3) for group in groups)
    _require(declared == rows, f"its row groups declare {declared} rows, not {rows}")
    found = [chunk for group in groups for chunk in _group_chunks(group, columns)]
    found.sort(key=lambda chunk: chunk.start)
    end = len(MAGIC)
    for chunk in found:
        _require(chunk.start >= end, f"column {chunk.column} overlaps another")
        end = chunk.start + chunk.size
    _require(end <= size - TAIL_BYTES, "a column reaches beyond its end")
    return found


KeyFilters: TypeAlias = "Sequence[tuple[int, int] | None]"
"""For each row group the start and the length of the filter of its keys, None where it has none.
Empty where no row group has one."""


def filters_of(footer: Fields, chunks: Sequence[Chunk], *, size: int) -> KeyFilters:
    """Where the filters of the key column are; they stand behind all `chunks`."""
    end = max((chunk.start + chunk.size for chunk in chunks), default=0)
    found: list[tuple[int, int] | None] = []
    for group in _listed(footer, 4, dict):
        fields = _struct(_listed(group, 1, dict)[0], 3)
        if 14 not in fields or 15 not in fields:
            found.append(None)
            continue
        start, length = _number(fields, 14), _number(fields, 15)
        _require(end <= start <= start + length <= size, "a filter of keys is outside of the tail")
        found.append((start, length))
    return found if any(found) else []


def _column(field: pa.Field) -> ParquetColumn:
    kind = _BYTE_ARRAY
    if not pa.types.is_binary(field.type):
        kind = _INT64 if field.type.bit_width == 64 else _INT32
    return ParquetColumn(field.name, kind, _OPTIONAL if field.nullable else _REQUIRED)


def _require_schema(footer: Fields, columns: Sequence[ParquetColumn]) -> None:
    root, *leaves = _listed(footer, 2, dict) or [{}]
    _require(_number(root, 5) == len(leaves), "its columns are nested")
    found = [
        ParquetColumn(_text(leaf, 4).decode(errors="replace"), _number(leaf, 1), _number(leaf, 3))
        for leaf in leaves
        if not leaf.get(5)
    ]
    _require(found == list(columns), f"its columns are {', '.join(c.name for c in found)[:200]}")


def _group_chunks(group: Fields, columns: Sequence[ParquetColumn]) -> Iterator[Chunk]:
    rows, chunks = _number(group, 3), _listed(group, 1, dict)
    _require(0 < rows <= GROUP_ROWS_READ_MAX, f"it declares a row group of {rows} rows")
    _require(len(chunks) == len(columns), "a row group has other columns than the part")
    decoded = 0
    for fields, column in zip(chunks, columns, strict=True):
        _require(not fields.keys() & {8, 9}, "a column is encrypted by Parquet's own means")
        _require(not _text(fields, 1, b""), f"column {column.name} is in another file")
        chunk = _chunk(_struct(fields, 3), column, rows)
        decoded += chunk.decoded_bytes
        yield chunk
    _require(decoded <= GROUP_BYTES_READ_MAX, f"it declares a row group of {decoded} bytes")
    _require(_number(group, 2) == decoded, "the bytes of its columns are not its row group's")


def _chunk(fields: Fields, column: ParquetColumn, rows: int) -> Chunk:
    name = column.name
    _require(_number(fields, 1) == column.kind, f"column {name} is of another type than it says")
    _require(_listed(fields, 3, bytes) == [name.encode()], f"column {name} is under another name")
    codec, encodings = _number(fields, 4), _listed(fields, 2, int)
    _require(codec in (_UNCOMPRESSED, _ZSTD), f"column {name} is compressed by {codec}")
    _require(set(encodings) <= set(_ENCODINGS), f"column {name} has encodings {encodings[:9]}")
    for count in _listed(fields, 13, dict):
        _require(_number(count, 2) in _ENCODINGS, f"column {name} counts unknown encodings")
        _require(
            _number(count, 1) in (_DATA_PAGE, _DICTIONARY_PAGE), f"{name} counts unknown pages"
        )
    _require(_number(fields, 5) == rows, f"column {name} has {fields[5]} values of {rows}")
    _require_statistics(fields, column, rows)
    start = _number(fields, 9)
    # Older writers state the place 0 for a dictionary that is not there.
    start = min(start, _number(fields, 11, start) or start)
    decoded, size = _number(fields, 6), _number(fields, 7)
    return Chunk(name, column.kind, start, size, decoded, rows, codec != _UNCOMPRESSED)


def _require_statistics(fields: Fields, column: ParquetColumn, rows: int) -> None:
    """Raise unless bounds of numbers have the width of the numbers, and histograms a place for each
    level. Otherwise Parquet's reader would end the process."""
    sizes = _struct(fields, 16) if 16 in fields else {}
    for histogram, places in ((2, 1), (3, 1 + column.repetition)):
        counts = _listed(sizes, histogram, int)
        _require(len(counts) in (0, places), f"a histogram of {column.name} has {len(counts)}")
    if 12 not in fields:
        return
    statistics = _struct(fields, 12)
    for bound in (1, 2, 5, 6):
        if bound in statistics and column.kind in _WIDTHS:
            length = len(_text(statistics, bound))
            _require(length == _WIDTHS[column.kind], f"a bound of {column.name} is {length} bytes")
        _text(statistics, bound, b"")
    for count in (3, 4):
        _require(_number(statistics, count, 0) <= rows, f"{column.name} counts more than its rows")


def require_pages(chunk: Chunk, data: memoryview) -> None:
    """Raise `ValueError` unless the pages in the bytes of a chunk are as large as it declares.

    Costs about 20 us a page. A row group has about one page per column and megabyte.
    """
    at = values = decoded = 0
    while values < chunk.rows:
        fields, head = _page_header(data, at)
        kind, size, compressed = (_number(fields, field) for field in (1, 2, 3))
        begin, at = at, at + head + compressed
        _require(at <= len(data), "a page reaches beyond its column")
        decoded += head + size
        _require(decoded <= chunk.decoded_bytes, "its pages are larger than their column declares")
        _require(chunk.is_compressed or size == compressed, "a page declares two sizes")
        _require(4 in fields, "a page has no checksum")
        if kind == _DICTIONARY_PAGE:
            _require(not begin, "a dictionary stands behind other pages")
            _require_dictionary(chunk, _struct(fields, 7), size)
        else:
            _require(kind == _DATA_PAGE, f"a page is of kind {kind}")
            values += _values(chunk, _struct(fields, 5))
    _require(values == chunk.rows, "its pages have more values than rows")


def _page_header(data: memoryview, at: int) -> tuple[Fields, int]:
    """The header of the page that begins at `at`, and its length."""
    try:
        return read_struct(bytes(data[at : at + _HEADER_BYTES]))
    except ValueError:  # cut short: it has keys in its statistics
        return read_struct(bytes(data[at : at + PAGE_HEADER_BYTES_MAX]))


def _require_dictionary(chunk: Chunk, fields: Fields, size: int) -> None:
    # With a dictionary of texts each row of a few bits could stand for a long text.
    _require(chunk.kind in _WIDTHS, "bytes are encoded by a dictionary")
    count, encoding = _number(fields, 1), _number(fields, 2)
    _require(encoding in (_PLAIN, _PLAIN_DICTIONARY), f"a dictionary has the encoding {encoding}")
    _require(count * _WIDTHS[chunk.kind] <= size, "a dictionary declares more than it has")


def _values(chunk: Chunk, fields: Fields) -> int:
    encoding, levels = _number(fields, 2), (_number(fields, 3), _number(fields, 4))
    allowed = _NUMBER_ENCODINGS if chunk.kind in _WIDTHS else (_PLAIN,)
    _require(encoding in allowed, f"column {chunk.column} has the encoding {encoding}")
    _require(set(levels) <= {_RLE, _BIT_PACKED}, f"its levels have the encodings {levels}")
    count = _number(fields, 1)
    _require(count > 0, "a page has no values")
    return count


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(problem)


# --------------------------------------------------------------------------------------------------
# Filters of keys: a reader learns that a row group lacks a key without fetching the group.
#
# They are the split block Bloom filters of Parquet's own format, which Parquet's writer makes and
# other programs use too. Parquet's reader has no call that asks one, so they are asked here.
#
#     filter := header (Thrift) | block 32 bytes ...      a block is eight words u32, little-endian
#
# A key sets one bit in each word of one block. The upper half of its hash, XXH64, chooses the
# block, and the lower half the bits. A filter that lacks one of the bits lacks the key.

_SALTS: Final = (
    0x47B6137B,
    0x44974D91,
    0x8824AD5B,
    0xA2B7289D,
    0x705495C7,
    0x2DF1424B,
    0x9EFC4947,
    0x5C6BFB31,
)
_BLOCK_BYTES = 32
_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def may_have(data: bytes, key: bytes) -> bool:
    """Whether the filter in `data` may have `key`. False is certain.

    Raises `ValueError` if `data` holds no filter, or one of another kind.
    """
    header, at = read_struct(data)
    kinds = (_struct(header, field) for field in (2, 3, 4))
    if any(1 not in kind for kind in kinds) or _number(header, 1) != len(data) - at:
        raise ValueError("a filter of keys is of another kind, or cut short")
    count = (len(data) - at) // _BLOCK_BYTES
    if not count or (len(data) - at) % _BLOCK_BYTES:
        raise ValueError("a filter of keys has no whole blocks")
    found = xxh64(key)
    at += ((found >> 32) * count >> 32) * _BLOCK_BYTES
    low = found & 0xFFFFFFFF
    return all(
        int.from_bytes(data[at + 4 * place : at + 4 * place + 4], "little")
        >> ((low * salt & 0xFFFFFFFF) >> 27)
        & 1
        for place, salt in enumerate(_SALTS)
    )


@lru_cache(maxsize=4096)
def xxh64(data: bytes) -> int:
    """XXH64 of `data` with the seed 0, the hash of Parquet's filters. 4 us for a short key.

    Source: github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
    """
    at, size = 0, len(data)
    if size >= 32:
        lanes = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        while at + 32 <= size:
            for place in range(4):
                word = int.from_bytes(data[at : at + 8], "little")
                lanes[place] = _round(lanes[place], word)
                at += 8
        turned = zip(lanes, (1, 7, 12, 18), strict=True)
        found = sum(_turn(lane, by) for lane, by in turned) & _MASK
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        found = _P5
    found = (found + size) & _MASK
    while at + 8 <= size:
        found ^= _round(0, int.from_bytes(data[at : at + 8], "little"))
        found = (_turn(found, 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= size:
        found ^= int.from_bytes(data[at : at + 4], "little") * _P1 & _MASK
        found = (_turn(found, 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        found ^= byte * _P5 & _MASK
        found = _turn(found, 11) * _P1 & _MASK
    found = (found ^ found >> 33) * _P2 & _MASK
    found = (found ^ found >> 29) * _P3 & _MASK
    return found ^ found >> 32


def _round(lane: int, word: int) -> int:
    return _turn((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _turn(word: int, by: int) -> int:
    return (word << by | word >> (64 - by)) & _MASK


# --------------------------------------------------------------------------------------------------
# Thrift's compact protocol, as far as Parquet's footers and page headers use it, read strictly.
#
#     struct := field ... | 0      field := (step 4 bits | kind 4 bits) | value
#     list   := (count 4 bits | kind 4 bits) | value ...
#
# Invariants
# 1. Memory and time are O(bytes read): a count that the bytes cannot hold is refused at once.
# 2. Malformed bytes raise `ValueError`. A field comes once; the kind of a known field is checked.

Fields: TypeAlias = "dict[int, Any]"
"""Fields by number. A field is an int, bytes, `Fields`, or a list of these. Booleans and doubles
are read as None."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _TEXT, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEPTH_MAX = 8


def read_struct(data: bytes, at: int = 0) -> tuple[Fields, int]:
    """The struct that begins at `at`, and where it ends."""
    try:
        return _read_fields(data, at, _DEPTH_MAX)
    except IndexError as error:
        raise ValueError("a header is cut short") from error


def _number(fields: Fields, field: int, default: int | None = None) -> int:
    """The number `field`, which is not negative."""
    found = fields.get(field, default)
    if type(found) is not int or found < 0:
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a count")
    return found


def _struct(fields: Fields, field: int) -> Fields:
    """The struct `field`."""
    found = fields.get(field)
    if type(found) is not dict:
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a struct")
    return found


def _text(fields: Fields, field: int, default: bytes | None = None) -> bytes:
    """The bytes `field`."""
    found = fields.get(field, default)
    if type(found) is not bytes:
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a text")
    return found


def _listed(fields: Fields, field: int, kind: type) -> list[Any]:
    """The list `field`, each item of `kind`; none where the field is missing."""
    found = fields.get(field, [])
    if type(found) is not list or not all(type(item) is kind for item in found):
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a list as it should")
    return found


def _shown(found: object) -> str:
    return "missing" if found is None else f"{found!r:.40}"


def _read_fields(data: bytes, at: int, depth: int) -> tuple[Fields, int]:
    if not depth:
        raise ValueError("a header is nested too deep")
    fields: Fields = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _zigzag(data, at)
        if field in fields:
            raise ValueError(f"field {field} of a header comes twice")
        kind = head & 15
        # Hot: a footer has 130 numbers for a row group, most of them in one byte or two.
        if _I16 <= kind <= _I64 and (byte := data[at]) < 128:
            fields[field] = (byte >> 1) ^ -(byte & 1)
            at += 1
        elif kind > _FALSE:
            fields[field], at = _value(data, at, kind, depth - 1)
        else:
            fields[field] = None
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if _I16 <= kind <= _I64:
        found, at = _zigzag(data, at)
        if not -(1 << (63 if kind == _I64 else 31)) <= found < 1 << (63 if kind == _I64 else 31):
            raise ValueError("a number of a header is too large for its type")
        return found, at
    if kind == _STRUCT:
        return _read_fields(data, at, depth)
    if kind == _TEXT:
        length, at = read_varint(data, at)
        if at + length > len(data):
            raise ValueError("a text of a header is cut short")
        return data[at : at + length], at + length
    if kind in (_LIST, _SET):
        return _list(data, at, depth)
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    raise ValueError(f"a header has a value of type {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    head, at = data[at], at + 1
    count, kind = head >> 4, head & 15
    if count == 15:
        count, at = read_varint(data, at)
    if count > len(data) - at or not depth:
        raise ValueError(f"a list of {count} in a header is cut short, or nested too deep")
    items: list[Any] = []
    for _ in range(count):
        if kind in (_TRUE, _FALSE):
            item, at = None, at + 1
        else:
            item, at = _value(data, at, kind, depth - 1)
        items.append(item)
    return items, at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    found, at = read_varint(data, at)
    return (found >> 1) ^ -(found & 1), at
