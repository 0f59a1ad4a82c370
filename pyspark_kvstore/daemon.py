"""PySpark's daemon, whose workers leave without a word when Spark has closed their sockets.

Spark does so to workers that were idle for a minute, and to planners as soon as it has their
answer. PySpark's worker then writes its last words into the closed socket: a Unix socket refuses
that at once (TCP does not look), and the session's terminal shows a `BrokenPipeError` for each.
`spark_connector.session` sets this module as `spark.python.daemon.module`.
"""

from __future__ import annotations

import os
import socket

from pyspark import daemon

_pyspark_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """As PySpark's, which serves one task and returns 0 if another may follow."""
    try:
        if not sock.recv(1, socket.MSG_PEEK):
            return 1
        return _pyspark_worker(sock, authenticated)
    except ConnectionError:
        os._exit(1)  # as PySpark's does, once it has shown the error


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
