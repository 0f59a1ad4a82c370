"""The demo of features, on two nights of a small airline."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from examples.demo.served import DAY, Plan, departures, report, require_served, run, save_picture

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAN = Plan(datetime(2013, 6, 16, 2, tzinfo=timezone.utc), 2, in_seconds=1, mixed_up=1)
ORIGINS = {"EWR": 11, "JFK": 22, "LGA": 33}
"""Minutes by which the flights of an airport leave late, but for the last one of a day."""
LAST = 300


def flights() -> pa.Table:
    """Each day two flights of each airport: in the morning, and an hour before the night's load."""
    found = [
        {"carrier": "UA", "origin": origin, "delay": delay, "due_s": due_s}
        for number in range(-1, PLAN.nights)
        for origin, late in ORIGINS.items()
        for hours, delay in ((10, late), (23, LAST))
        for due_s in [int(PLAN.night(number).timestamp()) + 3600 * hours]
    ]
    rows = [{**row, "left_s": row["due_s"] + 60 * row["delay"]} for row in found]
    return pa.Table.from_pylist(rows).sort_by("due_s")


def test_the_training_set_has_what_was_served_and_the_naive_one_has_not(
    spark: SparkSession, tmp_path: Path
) -> None:
    flown = flights()
    pq.write_table(flown, tmp_path / "flights.parquet")
    source = spark.read.parquet(str(tmp_path / "flights.parquet"))
    outcome = run(tmp_path / "store", source, flown, PLAN, Console(quiet=True))

    # A night knows the flight of the morning alone. The next one knows both, and restates.
    assert len(outcome.served) == 2 * len(ORIGINS) * PLAN.nights
    assert outcome.is_wrong.sum() == len(ORIGINS)
    assert {*outcome.served.tolist()} == {*ORIGINS.values()}
    wrong, last = outcome.is_wrong, outcome.asked_s >= PLAN.night(1).timestamp()
    both = [late + LAST for late in outcome.served[~last]]
    assert np.array_equal(2 * outcome.naive[~last], both)
    assert np.array_equal(outcome.naive[last & ~wrong], outcome.served[last & ~wrong])
    # The wrong load gave each airport the feature of another one, until it was undone.
    assert {*outcome.naive[wrong].tolist()} == {*ORIGINS.values()}
    assert not np.any(outcome.naive[wrong] == outcome.served[wrong])

    assert report(outcome).row_count == 2
    save_picture(outcome, PLAN, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_flights_are_taken_from_the_day_before_the_first_night_on() -> None:
    hours = [PLAN.first - 2 * DAY, PLAN.first - DAY, PLAN.night(PLAN.nights) - DAY]
    table = pa.table(
        {
            **{"carrier": ["UA"] * 4, "origin": ["EWR"] * 4, "dep_delay": [1, 2, None, -3]},
            **{"time_hour": [*hours, hours[-1]], "minute": [0, 30, 0, 45]},
        }
    )
    first, last = departures(table, PLAN).to_pylist()
    assert first["due_s"] == PLAN.night(-1).timestamp() + 1800
    assert (last["delay"], last["left_s"]) == (-3, last["due_s"] - 180)


def test_another_feature_than_the_served_one_is_told() -> None:
    row = {"carrier": "UA", "origin": "EWR", "asked": PLAN.first, "served": 11.0}
    require_served(pa.Table.from_pylist([{**row, "mean_delay": 11.0}]))
    with pytest.raises(AssertionError, match=r"another feature was served: .*12\.0"):
        require_served(pa.Table.from_pylist([{**row, "mean_delay": 12.0}]))
