"""A gate before a load shows: checks over staged rows, beside a baseline.

    {
      "rows": {"least": 1000, "least_of_baseline": 0.9, "most_of_baseline": 1.5},
      "no_nulls": ["fare"],
      "ranges": {"fare": [0, 500]},
      "distribution": {"fare": {"nulls": 0.01, "distinct": 0.2, "quantiles": 0.1}},
      "sql": {"no free rides": "SELECT count(*) = 0 FROM staged WHERE fare = 0"}
    }

The staged rows are those of the one table of an import, typed, or the plain keys of an import, with
the columns `key` and `value`. The record of a load that has passed a gate keeps its figures: rows,
and of each column those that its checks asked for. The baseline of a check is the newest load that
stands, is not empty, and has the figure: of the same table, or of plain keys among the staged ones.
GC and later writes change no figure. Where there is none, the baseline is the live rows: of the
whole table, or from the least staged key to the greatest, and all plain keys for a load without a
key. Where nothing is alive either, the comparison passes. The report names each baseline.

Invariants
1. The gate is passed before the rows show, and in general before the import is recorded.
2. A load is added only if no other load of the same rows came since the gate read its baselines:
   otherwise the gate runs again.
3. Every check is made, and the report has each with its figure, its bound and its baseline.
4. Memory is bounded: a column has a sketch of its distinct values and a sample for its quantiles.
   Up to 4,096 distinct values are counted exactly, more to some 2 %. Each text of a report is cut.
"""

from __future__ import annotations

import getpass
import importlib
import json
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from datetime import time as day_time
from decimal import Decimal, InvalidOperation
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.manifest import Manifest
from kvstore.codec.keys import encode_reference, span_bounds
from kvstore.engine.loose_files import LooseFiles
from kvstore.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    ForkedError,
    LoadRefusedError,
    StorageError,
    UsageError,
)
from kvstore.loops.blocks import xxh3
from kvstore.mvcc.arrow import rows_schema
from kvstore.mvcc.key_history import Lifetime
from kvstore.mvcc.scan import FilePass, Read, RowArrays
from kvstore.store import Store
from kvstore.tables import TableCodec
from kvstore.timeline.import_records import ImportRecord

ReadRows: TypeAlias = "Callable[[Sequence[str] | None], pa.RecordBatchReader]"
"""Makes a reader of some columns of rows."""
UserCheck: TypeAlias = "Callable[[pa.RecordBatchReader, pa.RecordBatchReader], object]"

_ROWS: Final = ("least", "most", "least_of_baseline", "most_of_baseline")
_SHAPES: Final = ("nulls", "distinct", "quantiles")
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_SKETCH: Final = 4096
_SAMPLE: Final = 1 << 16
_ROWS_AT_ONCE: Final = 1 << 15
_TEXT_CHARS_MAX: Final = 200
"""Characters of a text in a report: a function may return any."""
_REASON_CHARS_MAX: Final = 1000
_COLUMNS_KEPT_MAX: Final = 256
"""Columns whose figures a record keeps, at some 200 bytes each. A check of a further column has the
live rows as its baseline."""


class Force(NamedTuple):
    """Who adds a load that its gate refuses, and why. The record of the import keeps both."""

    reason: str
    by: str = ""

    @classmethod
    def of(cls, given: object, gate: Gate | None) -> Force | None:
        """What a caller gave as `force` beside a gate: a `Force`, its reason alone, or None. Raises
        `UsageError`."""
        if given is None:
            return None
        force = cls(given) if isinstance(given, str) else given
        if not isinstance(force, Force):
            raise UsageError(f"force={given!r:.100}", "pass a kvstore.bulk.Force, or the reason")
        if not isinstance(force.reason, str) or not force.reason.strip():
            raise UsageError(
                "a load is forced without a reason", "tell the reason: it stands with it"
            )
        if len(force.reason) > _REASON_CHARS_MAX:
            raise UsageError(
                f"the reason of force has {len(force.reason)} characters",
                f"pass at most {_REASON_CHARS_MAX}",
            )
        if not isinstance(force.by, str):
            raise UsageError(f"force has by={force.by!r:.100}", "pass a name")
        if gate is None:
            raise UsageError("a load is forced that has no gate", "pass check= too, or no force=")
        return force


@dataclass(frozen=True)
class Gate:
    """Checks of a load.

    `rows` bounds the number of staged rows: `least`, `most`, and `least_of_baseline`,
    `most_of_baseline` as shares of the rows of the baseline. The columns of `no_nulls` have no null
    and no NaN, those of `ranges` no NaN, and lie between two values, each of which may be None.
    `distribution` bounds for a column the distance from the baseline: `nulls` of the share of nulls
    and NaN, `distinct` of the number of distinct values, as a share of it, and `quantiles` of the
    quantiles 5, 25, 50, 75 and 95 % of numbers or times, as a share of the distance between the
    first and the last of them, and of the share of values that are not finite.

    The baseline is the newest load that stands, passed a gate (or was forced) and has the figure,
    of the same table; the live rows where there is none. The report names it.

    `sql` has queries by name over the tables `staged` and `live`, the live rows of the table, run
    by DuckDB, which holds them in memory: each passes if it has rows and all its values are true;
    they are booleans. `functions` are called with two readers of Arrow batches, of the staged rows
    and of the live ones: one passes if it returns None or True, and may return a text that tells
    why not. One that raises fails, and the report tells the error. Live rows of plain keys are
    those from the least staged key to the greatest.

    Raises `UsageError` for a check of another shape.
    """

    rows: Mapping[str, float] = field(default_factory=dict)
    no_nulls: Sequence[str] = ()
    ranges: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    distribution: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sql: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, UserCheck] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rows", "ranges", "distribution", "sql", "functions"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
                raise UsageError(f"{name} of a gate is no mapping of names", "pass {name: bounds}")
        _require_bounds("rows", self.rows, _ROWS)
        names = self.no_nulls
        if (
            isinstance(names, str)
            or not isinstance(names, Sequence)
            or not all(isinstance(each, str) for each in names)
        ):
            raise UsageError("no_nulls of a gate is no list of names", "pass a list of columns")
        for column, ends in self.ranges.items():
            _require_ends(column, ends)
        for column, bounds in self.distribution.items():
            if not isinstance(bounds, Mapping):
                raise UsageError(
                    f"distribution of {column!r} is {bounds!r:.100}", "pass {figure: bound}"
                )
            _require_bounds(f"distribution of {column!r}", bounds, _SHAPES)
        for name, query in self.sql.items():
            if not isinstance(query, str):
                raise UsageError(f"check {name!r} is {query!r:.100}", "pass a query, as text")
        for name, function in self.functions.items():
            if not callable(function):
                raise UsageError(f"check {name!r} is {function!r:.100}", "pass a function")

    @classmethod
    def of(cls, given: object) -> Gate:
        """The gate that a caller gave: a `Gate`, or a mapping of its fields. Raises
        `UsageError`."""
        if isinstance(given, Gate):
            return given
        if not isinstance(given, Mapping):
            raise UsageError(f"check={given!r:.100}", "pass a kvstore.bulk.Gate, or a mapping")
        unknown = sorted(set(map(str, given)) - set(cls.__dataclass_fields__))
        if unknown:
            raise UsageError(
                f"a gate has no {unknown[0]!r}", f"it has {', '.join(cls.__dataclass_fields__)}"
            )
        return cls(**given)

    @classmethod
    def of_file(cls, path: Path) -> Gate:
        """The gate in a file of JSON, or of TOML if its name ends so. Raises `UsageError`."""
        try:
            text = path.read_text()
            if path.suffix == ".toml":
                given = importlib.import_module("tomllib").loads(text)
            else:
                given = json.loads(text)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            raise UsageError(f"{path}: {error}", "name a file of JSON, or of TOML") from error
        if not isinstance(given, Mapping) or "functions" in given:
            raise UsageError(f"{path} has no gate", "write {'rows': {'least': 1}}")
        return cls.of(given)

    def require_fits(self, schema: pa.Schema) -> None:
        """Raise `UsageError` if rows of a schema have no column that a check names, or one of a
        type that it does not take."""
        for name in (*self.no_nulls, *self.ranges, *self.distribution):
            if name not in schema.names:
                named = ", ".join(schema.names)
                raise UsageError(f"a gate names a column {name!r}", f"there are {named}")
        for name, ends in self.ranges.items():
            for end in ends:
                _exact_bound(name, schema.field(name).type, end)
        for name, bounds in self.distribution.items():
            if "quantiles" in bounds and not _is_measured(schema.field(name).type):
                raise UsageError(
                    f"quantiles of {name!r}, which is {schema.field(name).type}",
                    "only numbers and times have some; nulls and distinct go with each column",
                )
        if self.sql and len({name.casefold() for name in schema.names}) < len(schema.names):
            raise UsageError(
                "a query over columns whose names differ in case alone",
                "SQL does not tell them apart: pass functions, or rename a column",
            )

    @property
    def _compared(self) -> set[tuple[str | None, str]]:
        """The figures that are compared with a baseline: of columns, and of all rows (None)."""
        found: set[tuple[str | None, str]] = {
            (name, figure) for name, bounds in self.distribution.items() for figure in bounds
        }
        if any(name.endswith("_of_baseline") for name in self.rows):
            found.add((None, "rows"))
        return found


def _require_bounds(what: str, given: Mapping[str, float], known: Sequence[str]) -> None:
    for name, bound in given.items():
        if name not in known:
            raise UsageError(f"{what} has no bound {name!r}", f"pass some of {', '.join(known)}")
        is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
        if not is_number or not 0 <= bound < math.inf:
            raise UsageError(f"{what}: {name}={bound!r:.100}", "pass a number from 0 on")


def _require_ends(column: str, ends: object) -> None:
    """Raise `UsageError` unless `ends` are two bounds of a range."""
    if isinstance(ends, str | bytes) or not isinstance(ends, Sequence) or len(ends) != 2:
        raise UsageError(f"the range of {column!r} is {ends!r:.100}", "pass [least, greatest]")
    for end in ends:
        if not isinstance(end, _BOUNDS) or end != end:  # NaN
            raise UsageError(
                f"the range of {column!r} has {end!r:.100}", "pass a number, a time, a text or None"
            )
    try:
        is_empty = None not in ends and ends[0] > ends[1]
    except TypeError:  # a text and a time: the type of the column decides
        is_empty = False
    if is_empty:
        raise UsageError(
            f"the range of {column!r} is empty: {list(ends)!r:.200}", "pass [least, greatest]"
        )


_BOUNDS: Final = (int, float, Decimal, str, bytes, date, day_time, np.generic, type(None))


class Checked(NamedTuple):
    """One check: what it looked at, the figure that it found, its bound, and what it compared
    with."""

    check: str
    figure: Any
    bound: str
    passed: bool
    baseline: str | None = None

    def __str__(self) -> str:
        beside = "" if self.baseline is None else f", beside {self.baseline}"
        return f"{self.check} is {_told(self.figure)}, and must be {self.bound}{beside}"

    def fields(self) -> dict[str, Any]:
        """The row of the report: JSON, and each text of a bounded length."""
        return {name: _told(each) for name, each in self._asdict().items()}


def _told(figure: Any) -> Any:
    """A figure as JSON has it."""
    if figure is None or isinstance(figure, bool):
        return figure
    if isinstance(figure, float) and math.isfinite(figure):
        return figure
    if isinstance(figure, int) and abs(figure) < 1 << 64:
        return figure
    return str(figure)[:_TEXT_CHARS_MAX]


class GateReport(NamedTuple):
    """The checks of a load, its figures, and who added it although a check failed."""

    checks: Sequence[Checked]
    figures: Mapping[str, Any]
    forced: Force | None = None
    read_at: int | None = None
    """The time before which the baselines were written, if the checks look at any."""

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(each.passed for each in self.checks)

    def to_json(self) -> str:
        """The report, as the record of the import keeps it."""
        fields: dict[str, Any] = {
            "passed": self.passed,
            "checks": [each.fields() for each in self.checks],
            "figures": self.figures,
        }
        if self.read_at is not None:
            fields["read_at"] = self.read_at
        if self.forced is not None:
            fields["forced"] = self.forced._asdict()
        return json.dumps(fields, allow_nan=False)


def pass_gate(
    gate: Gate,
    force: Force | None,
    store: Store,
    manifest: Manifest,
    files: Sequence[Path],
    where: str,
    *,
    linked: ImportRecord | None = None,
) -> str:
    """The report of a load that may be added, as JSON. `files` are its parts with rows, which lie
    in the directory `where`; or the store has `linked` them, and they are read there.

    Raises `LoadRefusedError` if a check fails and nobody forces the load. Costs a pass over the
    staged rows, and one over the live rows if a check compares and no load has its figure. To find
    one costs a look at each past import, a second for a hundred thousand.
    """
    looks_back = bool(gate._compared or gate.sql or gate.functions)
    read_at = int(store.upper) if looks_back else None
    rows = _rows_of(store, manifest, files, linked)
    run = _Run(gate, store, manifest.import_id, rows)
    checks = run.checks()
    report = GateReport(checks, run.kept(), read_at=read_at)
    if report.passed:
        return report.to_json()
    if force is None:
        failed = [str(each)[: 3 * _TEXT_CHARS_MAX] for each in checks if not each.passed]
        refused = LoadRefusedError(where, failed, json.loads(report.to_json()))
        raise refused from next(iter(run.raised), None)
    return report._replace(forced=force._replace(by=force.by or _user())).to_json()


@dataclass(frozen=True, slots=True)
class NoneLoaded:
    """The check that no load of the same rows was added or taken back since a gate read its
    baselines. The caller holds the commit lock. Costs a look at each import in memory."""

    store: Store
    import_id: int
    span: Span
    read_at: int

    @classmethod
    def of(cls, store: Store, import_id: int, report: str) -> list[NoneLoaded]:
        """That of a report, if the gate has compared. Raises `UsageError` for what is no report: it
        may come from a process beside this one."""
        try:
            told = json.loads(report) if report else {}
            if "read_at" not in told:
                return []
            figures = told["figures"]
            prefix = bytes.fromhex(figures["of"])
            plain = () if prefix else map(bytes.fromhex, figures["span"])
            span = Span.of_prefix(prefix) if prefix else Span(*plain)
            return [cls(store, import_id, span, int(told["read_at"]))]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError("the report of a gate is damaged", "load again") from error

    def __call__(self) -> None:
        """Raise `ConflictError` if one was."""
        last = max(
            (
                max(record.added or 0, record.reverted or 0)
                for record in self.store.imports.every()
                if record.import_id != self.import_id
                if any(self.span.intersect(each.start, each.end) for each in record.spans)
            ),
            default=0,
        )
        last = max(last, self.store.since)  # GC may have taken the record of a load since then
        if last >= self.read_at:
            raise ConflictError(
                read_at=self.read_at,
                written_at=last,
                where=f"the baseline of import {self.import_id:016x}",
                what=f"another load came at {last}, while the gate of import {self.import_id:016x} "
                f"compared with the state at {self.read_at}",
                remedy="load again: the gate compares with the newer load",
            )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without a name
        return "unknown"


# --------------------------------------------------------------------------------------------------
# The rows of a gate: staged ones, and live ones.


class _Rows(NamedTuple):
    of: str
    """The prefix of the keys of the table in hexadecimal, empty for plain keys."""
    hull: Span | None
    """From the least staged key to the greatest. None if there is none."""
    schema: pa.Schema
    staged: ReadRows
    live: ReadRows


def _rows_of(
    store: Store, manifest: Manifest, files: Sequence[Path], linked: ImportRecord | None
) -> _Rows:
    if len(manifest.tables) > 1:
        raise UsageError(
            f"a gate of an import of {len(manifest.tables)} tables", "load the tables one by one"
        )
    codec = store.table(manifest.tables[0].table).codec() if manifest.tables else None
    whole = Span().plain() if codec is None else Span.of_prefix(codec.key.prefix)
    hulls = [whole.intersect(part.smallest, part.largest + b"\0") for part in manifest.parts]
    hull = _hull([each for each in hulls if each is not None])
    alive = whole if codec is not None or hull is None else hull

    def staged(names: Sequence[str] | None) -> pa.RecordBatchReader:
        if linked is not None:
            found = _batches(store.imports.columns_in(linked, whole))
        else:
            found = _staged(files, manifest, whole) if files and hull is not None else iter(())
        return _reader(found, codec, names)

    def live(names: Sequence[str] | None) -> pa.RecordBatchReader:
        return _reader(iter(store.scan_batches(alive.start, alive.end)), codec, names)

    schema = rows_schema() if codec is None else codec.schema_of(None)
    of = "" if codec is None else codec.key.prefix.hex()
    return _Rows(of, hull, schema, staged, live)


def _hull(spans: Sequence[Span]) -> Span | None:
    if not spans:
        return None
    return Span(min(each.start for each in spans), max(each.end or b"" for each in spans))


def _batches(arrays: Iterable[RowArrays]) -> Iterator[pa.RecordBatch]:
    for each in arrays:
        yield pa.RecordBatch.from_arrays([each.keys, each.values], schema=rows_schema())


def _reader(
    rows: Iterator[pa.RecordBatch], codec: TableCodec | None, names: Sequence[str] | None
) -> pa.RecordBatchReader:
    """Rows with some columns, all of them by default."""
    if codec is None:
        return pa.RecordBatchReader.from_batches(rows_schema(), rows)
    return pa.RecordBatchReader.from_batches(codec.schema_of(names), codec.decoded(rows, names))


def _staged(files: Sequence[Path], manifest: Manifest, span: Span) -> Iterator[pa.RecordBatch]:
    start, end = span_bounds(span.start, span.end)
    alone = Read(0, {encode_reference(manifest.import_id): Lifetime(0)}, None)
    for piece, cut, held in LooseFiles(files).pieces(start, end):
        yield from _batches(
            FilePass(held, piece, cut, alone, keys_only=False).columns(_ROWS_AT_ONCE)
        )


# --------------------------------------------------------------------------------------------------
# The figures of rows, in one pass and bounded memory.


class ColumnFigures:
    """Nulls, least and greatest value, distinct values and a sample of a column."""

    def __init__(self, type_: pa.DataType, asked: Container[str]) -> None:
        """`asked` has the figures that a check wants: `range`, `distinct`, `quantiles`."""
        self.type, self._asked = type_, asked
        self.rows = self.nulls = self.nans = self.infinite = 0
        self.least: Any = None
        self.greatest: Any = None
        self._hashes = np.empty(0, np.uint64)
        self._sample = np.empty(0, np.float64)
        self._seen = 0
        self._draw = np.random.default_rng(0)

    def add(self, column: pa.Array) -> None:
        """Count the values of a batch."""
        self.rows += len(column)
        self.nulls += column.null_count
        column = _plain(column.drop_null() if column.null_count else column)
        if pa.types.is_floating(column.type):
            is_nan = pc.is_nan(column)
            if nans := is_nan.true_count:
                self.nans += nans
                column = column.filter(pc.invert(is_nan))
        if not len(column):
            return
        if "range" in self._asked:
            bounds = pc.min_max(column)
            low, high = bounds["min"].as_py(), bounds["max"].as_py()
            self.least = low if self.least is None else min(self.least, low)
            self.greatest = high if self.greatest is None else max(self.greatest, high)
        if "quantiles" in self._asked:
            self._add_sample(column)
        if "distinct" in self._asked:
            # Arrow tells no nested values apart. Once the sketch is full, most numbers pass it
            # faster than they are told apart.
            is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
            is_full = len(self._hashes) == _SKETCH
            if not (pa.types.is_nested(column.type) or (is_number and is_full)):
                column = column.unique()
            self._add_hashes(_hashes(column))

    @property
    def distinct(self) -> float:
        """The number of distinct values, an estimate above the size of the sketch."""
        if len(self._hashes) < _SKETCH:
            return float(len(self._hashes))
        return (_SKETCH - 1) / (float(self._hashes[-1]) / 2.0**64)

    @property
    def quantiles(self) -> list[float]:
        """Of the finite values; empty if there are none."""
        return np.quantile(self._sample, _QUANTILES).tolist() if len(self._sample) else []

    def figures(self) -> dict[str, Any]:
        """What the record of a load keeps: the figures that a later load is compared with."""
        rows = max(self.rows, 1)
        found: dict[str, Any] = {"nulls": (self.nulls + self.nans) / rows}
        if "distinct" in self._asked:
            found["distinct"] = self.distinct
        if "quantiles" in self._asked:
            found["quantiles"] = self.quantiles
            found["not_finite"] = (self.nans + self.infinite) / rows
        return found

    def _add_hashes(self, values: Any) -> None:
        """Keep the least hashes that have come: `_SKETCH` of them tell how dense they lie."""
        values ^= values >> np.uint64(30)  # the steps of splitmix64, each of which can be undone
        values *= np.uint64(0xBF58476D1CE4E5B9)
        values ^= values >> np.uint64(27)
        values *= np.uint64(0x94D049BB133111EB)
        values ^= values >> np.uint64(31)
        if len(self._hashes) == _SKETCH:
            values = values[values < self._hashes[-1]]
        if len(values):
            self._hashes = np.sort(np.unique(np.concatenate([self._hashes, values])))[:_SKETCH]

    def _add_sample(self, column: pa.Array) -> None:
        numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        is_finite = np.isfinite(numbers)
        self.infinite += len(numbers) - int(is_finite.sum())
        numbers = numbers[is_finite]
        room = _SAMPLE - len(self._sample)
        self._sample = np.concatenate([self._sample, numbers[:room]])
        self._seen += min(room, len(numbers))
        rest = numbers[room:]
        if len(rest):  # each value seen so far is in the sample with the same chance
            counts = np.arange(self._seen + 1, self._seen + len(rest) + 1)
            places = (self._draw.random(len(rest)) * counts).astype(np.int64)
            taken = places < _SAMPLE
            self._sample[places[taken]] = rest[taken]
            self._seen += len(rest)


def _plain(column: pa.Array) -> pa.Array:
    """A column as its values are compared: times as integers of their unit, since Python has not
    all of them, and short floats and views as types that Arrow has functions for."""
    type_ = column.type
    if _is_time(type_):
        column = column.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    elif pa.types.is_floating(type_):
        column = column.cast(pa.float64())
    elif pa.types.is_string_view(type_):
        column = column.cast(pa.large_string())
    elif pa.types.is_binary_view(type_):
        column = column.cast(pa.large_binary())
    return column


def _is_time(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_date(type_)
        or types.is_time(type_)
        or types.is_timestamp(type_)
        or types.is_duration(type_)
    )


def _is_measured(type_: pa.DataType) -> bool:
    """Whether a column has quantiles."""
    types = pa.types
    is_number = types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_)
    return bool(is_number or _is_time(type_))


def _hashes(column: pa.Array) -> Any:
    """64 bits of each value: its own, where it has no more."""
    type_ = column.type
    if pa.types.is_floating(type_):
        return (column.to_numpy(zero_copy_only=False) + 0.0).view(np.uint64)  # one zero
    if pa.types.is_integer(type_):
        numbers = column.to_numpy(zero_copy_only=False)
        return numbers.astype(np.uint64) if numbers.dtype.kind == "u" else _unsigned(numbers)
    return np.fromiter((xxh3(_bytes(each)) for each in column.to_pylist()), np.uint64, len(column))


def _unsigned(numbers: Any) -> Any:
    return numbers.astype(np.int64).view(np.uint64)


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text.encode("utf-8", "surrogatepass")


class _Figures(NamedTuple):
    rows: int
    columns: dict[str, ColumnFigures]


def _figures(rows: ReadRows, asked: Mapping[str, Container[str]], schema: pa.Schema) -> _Figures:
    """The figures `asked` of each column."""
    columns = {name: ColumnFigures(schema.field(name).type, each) for name, each in asked.items()}
    with rows(list(asked) or list(schema.names[:1])) as reader:
        count = 0
        for batch in reader:
            count += batch.num_rows
            for name, column in columns.items():
                column.add(batch.column(name))
    return _Figures(count, columns)


# --------------------------------------------------------------------------------------------------
# The baseline: kept figures of earlier loads, or those of the live rows.
#
#     figures := rows, columns {name: {nulls, distinct, quantiles, not_finite}},
#                of: the prefix of the table's keys, span: the hull of plain keys


class _Baseline(NamedTuple):
    """Figures of other rows than the staged ones."""

    name: str
    rows: int
    columns: Mapping[str, Mapping[str, Any]]

    def has(self, column: str | None, figure: str) -> bool:
        """Whether it can tell a figure of a column, or of all rows."""
        return column is None or bool(self.columns.get(column, {}).get(figure, []) != [])


def _earlier(store: Store, import_id: int, rows: _Rows) -> list[_Baseline]:
    """The loads of the same rows that stand, are not empty and have figures, newest first."""
    found = []
    imports = store.imports
    for record in chain(imports.every(), imports.past.all()):
        if record.state != "added" or record.import_id == import_id or not record.report:
            continue
        baseline, span = _kept_figures(record, rows.of)
        if baseline is None or not baseline.rows:
            continue
        if rows.hull is not None and not _touches(store, record, span, rows.hull):
            continue
        found.append((record.added or 0, baseline))
    return [each for _, each in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _touches(store: Store, record: ImportRecord, span: Span | None, hull: Span) -> bool:
    """Whether a load has plain keys within a hull, which the span between its own may cover without
    one. A load of a table has no span."""
    if span is None:
        return True
    shared = span.intersect(hull.start, hull.end)
    if shared is None or not record.spans:  # its rows are plain versions now
        return shared is not None
    name = record.import_id.to_bytes(8, "big")
    return next(iter(store.imports.rows_in(name, shared)), None) is not None


def _kept_figures(record: ImportRecord, of: str) -> tuple[_Baseline | None, Span | None]:
    """The figures in a record, if they are of the rows `of`. None for those of another shape: a
    process beside the owner of the store may have written them."""
    try:
        kept = json.loads(record.report)["figures"]
        if kept["of"] != of:
            return None, None
        name = f"import {record.import_id:016x} of {Timestamp(record.added or 0)}"
        columns = {
            column: {
                figure: [float(each) for each in value] if isinstance(value, list) else float(value)
                for figure, value in figures.items()
            }
            for column, figures in kept["columns"].items()
        }
        for figures in columns.values():
            quantiles = figures.get("quantiles", [])
            if not isinstance(quantiles, list) or len(quantiles) not in (0, len(_QUANTILES)):
                return None, None
        span = None if of else Span(*map(bytes.fromhex, kept["span"]))
        return _Baseline(name, int(kept["rows"]), columns), span
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return None, None


# --------------------------------------------------------------------------------------------------
# The checks.


class _Run:
    """The checks of one load."""

    def __init__(self, gate: Gate, store: Store, import_id: int, rows: _Rows) -> None:
        gate.require_fits(rows.schema)
        self._gate, self._rows = gate, rows
        self.raised: list[Exception] = []
        """What functions of the gate raised."""
        asked: dict[str, set[str]] = {name: set() for name in (*gate.no_nulls, *gate.ranges)}
        for name in gate.ranges:
            asked[name].add("range")
        for name, shape in gate.distribution.items():
            asked.setdefault(name, set()).update(shape)
        self._staged = _figures(rows.staged, asked, rows.schema)
        wanted = gate._compared
        self._earlier = _earlier(store, import_id, rows) if wanted else []
        self._live = self._of_live({each for each in wanted if self._found(*each) is None})

    def _of_live(self, wanted: set[tuple[str | None, str]]) -> _Baseline | None:
        """The live rows as a baseline for what no earlier load tells."""
        if not wanted:
            return None
        asked: dict[str, set[str]] = {}
        for column, figure in wanted:
            if column is not None:
                asked.setdefault(column, set()).add(figure)
        found = _figures(self._rows.live, asked, self._rows.schema)
        if not found.rows:
            return None
        columns = {name: column.figures() for name, column in found.columns.items()}
        return _Baseline("live rows", found.rows, columns)

    def _found(self, column: str | None, figure: str) -> _Baseline | None:
        return next((each for each in self._earlier if each.has(column, figure)), None)

    def _baseline(self, column: str | None, figure: str) -> _Baseline | None:
        found = self._found(column, figure)
        if found is None and self._live is not None and self._live.has(column, figure):
            return self._live
        return found

    def kept(self) -> dict[str, Any]:
        """The figures that the record of the load keeps."""
        columns = list(self._staged.columns.items())[:_COLUMNS_KEPT_MAX]
        found: dict[str, Any] = {
            "of": self._rows.of,
            "rows": self._staged.rows,
            "columns": {name: column.figures() for name, column in columns},
        }
        if not self._rows.of:
            hull = self._rows.hull or Span().plain()
            found["span"] = [hull.start.hex(), (hull.end or b"").hex()]
        return found

    def checks(self) -> list[Checked]:
        """All checks, in the order of the gate."""
        gate, columns = self._gate, self._staged.columns
        found = list(self._row_checks())
        for name in gate.no_nulls:
            nulls = columns[name].nulls + columns[name].nans
            found.append(Checked(f"nulls of {name}", nulls, "0", nulls == 0))
        for name, ends in gate.ranges.items():
            found += range_checks(name, columns[name], ends)
        for name, bounds in gate.distribution.items():
            for figure, bound in bounds.items():
                found += self._shape_checks(name, figure, bound)
        found += [_sql_check(name, query, self._rows) for name, query in gate.sql.items()]
        found += [self._user_check(name, each) for name, each in gate.functions.items()]
        return found

    def _row_checks(self) -> Iterator[Checked]:
        rows = self._staged.rows
        for name, bound in self._gate.rows.items():
            limit, told, beside = bound, "", None
            if name.endswith("_of_baseline"):
                baseline = self._baseline(None, "rows")
                if baseline is None:
                    yield Checked("rows", rows, "any", True, "nothing")
                    continue
                limit, beside = bound * baseline.rows, baseline.name
                told = f" ({bound:g} of {baseline.rows})"
            if name.startswith("least"):
                yield Checked("rows", rows, f"at least {limit:g}{told}", rows >= limit, beside)
            else:
                yield Checked("rows", rows, f"at most {limit:g}{told}", rows <= limit, beside)

    def _shape_checks(self, name: str, figure: str, bound: float) -> Iterator[Checked]:
        baseline = self._baseline(name, figure)
        if baseline is None:
            yield Checked(f"{figure} of {name}", None, "any", True, "nothing")
            return
        ours, theirs = self._staged.columns[name].figures(), baseline.columns[name]
        if figure == "nulls":
            yield _share_check(f"share of nulls of {name}", "nulls", ours, baseline, name, bound)
        elif figure == "distinct":
            count, before = ours["distinct"], theirs["distinct"]
            told = f"within {bound:g} of {before:.6g}"
            passed = abs(count - before) <= bound * before
            check = f"distinct values of {name}"
            yield Checked(check, round(count), told, passed, baseline.name)
        else:
            yield _quantile_check(name, ours["quantiles"], theirs["quantiles"], bound, baseline)
            if "not_finite" in theirs and pa.types.is_floating(self._staged.columns[name].type):
                check = f"share of values of {name} that are not finite"
                yield _share_check(check, "not_finite", ours, baseline, name, bound)

    def _user_check(self, name: str, function: UserCheck) -> Checked:
        bound = "None or True"
        try:
            with self._rows.staged(None) as staged, self._rows.live(None) as live:
                answer = function(staged, live)
            if isinstance(answer, pa.BooleanScalar):
                answer = answer.as_py()
            passed = answer is None or (isinstance(answer, bool | np.bool_) and bool(answer))
            return Checked(name, str(answer), bound, passed)
        except (ClosedError, ForkedError, CorruptionError, StorageError):
            raise  # such as a damaged file, which the function was reading
        except Exception as error:  # noqa: BLE001  # a user's function may raise anything
            self.raised.append(error)
            return Checked(name, f"{type(error).__name__}: {error}", bound, passed=False)


def range_checks(name: str, column: ColumnFigures, ends: Sequence[Any]) -> Iterator[Checked]:
    type_ = column.type
    low, high = (_exact_bound(name, type_, each) for each in ends)
    if column.nans or pa.types.is_floating(type_):
        yield Checked(f"NaN of {name}", column.nans, "0", column.nans == 0)
    if low is not None:
        least = column.least
        passed = least is None or _exact(type_, least) >= low
        yield Checked(f"least {name}", _shown(type_, least), f"at least {ends[0]}", passed)
    if high is not None:
        greatest = column.greatest
        passed = greatest is None or _exact(type_, greatest) <= high
        yield Checked(f"greatest {name}", _shown(type_, greatest), f"at most {ends[1]}", passed)


def _share_check(
    check: str,
    figure: str,
    ours: Mapping[str, Any],
    baseline: _Baseline,
    column: str,
    bound: float,
) -> Checked:
    one, two = ours[figure], baseline.columns[column][figure]
    told = f"within {bound:g} of {two:.4g}"
    return Checked(check, round(one, 6), told, abs(one - two) <= bound, baseline.name)


def _quantile_check(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    bound: float,
    baseline: _Baseline,
) -> Checked:
    if not ours:
        return Checked(f"quantiles of {name}", None, "of finite values", False, baseline.name)
    width = theirs[-1] - theirs[0]
    shifts = [abs(one - two) for one, two in zip(ours, theirs, strict=True)]
    worst = int(np.argmax(shifts))
    middle, reach = theirs[worst], bound * width
    told = f"{middle - reach:.6g} to {middle + reach:.6g}: there it is {middle:.6g}, and it may "
    told += f"move by {bound:g} of {width:.6g}, the distance of quantile 0.95 from 0.05"
    check = f"quantile {_QUANTILES[worst]:g} of {name}"
    passed = shifts[worst] <= reach
    return Checked(check, f"{ours[worst]:.6g}", told, passed, baseline.name)


# --------------------------------------------------------------------------------------------------
# Bounds of ranges, compared exactly: numbers as Python has them, times in nanoseconds.

_UNIT_NS: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_NS: Final = 86_400 * 10**9
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _exact_bound(name: str, type_: pa.DataType, given: Any) -> Any:
    """A bound as it is compared: JSON has times as texts. Raises `UsageError` if no value of the
    column can be compared with it."""
    if given is None:
        return None
    if isinstance(given, np.generic):
        given = given.item()
    found = _bound_of(type_, given)
    if found is None:
        raise UsageError(
            f"the range of {name!r} has {given!r:.100}, and the column is {type_}",
            "pass such a value; a time with a zone tells its offset",
        )
    return found


def _bound_of(type_: pa.DataType, given: Any) -> Any:
    types = pa.types
    is_number = isinstance(given, int | float | Decimal) and not isinstance(given, bool)
    if types.is_boolean(type_):
        return given if isinstance(given, bool) else None
    if types.is_integer(type_):
        least, most = (-(1 << 63), 1 << 63) if types.is_signed_integer(type_) else (0, 1 << 64)
        return given if is_number and (least <= given < most or math.isinf(given)) else None
    if types.is_float64(type_):
        return given if is_number else None
    if types.is_floating(type_):  # 0.1 means the nearest value of the column
        wide = float(given) if is_number else None
        return None if wide is None else float(type_.to_pandas_dtype()(wide))
    if types.is_decimal(type_):
        return _decimal(given) if is_number or isinstance(given, str) else None
    if types.is_time(type_):
        return _time_ns(given)
    if types.is_date(type_) or types.is_timestamp(type_):
        return _instant_ns(given, type_.tz if types.is_timestamp(type_) else None)
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return given if isinstance(given, str) else None
    is_binary = types.is_binary(type_) or types.is_large_binary(type_)
    if is_binary or types.is_fixed_size_binary(type_) or types.is_binary_view(type_):
        return given.encode() if isinstance(given, str) else _if_bytes(given)
    return None


def _if_bytes(given: Any) -> bytes | None:
    return given if isinstance(given, bytes) else None


def _decimal(given: Any) -> Decimal | None:
    try:
        found = Decimal(str(given))
    except InvalidOperation:
        return None
    return None if found.is_nan() else found


def _time_ns(given: Any) -> int | None:
    try:
        found = day_time.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        return None
    if not isinstance(found, day_time):
        return None
    seconds = (found.hour * 60 + found.minute) * 60 + found.second
    return seconds * 10**9 + found.microsecond * 1000


def _instant_ns(given: Any, zone: str | None) -> int | None:
    if isinstance(given, datetime):
        aware = given if given.tzinfo is not None else given.replace(tzinfo=timezone.utc)
        passed = aware - _EPOCH
        whole = (passed.days * 86_400 + passed.seconds) * 10**9 + passed.microseconds * 1000
        return whole + int(getattr(given, "nanosecond", 0))
    if isinstance(given, date):
        return (given - _EPOCH.date()).days * _DAY_NS
    if not isinstance(given, str):
        return None
    read = (_parsed_ns(given, unit, zone) for unit in reversed(_UNIT_NS))
    return next((found for found in read if found is not None), None)


def _parsed_ns(text: str, unit: str, zone: str | None) -> int | None:
    """None if the text is no time of the unit: a far time does not fit into nanoseconds."""
    try:
        return int(pa.scalar(text).cast(pa.timestamp(unit, zone)).value) * _UNIT_NS[unit]
    except pa.ArrowException:
        return None


def _exact(type_: pa.DataType, value: Any) -> Any:
    """A value of a column, as `_plain` has it, as bounds are compared with it."""
    if not _is_time(type_):
        return value
    if pa.types.is_date(type_):
        return value * (_DAY_NS if type_.bit_width == 32 else _UNIT_NS["ms"])
    return value * _UNIT_NS[type_.unit]


def _shown(type_: pa.DataType, value: Any) -> Any:
    """A value of a column in a report."""
    if value is None or not _is_time(type_):
        return value
    try:
        return pa.scalar(value, type_).cast(pa.string()).as_py()
    except pa.ArrowException:
        return value


# --------------------------------------------------------------------------------------------------
# Queries.


def _sql_check(name: str, query: str, rows: _Rows) -> Checked:
    try:
        duckdb = importlib.import_module("duckdb")
    except ImportError as error:
        raise UsageError(
            f"check {name!r} is SQL, and DuckDB is not installed", "install duckdb"
        ) from error
    sides = {"staged": rows.staged, "live": rows.live}
    with duckdb.connect() as connection:
        try:
            for table, side in sides.items():  # a reader is read once, a table often
                if re.search(rf"\b{table}\b", query, re.IGNORECASE) is None:
                    continue
                with side(None) as reader:
                    connection.register("kvstore_rows", reader)
                    connection.execute(f"CREATE TABLE {table} AS FROM kvstore_rows")
                    connection.unregister("kvstore_rows")
            connection.execute("SET enable_external_access = false")
            answer = connection.execute(query)
            kinds = [str(column[1]) for column in answer.description or ()]
            if not kinds or any(kind != "BOOLEAN" for kind in kinds):
                raise UsageError(
                    f"check {name!r} answers {', '.join(kinds) or 'nothing'}",
                    "ask for booleans: SELECT count(*) = 0 FROM staged WHERE ...",
                )
            shown: list[Any] = []
            passed = True
            while found := answer.fetchmany(1024):
                shown = shown or found[:3]
                passed = passed and all(value is True for row in found for value in row)
        except duckdb.Error as error:
            raise UsageError(f"check {name!r}: {error}", "mend the query") from error
    return Checked(name, str(shown), "true in each row", passed and bool(shown))
