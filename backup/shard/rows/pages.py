"""Pages: the sizes that a part declares are checked before Parquet's reader acts on them.

Parquet states sizes four times: in the footer, for each row group, for each column chunk and in the
header of each page. Parquet's reader allocates memory by the header of a page, so 9 kB of a hostile
part could ask for gigabytes. An unknown codec or statistic ends the process. So this module reads
the footer first, and holds each number against the number above it.

    footer  at most `PART_FOOTER_BYTES_MAX`; the columns of the format; rows as the state has them
    group   1..`GROUP_ROWS_READ_MAX` rows; at most `GROUP_BYTES_READ_MAX` bytes, decoded
    chunk   inside the file, one for each column, overlapping no other; plain or zstd
    page    inside its chunk; plain bytes, or numbers by a dictionary that is inside its page

Invariants
1. The footer declares at most `GROUP_BYTES_READ_MAX` for a row group, and a decoder allocates at
   most a few times the declared bytes.
2. A problem is a `ValueError`, which the caller turns into an error that names the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from kvstore.backup.shard.rows.thrift import Fields, listed, number, read_struct, struct, text
from kvstore.limits import (
    GROUP_BYTES_READ_MAX,
    GROUP_ROWS_READ_MAX,
    PAGE_HEADER_BYTES_MAX,
    PART_FOOTER_BYTES_MAX,
)

MAGIC: Final = b"PAR1"
TAIL_BYTES: Final = len(MAGIC) + 4
"""Bytes at a file's end: the length of the footer, and the magic."""

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
    return {text(pair, 1): text(pair, 2, b"") for pair in listed(footer, 5, dict)}


def chunks_of(footer: Fields, schema: pa.Schema, *, rows: int, size: int) -> list[Chunk]:
    """The chunks of a part with `schema`, `rows` rows and `size` bytes, sorted by their place."""
    columns = [_column(field) for field in schema]
    _require_schema(footer, columns)
    groups = listed(footer, 4, dict)
    _require(number(footer, 3) == rows, f"it declares {number(footer, 3)} rows, not {rows}")
    declared = sum(number(group, 3) for group in groups)
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
    for group in listed(footer, 4, dict):
        fields = struct(listed(group, 1, dict)[0], 3)
        if 14 not in fields or 15 not in fields:
            found.append(None)
            continue
        start, length = number(fields, 14), number(fields, 15)
        _require(end <= start <= start + length <= size, "a filter of keys is outside of the tail")
        found.append((start, length))
    return found if any(found) else []


def _column(field: pa.Field) -> ParquetColumn:
    kind = _BYTE_ARRAY
    if not pa.types.is_binary(field.type):
        kind = _INT64 if field.type.bit_width == 64 else _INT32
    return ParquetColumn(field.name, kind, _OPTIONAL if field.nullable else _REQUIRED)


def _require_schema(footer: Fields, columns: Sequence[ParquetColumn]) -> None:
    root, *leaves = listed(footer, 2, dict) or [{}]
    _require(number(root, 5) == len(leaves), "its columns are nested")
    found = [
        ParquetColumn(text(leaf, 4).decode(errors="replace"), number(leaf, 1), number(leaf, 3))
        for leaf in leaves
        if not leaf.get(5)
    ]
    _require(found == list(columns), f"its columns are {', '.join(c.name for c in found)[:200]}")


def _group_chunks(group: Fields, columns: Sequence[ParquetColumn]) -> Iterator[Chunk]:
    rows, chunks = number(group, 3), listed(group, 1, dict)
    _require(0 < rows <= GROUP_ROWS_READ_MAX, f"it declares a row group of {rows} rows")
    _require(len(chunks) == len(columns), "a row group has other columns than the part")
    decoded = 0
    for fields, column in zip(chunks, columns, strict=True):
        _require(not fields.keys() & {8, 9}, "a column is encrypted by Parquet's own means")
        _require(not text(fields, 1, b""), f"column {column.name} is in another file")
        chunk = _chunk(struct(fields, 3), column, rows)
        decoded += chunk.decoded_bytes
        yield chunk
    _require(decoded <= GROUP_BYTES_READ_MAX, f"it declares a row group of {decoded} bytes")
    _require(number(group, 2) == decoded, "the bytes of its columns are not its row group's")


def _chunk(fields: Fields, column: ParquetColumn, rows: int) -> Chunk:
    name = column.name
    _require(number(fields, 1) == column.kind, f"column {name} is of another type than it says")
    _require(listed(fields, 3, bytes) == [name.encode()], f"column {name} is under another name")
    codec, encodings = number(fields, 4), listed(fields, 2, int)
    _require(codec in (_UNCOMPRESSED, _ZSTD), f"column {name} is compressed by {codec}")
    _require(set(encodings) <= set(_ENCODINGS), f"column {name} has encodings {encodings[:9]}")
    for count in listed(fields, 13, dict):
        _require(number(count, 2) in _ENCODINGS, f"column {name} counts unknown encodings")
        _require(number(count, 1) in (_DATA_PAGE, _DICTIONARY_PAGE), f"{name} counts unknown pages")
    _require(number(fields, 5) == rows, f"column {name} has {fields[5]} values of {rows}")
    _require_statistics(fields, column, rows)
    start = number(fields, 9)
    # Older writers state the place 0 for a dictionary that is not there.
    start = min(start, number(fields, 11, start) or start)
    decoded, size = number(fields, 6), number(fields, 7)
    return Chunk(name, column.kind, start, size, decoded, rows, codec != _UNCOMPRESSED)


def _require_statistics(fields: Fields, column: ParquetColumn, rows: int) -> None:
    """Raise unless bounds of numbers have the width of the numbers, and histograms a place for each
    level. Otherwise Parquet's reader would end the process."""
    sizes = struct(fields, 16) if 16 in fields else {}
    for histogram, places in ((2, 1), (3, 1 + column.repetition)):
        counts = listed(sizes, histogram, int)
        _require(len(counts) in (0, places), f"a histogram of {column.name} has {len(counts)}")
    if 12 not in fields:
        return
    statistics = struct(fields, 12)
    for bound in (1, 2, 5, 6):
        if bound in statistics and column.kind in _WIDTHS:
            length = len(text(statistics, bound))
            _require(length == _WIDTHS[column.kind], f"a bound of {column.name} is {length} bytes")
        text(statistics, bound, b"")
    for count in (3, 4):
        _require(number(statistics, count, 0) <= rows, f"{column.name} counts more than its rows")


# -- pages -----------------------------------------------------------------------------------


def require_pages(chunk: Chunk, data: memoryview) -> None:
    """Raise `ValueError` unless the pages in the bytes of a chunk are as large as it declares.

    Costs about 20 us a page. A row group has about one page per column and megabyte.
    """
    at = values = decoded = 0
    while values < chunk.rows:
        fields, head = _page_header(data, at)
        kind, size, compressed = (number(fields, field) for field in (1, 2, 3))
        begin, at = at, at + head + compressed
        _require(at <= len(data), "a page reaches beyond its column")
        decoded += head + size
        _require(decoded <= chunk.decoded_bytes, "its pages are larger than their column declares")
        _require(chunk.is_compressed or size == compressed, "a page declares two sizes")
        _require(4 in fields, "a page has no checksum")
        if kind == _DICTIONARY_PAGE:
            _require(not begin, "a dictionary stands behind other pages")
            _require_dictionary(chunk, struct(fields, 7), size)
        else:
            _require(kind == _DATA_PAGE, f"a page is of kind {kind}")
            values += _values(chunk, struct(fields, 5))
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
    count, encoding = number(fields, 1), number(fields, 2)
    _require(encoding in (_PLAIN, _PLAIN_DICTIONARY), f"a dictionary has the encoding {encoding}")
    _require(count * _WIDTHS[chunk.kind] <= size, "a dictionary declares more than it has")


def _values(chunk: Chunk, fields: Fields) -> int:
    encoding, levels = number(fields, 2), (number(fields, 3), number(fields, 4))
    allowed = _NUMBER_ENCODINGS if chunk.kind in _WIDTHS else (_PLAIN,)
    _require(encoding in allowed, f"column {chunk.column} has the encoding {encoding}")
    _require(set(levels) <= {_RLE, _BIT_PACKED}, f"its levels have the encodings {levels}")
    count = number(fields, 1)
    _require(count > 0, "a page has no values")
    return count


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(problem)
