"""Streams on a machine that is so busy that Spark gives up on its own planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from tests.cluster.killing import WAIT_S

STARTS_MAX: Final = 20


def run_to_end(start: Callable[[], StreamingQuery]) -> None:
    """Run a stream to its end. Spark gives the process that plans it ten seconds to start, and the
    stream ends without them. Then it is started again, as docs/how-to/spark-cluster.md says."""
    for _ in range(STARTS_MAX):
        if _has_ended(start()):
            return
    raise AssertionError(f"no process that plans has started {STARTS_MAX} times")


def _has_ended(query: StreamingQuery) -> bool:
    """Wait for a query. False if its planner did not start in time."""
    try:
        assert query.awaitTermination(int(WAIT_S))
    except StreamingQueryException as error:
        if "Python worker failed to connect back" not in str(error):
            raise
        return False
    return True
