"""The demo of tables, on two small releases of each package."""

from __future__ import annotations

import zipfile
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from examples.demo.releases import Release, airport_rows, earth_rows
from examples.demo.restated import AHEAD_DAYS, require_known, run, save_picture

FIRST = datetime(2026, 1, 5, 1, tzinfo=timezone.utc)
LATER = FIRST + timedelta(days=30)


def line(day: date, value: float, letter: str) -> str:
    """A line of the file of the earth's orientation."""
    number = (day - date(1858, 11, 17)).days
    found = f"{day:%y%m%d} {number:8.2f} {letter} {0.1:9.6f}{0.01:9.6f} {0.2:9.6f}{0.01:9.6f}  "
    return (found + f"{letter}{value:10.7f}{0.0001:10.7f}").ljust(187)


def wheel(path: Path, name: str, text: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, text)
    return path


def earth(place: Path, at: datetime, shift: float) -> Release:
    """A release that has measured the days up to its own, and predicts the others."""
    days = [FIRST.date() + timedelta(days=n) for n in range(-3, 2 * AHEAD_DAYS)]
    lines = [
        line(day, n / 1000 + shift * (day >= at.date()), "P" if day >= at.date() else "I")
        for n, day in enumerate(days)
    ]
    path = place / f"earth-{at:%Y%m%d}.whl"
    name = "astropy_iers_data/data/finals2000A.all"
    return Release(at, wheel(path, name, "\n".join(lines)))


def airports(place: Path, at: datetime, codes: dict[str, str]) -> Release:
    head = '"icao","iata","name","city","country","elevation","lat","lon","tz"'
    rows = [f'"{c}","","n","c","{country}",1,2.5,3,"UTC"' for c, country in codes.items()]
    path = place / f"airports-{at:%Y%m%d}.whl"
    return Release(at, wheel(path, "airportsdata/airports.csv", "\n".join([head, *rows])))


def test_a_release_is_parsed_column_by_column(tmp_path: Path) -> None:
    rows = list(earth_rows(earth(tmp_path, FIRST, 0.5)))
    assert rows[2] == {
        **{"parameter": "ut1-utc", "day": date(2026, 1, 2), "value": 0.0},
        **{"error": 0.0001, "is_predicted": False},
    }
    assert rows[11]["day"] == date(2026, 1, 5)
    assert (rows[11]["value"], rows[11]["is_predicted"]) == (0.503, True)
    [row] = airport_rows(airports(tmp_path, FIRST, {"BIRK": "IS"}))
    assert (row["icao"], row["country"], row["lat"], row["zone"]) == ("BIRK", "IS", 2.5, "UTC")


def test_the_join_gives_the_prediction_that_was_known(tmp_path: Path) -> None:
    both = [earth(tmp_path, FIRST, 0.5), earth(tmp_path, LATER, 0.25)]
    places = [
        airports(tmp_path, FIRST, {"BIRK": "IS", "BIKF": "IS", "KJFK": "US"}),
        airports(tmp_path, LATER, {"BIRK": "IS", "BIVM": "IS", "BIKF": "GL"}),
    ]
    outcome = run(tmp_path / "store", both, places, Console(quiet=True))
    assert set(outcome.ahead.tolist()) == set(range(1, 30))
    assert np.allclose(outcome.known - outcome.measured, 0.5)
    save_picture(outcome, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_an_answer_that_no_file_has_is_told(tmp_path: Path) -> None:
    row = {"release": 0, "at": FIRST, "day": FIRST.date(), "value": 0.503}
    release = earth(tmp_path, FIRST, 0.5)
    require_known(pa.Table.from_pylist([row]), [release])
    with pytest.raises(AssertionError, match=r"release 0 did not say 0\.75"):
        require_known(pa.Table.from_pylist([{**row, "value": 0.75}]), [release])
