"""Reads CSV and TSV: this module cuts files into records and checks their quotes; Arrow parses.

    file     := mark? header record*        the mark is the byte order mark of UTF-8
    header   := record                      the names of the columns, in UTF-8; a caller may name
                                            them instead
    record   := field (delimiter field)* end
    field    := quoted | plain
    quoted   := " (any byte but ", or "")* "
    plain    := any bytes but delimiter, CR and LF; the first one is no quote
    end      := LF | CR LF | end of file    in a file whose first end is a lone CR: CR

Invariants
1. A value is what stands in the file, or the file is refused by its row: nothing is guessed. A
   quote opens at the start of a field alone, and behind a quote that closes stands a delimiter or
   an end. Each quote that opens is closed. With the quoting `none`, a quote is a byte as others.
2. Arrow parses whole records, so no value lies in two of its blocks.
3. Empty lines between records are passed, and have no number. The header is row 1; without one,
   the first record is.
4. Memory is bounded by `CSV_BLOCK_BYTES` and by the longest record, which has at most
   `TEXT_ROW_BYTES_MAX`.
5. A number that its column would alter is refused: see `is_float_of` in `kvstore.tables.words`.

Chosen: Arrow's parser, fed with records that a compiled loop of 40 lines (`scan_records`) has cut
and checked. Left alone, Arrow's blocks end anywhere: a value of several lines loses the LF of a
CR LF that falls on an edge (arrow#51368), a row above a block is refused, and a quote that nobody
closed swallows rows.
Rejected: a compiled parser of our own, which would repeat Arrow's for the sake of its edges.
Python's `csv`, which reads a tenth of the rows a second, and takes a quote in the middle of a field
even if it is strict. DuckDB and Polars, which this package does not need otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Final, Literal, NoReturn, TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from kvstore.errors import UsageError
from kvstore.limits import CSV_BLOCK_BYTES, TEXT_ROW_BYTES_MAX
from kvstore.loops.records import scan_records
from kvstore.loops.shapes import CLOSED, FIELD, QUOTED, RETURN
from kvstore.tables.nested import is_nested
from kvstore.tables.words import FLOAT_DIGITS, column_of, is_float_of, to_value

Quoting: TypeAlias = Literal["standard", "none"]
QUOTINGS: Final[tuple[Quoting, ...]] = ("standard", "none")

NULLS: Final = ("", "#N/A", "#N/A N/A", "#NA", "N/A", "NA", "NULL", "n/a", "null")
"""Texts that are nulls in columns of a table, except in columns of text and of bytes."""

_Positions: TypeAlias = npt.NDArray[np.intp]

_LF, _CR, _QUOTE = b'\n\r"'
_MARK: Final = b"\xef\xbb\xbf"
_COLUMNS: Final = re.compile(r".*?Row #(\d+): Expected (\d+) columns, got (\d+)", re.DOTALL)
_CONVERSION: Final = re.compile(r"In CSV column #(\d+): Row #(\d+): (.*)", re.DOTALL)
_QUOTE_ALL: Final = (
    "quote the whole field and double each quote in it; a file without quoting is read with "
    "--quoting none"
)


class DelimitedFile:
    """A file of records, read once, from its start. `names` are those of its header."""

    def __init__(
        self,
        source: pa.NativeFile,
        where: str,
        delimiter: str,
        quoting: Quoting,
        names: Sequence[str] | None = None,
    ) -> None:
        """Read the header; a file without one has columns called `names`. `where` names the file
        in errors. Raises `UsageError`."""
        self._where = where
        self._delimiter = delimiter
        self._is_quoted = quoting == "standard"
        self._before = 0
        """How many records the earlier blocks have, with the header."""
        self._end = _LF
        self._blocks = self._whole_records(source)
        first = next(self._blocks, b"")
        self._shape, self._remedy = "the header has", "correct the row; the header is row 1"
        if names is not None:
            self._rest, self.names = first, list(names)
            self._shape, self._remedy = "the names are", "correct the row, or the names"
            return
        end = self._first_end(first)
        self._rest = first[end:]
        self.names = self._header(first[:end])
        self._before = 1

    def batches(
        self, wanted: Sequence[str], types: Mapping[str, pa.DataType] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The columns `wanted` of all records: as bytes, or in their types. A column that has none
        in `types` is text. Raises `UsageError` that names the first row that is no record, or has
        a value that its type does not hold exactly. Can be called once."""
        if types is None:
            kinds = dict.fromkeys(wanted, pa.binary())
        else:
            kinds = {name: types.get(name, pa.string()) for name in wanted}
        block: bytes | None = self._rest
        self._rest = b""
        while block is not None:
            batch = self._parsed(block, kinds)
            yield batch
            self._before += batch.num_rows
            block = next(self._blocks, None)

    def _header(self, record: bytes) -> list[str]:
        try:
            text = record.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{self._where}: the header is not UTF-8: {error}", "write the file in UTF-8"
            ) from error
        if not record:
            raise UsageError(f"{self._where} is empty", "begin it with the names of the columns")
        if not self._is_quoted:
            return text.split(self._delimiter)
        end = re.escape(self._delimiter)
        field = f'"([^"]*(?:""[^"]*)*)"{end}|([^{end}]*){end}'
        found = re.findall(field, text + self._delimiter)
        return [quoted.replace('""', '"') or plain for quoted, plain in found]

    def _first_end(self, data: bytes) -> int:
        """Where the first record of `data` ends, with its CR and LF. It is the end of `data` if no
        record ends there."""
        pattern = rb'(?:[^"\r\n]+|"[^"]*")*' if self._is_quoted else rb"[^\r\n]*"
        found = re.match(pattern + rb"(?:\r\n?|\n)?", data)
        assert found is not None  # each part of the pattern may be empty
        return found.end()

    def _beginning(self, source: pa.NativeFile) -> bytes:
        """The first bytes, of which the first is of the header, and with them the end of the
        header. Sets what ends records."""
        data, is_marked = b"", True
        while more := source.read(max(len(data), len(_MARK), CSV_BLOCK_BYTES)):
            data += more
            if is_marked and len(data) >= len(_MARK):
                data, is_marked = data.removeprefix(_MARK), False
            data = data.lstrip(b"\r\n")
            end = self._first_end(data)
            is_whole = 0 < end < len(data) and data[end - 1] in b"\r\n"
            if is_whole or len(data) > TEXT_ROW_BYTES_MAX:
                break
        header = data[: self._first_end(data)]
        self._end = _CR if header.endswith(b"\r") and len(header) < len(data) else _LF
        return data

    def _whole_records(self, source: pa.NativeFile) -> Iterator[bytes]:
        """The bytes of the file, without the mark, in blocks that end with a record."""
        chunk = self._beginning(source)
        delimiter, quote = ord(self._delimiter), _QUOTE if self._is_quoted else -1
        state = FIELD
        held: list[bytes] = []
        size = whole = 0
        while chunk:
            state, end, wrong = scan_records(chunk, state, delimiter, self._end, quote)
            held.append(chunk)
            if wrong >= 0:
                problem = _problem(state, chunk[wrong])
                self._refuse(b"".join(held)[: size + wrong], problem)
            whole = size + end if end else whole
            size += len(chunk)
            if size - whole > TEXT_ROW_BYTES_MAX:
                self._refuse_long(b"".join(held)[: whole + 1], is_open=state == QUOTED)
            if whole and size >= CSV_BLOCK_BYTES:
                data = b"".join(held)
                yield data[:whole]
                held, size, whole = [data[whole:]], size - whole, 0
            chunk = source.read(CSV_BLOCK_BYTES)
        data = b"".join(held)
        if state == QUOTED:
            self._refuse(data[: whole + 1], "a quote is not closed before the file ends")
        if data:
            yield data if data[-1] == self._end else data + bytes([self._end])

    def _refuse(self, data: bytes, problem: str) -> NoReturn:
        """Name the record in which `data` ends. `data` begins with a record."""
        raise UsageError(f"{self._where}: row {self._row_at(data)}: {problem}", _QUOTE_ALL)

    def _refuse_long(self, data: bytes, *, is_open: bool) -> NoReturn:
        size = f"{TEXT_ROW_BYTES_MAX >> 20} MiB"
        if is_open:
            self._refuse(data, f"a quote is not closed within {size}")
        raise UsageError(
            f"{self._where}: row {self._row_at(data)} has more than {size}",
            "write it as Parquet or Arrow",
        )

    def _row_at(self, data: bytes) -> int:
        if self._is_quoted:
            data = re.sub(rb'"[^"]*"', b'"', data)
        lines = data.split(bytes([self._end]))
        return self._before + 1 + sum(bool(line.strip(b"\r")) for line in lines[:-1])

    def _parsed(self, block: bytes, kinds: Mapping[str, pa.DataType]) -> pa.RecordBatch:
        """The columns of a block of whole records."""
        schema = pa.schema(kinds.items())
        if not block or (block[0] in b"\r\n" and not block.lstrip(b"\r\n")):
            return _empty(schema)
        if block.startswith(_MARK):
            block = b"\n" + block  # Arrow would pass a mark in the first value
        read = self._read(block, {name: _readable(kind) for name, kind in kinds.items()})
        told = _Told(block)
        columns = [self._exact(told, name, read.column(name), kind) for name, kind in kinds.items()]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _read(self, block: bytes, kinds: Mapping[str, pa.DataType]) -> pa.RecordBatch:
        try:
            return self._arrow(block, kinds)
        except pa.ArrowInvalid as error:
            raise self._refusal(block, kinds) from error

    def _arrow(
        self, block: bytes, kinds: Mapping[str, pa.DataType], *, is_numbered: bool = False
    ) -> pa.RecordBatch:
        """A block as Arrow parses it. Arrow numbers rows only where one thread reads."""
        table = pa_csv.read_csv(
            pa.BufferReader(block),
            pa_csv.ReadOptions(
                use_threads=not is_numbered, block_size=len(block) + 1, column_names=self.names
            ),
            pa_csv.ParseOptions(
                delimiter=self._delimiter,
                quote_char='"' if self._is_quoted else False,
                newlines_in_values=self._is_quoted,
            ),
            pa_csv.ConvertOptions(
                column_types=kinds,
                include_columns=list(kinds),
                strings_can_be_null=False,
                null_values=NULLS,
            ),
        )
        batches = table.to_batches()
        assert len(batches) <= 1, "a block is one batch"
        return batches[0] if batches else _empty(table.schema)

    def _refusal(self, block: bytes, kinds: Mapping[str, pa.DataType]) -> UsageError:
        """The error for the first record with more or fewer columns than the header, or else for
        the first value that is no text of its column's type."""
        try:
            self._arrow(block, kinds, is_numbered=True)
        except pa.ArrowInvalid as error:
            told = str(error)
            if found := _COLUMNS.match(told):
                return UsageError(
                    f"{self._where}: row {self._before + int(found[1])} has {found[3]} columns, "
                    f"and {self._shape} {found[2]}",
                    self._remedy,
                )
            if found := _CONVERSION.match(told):
                return self._wrong(int(found[2]) - 1, self.names[int(found[1])], found[3])
            return UsageError(f"{self._where} cannot be read: {told}", "check the file")
        raise AssertionError("Arrow refuses a block with threads, and takes it without")

    def _wrong(self, at: int, name: str, problem: str) -> UsageError:
        """The error for the value of a column in the record `at` of the present block."""
        where = f"{self._where}: row {self._before + at + 1}, column {name!r}"
        return UsageError(f"{where}: {problem}", self._remedy)

    def _exact(self, told: _Told, name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
        """A column in its type. Raises `UsageError` for the first value that Arrow altered."""
        if isinstance(kind, pa.UuidType) or is_nested(kind):
            return self._converted(name, column, kind)
        if pa.types.is_decimal256(kind):
            column = self._converted(name, column, kind)
        if pa.types.is_decimal(kind):
            self._require(name, column, kind, _over_precision(column))
            digits = _digits_surely_exact(kind)
            if digits < _DIGITS_SEEN or told.has_long:
                texts = self._arrow(told.block, {name: pa.string()}).column(name)
                self._require(name, texts, kind, _altered_decimals(texts, column, digits))
        elif pa.types.is_integer(kind) or pa.types.is_duration(kind):
            if told.has_hex:  # 0xFF would be -1 in an int8
                texts = self._arrow(told.block, {name: pa.string()}).column(name)
                is_hex = pc.match_substring_regex(texts, "^[ \t]*[+-]?0[xX]")
                self._require(name, texts, kind, np.flatnonzero(is_hex))
        elif pa.types.is_floating(kind):
            doubtful = _doubtful(column, told)
            if len(doubtful):
                texts = self._arrow(told.block, {name: pa.string()}).column(name)
                self._require(name, texts, kind, _altered(texts, column, doubtful))
        return column

    def _require(
        self, name: str, values: pa.Array, kind: pa.DataType, wrong: Sequence[int] | _Positions
    ) -> None:
        if len(wrong):
            at = int(wrong[0])
            problem = f"{kind} does not hold {str(values[at].as_py())!r:.100} exactly"
            raise self._wrong(at, name, problem)

    def _converted(self, name: str, texts: pa.Array, kind: pa.DataType) -> pa.Array:
        """Texts in a type that Arrow does not read from CSV."""
        words = pc.utf8_trim(texts, " \t")
        is_null = pc.is_in(words, pa.array(NULLS))
        words = pc.if_else(is_null, pa.scalar(None, pa.string()), words)
        try:
            return _cast(words, kind)
        except (ValueError, pa.ArrowInvalid) as error:
            at = next(at for at in range(len(words)) if not _casts(words.slice(at, 1), kind))
            raise self._wrong(at, name, f"{words[at].as_py()!r:.100} is no {kind}") from error


class _Told:
    """What the bytes of a block tell of its numbers. Costs a pass for each question asked."""

    def __init__(self, block: bytes) -> None:
        self.block = block

    @cached_property
    def has_hex(self) -> bool:
        """Whether a number may be written as 0xFF."""
        if b"x" not in self.block and b"X" not in self.block:
            return False
        data = np.frombuffer(self.block, np.uint8)
        return bool(np.any((data[:-1] == ord("0")) & (data[1:] | 0x20 == ord("x"))))

    @cached_property
    def has_small(self) -> bool:
        """Whether a number may be next to zero, and not zero: it is written with a negative
        exponent, or with more than thirty zeros, of which two words of eight bytes have none but
        zeros."""
        data = np.frombuffer(self.block, np.uint8)
        if np.any((data[1:] == ord("-")) & (data[:-1] | 0x20 == ord("e"))):
            return True
        words = np.frombuffer(self.block, "V8", len(self.block) // 8).view(np.uint64)
        zeros = words == int.from_bytes(b"0" * 8, "little")
        return bool(np.any(zeros[:-1] & zeros[1:]))

    @cached_property
    def has_long(self) -> bool:
        """Whether a number may be written with an exponent or with `_DIGITS_SEEN` digits in a row.
        Among so many, two words of eight bytes lie side by side that are all digits."""
        data = np.frombuffer(self.block, np.uint8)
        places = np.flatnonzero(data[1:-1] | 0x20 == ord("e")) + 1
        if np.any(_NUMERAL[data[places - 1]] & _NUMERAL[data[places + 1]]):
            return True
        words = np.frombuffer(self.block, "V8", len(self.block) // 8).view(np.uint64)
        digits = words & int.from_bytes(b"\xf0" * 8, "little") == int.from_bytes(b"0" * 8, "little")
        return bool(np.any(digits[:-1] & digits[1:]))


_DIGITS_SEEN: Final = 23
_NUMERAL: Final = np.isin(np.arange(256), np.frombuffer(b"0123456789.+-", np.uint8))


def _problem(state: int, byte: int) -> str:
    """Why `byte` fits no record in a state of `scan_records`."""
    if state == RETURN or byte == _LF:
        return "a line end of another kind than the header's stands outside quotes"
    if state == CLOSED:
        return "text stands behind a quote that closes a field"
    return "a quote stands in the middle of a field"


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)


def _readable(kind: pa.DataType) -> pa.DataType:
    """The type in which Arrow reads a column of CSV."""
    is_unknown = isinstance(kind, pa.BaseExtensionType) or pa.types.is_decimal256(kind)
    is_unknown = is_unknown or is_nested(kind)  # their JSON
    return pa.string() if is_unknown else kind


def _cast(words: pa.Array, kind: pa.DataType) -> pa.Array:
    if is_nested(kind):
        read = [None if word is None else to_value(kind, word, "it") for word in words.to_pylist()]
        return column_of(kind, read)
    if not isinstance(kind, pa.UuidType):
        return words.cast(kind)
    raws = [None if word is None else UUID(word).bytes for word in words.to_pylist()]
    return pa.ExtensionArray.from_storage(kind, pa.array(raws, kind.storage_type))


def _casts(words: pa.Array, kind: pa.DataType) -> bool:
    try:
        _cast(words, kind)
    except (ValueError, pa.ArrowInvalid):
        return False
    return True


def _over_precision(column: pa.Array) -> list[int]:
    """The first row of a column of decimals that has more digits than its type."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        most = Decimal(10) ** (column.type.precision - column.type.scale)
        return [at for at, each in enumerate(column.to_pylist()) if each and abs(each) >= most]
    return []


def _digits_surely_exact(kind: pa.DataType) -> int:
    """Digits in a row, without an exponent, that a column of decimals holds or refuses. Arrow
    shifts a number by powers of ten up to 38, and has no look at what leaves its bits."""
    most, scale = 38 if kind.byte_width == 16 else 76, int(kind.scale)
    return max(min(37 + min(scale, 0), most - scale), 0)


def _altered_decimals(texts: pa.Array, column: pa.Array, digits: int) -> list[int]:
    """The first row whose decimal is not the number of its text, where a text has an exponent or
    more than so many digits in a row: Arrow makes 0.00 out of 2E-41, and 706.53 out of 30000000 in
    a decimal128(38, 35)."""
    words = pc.utf8_trim(texts, " \t")
    is_long = pc.match_substring_regex(words, f"[eE]|[0-9]{{{digits + 1}}}")
    for at in np.flatnonzero(pc.and_(is_long, column.is_valid()).to_numpy(zero_copy_only=False)):
        if Decimal(words[int(at)].as_py()) != column[int(at)].as_py():
            return [int(at)]
    return []


def _doubtful(column: pa.Array, told: _Told) -> _Positions:
    """The rows whose number may be another one than their text: infinite, or so large that floats
    leave out whole numbers, or zero, or so small that digits are lost."""
    is_single = column.type.bit_width == 32
    kind, normal, exact = (np.float32, 1.2e-38, 2**24) if is_single else (float, 2.3e-308, 2**53)
    # Arrow's own `to_numpy` would import pandas.
    numbers = np.abs(np.frombuffer(column.buffers()[1], kind)[: len(column)])
    wrong = numbers >= exact
    small = numbers < normal
    if small.any() and told.has_small:
        wrong |= small
    if column.null_count:
        wrong &= np.array(column.is_valid().to_pylist())
    return np.flatnonzero(wrong)


def _altered(texts: pa.Array, column: pa.Array, rows: _Positions) -> list[int]:
    """The first of `rows` whose text its float does not hold. Looks at each text once."""
    coded = texts.take(pa.array(rows)).dictionary_encode()
    _, firsts = np.unique(coded.indices.to_numpy(), return_index=True)
    digits = FLOAT_DIGITS[column.type.bit_width]
    for at in rows[np.sort(firsts)].tolist():
        if not is_float_of(texts[at].as_py(), column[at].as_py(), digits):
            return [at]
    return []
