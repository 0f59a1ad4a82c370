"""asof-bench: its exact answers, those of its runners, and its page. Nothing is timed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.asof import document
from benchmarks.asof.data import (
    QUESTIONS,
    History,
    Labels,
    Shape,
    answers,
    answers_at,
    history_of,
    labels_at,
    labels_of,
    make,
)
from benchmarks.asof.run import measure
from benchmarks.asof.runners import RUNNERS, Runner, measured, right

SHAPE = Shape(2_000, per_key=50)
FACTS = {
    "seconds": 90, "commit": "0123456", "date": "2026-11-30", "processor": "a processor",
    "cores": 2, "load": 0.1,
}  # fmt: skip

NUMBERS = st.integers(0, 4)
EVENTS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=12)
"""Entity, event time, and by how much later it became known."""


@given(EVENTS, st.lists(st.tuples(NUMBERS, st.integers(0, 9)), min_size=1, max_size=8))
def test_the_exact_answers_are_those_of_a_look_at_every_event(
    events: list[tuple[int, int, int]], labels: list[tuple[int, int]]
) -> None:
    rows = sorted(((at + late, entity, at) for entity, at, late in events), key=lambda row: row[0])
    known, entity, at = (np.array(each) for each in zip(*rows, strict=True))
    history = History(entity, at, known, np.arange(len(rows)))
    asked = Labels(*(np.array(each) for each in zip(*labels, strict=True)))
    for question in QUESTIONS:
        expected = [
            max(
                (
                    (at, value)
                    for value, (known_at, entity, at) in enumerate(rows)
                    if (entity, True) == (wanted, at <= ts)
                    and (question == "event" or known_at <= ts)
                ),
                default=(None, None),
            )[1]
            for wanted, ts in labels
        ]
        assert answers(history, asked, question).to_pylist() == expected


def test_a_history_has_late_and_restated_events_and_labels_without_an_answer() -> None:
    history, labels = history_of(SHAPE), labels_of(SHAPE, 1.0)
    assert len(history.at) == len(labels.ts) == SHAPE.versions
    assert (np.diff(history.known) >= 0).all()
    assert (history.at <= history.known).all()
    pairs = list(zip(history.entity.tolist(), history.at.tolist(), strict=True))
    assert len(pairs) - len({*pairs}) == SHAPE.versions * SHAPE.tied
    both = [answers(history, labels, question) for question in QUESTIONS]
    assert both[0] != both[1]
    assert 0 < both[0].null_count < len(labels.ts) / 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("asof") / "data"
    make(made, SHAPE, [0.1, 1.0])
    return made


EXACT = {"kvstore": QUESTIONS, "kvstore-keys": QUESTIONS, "duckdb": QUESTIONS[1:]}
EXACT |= {"polars": QUESTIONS, "pandas": QUESTIONS}


@pytest.mark.parametrize("name", EXACT)
def test_a_runner_gives_the_exact_answers(name: str, place: Path) -> None:
    [kind] = [each for each in RUNNERS if each.name == name]
    ready, *facts = measured(kind, place, [0.1, 1.0], rounds=1)
    assert ready["question"] == "ready"
    asked = [(density, question) for density in (0.1, 1.0) for question in QUESTIONS]
    assert [(fact["density"], fact["question"]) for fact in facts] == asked
    for fact in facts:
        assert "problem" not in fact
        if fact["question"] in EXACT[name]:
            assert fact["right"] == 1.0


class Half(Runner):
    """Knows every other answer, and fails at one question."""

    name, package = "half", "kvstore"

    def join(self, labels: Any, question: str) -> Any:
        if question == "known":
            raise OSError("no such question")
        exact = pq.read_table(answers_at(self.place, question, 0.1))["value"]
        return pa.table({"row": labels["row"], "value": exact}).take([*range(0, len(exact), 2)])


def test_a_row_that_is_missing_is_wrong_and_a_failure_is_a_problem(place: Path) -> None:
    _, half, failed = measured(Half, place, [0.1], rounds=1)
    count = pq.read_metadata(labels_at(place, 0.1)).num_rows
    assert half["right"] == pytest.approx(-(-count // 2) / count)
    assert failed["problem"] == "OSError: no such question"


def test_a_row_counts_once_and_a_null_for_a_value_is_wrong() -> None:
    exact = pa.chunked_array([[1, None, 3]])
    found = pa.table({"row": [0, 0, 1, 2], "value": pa.array([1, 1, None, None], pa.int64())})
    assert right(found, exact) == pytest.approx(2 / 3)


def test_a_runner_is_a_process_and_one_that_is_not_there_is_named(place: Path) -> None:
    kinds = [each for each in RUNNERS if each.name in ("pandas", "feast-file")]
    found = measure(kinds, place, 1, feast=place / "no-python", densities=[0.1])
    assert [fact["right"] for fact in found["pandas"][1:]] == [1.0, 1.0]
    assert found["feast-file"] == [{"question": "ready", "problem": "feast is not installed"}]


def facts(ready: float, **least: float) -> list[dict[str, Any]]:
    """A runner whose join of all labels takes twice as long as its join of a tenth."""
    found: list[dict[str, Any]] = [{"question": "ready", "seconds": ready}]
    for question, seconds in least.items():
        for density, times in ((0.1, 1), (1.0, 2)):
            fact = {"question": question, "density": density, "seconds": seconds * times}
            found.append({**fact, "right": 0.9999 if ready else 1.0})
    return found


def test_the_page_tells_ratios_winners_and_what_was_not_measured(tmp_path: Path) -> None:
    found = {
        "kvstore": facts(4.0, event=1.0, known=0.5),
        "polars": facts(0.0, event=0.5, known=1.0),
        "feast-file": [{"question": "ready", "problem": "feast is not installed"}],
    }
    found["polars"].append({"question": "known", "density": 0.01, "problem": "no memory"})
    text = document.page(found, SHAPE, FACTS)
    assert "| `event`: labels, % of versions | kvstore | polars |" in text
    assert "| 10 | 2.0 | **1** |" in text
    assert "| 100 | 2.0 | **1** |" in text
    assert "| exact answers | 99.9 % | all |" in text
    assert "* Fastest for `event`: polars at 10 %, 100 %." in text
    assert "* Fastest for `known`: kvstore at 10 %, 100 %." in text
    assert "load of kvstore took 2 times" in text
    assert "* Not measured: feast-file (feast is not installed)." in text
    assert "* Not measured: polars, `known` (no memory)." in text
    assert "2,000 versions of 40 entities. 10 %" in text
    document.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
