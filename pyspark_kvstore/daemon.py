"""PySpark's daemon, with workers that end silently when Spark has closed their sockets.

Spark closes the socket of a worker that was idle for a minute, and the socket of a planner as soon
as it has the answer. PySpark's worker then writes to the closed socket. A Unix socket refuses the
write at once, unlike TCP, and the session's terminal shows a `BrokenPipeError` for each worker.
`spark_connector.session` sets this module as `spark.python.daemon.module`.
"""

from __future__ import annotations

import os
import socket

from pyspark import daemon

_pyspark_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve one task as PySpark's worker does. Returns 0 if another task may follow."""
    try:
        if not sock.recv(1, socket.MSG_PEEK):
            return 1
        return _pyspark_worker(sock, authenticated)
    except ConnectionError:
        os._exit(1)  # PySpark's worker ends so too, after it has shown the error


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
