"""The history and the labels of asof-bench, and the exact answers.

    history.parquet              entity, at, known, value; in the order in which events became known
    labels-DENSITY.parquet       row, entity, ts; in no order
    answers-QUESTION-DENSITY     value, in the order of the labels; null where there is none

An event happens at `at` and is known with the hourly batch `known`: the next one, or for a late
event one of the following days. A restated event comes again with the same entity and `at`, another
value and a later batch: it ties with its former self. Some labels ask for an entity without events.

The answers come from sorted arrays alone, and share no code with any runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

QUESTIONS: Final = ("event", "known")
DENSITIES: Final = (0.001, 0.01, 0.1, 1.0)
"""Labels, as shares of the versions."""

US: Final = pa.timestamp("us", "UTC")
HOUR_US: Final = 3_600_000_000

_FIRST_US: Final = 1_700_000_000_000_000 // HOUR_US * HOUR_US
_SEED: Final = 51

Ints = npt.NDArray[np.int64]


class Shape(NamedTuple):
    """What a history is like."""

    versions: int
    per_key: int = 100
    late: float = 0.1
    """The share of events that become known up to three days late."""
    tied: float = 0.1
    """The share of versions that restate another one."""
    days: int = 30
    unknown: float = 0.01
    """The share of labels that ask for an entity without events."""

    @property
    def keys(self) -> int:
        """The number of entities."""
        return max(self.versions // self.per_key, 1)

    @property
    def end_us(self) -> int:
        """The time of the last label, and the end of the days."""
        return _FIRST_US + self.days * 24 * HOUR_US


class History(NamedTuple):
    """The columns of a history, in the order in which its events became known."""

    entity: Ints
    at: Ints
    known: Ints
    value: Ints

    def table(self) -> pa.Table:
        """As Arrow has it."""
        times = [pa.array(each).cast(US) for each in (self.at, self.known)]
        return pa.table([self.entity, *times, self.value], list(self._fields))


class Labels(NamedTuple):
    """The columns of labels."""

    entity: Ints
    ts: Ints

    def table(self) -> pa.Table:
        """As Arrow has it, with the number of each row."""
        columns = [np.arange(len(self.ts)), self.entity, pa.array(self.ts).cast(US)]
        return pa.table(columns, ["row", "entity", "ts"])


def make(place: Path, shape: Shape, densities: Sequence[float] = DENSITIES) -> None:
    """Write history, labels and answers into a new directory."""
    place.mkdir(parents=True)
    history = history_of(shape)
    pq.write_table(history.table(), place / "history.parquet", compression="zstd")
    for density in densities:
        labels = labels_of(shape, density)
        pq.write_table(labels.table(), labels_at(place, density))
        for question in QUESTIONS:
            found = pa.table({"value": answers(history, labels, question)})
            pq.write_table(found, answers_at(place, question, density))


def labels_at(place: Path, density: float) -> Path:
    """The file of the labels of a density."""
    return place / f"labels-{density:g}.parquet"


def answers_at(place: Path, question: str, density: float) -> Path:
    """The file of the exact answers to a question."""
    return place / f"answers-{question}-{density:g}.parquet"


def history_of(shape: Shape) -> History:
    """Events at random times of random entities; a share of them restated."""
    rng = np.random.default_rng(_SEED)
    again = int(shape.versions * shape.tied)
    events = shape.versions - again
    entity = rng.integers(0, shape.keys, events)
    at = rng.integers(_FIRST_US, shape.end_us, events)
    known = _next_batch(at) + np.where(
        rng.random(events) < shape.late, rng.integers(0, 72, events) * HOUR_US, 0
    )
    chosen = rng.choice(events, min(again, events), replace=False)
    later = known[chosen] + rng.integers(1, 72, len(chosen)) * HOUR_US
    known = np.concatenate([known, later])
    order = np.argsort(known, kind="stable")
    every = np.concatenate([np.arange(events), chosen])[order]
    return History(entity[every], at[every], known[order], rng.permutation(len(order)))


def _next_batch(at: Ints) -> Ints:
    found: Ints = -(-at // HOUR_US) * HOUR_US
    return found


def labels_of(shape: Shape, density: float) -> Labels:
    """Labels of random entities at random times, in no order."""
    rng = np.random.default_rng((_SEED, round(density * 1_000_000)))
    count = max(int(shape.versions * density), 1)
    entity = rng.integers(0, shape.keys, count)
    entity = np.where(rng.random(count) < shape.unknown, shape.keys + entity, entity)
    return Labels(entity, rng.integers(_FIRST_US, shape.end_us, count))


def answers(history: History, labels: Labels, question: str) -> pa.Array:
    """The exact value of each label: of the newest event at or before its time; of events at one
    time, the one that became known last. Costs a sort, and a search for each label."""
    # The events of an entity lie together, by their times, and by their knowledge for one time.
    order = np.lexsort((np.arange(len(history.at)), history.at, history.entity))
    at, known, entity = history.at[order], history.known[order], history.entity[order]
    base = min(at.min(initial=0), labels.ts.min(initial=0))
    width = max(at.max(initial=0), labels.ts.max(initial=0)) - base + 1
    places = np.searchsorted(
        entity * width + (at - base), labels.entity * width + (labels.ts - base), side="right"
    )
    places -= 1
    if question == "known":
        while True:
            is_early = (places >= 0) & (entity[places] == labels.entity)
            is_early &= known[places] > labels.ts  # not known yet: look at the one before
            if not is_early.any():
                break
            places -= is_early
    found = (places >= 0) & (entity[places] == labels.entity)
    return pa.array(history.value[order][places], mask=~found)
