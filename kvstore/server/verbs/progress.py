"""Long work of the owner of a store: its progress as a stream of rows, then its outcome.

A verb of long work answers with rows of `done`, the progress so far, with its `total` if that is
known, and a last row with the `result` or the `error`, as JSON. A caller that goes away ends the
work at its next step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from kvstore.counts import WorkCount
from kvstore.errors import KVStoreError, RetryableError
from kvstore.limits import CONTROL_PROGRESS_S
from kvstore.protocol import failure_fields

PROGRESS_SCHEMA: Final = pa.schema(
    [
        ("done", pa.int64()),
        ("total", pa.int64()),
        ("is_about", pa.bool_()),
        ("result", pa.string()),
        ("error", pa.string()),
    ]
)

Work = Callable[[Callable[[int], None]], Mapping[str, Any]]
"""Long work: is given a function that tells progress, and returns its result as JSON."""


def told(work: Work) -> pa.RecordBatchReader:
    """Do long work in a thread, and stream its progress, then its outcome."""
    return pa.RecordBatchReader.from_batches(PROGRESS_SCHEMA, _Progress(work).rows())


class _Progress:
    """Long work in a thread of its own: the latest progress, and the outcome."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._done: int = WorkCount(0)
        self._outcome: Mapping[str, Any] | BaseException | None = None
        self._is_gone = False

    def rows(self) -> Iterator[pa.RecordBatch]:
        """A row for each progress that the caller has time to take, and the last one for the
        outcome. The end of the rows ends the work: `_tell` raises then."""
        thread = threading.Thread(target=self._run, name="kvstore-control-work", daemon=True)
        thread.start()
        told = 0
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_news(told), CONTROL_PROGRESS_S)
                    done, outcome = self._done, self._outcome
                if done != told or outcome is None:  # also says that the work goes ahead
                    yield _row(done)
                    told = done
                if outcome is not None:
                    yield _ended(done, outcome)
                    return
        finally:
            self._is_gone = True
            thread.join()

    def _has_news(self, told: int) -> Callable[[], bool]:
        return lambda: self._done != told or self._outcome is not None

    def _tell(self, done: int) -> None:
        if self._is_gone:
            raise RetryableError("the caller of this work went away", "call it again")
        with self._changed:
            self._done = done
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            outcome: Mapping[str, Any] | BaseException = self._work(self._tell)
        except BaseException as error:  # noqa: BLE001  # raised where the rows are read
            outcome = error
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()


def _ended(done: int, outcome: Mapping[str, Any] | BaseException) -> pa.RecordBatch:
    if isinstance(outcome, KVStoreError):
        return _row(done, error=json.dumps(failure_fields(outcome)))
    if isinstance(outcome, BaseException):
        raise outcome
    return _row(done, result=json.dumps(outcome))


def _row(done: int, **ending: str) -> pa.RecordBatch:
    count = done if isinstance(done, WorkCount) else WorkCount(done)
    fields = {"done": int(count), "total": count.total, "is_about": count.is_about}
    return pa.RecordBatch.from_pylist([{**fields, **ending}], schema=PROGRESS_SCHEMA)
