"""The demo of tables: `make demo-tables`, or `python -m examples.demo.restated`.

Releases of two real packages become commits of a store, at the times at which they came out.

    earth       key parameter, event time day: each release restates its predictions
    airports    key icao, index by country: each release changes some rows and drops some

The question: on the day of a release, which value did the release give for the rotation of the
earth some days ahead? `join` answers on two axes: the day that is asked for, and the time at which
the value was known. A join on the day alone gives the value that was measured later.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Console
from rich.table import Table as PrintedTable

import kvstore
from examples.demo.place import prepare
from examples.demo.releases import (
    AIRPORT_SCHEMA,
    EARTH_SCHEMA,
    Release,
    airport_rows,
    download,
    earth_rows,
)
from kvstore import ManualClock, Timestamp
from kvstore.base.timestamp import to_timestamp
from kvstore.tables import Table

PARAMETER: Final = "ut1-utc"
AHEAD_DAYS: Final = 90
SHOWN: Final = (1, 7, 30, 60, 90)

Row = dict[str, Any]
Key = tuple[Any, ...]


class Predictions(NamedTuple):
    """The answers to the labels whose day was measured later: how many days ahead they asked, the
    value that was known, and the value that was measured."""

    ahead: npt.NDArray[np.int64]
    known: npt.NDArray[np.float64]
    measured: npt.NDArray[np.float64]


def main() -> int:
    """Run the demo. Raises `AssertionError` if an answer differs from the file of its release."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.restated")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="emptied first")
    out: Path = parser.parse_args().out
    prepare(out)
    console = Console(highlight=False, width=108)
    began = time.perf_counter()
    console.print("downloading 12 releases of astropy-iers-data and of airportsdata ...")
    earth, airports = download(out / "releases")
    outcome = run(out / "store", earth, airports, console)
    console.print(report(outcome))
    save_picture(outcome, out / "tables.png")
    console.print(f"\npicture: {out / 'tables.png'}")
    console.print(f"everything held, in {time.perf_counter() - began:.0f} s")
    return 0


def run(
    place: Path, earth: Sequence[Release], airports: Sequence[Release], console: Console
) -> Predictions:
    """Commit the releases in the order of their times, then look up, join and compare."""
    clock = ManualClock()
    with kvstore.open(place, clock=clock) as store:
        days = store.table("earth", EARTH_SCHEMA, "parameter", event_time="day")
        places = store.table(
            "airports", AIRPORT_SCHEMA, "icao", {"by_country": ["country", "city"]}
        )
        loaders = {
            "earth": Loader(days, ("parameter", "day"), earth_rows),
            "airports": Loader(places, ("icao",), airport_rows),
        }
        releases = [*(("earth", r) for r in earth), *(("airports", r) for r in airports)]
        stamps: dict[str, list[Timestamp]] = {name: [] for name in loaders}
        for name, release in sorted(releases, key=lambda each: each[1].at):
            clock.set(to_timestamp(release.at, name="at"))
            put, gone = loaders[name].commit(store, release)
            stamps[name].append(Timestamp(store.upper - 1))
            console.print(
                f"{release.at:%Y-%m-%d}  {name:8}  {put:6,} rows set, {gone:3,} deleted, one commit"
            )
        require_index(places, stamps["airports"], "IS")
        return compared(days, earth, stamps["earth"], console)


class Loader:
    """Writes releases of one table: the rows that differ from the release before."""

    def __init__(self, table: Table, key: Key, rows_of: Callable[[Release], Iterable[Row]]) -> None:
        self._name, self._schema = table.name, table.schema
        self._key, self._rows_of = key, rows_of
        self._last: dict[Key, Row] = {}

    def commit(self, store: kvstore.Store, release: Release) -> tuple[int, int]:
        """Write a release as one commit. Returns the rows that were set and deleted."""
        rows = {tuple(row[name] for name in self._key): row for row in self._rows_of(release)}
        fresh = [row for key, row in rows.items() if self._last.get(key) != row]
        gone = self._last.keys() - rows.keys()
        with store.transaction() as transaction:
            table = transaction.table(self._name)
            table.put_batch(pa.Table.from_pylist(fresh, self._schema))
            for key in gone:
                table.delete(*key)
        self._last = rows
        return len(fresh), len(gone)


def require_index(table: Table, stamps: Sequence[Timestamp], country: str) -> None:
    """Raise `AssertionError` unless the index finds at each time the rows of a scan with a
    filter."""
    for stamp in stamps:
        found = sorted(row["icao"] for row in table.find("by_country", country, as_of=stamp))
        rows = table.scan(as_of=stamp, columns=["icao", "country"]).read_all().to_pylist()
        if found != [row["icao"] for row in rows if row["country"] == country]:
            raise AssertionError(f"the index of airports differs from its rows at {stamp}")


def compared(
    table: Table, releases: Sequence[Release], stamps: Sequence[Timestamp], console: Console
) -> Predictions:
    """Ask at each release for the days ahead of it, on two axes and on one."""
    labels = labels_of(releases, stamps)
    began = time.perf_counter()
    asked: dict[str, Any] = {
        "on": "parameter",
        "at": "at",
        "columns": ["day", "value", "is_predicted"],
    }
    known = table.join(labels, **asked, known_at="known").read_all()
    newest = table.join(labels, **asked).read_all()
    console.print(
        f"{len(labels):,} labels joined twice in {time.perf_counter() - began:.1f} s: as known "
        "then, and as known now"
    )
    require_known(known, releases)
    measured = np.flatnonzero(~newest["is_predicted"].to_numpy())
    if not len(measured):
        raise AssertionError("no prediction was measured later")
    values = [found["value"].to_numpy()[measured] for found in (known, newest)]
    return Predictions(labels["ahead"].to_numpy()[measured], *values)


def labels_of(releases: Sequence[Release], stamps: Sequence[Timestamp]) -> pa.Table:
    """The questions: at each release the days from the next one on."""
    rows = [
        {
            "parameter": PARAMETER,
            "at": _midnight(release.at) + timedelta(days=ahead),
            "known": int(stamp),
            "release": number,
            "ahead": ahead,
        }
        for number, (release, stamp) in enumerate(zip(releases, stamps, strict=True))
        for ahead in range(1, AHEAD_DAYS + 1)
    ]
    fields = [("parameter", pa.string()), ("at", pa.timestamp("us", "UTC")), ("known", pa.int64())]
    return pa.Table.from_pylist(rows, pa.schema([*fields, *_NUMBERS]))


_NUMBERS: Final = [("release", pa.int64()), ("ahead", pa.int64())]


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def require_known(answers: pa.Table, releases: Sequence[Release]) -> None:
    """Raise `AssertionError` unless each answer stands in the file of its release."""
    files = [
        {row["day"]: row["value"] for row in earth_rows(each) if row["parameter"] == PARAMETER}
        for each in releases
    ]
    for row in answers.to_pylist():
        if row["day"] != row["at"].date() or row["value"] != files[row["release"]][row["day"]]:
            raise AssertionError(f"release {row['release']} did not say {row['value']}: {row}")


def report(outcome: Predictions) -> PrintedTable:
    """One line for each number of days ahead."""
    result = PrintedTable(
        title="UT1-UTC some days ahead: the known value, against the value that a join leaks"
    )
    for column in ("days ahead", "labels", "as known then, ms off", "by event time alone, ms off"):
        result.add_column(column, justify="right")
    for ahead in SHOWN:
        rows = outcome.ahead == ahead
        if rows.any():
            off = 1000 * np.abs(outcome.known - outcome.measured)[rows]
            result.add_row(str(ahead), str(rows.sum()), f"{np.median(off):.2f}", "0.00")
    result.caption = "a join by event time alone hands out the measured value: nobody had it yet"
    return result


def save_picture(outcome: Predictions, path: Path) -> None:
    """Draw how far the known values are from the measured ones, by the days ahead."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    off = 1000 * np.abs(outcome.known - outcome.measured)
    days = np.unique(outcome.ahead)
    axes.scatter(outcome.ahead, off, s=6, alpha=0.35, color="#1b6ca8", label="as known then")
    medians = [np.median(off[outcome.ahead == day]) for day in days]
    axes.plot(days, medians, color="#1b6ca8", label="as known then, median")
    axes.axhline(0, color="#d95f02", lw=2, label="by event time alone: the value of later")
    axes.set_title("The rotation of the earth, asked some days ahead")
    axes.set_xlabel("days between the question and the day that it asks for")
    axes.set_ylabel("ms off the value that was measured later")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
