"""The origin of a micro-batch, as Spark tells it to the function of `foreachBatch`.

Spark gives the function a frame and a number. The id of the stream is a property of the thread in
which the function runs. The offsets of the micro-batch lie in the checkpoint location: Spark writes
them once, before it runs the micro-batch, and a repetition runs by them again.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark.sql import DataFrame

from kvstore.bulk.micro_batches import Origin
from kvstore.spark.access import is_remote

_QUERY: Final = "sql.streaming.queryId"
PLAN_DIGITS: Final = 32
"""Of the SHA-256 in a plan: 128 bits."""


def planned_origin(batch: DataFrame, number: int) -> Origin:
    """The stream and the offsets of micro-batch `number`, in the function of `foreachBatch`.

    Nothing is known outside of such a function and in a session of Spark Connect, and no offsets
    are known where a release keeps them elsewhere. Reads one small file of the checkpoint location.
    """
    session: Any = batch.sparkSession
    if is_remote(session):
        return Origin()
    query = session.sparkContext.getLocalProperty(_QUERY)
    if not query:
        return Origin()
    try:
        offsets = _offsets(session, query, number)
    except Py4JError:  # a release whose streams have no such offsets, or no such file
        return Origin(query)
    return Origin(query, f"offsets-{hashlib.sha256(offsets).hexdigest()[:PLAN_DIGITS]}")


def _offsets(session: Any, query: str, number: int) -> bytes:
    """The file of offsets of a micro-batch that runs. `sharedState` knows the streams of all
    sessions; the session of a micro-batch is a copy, and knows none."""
    java = session.sparkContext._jvm
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    stream = running.get(java.java.util.UUID.fromString(query))
    path = java.org.apache.hadoop.fs.Path(stream.resolvedCheckpointRoot(), f"offsets/{number}")
    file = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).open(path)
    try:
        return bytes(file.readAllBytes())
    finally:
        file.close()
