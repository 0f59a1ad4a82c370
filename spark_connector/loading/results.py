"""Results of tasks: pickled objects, one in a row, or the reason why a task refuses its rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame

from kvstore.errors import KeyOrderError, UsageError
from kvstore.span import Span
from spark_connector.executors import require_seen, running_tasks
from spark_connector.worker import freeze_objects

RESULT: Final = "result binary"
"""The schema of the rows that such a task returns."""


class _Refusal(NamedTuple):
    """An error in the rows of a task. It comes back as a result, because a retry cannot help."""

    what: str
    remedy: str
    twice: bytes | None = None


def spans_of(borders: Sequence[bytes]) -> list[Span]:
    ends: list[bytes | None] = [*borders, None]
    return [Span(start, end) for start, end in zip([b"", *borders], ends, strict=True)]


def results(place: Path | str, tasks: DataFrame, doing: str) -> list[Any]:
    """The results of the tasks, which are `doing` something at a place.

    Raises the error that a task has found in its rows.
    """
    with running_tasks(tasks.sparkSession, f"{doing} {place}"):
        found = [pickle.loads(row[0]) for row in tasks.collect()]
    for result in found:
        if isinstance(result, _Refusal):
            if result.twice is not None:
                raise KeyOrderError(str(place), previous=result.twice, key=result.twice)
            raise UsageError(result.what, result.remedy)
    return found


def as_batches(work: Callable[[], Sequence[Any]], *sees: Path | str) -> Iterator[pa.RecordBatch]:
    """The results of `work`, or its refusal, as the only rows that its task returns.

    The machine of the task must see the directories `sees`.
    """
    freeze_objects()
    found: Sequence[Any]
    try:
        require_seen(sees)
        found = work()
    except KeyOrderError as error:
        found = [_Refusal(error.what, error.remedy, twice=error.key)]
    except UsageError as error:
        found = [_Refusal(error.what, error.remedy)]
    for result in found:
        yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})
