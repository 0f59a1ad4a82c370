"""PySpark's daemon, whose workers leave without a word when Spark ends them.

Spark closes the sockets of workers that were idle for a minute. PySpark's worker then writes why it
ends into the closed socket: a Unix socket refuses that at once (TCP does not look), and the
session's terminal shows a `BrokenPipeError` for each. Here a worker looks first whether there is
anything to read. `spark_connector.session` sets this module as `spark.python.daemon.module`.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_pyspark_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """As PySpark's, which serves one task and returns 0 if another may follow."""
    try:
        if not sock.recv(1, socket.MSG_PEEK):
            return 1
    except ConnectionError:
        return 1
    return _pyspark_worker(sock, authenticated)


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
